"""Building a workload's TrainingStep from its name and options, and running it with hand-placed checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memfit.capture.function_step import FunctionStep
from memfit.capture.training_step import TrainingStep
from memfit.cost.environment import find_device
from memfit.errors import InvalidOptionError, InvalidTargetError
from memfit.torch_private.tensors import tree_map
from memfit.workloads import registry
from memfit.workloads.parts import Iteration, Options, Parts
from memfit.workloads.registry import OptionValue, Workload

GRANULARITIES = ("block", "stage")

_LEARNING_RATE = 1e-3  # small enough that no workload diverges in the steps that tests and benchmarks take
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

# pytorchcv requires torchvision, which no workload needs and which may install another torch
_INSTALL = {"pytorchcv": "--no-deps pytorchcv requests", "transformers": "transformers"}


def build_workload(name: str, given: Mapping[str, OptionValue]) -> TrainingStep:
    """Return a built-in workload, a `FunctionStep` for an iterative one; `memfit.workloads.build` documents errors.

    Args:
        name: one of `WORKLOADS`.
        given: option -> value, or its text.
    """
    workload = registry.find(name)
    options = workload.read_options(given)
    device = torch.device("meta") if options["device"] == "meta" else find_device(str(options["device"]))
    parts = _make(workload, options)
    if isinstance(parts, Iteration):
        return FunctionStep.of(parts.function, _moved(parts.state, device), _moved(parts.batch, device), name=name)
    model = parts.model.to(device)
    batch = _moved(parts.batch, device)
    if options.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
        batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
    model.train()
    make_optimizer = _OPTIMIZERS.get(str(options["optimizer"]))
    optimizer = None if make_optimizer is None else make_optimizer(model.parameters(), lr=_LEARNING_RATE)
    return TrainingStep(model=model, loss=parts.loss, batch=batch, optimizer=optimizer, name=name)


@contextmanager
def checkpoints_placed(step: TrainingStep, granularity: str = "block") -> Generator[None]:
    """Run a built-in step with `torch.utils.checkpoint` at the usual hand-placed positions, inside the block only.

        >>> from memfit.workloads import build
        >>> step = build("lstm", batch=2, steps=3, width=8)
        >>> with checkpoints_placed(step, "stage"):
        ...     step.compute_loss(step.model, step.batch).backward()

    Args:
        step: a step that `memfit.workloads.build` returned.
        granularity: "block" for every residual block, unit, layer or time step; "stage" for every group of them.

    Raises:
        InvalidOptionError: another granularity.
        InvalidTargetError: not a built-in step, or one without a backward pass.
    """
    if not step.has_backward:
        raise InvalidTargetError(f"{step.name} has no backward pass, so that checkpoints have no meaning for it")
    if granularity not in GRANULARITIES:
        raise InvalidOptionError(f"granularity is {granularity!r}, expected one of {', '.join(GRANULARITIES)}")
    if step.name not in registry.WORKLOADS:
        raise InvalidTargetError(
            f"step {step.name!r} is not a built-in workload, so its blocks are not known; give what build() returned"
        )
    modules: list[torch.nn.Module] = _module(registry.WORKLOADS[step.name]).places(step.model, granularity)
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own is visible again


def _make(workload: Workload, options: Options) -> Parts | Iteration:
    """Make model and batch on the CPU for every device, so that they depend on the seed alone."""
    module = _module(workload)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(options["seed"]))
        return module.make(workload.name, options)


def _module(workload: Workload) -> ModuleType:
    try:
        return import_module(f"memfit.workloads.{workload.module}")
    except ModuleNotFoundError as error:
        if workload.requires is None or (error.name or "").partition(".")[0] != workload.requires:
            raise
        raise InvalidTargetError(
            f"workload {workload.name} needs the package {workload.requires}, which is not installed; "
            f"run `pip install {_INSTALL[workload.requires]}`"
        ) from error


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda tensor: tensor.to(device), batch)
