"""Accelerate's loop inside a budget: `prepare(accelerator, model, optimizer, loader, budget="6GiB")`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend

from memfit.errors import InvalidOptionError, InvalidTargetError, UnsupportedStepError
from memfit.runtime.compile.model import compile_anew
from memfit.runtime.compile.updates import parameters_of

_WHERE = "memfit.integrations.accelerate.prepare"


def prepare(accelerator: Accelerator, *things: Any, budget: str | int, **options: Any) -> Any:
    """Return what `accelerator.prepare(*things)` does, with the calls of its models inside `budget`.

    The loop stays as it is: `accelerator.accumulate`, `accelerator.backward(loss)`, clipping and saving.

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
        accelerator: on one process; without a Dynamo backend, whose names are an enumeration without memfit.
        things: models, their optimizers, and what else `accelerator.prepare` takes. The calls of each model are planned
            within what the others leave of the budget.
        budget: the bytes for everything on the device: `"6GiB"`, or an integer.
        options: `reserve`, `planner`, `options`, `time_limit_seconds`, `seed`, `host_budget`, `host_dir` as in
            `memfit.compile`.

    Raises:
        InvalidTargetError: no model.
        InvalidOptionError: the accelerator compiles the model itself.
        UnsupportedStepError: several processes or devices.
        MemfitError: as `memfit.compile`.
    """
    if accelerator.distributed_type != DistributedType.NO:
        raise UnsupportedStepError(
            f"{_WHERE}: the accelerator is distributed ({accelerator.distributed_type}), and memfit does not plan "
            "across ranks yet; run one process"
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise InvalidOptionError(
            f"{_WHERE}: the accelerator compiles the model by backend {accelerator.state.dynamo_plugin.backend}; leave "
            "dynamo_backend and dynamo_plugin out"
        )
    prepared = accelerator.prepare(*things)
    made = prepared if len(things) > 1 else (prepared,)
    models = [model for model, thing in zip(made, things, strict=True) if isinstance(thing, torch.nn.Module)]
    if not models:
        raise InvalidTargetError(f"{_WHERE}: no model; give the model, its optimizer and the rest to one prepare")
    optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
    for model in models:
        own = set(model.parameters())
        theirs = [each for each in optimizers if len(models) == 1 or not own.isdisjoint(parameters_of(each))]
        compile_anew(model, {"budget": budget, **options}, _WHERE).account.follow(*theirs)
    return prepared
