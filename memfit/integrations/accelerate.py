"""Accelerate's loop inside a budget: `prepare(accelerator, model, optimizer, loader, budget="6GiB")`."""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.training_step import parameters_of
from memfit.errors import InvalidOptionError, InvalidTargetError, naming_extra
from memfit.integrations.held import AUTO, CHECKPOINT, EAGER, HeldModel
from memfit.torch_private.modules import is_compiled

with naming_extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, DynamoBackend

_WHERE = "memfit.integrations.accelerate.prepare"


def prepare(accelerator: Accelerator, *things: Any, budget: str | int, door: str = "auto", **options: Any) -> Any:
    """Return what `accelerator.prepare(*things)` does, with the calls of its models inside `budget`.

    The loop stays as it is: `accelerator.accumulate`, `accelerator.backward(loss)`, clipping and saving. What holds
    each model is in `accelerator.memfit`, in their order: `accelerator.memfit[0].most_bytes`, `.plans`, `.report()`.

        >>> import torch
        >>> from accelerate import Accelerator
        >>> from memfit.integrations.accelerate import prepare
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer = prepare(accelerator, model, optimizer, budget="1MiB")
        >>> accelerator.backward(model(torch.randn(32, 8)).square().mean())
        >>> optimizer.step()

    Args:
        accelerator: one with a Dynamo backend compiles the models as without memfit.
        things: models, their optimizers, and what else `accelerator.prepare` takes. The calls of each model are planned
            within what the others leave of the budget; `memfit.checkpoint` holds all of them by one plan, unless
            `blocks` or `chunk_loss` are given, or the accelerator compiles them.
        budget: the bytes for everything on the device: `"6GiB"`, `"90% of the card"`, or an integer; of each rank's
            device, if there are several. `"60%"` of the loop's peak is for `door="checkpoint"` alone.
        door: which of memfit's doors holds it. `auto`: `memfit.compile`, or else, with several processes, for a
            model that the compiler breaks into several graphs, and with a Dynamo backend, `memfit.checkpoint`.
            `compile`, `checkpoint`: that one; of several processes `compile` holds those of DDP, and leaves other
            models to `checkpoint`.
        options: of the door: those of `memfit.options.CompileOptions`, such as `planner` and `kernels`, for
            `memfit.compile`; `blocks`, `host_budget`, `budget_is`, `chunk_loss` for `memfit.checkpoint`.

    Raises:
        InvalidTargetError: no model.
        InvalidOptionError: door="eager", whose end no accelerator tells.
        UnsupportedStepError: a Dynamo backend with door="compile".
        MemfitError: as the door.
    """
    if door == EAGER:
        raise InvalidOptionError(
            f"{_WHERE}: door='eager' ends with a block, which an accelerator does not have; write "
            "`with memfit.eager(model, budget=...):` around the loop"
        )
    is_divided = accelerator.distributed_type != DistributedType.NO
    over_ranks = f"the accelerator is distributed ({accelerator.distributed_type})" if is_divided else ""
    backend = accelerator.state.dynamo_plugin.backend
    compiles = backend != DynamoBackend.NO
    why = f"the accelerator compiles the model (dynamo_backend={backend.value.lower()!r})" if compiles else ""
    HeldModel(budget, door, options, _WHERE)  # a wrong option is refused before anything is prepared
    prepared = accelerator.prepare(*things)
    made = prepared if len(things) > 1 else (prepared,)
    models = [model for model, thing in zip(made, things, strict=True) if isinstance(thing, torch.nn.Module)]
    if not models:
        raise InvalidTargetError(f"{_WHERE}: no model; give the model, its optimizer and the rest to one prepare")
    optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
    held: list[HeldModel] = []
    is_by_model = any(map(is_compiled, models)) or bool({"blocks", "chunk_loss"} & options.keys())
    if len(models) > 1 and (door == CHECKPOINT or (door == AUTO and (why or over_ranks))) and not is_by_model:
        together = HeldModel(budget, door, options, _WHERE)
        together.hold(torch.nn.ModuleList(models), why_not_compile=why, over_ranks=over_ranks, has_end=False)
        held = [together] * len(models)
    for model in models[len(held) :]:
        own = set(model.parameters())
        theirs = [each for each in optimizers if len(models) == 1 or not own.isdisjoint(parameters_of(each))]
        held.append(HeldModel(budget, door, options, _WHERE))
        held[-1].hold(model, why_not_compile=why, over_ranks=over_ranks, has_end=False)
        held[-1].follow(*theirs)
    accelerator.memfit = held  # pyright: ignore[reportAttributeAccessIssue] # for their reports
    return prepared
