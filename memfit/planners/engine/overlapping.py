"""Overlap of collectives with compute: parameters are gathered before compute needs them, sums are waited for later.

A planner puts a gather right in front of what waits for it, and the wait for a sum right behind its start, where they
take no more memory than they must, and compute stands still meanwhile. Here gathers are moved back, and waits forward,
with all that depends on them: as far as compute needs to hide them, and the budget has room for their storages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.device import Device
from memfit.graph import Graph, Op
from memfit.planners.engine.order import ordered_by
from memfit.schedule import Compute, CrossBoundary, Drop, Instruction, Schedule
from memfit.simulate import Timeline, simulate

Order = NDArray[np.int64]
"""Places of instructions in a given schedule, in the order in which they are carried out."""

_UNLIMITED = 1 << 62


def largest_gather_bytes(graph: Graph, device: Device) -> int:
    """Return the aligned bytes of the largest result of a gather; 0 if there is none.

    Args:
        graph: the step.
        device: gives the alignment.
    """
    gathers = (op for op in graph.ops if op.is_gather)
    return max((sum(device.aligned(graph.storages[s].bytes) for s in op.writes) for op in gathers), default=0)


def with_overlap(graph: Graph, device: Device, schedule: Schedule, budget_bytes: int | None) -> Schedule:
    """Return `schedule` with gathers started earlier, and sums waited for later, as its memory allows.

    Collectives keep their order. Only graphs with gathers are changed.

    Args:
        graph: the step.
        device: gives the alignment of allocations.
        schedule: legal on the graph.
        budget_bytes: for the peak of the graph's own bytes; None is no limit.
    """
    if not any(op.is_gather for op in graph.ops):
        return schedule
    timeline = simulate(graph, schedule, device)
    limit = _UNLIMITED if budget_bytes is None else max(budget_bytes, timeline.peak_bytes)
    found = _Overlap(graph, device, schedule, timeline, limit)
    found.defer_waits()
    found.prefetch()
    return found.schedule


class _Overlap:
    """A schedule that is made faster by other orders of its instructions, and its timeline.

    Args:
        graph, device: of the schedule.
        schedule: legal on the graph.
        timeline: of the schedule.
        limit_bytes: the most that the graph may take.
    """

    def __init__(self, graph: Graph, device: Device, schedule: Schedule, timeline: Timeline, limit_bytes: int) -> None:
        self._graph, self._device, self._limit_bytes = graph, device, limit_bytes
        self._given, self._instructions = schedule, tuple(schedule)
        ops = [graph.ops[each.op] if isinstance(each, Compute) else None for each in self._instructions]
        self._seconds = np.array([0.0 if op is None else op.compute_seconds for op in ops])
        self._is_collective = np.array([op is not None and op.group is not None for op in ops], np.bool_)
        self._known: dict[Instruction, tuple[set[int | str], set[int | str]]] = {}
        self.timeline = timeline
        self.order: Order = np.arange(len(self._instructions))

    @property
    def schedule(self) -> Schedule:
        """The instructions in their present order."""
        return self._ordered(self.order)

    def _ordered(self, order: Order) -> Schedule:
        given = self._given
        return Schedule(given.codes[order], given.operands[order], given.extras[order])

    def defer_waits(self) -> None:
        """Move the waits for sums, and what depends on them, behind so much compute as hides them; the last first."""
        starts = [place for place in self._collectives() if not self._op(place).is_gather]
        for start in reversed(starts):
            clock, wait = self._clock(), self._first_use(start)
            if wait < len(self.order):
                self._take(self._deferred(clock, wait, self._ends(clock)[start]))

    def prefetch(self) -> None:
        """Start gathers so early that they have ended when compute needs them."""
        clock, places = self._clock(), self._collectives()
        device_bytes = self.timeline.device_bytes.copy()
        targets: dict[int, int] = {}
        first = 0
        for place, latest in zip(places, self._latest_starts(places, clock), strict=True):
            op = self._op(place)
            if op.is_gather:
                size = self._written_bytes(op)
                target = place
                while target > first and clock[target] > latest:
                    is_full = device_bytes[target - 1] + size > self._limit_bytes
                    if is_full or not self._may_pass(self._at(target - 1), self._compute(place)):
                        break
                    target -= 1
                device_bytes[target:place] += size
                targets[place] = first = target
            else:
                first = place + 1
        self._take(_moved_back(self.order, targets))

    def _take(self, order: Order) -> None:
        """Take an order if it is faster, and fits."""
        timeline = simulate(self._graph, self._ordered(order), self._device)
        if timeline.peak_bytes <= self._limit_bytes and timeline.makespan_seconds < self.timeline.makespan_seconds:
            self.order, self.timeline = order, timeline

    def _at(self, place: int) -> Instruction:
        return self._instructions[int(self.order[place])]

    def _collectives(self) -> list[int]:
        return [int(place) for place in np.flatnonzero(self._is_collective[self.order])]

    def _op(self, place: int) -> Op:
        return self._graph.ops[self._compute(place).op]

    def _compute(self, place: int) -> Compute:
        instruction = self._at(place)
        assert isinstance(instruction, Compute)
        return instruction

    def _written_bytes(self, op: Op) -> int:
        return sum(self._device.aligned(self._graph.storages[storage].bytes) for storage in op.writes)

    def _clock(self) -> NDArray[np.float64]:
        """Return when compute comes to each instruction if it never waits."""
        return np.concatenate([[0.0], np.cumsum(self._seconds[self.order])])

    def _ends(self, clock: NDArray[np.float64]) -> dict[int, float]:
        """Return when each collective ends on that clock."""
        ends: dict[int, float] = {}
        free = 0.0
        for place in self._collectives():
            ends[place] = free = max(float(clock[place]), free) + self._op(place).seconds
        return ends

    def _latest_starts(self, places: list[int], clock: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when each collective has to start, at the latest, so that nothing waits for it or for a later one."""
        latest = np.empty(len(places))
        next_start = np.inf
        for number in reversed(range(len(places))):
            needed = clock[self._first_use(places[number])]
            latest[number] = next_start = min(needed, next_start) - self._op(places[number]).seconds
        return latest

    def _first_use(self, place: int) -> int:
        """Return the first instruction that waits for the collective at a place; their number if there is none."""
        collective = self._op(place)
        storages = {*collective.writes, *collective.mutates}
        for later in range(place + 1, len(self.order)):
            instruction = self._at(later)
            if isinstance(instruction, Compute):
                op = self._graph.ops[instruction.op]
                if op.group is None and not storages.isdisjoint((*op.reads, *op.mutates)):
                    return later
        return len(self.order)

    def _deferred(self, clock: NDArray[np.float64], wait: int, until_seconds: float) -> Order:
        """Return an order with a wait, and what depends on it, behind others up to a time of the clock."""
        order = self.order
        chain, passed = [order[wait]], list[np.int64]()
        written, read = (set(each) for each in self._touched(self._at(wait)))
        more_bytes, seconds, place = 0, float(clock[wait]), wait + 1
        while place < len(order) and seconds < until_seconds:
            instruction = self._at(place)
            writes, reads = self._touched(instruction)
            if isinstance(instruction, CrossBoundary):
                break
            if written.isdisjoint(writes) and written.isdisjoint(reads) and read.isdisjoint(writes):
                if self.timeline.device_bytes[place] + more_bytes > self._limit_bytes:
                    break
                passed.append(order[place])
                seconds += float(clock[place + 1] - clock[place])
            else:
                chain.append(order[place])
                written |= writes
                read |= reads
                more_bytes += self._held_bytes(instruction)
            place += 1
        return np.array([*order[:wait], *passed, *chain, *order[place:]], np.int64)

    def _touched(self, instruction: Instruction) -> tuple[set[int | str], set[int | str]]:
        """Return the storages that an instruction writes, frees or copies, and those that it reads.

        Things shared by ops whose order is kept count as written: mutated storages, generators, collectives.
        """
        if isinstance(instruction, CrossBoundary):
            return set(), set()
        if not isinstance(instruction, Compute):
            return {instruction.storage}, set()
        if instruction not in self._known:
            op = self._graph.ops[instruction.op]
            over = () if instruction.in_place_of is None else (instruction.in_place_of,)
            self._known[instruction] = {*op.writes, *over, *ordered_by(self._graph, op)}, set(op.reads)
        return self._known[instruction]

    def _may_pass(self, instruction: Instruction, gather: Compute) -> bool:
        """Return whether a gather may come before an instruction; gathers keep their order by themselves."""
        if isinstance(instruction, CrossBoundary):
            return False
        written, read = self._touched(instruction)
        gathered, gathered_from = self._touched(gather)
        gathered = gathered - {self._graph.ops[gather.op].group}
        return written.isdisjoint(gathered | gathered_from) and read.isdisjoint(gathered)

    def _held_bytes(self, instruction: Instruction) -> int:
        """Return by how much a deferred instruction raises the bytes of those that pass it."""
        if isinstance(instruction, Drop):
            return self._device.aligned(self._graph.storages[instruction.storage].bytes)
        if isinstance(instruction, Compute) and instruction.in_place_of is None:
            return -self._written_bytes(self._graph.ops[instruction.op])
        return 0


def _moved_back(order: Order, targets: dict[int, int]) -> Order:
    """Return an order with some instructions in front of others.

    Args:
        order: of the instructions of a schedule.
        targets: of each place that is moved, the place in front of which it comes.
    """
    starting: dict[int, list[int]] = {}
    for place, target in targets.items():
        starting.setdefault(target, []).append(place)
    places: list[int] = []
    for place in range(len(order)):
        places += starting.get(place, ())
        if place not in targets:
            places.append(place)
    return order[np.array(places, np.int64)]
