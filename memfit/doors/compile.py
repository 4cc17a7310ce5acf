"""`memfit.compile`: a model whose calls run inside a budget, in whatever loop trains it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch

from memfit.capture.step_check import is_over_ranks
from memfit.checkpointing.handle import Checkpointed, loops_of
from memfit.doors.checkpoint import checkpoint
from memfit.dynamo.model import compile_in_place, release
from memfit.errors import MemfitError, UnsupportedStepError
from memfit.options import CompileOptions
from memfit.torch_private.modules import eager_call
from memfit.torch_private.ranks import inside_ddp

_log = logging.getLogger("memfit")
LEAVES_WHOLE = "logits leave a compiled graph whole, and chunk_loss computes them by rows"


def compile(
    model: torch.nn.Module,
    *,
    budget: str | int,
    optimizer: torch.optim.Optimizer | None = None,
    chunk_loss: bool | str = False,
    **options: Unpack[CompileOptions],
) -> torch.nn.Module:
    """Let all calls of `model` run inside `budget`, in a loop that stays as it is; return the model itself.

        >>> import torch, memfit
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = memfit.compile(model, budget="1MiB", optimizer=optimizer)
        >>> loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 8)), torch.randint(0, 2, (32,)))
        >>> loss.backward()
        >>> optimizer.step()

    Args:
        model: is changed in place, like `model.compile(...)`: its parameters, its class and its `state_dict` stay.
        budget: the bytes for everything on the device during a step: `"6GiB"`, `"90% of the card"`, or an integer. A
            percentage of the peak is refused: loss and optimizer are not known yet.
        optimizer: counts the state that its first step will make, and holds its updates to the budget.
        chunk_loss: as for `memfit.checkpoint`, which then holds the model: its logits leave a compiled graph whole.
        options: how plans are searched, and calls are run; see `memfit.options.CompileOptions`.

    Raises:
        InvalidTargetError: no module, or one that is compiled already.
        InvalidOptionError, InvalidBudgetError: a value that cannot be read.
        UnsupportedStepError: a model under DataParallel, or an optimizer that evaluates the loss itself.

    Guarantees: a call with gradients runs as one planned graph. At the first call that PyTorch's compiler does not
    enter, or breaks into several graphs, `memfit.checkpoint` takes over with the same budget, which one line says. It
    holds a model under FSDP or tensor parallelism from the beginning. Inside of DistributedDataParallel the module is
    planned, and DDP reduces the gradients. A call without gradients runs unplanned (with Inductor's kernels as
    `torch.compile` runs it), and raises OverBudgetError if it takes more than the budget. An update that takes more
    raises InfeasibleBudgetError. If forward, loss and backward take more than was planned, a warning says so, and they
    are planned again for less; after three times that raises BudgetNotHeldError. A soft budget only warns.
    """
    given = {"budget": budget, **options}
    if chunk_loss:
        hand_over(model, {**given, "chunk_loss": chunk_loss}, LEAVES_WHOLE, "memfit.compile")
        return model

    inside = inside_ddp(model)

    def otherwise(why: str) -> Callable[..., Any]:
        release(inside)
        hand_over(inside, given, why, "memfit.compile")
        return eager_call(inside)

    over_ranks = is_over_ranks(inside) if isinstance(inside, torch.nn.Module) else ""
    if over_ranks:
        hand_over(model, given, over_ranks, "memfit.compile")
        return model
    calls = compile_in_place(inside, given, "memfit.compile", otherwise=otherwise)
    if optimizer is not None:
        try:
            calls.account.optimizers.follow(optimizer)
        except MemfitError:
            release(inside)
            raise
    return model


def hand_over(model: torch.nn.Module, options: Mapping[str, Any], why: str, where: str) -> Checkpointed:
    """Let `memfit.checkpoint` hold a model that cannot be planned as one graph, and say so in one line.

    Args:
        model: the model.
        options: that were given, `budget` among them; those that `memfit.checkpoint` does not have are named.
        why: the model cannot be planned; nothing is said if it is empty.
        where: begins the message of an error.

    Raises:
        UnsupportedStepError: `memfit.checkpoint` does not hold it either.
    """
    taken = inspect.signature(checkpoint).parameters
    own = {name: value for name, value in options.items() if name in taken}
    left = [name for name, value in options.items() if name not in own and value is not None]
    for loop in loops_of(model):  # of a run that was broken off
        loop.close(is_judged=False)
    try:
        held = checkpoint(model, **own)
    except UnsupportedStepError as error:
        raise UnsupportedStepError(f"{where}: {f'{why}; and ' if why else ''}{error}") from error
    if why:
        without = f", without {', '.join(left)}" if left else ""
        _log.warning("memfit: the budget is held by memfit.checkpoint%s, since %s", without, why)
    return held
