"""Measurement of planned and eager steps: peak bytes and seconds, interleaved in one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.capture import TrainingStep
from memfit.capture.training_step import parameters_of, states_of
from memfit.cost.gpu_timing import now
from memfit.memory.contract import STEPS_IN_A_ROW
from memfit.memory.footprint import footprint
from memfit.memory.place import span_bytes
from memfit.memory.saved_on_host import EagerRun
from memfit.memory.snapshot import left_as_it_was
from memfit.planning import Settings
from memfit.simulate.overlap import Transfers
from memfit.step.measured import Measured
from memfit.step.overhead import spread_of
from memfit.step.verify import RunsStep, unplanned_bytes
from memfit.system.budget import parse_budget
from memfit.system.recorder import Usage, empty_cache, record, taken_bytes
from memfit.torch_private.modules import own_tensors
from memfit.torch_private.tensors import tree_flatten

_LEAST_TURNS, _MOST_TURNS, _MOST_SECONDS = 5, 40, 10.0
_SPREAD = 0.02  # of an overhead that is known well enough
_NO_ROOM = "The device has no room for an eager step: times and peaks are not compared with it."


class MeasurableStep(RunsStep, Protocol):
    """A step on a device, which runs as the user's code does, unless a class says otherwise."""

    device: torch.device

    @property
    def held_bytes(self) -> int:
        """The bytes that it holds on the device between calls, beside the residents."""
        return 0

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the step closes over, as far as they are known."""
        return ()

    @property
    def transfers(self) -> Transfers:
        """The copies to the host and back in the last step."""
        return Transfers()


def measure_step(planned: MeasurableStep, batch: Any, *, repeats: int | None = None) -> Measured:
    """Measure planned and eager steps on `batch`, interleaved; the state is put back at the end.

    The first step of each is not counted: it creates the optimizer's state and fills caches. Where the device has no
    room for an eager step, only planned steps are measured, and the note says so.

    Args:
        planned: the planned step.
        batch: the batch of every step.
        repeats: how many steps of each count; seconds are medians of them, peaks are maxima. None takes turns until the
            overhead is known to two percentage points, or 10 seconds have passed, five at least.
    """
    step, device = planned.step, planned.device
    runs: dict[str, Callable[[Any], Any]] = {"eager": step.run_eager, "planned": planned}
    taken: dict[str, list[_Taken]] = {"eager": [], "planned": []}
    with left_as_it_was(step, planned.generators) as put_back:
        eager = EagerRun(step.run_eager, device, unplanned_bytes(planned), put_back)
        if device.type == "cuda" and not eager.is_saved_on_host:
            eager(batch)  # shows whether there is room
        if eager.is_saved_on_host:
            del runs["eager"]
        started = time.perf_counter()
        for number in range((repeats or _MOST_TURNS) + 1):
            pairs = _pairs(taken)
            if (
                repeats is None
                and len(taken["planned"]) >= _LEAST_TURNS
                and (time.perf_counter() - started > _MOST_SECONDS or not pairs or _is_tight(pairs))
            ):
                break
            for name, run in sorted(runs.items(), reverse=bool(number % 2)):  # a machine that slows down hits both
                _without_gradients(step)
                # the instrument counts from here on, so that it does not see an arena made before
                held_bytes = planned.held_bytes if name == "planned" else 0
                gc.collect()  # garbage that Python frees within the step hides as many bytes of its peak
                began = time.perf_counter()
                with record(device) as usage:
                    seconds = _timed(run, batch, device)
                if number:
                    copies = planned.transfers.since(began)
                    taken[name].append(_Taken(usage=usage, held_bytes=held_bytes, seconds=seconds, transfers=copies))
        has_reserved = taken["planned"][0].usage.reserved_bytes is not None
        reserved = _reserved_bytes(planned, batch) if has_reserved else None
        resident = resident_bytes(planned, batch)  # while the optimizer's state is there
    return _measured(taken, resident, reserved)


def _measured(taken: dict[str, list[_Taken]], resident: int, reserved: int | None) -> Measured:
    """Return medians of seconds and maxima of bytes.

    Args:
        taken: by eager and planned steps.
        resident: bytes that are there between steps.
        reserved: bytes of the allocator, where they are measured.
    """
    mine, eagers, pairs = taken["planned"], taken["eager"], _pairs(taken)
    median = sorted(mine, key=lambda one: one.seconds)[(len(mine) - 1) // 2]
    peak_bytes = resident + max(one.peak_bytes for one in mine)
    return Measured(
        baseline_peak_bytes=resident + max(one.peak_bytes for one in eagers) if pairs else None,
        baseline_step_seconds=statistics.median(one.seconds for one in eagers) if pairs else None,
        peak_bytes=peak_bytes,
        step_seconds=statistics.median(one.seconds for one in mine),
        overhead_spread=spread_of(pairs) if pairs else None,
        turns=len(mine),
        resident_bytes=resident,
        reserved_bytes=peak_bytes if reserved is None else reserved,
        source=mine[0].usage.source,
        transfers=median.transfers if median.transfers.to_host else None,
        note="" if pairs else _NO_ROOM,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """What one step took; the bytes that were there before it do not count, but for those that the step holds."""

    usage: Usage
    held_bytes: int
    seconds: float
    transfers: Transfers

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + self.usage.peak_bytes


def _pairs(taken: dict[str, list[_Taken]]) -> list[tuple[float, float]]:
    """Return the seconds of eager and of the planned step in each turn; none where eager does not run."""
    turns = zip(taken["eager"], taken["planned"], strict=False)
    return [(eager.seconds, planned.seconds) for eager, planned in turns]


def _is_tight(pairs: list[tuple[float, float]]) -> bool:
    low, high = spread_of(pairs)
    return high - low <= _SPREAD


def _without_gradients(step: TrainingStep) -> None:
    """Let a step without an optimizer find no gradients that it would add to."""
    if step.optimizer is None:
        for parameter in step.model.parameters():
            parameter.grad = None


def _reserved_bytes(planned: MeasurableStep, batch: Any) -> int:
    """Return the most bytes that torch's allocator holds during two planned steps, without what eager left unused."""
    empty_cache(planned.device)
    most = 0
    for _ in range(STEPS_IN_A_ROW):  # a second step may take more than a first, whose blocks it splits
        _without_gradients(planned.step)
        gc.collect()
        with record(planned.device) as usage:
            planned(batch)
        most = max(most, usage.reserved_bytes or 0)
    return most


