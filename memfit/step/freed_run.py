"""The seconds of a step that does not fit: its ops run one after the other, and what is big is freed as it comes.

"During training, we free all big intermediate results. Before we reuse the intermediate results, we malloc new
intermediate results for backpropagation." (dqn2020, section 4.7.) The derivatives are wrong, the seconds roughly right.
The paper calls the time of these mallocs negligible; here the new results are filled with noise as well, because
memory that was never written to reads faster, and neither counts. Whole numbers are not freed: they are indices.
"""

from __future__ import annotations

import bisect
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from memfit.binding import Call, Value, map_values, values_in
from memfit.capture import Captured, TrainingStep
from memfit.cost.op_inputs import InputMaker, holds_noise
from memfit.cost.single_op import Clock, undisturbed
from memfit.cost.stopwatch import Stopwatch
from memfit.errors import InvalidBudgetError
from memfit.graph import Graph, Op
from memfit.step.step_program import fetchers
from memfit.system.budget import format_bytes
from memfit.system.recorder import record, taken_bytes
from memfit.torch_private.tensors import tree_flatten

BIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedRun:
    """What a run that frees big results said of its step.

    Attributes:
        step_seconds: of all ops, the median of the runs.
        op_seconds: of each op, in the order of the graph, the median of the runs.
        peak_bytes: of the run, with the step's residents, and copies of those that ops write to.
        freed_bytes: how many bytes of results were freed before they were read again.
        big_bytes: results from this size on were freed.
    """

    step_seconds: float
    op_seconds: tuple[float, ...]
    peak_bytes: int
    freed_bytes: int
    big_bytes: int


def run_freed(
    step: TrainingStep,
    captured: Captured,
    graph: Graph,
    *,
    within_bytes: int | None = None,
    runs: int = 3,
    clock: Clock = time.perf_counter,
    progress: Callable[[float, float], None] = lambda _done, _total: None,
) -> FreedRun:
    """Run the ops of a step, and free what is big as it comes; the step's tensors stay as they are.

    An optimizer's update is not run, because it would change them: it counts with its seconds in `graph`.

    Args:
        step: the training step.
        captured: its finished capture.
        graph: with the measured seconds of each op (`memfit.cost.measurement.measure`).
        within_bytes: what the run may take, residents included; the smaller it is, the smaller is what is freed. None
            frees what has 1 MiB or more.
        runs: how often, after one that does not count.
        clock: gives seconds; CUDA devices are timed by events.
        progress: called with (ops run, ops to run).

    Raises:
        InvalidBudgetError: an op alone takes more than `within_bytes`.
    """
    device = captured.binding.device
    uses = _Uses(graph, captured.binding.calls, device)
    seconds: list[list[float]] = []
    peak_bytes = beside_bytes = 0
    with undisturbed(device):
        with record(device) as beside:
            run = _Run(step, captured, graph, uses, clock)
        beside_bytes = uses.resident_bytes + beside.end_bytes - beside.start_bytes
        run.big_bytes = BIG_BYTES if within_bytes is None else _least_big_bytes(graph, uses, within_bytes, beside_bytes)
        for number in range(runs + 1):
            gc.collect()
            with record(device) as usage:
                found = run.once(lambda op, at=number: progress(at + op / len(graph.ops), runs + 1))
            peak_bytes = max(peak_bytes, beside_bytes + usage.peak_bytes)
            seconds += [found] if number else []
    return FreedRun(
        step_seconds=statistics.median(map(sum, seconds)),
        op_seconds=tuple(map(statistics.median, zip(*seconds, strict=True))),
        peak_bytes=peak_bytes,
        freed_bytes=run.freed_bytes,
        big_bytes=run.big_bytes,
    )


class _Uses:
    """Where each storage of a graph is read, and as what.

    Attributes:
        reads: for each storage the ops that read or mutate it, ascending.
        values: for each storage the Values on it.
        sizes_bytes: for each storage what it takes of the device.
        resident_bytes: of all residents.
    """

    def __init__(self, graph: Graph, calls: Sequence[Call], device: torch.device) -> None:
        self.sizes_bytes = [taken_bytes(storage.bytes, device) for storage in graph.storages]
        self.resident_bytes = sum(self.sizes_bytes[storage.id] for storage in graph.storages if storage.resident)
        self.reads: list[list[int]] = [[] for _ in graph.storages]
        self.values: list[list[Value]] = [[] for _ in graph.storages]
        for op, call in zip(graph.ops, calls, strict=True):
            for storage in {*op.reads, *op.mutates}:
                self.reads[storage].append(op.id)
            for value in values_in((call.args, call.kwargs, [each for each in call.results if each is not None])):
                self.values[value.storage].append(value)

    def next_read(self, storage: int, op: int) -> int | None:
        """Return the first op after another that reads or mutates a storage; None if there is none.

        Args:
            storage: its number in the graph.
            op: the number of the other op.
        """
        reads = self.reads[storage]
        at = bisect.bisect_right(reads, op)
        return reads[at] if at < len(reads) else None

    def is_noise(self, storage: int) -> bool:
        """Return whether noise may stand for a storage: all that reads it takes floating-point numbers."""
        return bool(self.values[storage]) and all(map(holds_noise, self.values[storage]))

    def let_go(self, graph: Graph, op: Op, live: Iterator[int], big_bytes: int) -> Iterator[tuple[int, bool]]:
        """Yield the storages that are freed after an op, and whether they are read again.

        Args:
            graph: of the step.
            op: the op that has just run.
            live: storages on the device after it, without residents; not changed while this is read.
            big_bytes: a storage that is read again is freed only if it has so many.
        """
        for storage in live:
            following = self.next_read(storage, op.id)
            if following is None:
                yield storage, False
            elif following > op.id + 1 and graph.storages[storage].bytes >= big_bytes and self.is_noise(storage):
                yield storage, True


