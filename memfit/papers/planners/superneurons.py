"""Planner `superneurons`: a cache of convolutions over the host, and cost-aware recomputation (Wang et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.graph import Op, Phase
from memfit.papers.options import refuse
from memfit.papers.planners.copies import CopyPlanner, mark_copied, op_at_stops
from memfit.papers.planners.layers import is_convolution, is_fully_connected, layer_of_backward
from memfit.plan import Problem
from memfit.planners.engine.offloading.absences import HostRoom
from memfit.planners.engine.offloading.intervals import OffloadIntervals, find_offload_intervals, with_offloads
from memfit.planners.engine.order import original_order
from memfit.planners.engine.results import keeping_schedule
from memfit.planners.engine.retention.decisions import Retention, drop_at, evaluate, keep_everything, simulated
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import FREE, Instance, build_instance
from memfit.schedule import Schedule
from memfit.system.records import Flags

_MODES = ("swap", "recompute", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperNeurons(CopyPlanner):
    """Keep outputs of convolutions in a cache over the host, recompute what lies between checkpoints, or both.

    Mode `swap`: if an op does not fit the budget, the least recently used outputs of convolutions that it does not read
    go to the host. They come back when they are read; and at the backward of each convolution, those that the backward
    of the convolution before it reads are fetched ahead. Mode `recompute`: convolutions and fully connected layers are
    checkpoints, and the forward ops between two of them are a segment. Where the results of a segment need no more
    bytes than the largest op, they are recomputed once and kept for its backward; else for each reader anew. Mode
    `both` recomputes, and caches the rest.

    Where the paper leaves a choice, or its framework differs:
    - A layer is a forward op (see `memfit.papers.planners.layers`), and segments are runs of the original order. The
      results of a segment are those that backward reads and that are not required at the end.
    - The largest op is that of the most bytes read, written and of workspace, residents left out, forward or backward.
    - Recomputation does not depend on the budget. A result that must not be recomputed is kept; one that the user
      pinned to be recomputed is recomputed once.
    - An eviction is a copy that compute waits for; an output that the host holds already needs none. What is fetched
      ahead needs room until its reader, evicts nothing, and is locked until then.

    Source: Wang et al. 2018, "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks".
    """

    name: ClassVar[str] = "superneurons"
    source: ClassVar[str] = "Wang et al. 2018"

    mode: str = field(default="both", metadata={"help": "swap, recompute, or both"})

    def schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Yield the schedules of the mode; without a host or a link, nothing is swapped."""
        if self.mode not in _MODES:
            refuse(self, "mode", f"one of {', '.join(_MODES)}")
        schedule = keeping_schedule(problem) if self.mode == "swap" else _recomputing(problem)
        if self.mode == "recompute" or not problem.may_copy:
            yield schedule
            return
        yield _Cache(problem, find_offload_intervals(problem, schedule), problem.budget_bytes).schedule()
        # Everything evicted: the least peak.
        yield _Cache(problem, find_offload_intervals(problem, schedule), 0).schedule()


def _recomputing(problem: Problem) -> Schedule:
    """Return the schedule of cost-aware recomputation."""
    instance = build_instance(problem, original_order(problem.graph))
    once, anew = _recomputed(instance)
    retention = drop_at(instance, keep_everything(instance), once | anew)
    hold = np.where(anew, instance.tables.intervals["end"], retention.hold).astype(np.int64)
    state = simulated(instance, Retention(release=retention.release, hold=hold))
    return emit(instance, evaluate(instance, state).sequence)


def _recomputed(instance: Instance) -> tuple[Flags, Flags]:
    """Return bool[intervals] twice: those at whose end a result is recomputed and then kept; recomputed anew."""
    intervals, storages = instance.tables.intervals, instance.tables.storages
    is_read_again = instance.crosses & intervals["closed"] & (intervals["rule"] == FREE)
    once = np.zeros(len(intervals), np.bool_)
    anew = once.copy()
    required = set(instance.reads(len(instance.op_at) - 1))  # the last position is the end
    most_bytes = _largest_op_bytes(instance)
    for segment in _segments(instance):
        results = {storage for position in segment for storage in instance.writes(position)} - required
        mine = np.isin(intervals["storage"], list(results))
        dropped = mine & is_read_again
        if storages["size_bytes"][np.unique(intervals["storage"][dropped])].sum() <= most_bytes:
            once |= dropped
            continue
        in_backward = intervals["closed"] & (intervals["start"] >= instance.backward_start)
        again = np.isin(intervals["storage"], np.unique(intervals["storage"][dropped])) & in_backward
        anew |= dropped | (again & (intervals["rule"] == FREE))
    return once, anew


