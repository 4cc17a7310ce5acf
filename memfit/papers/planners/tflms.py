"""Planner `tflms`: swap-outs and swap-ins on long edges of the graph (Le et al. 2018)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.graph import Graph, Phase
from memfit.papers.options import refuse
from memfit.papers.planners.copies import CopyPlanner, backward_start, op_at_stops, place_copies
from memfit.papers.planners.layers import layer_of_backward
from memfit.plan import Problem
from memfit.planners.engine.offloading.absences import HostRoom, load
from memfit.planners.engine.offloading.intervals import find_offload_intervals, with_offloads
from memfit.planners.engine.results import keeping_schedule
from memfit.schedule import Schedule
from memfit.system.records import Integers

_DIRECT_ORDER, _CHAIN_RULE = "direct_order", "chain_rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class TFLMS(CopyPlanner):
    """Swap tensors out after their producer, and in before a backward op that is far from it.

    The level of an op is one more than that of the ops it depends on. An edge from a forward op to a backward op whose
    levels differ by more than `threshold` is swapped, for `n_tensors` tensors in breadth-first order from the input.
    The swap-in begins after a trigger. By `direct_order` it is the nearest backward op that is `lower_bound` to
    `upper_bound` levels before the reader. By `chain_rule` it is the backward of a forward op as many steps below the
    producer. The paper makes no plan for a limit: without `n_tensors`, it is raised from 0 until the plan fits.

    Where the paper leaves a choice, or its framework differs:
    - The order of ops is the graph's. Of several triggers at one level or step, the last before the reader is taken;
      without one, the swap-in begins right before the reader.
    - Backward readers of a tensor that are at most `threshold` levels apart share a swap-in.
    - The copy out starts right after the producer. Forward readers use the tensor on the device, as it leaves only
      after the last of them.
    - If memory is short, compute waits for a copy out, and a swap-in waits for room, as TensorFlow's allocator does
      (see `memfit.papers.planners.copies`). A tensor for which the host has no room is left out.
    - The paper leaves the defaults open. These are its software's, with a threshold of 1: all longer edges.

    Source: Le et al. 2018, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting".
    """

    name: ClassVar[str] = "tflms"
    source: ClassVar[str] = "Le et al. 2018"

    n_tensors: int | None = field(
        default=None, metadata={"help": "how many tensors to swap; as few as fit the budget if left out"}
    )
    threshold: int = field(default=1, metadata={"help": "swap edges whose levels differ by more than this"})
    lower_bound: int = field(default=1, metadata={"help": "least distance of a swap-in's trigger"})
    upper_bound: int = field(default=10_000, metadata={"help": "greatest distance of a swap-in's trigger"})
    trigger: str = field(default=_DIRECT_ORDER, metadata={"help": "how triggers are found: direct_order or chain_rule"})

    def schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Yield the schedule of the rewritten graph; without a host or a link, the one that keeps everything."""
        self._check()
        schedule = keeping_schedule(problem)
        yield _Rewriting(self, problem, schedule).schedule() if problem.may_copy else schedule

    def _check(self) -> None:
        least_of = {"n_tensors": 0, "threshold": 0, "lower_bound": 1, "upper_bound": self.lower_bound}
        for option, least in least_of.items():
            value = getattr(self, option)
            if value is not None and value < least:
                refuse(self, option, f"a number of {least} or more")
        if self.trigger not in (_DIRECT_ORDER, _CHAIN_RULE):
            refuse(self, "trigger", f"{_DIRECT_ORDER} or {_CHAIN_RULE}")


