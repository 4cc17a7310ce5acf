"""Measurement of a planned step beside eager: peak bytes and seconds, both sides interleaved in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.capture import TrainingStep
from memfit.capture.torch_private import tree_flatten
from memfit.cost.recorder import Usage, record
from memfit.runtime.state import StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured. Peaks include the residents; `overhead` is the median of paired ratios of seconds, minus one.

    `baseline` is eager PyTorch. `reserved_bytes` is what the allocator on CUDA held at most, None on a CPU. `source`
    names the instrument.
    """

    baseline_peak_bytes: int
    baseline_step_seconds: float
    peak_bytes: int
    step_seconds: float
    overhead: float
    resident_bytes: int
    reserved_bytes: int | None
    source: str


class MeasurableStep(Protocol):
    """A planned way to run a step on a device."""

    step: TrainingStep
    device: torch.device

    @property
    def held_bytes(self) -> int:
        """What it holds on the device between calls, beside the residents."""
        ...

    def __call__(self, batch: Any) -> torch.Tensor: ...


def measure_step(planned: MeasurableStep, batch: Any, *, repeats: int = 3) -> Measurement:
    """Measure `planned` and eager on `batch`, interleaved, medians of `repeats`; the state is put back at the end.

    The first step of each is not counted: it creates the optimizer's state and fills caches.
    """
    step, device = planned.step, planned.device
    before = StepState.take(step)
    run: Callable[[Any], Any]
    usages: dict[str, list[Usage]] = {"eager": [], "planned": []}
    peaks: dict[str, list[int]] = {"eager": [], "planned": []}  # without what is there before each step
    seconds: dict[str, list[float]] = {"eager": [], "planned": []}
    try:
        for number in range(repeats + 1):
            for name, run in (("eager", step.run_eager), ("planned", planned)):
                if step.optimizer is None:
                    for parameter in step.model.parameters():
                        parameter.grad = None
                # the instruments count from here on, so that an arena made before is not seen by them
                held_bytes = planned.held_bytes if name == "planned" else 0
                with record(device) as usage:
                    elapsed = _timed(run, batch, device)
                if number:
                    usages[name].append(usage)
                    peaks[name].append(held_bytes + usage.peak_bytes)
                    seconds[name].append(elapsed)
        resident = resident_bytes(planned, batch)  # while the optimizer's state is there
    finally:
        before.put_back(step)
    ratios = [mine / eager for mine, eager in zip(seconds["planned"], seconds["eager"], strict=True)]
    reserved = [usage.reserved_bytes for usage in usages["planned"] if usage.reserved_bytes is not None]
    return Measurement(
        baseline_peak_bytes=resident + max(peaks["eager"]),
        baseline_step_seconds=statistics.median(seconds["eager"]),
        peak_bytes=resident + max(peaks["planned"]),
        step_seconds=statistics.median(seconds["planned"]),
        overhead=statistics.median(ratios) - 1.0,
        resident_bytes=resident,
        reserved_bytes=max(reserved, default=None),
        source=usages["planned"][0].source,
    )


def resident_bytes(planned: MeasurableStep, batch: Any) -> int:
    """Return the bytes of all that is there before a step: parameters, buffers, optimizer state, batch; each once."""
    step, device = planned.step, planned.device
    tensors = [*step.model.parameters(), *step.model.buffers(), *tree_flatten(batch)[0]]
    if step.optimizer is not None:
        tensors += [value for state in step.optimizer.state.values() for value in state.values()]
    storages: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _timed(run: Callable[[Any], Any], batch: Any, device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    run(batch)
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