def resident_bytes(planned: MeasurableStep, batch: Any) -> int:
    """Return the bytes on the device before a step, each storage once, and of a batch's only what the batch uses.

    These are parameters, buffers, the optimizer's state, the batch, and the tensors that the loss closes over.

    Args:
        planned: the planned step; its arena is not counted.
        batch: the batch that the step will run on.
    """
    return _resident_bytes(planned.step, batch, planned.device, planned.constants)


def _resident_bytes(
    step: TrainingStep, batch: Any, device: torch.device, constants: Sequence[torch.Tensor] = ()
) -> int:
    parameters, buffers = own_tensors(step.model)
    tensors = [*parameters, *buffers, *constants, *parameters_of(step.optimizer), *states_of(step.optimizer)]
    kept_bytes = 0 if step.across is None else step.across.kept_bytes
    return kept_bytes + sum((_batch_storages(batch, device) | footprint(tensors, device)).values())


def _batch_storages(batch: Any, device: torch.device) -> dict[int, int]:
    """As `footprint`; a slice of a larger tensor, the rest of which is not the step's, counts by itself."""
    used: dict[int, list[tuple[int, int]]] = {}
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type and leaf.layout is torch.strided:
            used.setdefault(leaf.untyped_storage().data_ptr(), []).append(span_bytes(leaf))
    return {
        pointer: taken_bytes(max(end for _, end in spans) - min(start for start, _ in spans), device)
        for pointer, spans in used.items()
    }


def in_bytes(settings: Settings, step: TrainingStep, device: torch.device) -> Settings:
    """Return settings whose budget is in bytes; a percentage is of the peak that an eager step is measured to have.

    Args:
        settings: with the budget.
        step: the training step.
        device: where it runs.
    """
    eager_bytes = 0 if settings.is_in_bytes else measured_eager_peak(step, device)
    return settings.within(parse_budget(settings.budget, eager_bytes))


def measured_eager_peak(step: TrainingStep, device: torch.device) -> int:
    """Return the peak in bytes of an eager step on the step's own batch, residents included; the state is put back.

    Args:
        step: the training step.
        device: where it runs.
    """
    with left_as_it_was(step):
        step.run_eager(step.batch)  # makes the optimizer's state
        _without_gradients(step)
        resident = _resident_bytes(step, step.batch, device)
        gc.collect()
        with record(device) as usage:
            step.run_eager(step.batch)
    return resident + usage.peak_bytes


def _timed(run: Callable[[Any], Any], batch: Any, device: torch.device) -> float:
    started = now(device)
    run(batch)
    return now(device) - started