def _segments(instance: Instance) -> list[list[int]]:
    """Return the positions of the forward ops between checkpoints."""
    segments: list[list[int]] = [[]]
    for position, op in _forward(instance):
        if is_convolution(op) or is_fully_connected(op):
            segments.append([])
        else:
            segments[-1].append(position)
    return segments


def _forward(instance: Instance) -> Iterator[tuple[int, Op]]:
    for position in range(instance.backward_start):
        if position not in instance.boundary_at and instance.op_at[position] >= 0:
            yield position, instance.graph.ops[instance.op_at[position]]


def _largest_op_bytes(instance: Instance) -> int:
    sizes, positions = instance.tables.storages["size_bytes"], instance.tables.positions
    most_bytes = 0
    for position, op in enumerate(instance.op_at):
        if op >= 0 and instance.graph.ops[op].phase is not Phase.UPDATE:
            used = instance.reads(position) + instance.writes(position)
            most_bytes = max(most_bytes, int(sizes[used].sum() + positions["workspace_bytes"][position]))
    return most_bytes


class _Cache:
    """The cache of outputs of convolutions, stop by stop; an output is in use where it is read, and locked there."""

    def __init__(self, problem: Problem, found: OffloadIntervals, budget_bytes: int) -> None:
        self.graph, self.found, self.rows = problem.graph, found, found.intervals
        self.budget_bytes = budget_bytes
        self.op_at = op_at_stops(found)
        self.live = found.stops["held_bytes"].copy()
        self.room = HostRoom(found, problem.host_budget_bytes)
        self.begun = self.rows["start"].copy()
        self.away: list[int] = []
        convolutions = [op for op in self.graph.ops if op.phase is Phase.FORWARD and is_convolution(op)]
        outputs = {storage for op in convolutions for storage in op.writes}
        self.cached = [number for number, row in enumerate(self.rows) if int(row["storage"]) in outputs]
        layer_of = layer_of_backward(self.graph)
        numbers = [op.id for op in convolutions]
        self.previous = dict(zip(numbers[1:], numbers, strict=False))
        self.layer_at = {stop: layer_of[op] for stop, op in enumerate(self.op_at) if op in layer_of}

    def schedule(self) -> Schedule:
        """Return the schedule with all evictions and copies back."""
        self.rows["returned"] = self.rows["end"]
        begun_layers = set[int]()
        for stop in range(len(self.live)):
            self.away = [number for number in self.away if self.rows["end"][number] > stop]
            self._evict(stop)
            layer = self.layer_at.get(stop)
            if layer is not None and layer in self.previous and layer not in begun_layers:
                begun_layers.add(layer)
                self._fetch_ahead(stop, self.previous[layer])
        mark_copied(self.found)
        return with_offloads(self.found, self.begun)

    def _evict(self, stop: int) -> None:
        """Evict the least recently used outputs until the op at `stop` fits."""
        rows = self.rows
        if self.live[stop] <= self.budget_bytes:
            return
        unlocked = [n for n in self.cached if rows["start"][n] < stop < rows["end"][n] and not rows["chosen"][n]]
        for number in sorted(unlocked, key=lambda number: (int(rows["start"][number]), number)):
            if self.live[stop] <= self.budget_bytes:
                return
            if self.room.take(number, stop - 1):
                rows["chosen"][number], rows["left"][number], self.begun[number] = True, stop, stop - 1
                self.live[stop : rows["end"][number]] -= rows["size_bytes"][number]
                self.away.append(number)

    def _fetch_ahead(self, stop: int, layer: int) -> None:
        """Fetch what the backward of a layer reads first, as far as there is room."""
        for number in list(self.away):
            end, size_bytes = int(self.rows["end"][number]), int(self.rows["size_bytes"][number])
            if self.layer_at.get(end) == layer and self.live[stop:end].max() + size_bytes <= self.budget_bytes:
                self.live[stop:end] += size_bytes
                self.rows["returned"][number] = stop
                self.away.remove(number)