class _Rewriting:
    """A graph with its levels, and the edges that are swapped."""

    def __init__(self, options: TFLMS, problem: Problem, schedule: Schedule) -> None:
        self.options, self.problem, self.graph = options, problem, problem.graph
        self.found = find_offload_intervals(problem, schedule)
        self.op_at = op_at_stops(self.found)
        self.split = backward_start(problem, self.found)
        self.makers = _makers(self.graph)
        self.readers: dict[int, list[int]] = {}
        for op, makers in enumerate(self.makers):
            for maker in makers:
                self.readers.setdefault(maker, []).append(op)
        self.levels = _levels(self.makers)

    def schedule(self) -> Schedule:
        """Return the schedule with as many tensors as asked for, or the fewest that fit, or those of the least peak."""
        rows, most, wanted = self.found.intervals, self.problem.budget_bytes, self.options.n_tensors
        tensors = list(self._tensors())
        tensors = tensors if wanted is None else tensors[:wanted]
        room, best = HostRoom(self.found, self.problem.host_budget_bytes), rows["chosen"].copy()
        least_bytes = int(load(self.found).max())
        for numbers in tensors:
            if wanted is None and least_bytes <= most:
                break
            rows["chosen"][[number for number in numbers if room.take(number, int(rows["made"][number]))]] = True
            peak_bytes = int(load(self.found).max())
            if peak_bytes < least_bytes or wanted is not None:
                least_bytes, best = peak_bytes, rows["chosen"].copy()
        rows["chosen"] = best
        place_copies(self.problem, self.found, rows["made"], self._triggers())
        return with_offloads(self.found, rows["made"])

    def _tensors(self) -> Iterator[list[int]]:
        """Yield the intervals of each tensor with a long edge, breadth first from the input."""
        by_maker: dict[int, dict[int, list[int]]] = {}
        for number, row in enumerate(self.found.intervals):
            maker, start, end = (self.op_at[int(row[name])] for name in ("made", "start", "end"))
            if maker is None or end is None or self.graph.ops[maker].phase is not Phase.FORWARD:
                continue
            if not row["made"] < self.split <= row["end"] or not self._is_long(maker, end):
                continue
            if row["start"] < self.split or (start is not None and self._is_long(start, end)):
                by_maker.setdefault(maker, {}).setdefault(int(row["storage"]), []).append(number)
        for maker in self._breadth_first():
            yield from by_maker.get(maker, {}).values()

    def _is_long(self, first: int, last: int) -> bool:
        return self.levels[last] - self.levels[first] > self.options.threshold

    def _breadth_first(self) -> Iterator[int]:
        waiting = deque(op for op, makers in enumerate(self.makers) if not makers)
        seen = set(waiting)
        while waiting:
            yield (op := waiting.popleft())
            following = [reader for reader in self.readers.get(op, ()) if reader not in seen]
            seen.update(following)
            waiting.extend(dict.fromkeys(following))

    def _triggers(self) -> Integers:
        """Return int64[intervals]: the stop before which each chosen interval's swap-in begins."""
        rows = self.found.intervals
        triggers = rows["end"].copy()
        stop_of = {op: stop for stop, op in enumerate(self.op_at) if op is not None and stop >= self.split}
        backward_of: dict[int, list[int]] = {}
        for op, layer in layer_of_backward(self.graph).items():
            backward_of.setdefault(layer, []).append(stop_of[op])
        find = self._in_direct_order if self.options.trigger == _DIRECT_ORDER else self._by_chain_rule
        for number in np.flatnonzero(rows["chosen"]):
            stop = find(rows[number], backward_of)
            if stop is not None:
                triggers[number] = stop + 1
        return triggers

    def _in_direct_order(self, row: np.void, _: dict[int, list[int]]) -> int | None:
        reader = self.op_at[int(row["end"])]
        assert reader is not None, "only ops read what is swapped"
        nearest = self.levels[reader] - self.options.lower_bound
        farthest = self.levels[reader] - self.options.upper_bound
        stops = range(max(self.split, int(row["start"]) + 1), int(row["end"]))
        levels = [(self.levels[op], stop) for stop in stops if (op := self.op_at[stop]) is not None]
        return max(((level, stop) for level, stop in levels if farthest <= level <= nearest), default=(0, None))[1]

    def _by_chain_rule(self, row: np.void, backward_of: dict[int, list[int]]) -> int | None:
        producer = self.op_at[int(row["made"])]
        assert producer is not None, "only ops produce what is swapped"
        below = {producer}
        for steps in range(1, self.options.upper_bound + 1):
            readers = {reader for op in below for reader in self.readers.get(op, ())}
            below = {op for op in readers if self.graph.ops[op].phase is Phase.FORWARD}
            if not below:
                return None
            stops = [stop for op in below for stop in backward_of.get(op, ()) if row["start"] < stop < row["end"]]
            if steps >= self.options.lower_bound and stops:
                return max(stops)
        return None


def _makers(graph: Graph) -> list[set[int]]:
    """Return for each op the ops that it depends on: the makers of the versions that it reads or mutates."""
    made: dict[int, int] = {}
    makers: list[set[int]] = []
    for op in graph.ops:
        makers.append({made[storage] for storage, _ in graph.read_versions[op.id] if storage in made})
        made |= dict.fromkeys((*op.writes, *op.mutates), op.id)
    return makers


def _levels(makers: list[set[int]]) -> list[int]:
    levels: list[int] = []
    for earlier in makers:
        levels.append(1 + max((levels[op] for op in earlier), default=0))
    return levels
