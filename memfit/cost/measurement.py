"""Seconds and workspace bytes of each op, measured on this device, each op by itself."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from memfit.binding import Binding, Call
from memfit.cost.calibration import calibrate, local_device
from memfit.cost.environment import environment
from memfit.cost.kept_costs import PRIVATE, KeptCosts, OpCost, cost_key
from memfit.cost.made_inputs import InputMaker, values_in
from memfit.cost.recorder import record
from memfit.cost.result_check import check_results, result_bytes
from memfit.cost.rooflines import roofline_seconds
from memfit.device import Device
from memfit.errors import CaptureError
from memfit.graph import Graph, Op

Clock = Callable[[], float]

_ENOUGH_SECONDS = 0.03  # an op is timed until this much has been spent on it,
_MOST_RUNS = 15  # or this often
_CUDA_LAUNCHES = 5  # between two events, so that the events' own resolution (0.5 us) does not count

_log = logging.getLogger(__name__)


def measure(
    graph: Graph,
    binding: Binding,
    *,
    cache: bool = True,
    budget_bytes: int | None = None,
    progress: Callable[[float, float], None] | None = None,
    clock: Clock = time.perf_counter,
) -> Graph:
    """Return `graph` with seconds and workspace bytes of every op, measured on the binding's device.

        captured = capture(step)
        graph = measure(captured.graph, captured.binding)

    Each op is run by itself on inputs made for it, which are freed at once; equal ops are measured once, and kept on
    disk in $MEMFIT_CACHE or ~/.cache/memfit. The median of several runs counts, after one that warms up. The first
    run's results are compared with what the capture said of them. The random generators stay as they were.

    An op that cannot be run by itself gets the seconds of a roofline over this device's calibrated rates: an
    optimizer's update (which brings its own workspace), or one that refuses made-up inputs or has no room in the budget
    (these are named in a warning, and keep the workspace that the capture knew).

    Args:
        graph: a captured graph.
        binding: its calls.
        cache: whether to read and write the costs on disk.
        budget_bytes: residents and what is made for one op stay within these bytes; None sets no limit.
        progress: called with (ops measured, ops to measure) as they go.
        clock: gives seconds; CUDA devices are timed by events.

    Raises:
        CaptureError: an op's real results differ from the captured ones in shape, dtype, strides or bytes.
    """
    device: torch.device = binding.device
    kept = KeptCosts.load(environment(device), use_disk=cache)
    keys = [_key(call) for call in binding.calls]
    measurer = _Measurer(graph=graph, device=device, inputs=InputMaker(device), clock=clock, budget_bytes=budget_bytes)
    wanted = {key: index for index, key in reversed(list(enumerate(keys))) if key not in kept.costs}
    new: dict[str, OpCost] = {}
    skipped: list[tuple[str, str]] = []
    try:
        with _undisturbed(device):
            for done, (key, index) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
                if progress is not None:
                    progress(done, len(wanted))
                outcome = measurer.measure(graph.ops[index], binding.calls[index])
                if isinstance(outcome, OpCost):
                    new[key] = outcome
                else:
                    skipped.append((graph.ops[index].name, outcome))
    finally:
        kept.add(new)  # Ctrl-C loses no more than the op at hand
    _warn_of(skipped)
    return _with_costs(graph, binding, [kept.costs.get(key) for key in keys])


def _key(call: Call) -> str:
    return cost_key(call) or f"{PRIVATE}{call.op}"


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, and the caller's random generators as they were."""
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurer:
    """Measures single ops of one graph."""

    graph: Graph
    device: torch.device
    inputs: InputMaker
    clock: Clock
    budget_bytes: int | None

    def measure(self, op: Op, call: Call) -> OpCost | str:
        """Return the cost of `op`, or why it cannot be had by running it."""
        if not getattr(call.target, "measurable", True):
            return ""
        needed = self._needed_bytes(op, call)
        if self.budget_bytes is not None and needed > self.budget_bytes:
            return f"it needs {needed} bytes with the residents, of {self.budget_bytes}"
        try:
            args, kwargs = self.inputs.make(call, self.graph.storages)
            workspace_bytes = self._first_run(op, call, args, kwargs)
            seconds = self._seconds(call, args, kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, CaptureError):
                raise
            return f"it refuses inputs made for it: {str(error).strip().splitlines()[0]}"
        return OpCost(seconds=seconds, workspace_bytes=workspace_bytes)

    def _needed_bytes(self, op: Op, call: Call) -> int:
        touched = {value.storage for value in values_in((call.args, call.kwargs))} | set(op.writes)
        return self.graph.resident_bytes + sum(self.graph.storages[storage].bytes for storage in touched)

    def _first_run(self, op: Op, call: Call, args: Sequence[Any], kwargs: Any) -> int:
        """Run once: check what comes back, warm up, and return the workspace bytes."""
        if self.device.type == "cuda":
            call.target(*args, **kwargs)  # libraries take workspaces of their own at their first call, and keep them
        with record(self.device) as usage:
            returned = call.target(*args, **kwargs)
        check_results(op, call, returned, self.graph.storages)
        return max(0, usage.peak_bytes - result_bytes(returned, args, kwargs, self.device))

    def _seconds(self, call: Call, args: Sequence[Any], kwargs: Any) -> float:
        run = self._cuda_run if self.device.type == "cuda" else self._cpu_run
        seconds: list[float] = []
        started = self.clock()
        while not seconds or (len(seconds) < _MOST_RUNS and self.clock() - started < _ENOUGH_SECONDS):
            seconds.append(run(call, args, kwargs))
        return statistics.median(seconds)

    def _cpu_run(self, call: Call, args: Sequence[Any], kwargs: Any) -> float:
        started = self.clock()
        call.target(*args, **kwargs)
        return self.clock() - started

    def _cuda_run(self, call: Call, args: Sequence[Any], kwargs: Any) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self.device):
            begin.record()
            for _ in range(_CUDA_LAUNCHES):
                call.target(*args, **kwargs)
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / _CUDA_LAUNCHES


def _warn_of(skipped: Sequence[tuple[str, str]]) -> None:
    """Name the ops that were not measured though they should have been."""
    named = [(name, reason) for name, reason in skipped if reason]
    if named:
        name, reason = named[0]
        more = f", and {len(named) - 1} more" if len(named) > 1 else ""
        _log.warning("op %s%s cannot be measured, a roofline gives its seconds: %s", name, more, reason)


def _with_costs(graph: Graph, binding: Binding, costs: Sequence[OpCost | None]) -> Graph:
    profile: Device | None = None
    ops: list[Op] = []
    for op, call, cost in zip(graph.ops, binding.calls, costs, strict=True):
        if cost is not None:
            ops.append(msgspec.structs.replace(op, seconds=cost.seconds, workspace_bytes=cost.workspace_bytes))
            continue
        profile = profile or _calibrated(binding.device)
        seconds = roofline_seconds(call, op, graph.storages, profile)
        workspace_bytes = getattr(call.target, "workspace_bytes", op.workspace_bytes)
        ops.append(msgspec.structs.replace(op, seconds=seconds, workspace_bytes=workspace_bytes))
    return msgspec.structs.replace(graph, ops=tuple(ops))


def _calibrated(device: torch.device) -> Device:
    known = local_device(device)
    return known if known.memory_bytes_per_second is not None else calibrate(device)
