"""Overlap of collectives with compute: parameters are gathered before compute needs them, sums are waited for later.

A planner puts a gather right in front of what waits for it, and the wait for a sum right behind its start, where they
take no more memory than they must, and compute stands still meanwhile. Here gathers are moved back, and waits forward,
with all that depends on them: as far as compute needs to hide them, and the budget has room for their storages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.device import Device
from memfit.graph import Graph, Op
from memfit.planners.engine.order import ordered_by
from memfit.schedule import Compute, CrossBoundary, Drop, Instruction, Schedule
from memfit.simulate import Timeline, simulate

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
    found = _Overlap(graph=graph, device=device, limit_bytes=limit, schedule=schedule, timeline=timeline)
    found.defer_waits()
    found.prefetch()
    return found.schedule


@dataclass(slots=True, kw_only=True)
class _Overlap:
    """A schedule that is made faster, its timeline, and the most bytes that its graph may take."""

    graph: Graph
    device: Device
    limit_bytes: int
    schedule: Schedule
    timeline: Timeline

    def defer_waits(self) -> None:
        """Move the waits for sums, and what depends on them, behind so much compute as hides them; the last first."""
        starts = [place for place in self._collectives() if not self._op(place).is_gather]
        for start in reversed(starts):
            instructions, clock = list(self.schedule), self._clock()
            wait = self._first_use(instructions, start)
            if wait < len(instructions):
                self._take(self._deferred(instructions, clock, wait, self._ends(clock)[start]))

    def prefetch(self) -> None:
        """Start gathers so early that they have ended when compute needs them."""
        instructions, clock = list(self.schedule), self._clock()
        places = self._collectives()
        device_bytes = self.timeline.device_bytes.copy()
        targets: dict[int, int] = {}
        first = 0
        for place, latest in zip(places, self._latest_starts(instructions, places, clock), strict=True):
            op = self._op(place)
            if op.is_gather:
                size = self._written_bytes(op)
                target = place
                while target > first and clock[target] > latest:
                    passed = instructions[target - 1]
                    is_full = device_bytes[target - 1] + size > self.limit_bytes
                    if is_full or not self._may_pass(passed, self._compute(place)):
                        break
                    target -= 1
                device_bytes[target:place] += size
                targets[place] = first = target
            else:
                first = place + 1
        self._take(_moved_back(instructions, targets))

    def _take(self, instructions: list[Instruction]) -> None:
        """Take a schedule if it is faster, and fits."""
        schedule = Schedule.of(instructions)
        timeline = simulate(self.graph, schedule, self.device)
        if timeline.peak_bytes <= self.limit_bytes and timeline.makespan_seconds < self.timeline.makespan_seconds:
            self.schedule, self.timeline = schedule, timeline

    def _collectives(self) -> list[int]:
        ops = ((place, each.op) for place, each in enumerate(self.schedule) if isinstance(each, Compute))
        return [place for place, op in ops if self.graph.ops[op].group is not None]

    def _op(self, place: int) -> Op:
        return self.graph.ops[self._compute(place).op]

    def _compute(self, place: int) -> Compute:
        instruction = self.schedule[place]
        assert isinstance(instruction, Compute)
        return instruction

    def _written_bytes(self, op: Op) -> int:
        return sum(self.device.aligned(self.graph.storages[storage].bytes) for storage in op.writes)

    def _clock(self) -> NDArray[np.float64]:
        """Return when compute comes to each instruction if it never waits."""
        seconds = [
            self.graph.ops[each.op].compute_seconds if isinstance(each, Compute) else 0.0 for each in self.schedule
        ]
        return np.concatenate([[0.0], np.cumsum(seconds)])

    def _ends(self, clock: NDArray[np.float64]) -> dict[int, float]:
        """Return when each collective ends on that clock."""
        ends: dict[int, float] = {}
        free = 0.0
        for place in self._collectives():
            ends[place] = free = max(float(clock[place]), free) + self._op(place).seconds
        return ends

    def _latest_starts(
        self, instructions: list[Instruction], places: list[int], clock: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return when each collective has to start, at the latest, so that nothing waits for it or for a later one."""
        latest = np.empty(len(places))
        next_start = np.inf
        for number in reversed(range(len(places))):
            needed = clock[self._first_use(instructions, places[number])]
            latest[number] = next_start = min(needed, next_start) - self._op(places[number]).seconds
        return latest

    def _first_use(self, instructions: list[Instruction], place: int) -> int:
        """Return the first instruction that waits for the collective at a place; their number if there is none."""
        collective = self._op(place)
        storages = {*collective.writes, *collective.mutates}
        for later in range(place + 1, len(instructions)):
            instruction = instructions[later]
            if isinstance(instruction, Compute):
                op = self.graph.ops[instruction.op]
                if op.group is None and not storages.isdisjoint((*op.reads, *op.mutates)):
                    return later
        return len(instructions)

    def _deferred(
        self, instructions: list[Instruction], clock: NDArray[np.float64], wait: int, until_seconds: float
    ) -> list[Instruction]:
        """Return the instructions with a wait, and what depends on it, behind others up to a time of the clock."""
        chain, passed = [instructions[wait]], list[Instruction]()
        written, read = self._touched(instructions[wait])
        more_bytes, seconds, place = 0, float(clock[wait]), wait + 1
        while place < len(instructions) and seconds < until_seconds:
            instruction = instructions[place]
            writes, reads = self._touched(instruction)
            if isinstance(instruction, CrossBoundary):
                break
            if written.isdisjoint(writes | reads) and read.isdisjoint(writes):
                if self.timeline.device_bytes[place] + more_bytes > self.limit_bytes:
                    break
                passed.append(instruction)
                seconds += float(clock[place + 1] - clock[place])
            else:
                chain.append(instruction)
                written, read = written | writes, read | reads
                more_bytes += self._held_bytes(instruction)
            place += 1
        return [*instructions[:wait], *passed, *chain, *instructions[place:]]

    def _touched(self, instruction: Instruction) -> tuple[set[int | str], set[int | str]]:
        """Return what an instruction writes, frees or copies, and what it reads.

        What ops share whose order is kept counts as written: storages that any op mutates, generators, collectives.
        """
        if isinstance(instruction, CrossBoundary):
            return set(), set()
        if not isinstance(instruction, Compute):
            return {instruction.storage}, set()
        op = self.graph.ops[instruction.op]
        over = () if instruction.in_place_of is None else (instruction.in_place_of,)
        return {*op.writes, *over, *ordered_by(self.graph, op)}, set(op.reads)

    def _may_pass(self, instruction: Instruction, gather: Compute) -> bool:
        """Return whether a gather may come before an instruction; gathers keep their order by themselves."""
        if isinstance(instruction, CrossBoundary):
            return False
        written, read = self._touched(instruction)
        gathered, gathered_from = self._touched(gather)
        gathered.discard(self.graph.ops[gather.op].group)
        return written.isdisjoint(gathered | gathered_from) and read.isdisjoint(gathered)

    def _held_bytes(self, instruction: Instruction) -> int:
        """Return by how much a deferred instruction raises the bytes of those that pass it."""
        if isinstance(instruction, Drop):
            return self.device.aligned(self.graph.storages[instruction.storage].bytes)
        if isinstance(instruction, Compute) and instruction.in_place_of is None:
            return -self._written_bytes(self.graph.ops[instruction.op])
        return 0


def _moved_back(instructions: list[Instruction], targets: dict[int, int]) -> list[Instruction]:
    """Return the instructions with some of them in front of others.

    Args:
        instructions: of a schedule.
        targets: of each place that is moved, the place in front of which it comes.
    """
    starting: dict[int, list[Instruction]] = {}
    for place, target in targets.items():
        starting.setdefault(target, []).append(instructions[place])
    moved: list[Instruction] = []
    for place, instruction in enumerate(instructions):
        moved += starting.get(place, ())
        if place not in targets:
            moved.append(instruction)
    return moved