def _least_big_bytes(graph: Graph, uses: _Uses, within_bytes: int, beside_bytes: int) -> int:
    """Return the largest size from which on results have to be freed for the run to stay within `within_bytes`.

    Args:
        graph: of the step.
        uses: of its storages.
        within_bytes: for all.
        beside_bytes: what is there before the first op.

    Raises:
        InvalidBudgetError: it does not if all are.
    """

    def fits(big_bytes: int) -> bool:
        return beside_bytes + _peak_bytes(graph, uses, big_bytes) <= within_bytes

    sizes = sorted({storage.bytes for storage in graph.storages if not storage.resident and storage.bytes})
    choices = [1, *sizes, (sizes or [0])[-1] + 1]
    first_too_large = bisect.bisect_left(choices, True, key=lambda size: not fits(size))
    if first_too_large == 0:
        raise InvalidBudgetError(
            f"{format_bytes(within_bytes)} are too few to run the ops of the step one by one: that takes "
            f"{format_bytes(beside_bytes + _peak_bytes(graph, uses, 1))}, with the step's parameters and batch; "
            "raise --within"
        )
    return choices[first_too_large - 1]


def _peak_bytes(graph: Graph, uses: _Uses, big_bytes: int) -> int:
    """Return the most bytes, residents left out, of a run that frees results of `big_bytes` and more."""
    live: set[int] = set()
    peak_bytes = 0
    for op in graph.ops:
        live |= {storage for storage in (*op.reads, *op.mutates, *op.writes) if not graph.storages[storage].resident}
        now_bytes = sum(uses.sizes_bytes[storage] for storage in live) + (op.workspace_bytes or 0)
        peak_bytes = max(peak_bytes, now_bytes)
        live -= {storage for storage, _ in uses.let_go(graph, op, iter(live), big_bytes)}
    return peak_bytes


class _Run:
    """Runs the ops of a captured step on its own residents; what ops write to is a copy."""

    def __init__(self, step: TrainingStep, captured: Captured, graph: Graph, uses: _Uses, clock: Clock) -> None:
        self.calls, self.device = captured.binding.calls, captured.binding.device
        self.graph, self.uses, self.clock = graph, uses, clock
        self.big_bytes, self.freed_bytes = BIG_BYTES, 0
        self.inputs = InputMaker(self.device)
        filled = [value for values in uses.values for value in values if holds_noise(value)]
        for dtype in {value.dtype for value in filled}:
            longest = max(value.reach_bytes for value in filled if value.dtype == dtype)
            self.inputs.pattern(dtype, self.device, longest // dtype.itemsize)
        self.residents = self._residents(step, captured)

    def _residents(self, step: TrainingStep, captured: Captured) -> Mapping[int, torch.Tensor]:
        run = [op for op, call in zip(self.graph.ops, self.calls, strict=True) if _is_run(call)]
        used = {s for op in run for s in (*op.reads, *op.mutates) if self.graph.storages[s].resident}
        mutated = {storage for op in run for storage in op.mutates}
        leaves = tree_flatten(step.batch)[0]
        order = sorted(used)
        found = {s: fetch(leaves) for s, fetch in zip(order, fetchers(step.model, captured, order), strict=True)}
        return {s: tensor.detach().clone() if s in mutated else tensor.detach() for s, tensor in found.items()}

    def once(self, progress: Callable[[int], None]) -> list[float]:
        """Return the seconds of each op in one run."""
        live: dict[int, torch.Tensor] = {}
        timings: list[Callable[[], float]] = []
        self.freed_bytes = 0
        for op, call in zip(self.graph.ops, self.calls, strict=True):
            if op.id % 64 == 0:
                progress(op.id)
            if _is_run(call):
                timings.append(self._timed(op, call, live))
            else:
                timings.append(lambda seconds=op.seconds: seconds)
            for storage, is_read_again in tuple(self.uses.let_go(self.graph, op, iter(live), self.big_bytes)):
                del live[storage]
                self.freed_bytes += is_read_again * self.graph.storages[storage].bytes
        return [timing() for timing in timings]

    def _timed(self, op: Op, call: Call, live: dict[int, torch.Tensor]) -> Callable[[], float]:
        """Run an op, and return what gives its seconds."""
        for storage in {*op.reads, *op.mutates}:
            if storage not in live and storage not in self.residents:
                live[storage] = self.inputs.filled(self.uses.values[storage], self.graph.storages[storage].bytes)

        def tensor(value: Value) -> torch.Tensor:
            storage = value.storage
            return value.on(self.residents[storage] if storage in self.residents else live[storage])

        args, kwargs = map_values(call.args, tensor), map_values(call.kwargs, tensor)
        watch = Stopwatch(self.device, self.clock)
        returned = call.target(*args, **kwargs)
        watch.stop()
        for value, result in zip(call.results, tree_flatten(returned)[0], strict=False):
            if value is not None and value.storage not in self.residents:
                live.setdefault(value.storage, result)
        return lambda: watch.seconds() or 0.0


def _is_run(call: Call) -> bool:
    return getattr(call.target, "measurable", True)
