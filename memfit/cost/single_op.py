"""One op run by itself: its seconds, its workspace bytes, and whether its results are what the capture said."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.binding import Call
from memfit.cost.kept_costs import OpCost
from memfit.cost.made_inputs import InputMaker, values_in
from memfit.cost.recorder import record
from memfit.cost.result_check import check_results, result_bytes
from memfit.errors import CaptureError
from memfit.graph import Graph, Op

Clock = Callable[[], float]

_MOST_RUNS = 15
_ENOUGH_SECONDS = 0.03  # of runs as short as the shortest: what other processes take does not count
_MOST_SECONDS = 0.3
_CUDA_LAUNCHES = 5  # between two events, so that the events' own resolution (0.5 us) does not count


@contextmanager
def undisturbed(device: torch.device) -> Generator[None]:
    """Measure without gradients and autocast, and leave the caller's random generators as they were."""
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures single ops of one graph."""

    graph: Graph
    device: torch.device
    inputs: InputMaker
    clock: Clock
    budget_bytes: int | None

    def measure(self, op: Op, call: Call) -> OpCost | str:
        """Return the cost of `op`, or why it cannot be had by running it (nothing where that is as it should be).

        Raises:
            CaptureError: its results are not what the capture said.
        """
        if not getattr(call.target, "measurable", True):
            return ""
        if not self.has_room(op, call):
            return f"it needs {self._needed_bytes(op, call)} bytes with the residents, of {self.budget_bytes}"
        try:
            return self._cost(op, call, *self.inputs.make(call, self.graph.storages))
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, CaptureError):
                raise
            return f"it refuses inputs made for it: {str(error).strip().splitlines()[0]}"

    def has_room(self, op: Op, call: Call) -> bool:
        """Whether what `call` takes and gives stays within the budget, beside the residents."""
        return self.budget_bytes is None or self._needed_bytes(op, call) <= self.budget_bytes

    def _needed_bytes(self, op: Op, call: Call) -> int:
        touched = {value.storage for value in values_in((call.args, call.kwargs))} | set(op.writes)
        return self.graph.resident_bytes + sum(self.graph.storages[storage].bytes for storage in touched)

    def _cost(self, op: Op, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCost:
        if self.device.type == "cuda":
            call.target(*args, **kwargs)  # libraries take workspaces of their own at their first call, and keep them
        with record(self.device) as usage:
            started = self.clock()
            returned = call.target(*args, **kwargs)
            first_seconds = self.clock() - started
        storage_bytes = check_results(op, call, returned, self.graph.storages, self.device)
        workspace_bytes = max(0, usage.peak_bytes - result_bytes(returned, args, kwargs, self.device))
        del returned
        seconds = self._seconds(call, args, kwargs, first_seconds)
        return OpCost(seconds=seconds, workspace_bytes=workspace_bytes, storage_bytes=storage_bytes)

    def _seconds(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], first_seconds: float) -> float:
        """Return the median of several runs; of two, the shorter one. A first run that is long needs no second."""
        is_cuda = self.device.type == "cuda"
        run = self._cuda_run if is_cuda else self._cpu_run
        seconds = [run(call, args, kwargs)] if is_cuda else [first_seconds]
        while len(seconds) < _MOST_RUNS and sum(seconds) < _MOST_SECONDS:
            if len(seconds) > 1 and min(seconds) * len(seconds) >= _ENOUGH_SECONDS:
                break
            seconds.append(run(call, args, kwargs))
        return statistics.median_low(seconds)

    def _cpu_run(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        started = self.clock()
        call.target(*args, **kwargs)
        return self.clock() - started

    def _cuda_run(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self.device):
            begin.record()
            for _ in range(_CUDA_LAUNCHES):
                call.target(*args, **kwargs)
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / _CUDA_LAUNCHES
