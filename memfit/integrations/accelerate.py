"""Accelerate's loop inside a budget: `prepare(accelerator, model, optimizer, loader, budget="6GiB")`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend

from memfit.errors import InvalidOptionError, InvalidTargetError, UnsupportedStepError
from memfit.runtime.compile.model import compile_anew

_WHERE = "memfit.integrations.accelerate.prepare"


def prepare(accelerator: Accelerator, *things: Any, budget: str | int, **options: Any) -> Any:
    """Return what `accelerator.prepare(*things)` does, with the calls of the model inside `budget`.

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
        things: one model, its optimizers, and what else `accelerator.prepare` takes.
        budget: the bytes for everything on the device: `"6GiB"`, or an integer.
        options: `reserve`, `planner`, `options`, `time_limit_seconds`, `seed`, `host_budget`, `host_dir` as in
            `memfit.compile`.

    Raises:
        InvalidTargetError: no model, or several.
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
    models = [thing for thing in things if isinstance(thing, torch.nn.Module)]
    optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
    if len(models) != 1:
        raise InvalidTargetError(
            f"{_WHERE}: {len(models)} models, expected one; prepare the others by accelerator.prepare"
        )
    prepared = accelerator.prepare(*things)
    model = prepared if len(things) == 1 else prepared[things.index(models[0])]
    compile_anew(model, {"budget": budget, **options}, _WHERE).account.follow(*optimizers)
    return prepared
