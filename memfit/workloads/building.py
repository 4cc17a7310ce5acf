"""From a workload's name and options to its TrainingStep, and to the same step with checkpoints placed by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memfit.capture.training_step import TrainingStep
from memfit.cost.environment import find_device
from memfit.errors import InvalidOptionError, InvalidTargetError
from memfit.workloads import registry
from memfit.workloads.parts import Options, Parts
from memfit.workloads.registry import OptionValue, Workload

GRANULARITIES = ("block", "stage")

_LEARNING_RATE = 1e-3  # small enough that no workload diverges in the steps that tests and benchmarks take
_MOMENTUM = 0.9

# pytorchcv asks for torchvision, which no workload needs and which may bring another torch
_INSTALL = {"pytorchcv": "--no-deps pytorchcv requests", "transformers": "transformers"}


def build_workload(name: str, given: Mapping[str, OptionValue]) -> TrainingStep:
    """Do what `memfit.workloads.build` says."""
    workload = registry.find(name)
    options = workload.read_options(given)
    device = _device(str(options["device"]))
    parts = _make(workload, options)
    model = parts.model.to(device)
    batch = _moved(parts.batch, device)
    if options.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
        batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
    model.train()
    return TrainingStep(
        model=model, loss=parts.loss, batch=batch, optimizer=_optimizer(model, str(options["optimizer"])), name=name
    )


def with_checkpoints(step: TrainingStep, granularity: str) -> TrainingStep:
    """Do what `memfit.workloads.checkpointed` says."""
    if granularity not in GRANULARITIES:
        raise InvalidOptionError(f"granularity is {granularity!r}, expected one of {', '.join(GRANULARITIES)}")
    if step.name not in registry.WORKLOADS:
        raise InvalidTargetError(
            f"step {step.name!r} is not a built-in workload, so its blocks are not known; give what build() returned"
        )
    # one copy of both, so that the copied optimizer holds the copied parameters
    model, optimizer = copy.deepcopy((step.model, step.optimizer))
    for module in _module(registry.WORKLOADS[step.name]).places(model, granularity):
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return TrainingStep(
        model=model,
        loss=step.loss,
        batch=step.batch,
        optimizer=optimizer,
        clip_norm=step.clip_norm,
        scaler=step.scaler,
        name=f"{step.name}, checkpoint every {granularity}",
    )


def _make(workload: Workload, options: Options) -> Parts:
    """Make model and batch on the CPU from the seed alone, whatever the device, and leave the caller's generators."""
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


def _device(name: str) -> torch.device:
    return torch.device("meta") if name == "meta" else find_device(name)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {key: tensor.to(device) for key, tensor in batch.items()}
    return tuple(tensor.to(device) for tensor in batch)


def _optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer | None:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    return None
