"""The fastest schedule of a small graph with copies on the host, proved: a shortest path with three clocks.

A state is what has been computed, what is on the device and on the host, and which copies are under way. A *label* is a
state with the times at which compute and the two directions of the link are free, and at which each copy under way
ends. Of two labels of one state, one that is later in nothing can do all that the other can, and no instruction after
it ends later: what is dominated so is forgotten, and nothing else. The seconds are the simulator's.

What the search does not try is no better than what it does:

- storages are dropped, after a Wait where their copy is under way, only where an op or a Prefetch would not fit
  otherwise, and then no more than it takes; a Wait earlier, or for nothing, only delays;
- a copy to the host starts right after a computation, and the first of several with what that computation wrote: else
  all could have started after the one before, in the same order, where the host has room for everything;
- a copy to the host is let go only where the host has no room for another one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from memfit.plan import Problem
from memfit.planners.shortest_path import SmallGraph, is_small, members, smallest
from memfit.schedule import Compute, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait

_MOST_LABELS = 60_000
_CLOSED, _OPEN = -1, -2  # no copy to the host may start before the next op; any may


class State(NamedTuple):
    """All but `may_copy` are sets of ops or storages, as bits; `out` and `back` are the copies under way.

    `may_copy` is the set of storages with which copies to the host may begin, or _CLOSED, or _OPEN.
    """

    done: int
    live: int
    host: int
    out: int
    back: int
    may_copy: int


class Clocks(NamedTuple):
    """When compute and both directions of the link are free, and when the copies of `out` and `back` end."""

    now: float
    out_free: float
    back_free: float
    out: tuple[float, ...]
    back: tuple[float, ...]

    def is_no_later(self, other: Clocks) -> bool:
        """Whether nothing here is later than there, for two labels of one state."""
        return (
            self.now <= other.now
            and self.out_free <= other.out_free
            and self.back_free <= other.back_free
            and all(a <= b for a, b in zip(self.out + self.back, other.out + other.back, strict=True))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestSchedule:
    """The fastest schedule and its seconds; `schedule` is None where none is faster than was asked for."""

    schedule: Schedule | None
    seconds: float


class _Label(NamedTuple):
    state: State
    clocks: Clocks
    came: int  # the label before
    instructions: tuple[Instruction, ...]


def fastest_with_host(problem: Problem, *, below_seconds: float, until_seconds: float) -> FastestSchedule | None:
    """Return the fastest schedule of less than `below_seconds`, or None where there are too many states to tell.

    Nothing is told either once the problem's clock is past `until_seconds`. The graphs that are looked at are those of
    `memfit.planners.shortest_path.is_small`; the device has a link.
    """
    return _Search(problem, below_seconds, until_seconds).run() if is_small(problem) else None


class _Search:
    def __init__(self, problem: Problem, below_seconds: float, until_seconds: float) -> None:
        self.clock, self.until_seconds, self.below_seconds = problem.clock, until_seconds, below_seconds
        self.graph, self.small = problem.graph, SmallGraph(problem)
        self.host_budget_bytes = problem.host_budget_bytes
        self.host_sizes = [0 if s.resident else s.bytes for s in problem.graph.storages]
        self.has_host_room = sum(self.host_sizes) <= problem.host_budget_bytes
        rates = problem.device.to_host_bytes_per_second, problem.device.to_device_bytes_per_second
        assert rates[0] is not None and rates[1] is not None, "the device has a link"
        self.out_seconds = [size / rates[0] for size in self.host_sizes]
        self.back_seconds = [size / rates[1] for size in self.host_sizes]
        self.labels: list[_Label] = []
        self.reached: dict[State, list[Clocks]] = {}
        self.heap: list[tuple[float, int]] = []

    def run(self) -> FastestSchedule | None:
        """Labels by the least time that their schedules can take, until one has computed everything."""
        everything, at_end = (1 << len(self.graph.ops)) - 1, self.small.at_end
        self._reach(State(0, 0, 0, 0, 0, _CLOSED), Clocks(0.0, 0.0, 0.0, (), ()), -1, ())
        while self.heap:
            seconds, number = heapq.heappop(self.heap)
            label = self.labels[number]
            if label.clocks not in self.reached[label.state]:
                continue
            if label.state.done == everything and label.state.live & at_end == at_end:
                return FastestSchedule(schedule=self._schedule(number), seconds=seconds)
            if len(self.labels) > _MOST_LABELS or self.clock() > self.until_seconds:
                return None
            for state, clocks, instructions in itertools.chain(
                self._computations(label), self._returns(label), self._departures(label)
            ):
                self._reach(state, clocks, number, instructions)
        return FastestSchedule(schedule=None, seconds=self.below_seconds)

    def _reach(self, state: State, clocks: Clocks, came: int, instructions: tuple[Instruction, ...]) -> None:
        """Note a label, unless it is dominated, or too late."""
        left_seconds = sum(op.seconds for op in self.graph.ops if not state.done >> op.id & 1)
        seconds = max(clocks.now + left_seconds, clocks.out_free, clocks.back_free)
        if seconds >= self.below_seconds:
            return
        others = self.reached.setdefault(state, [])
        if any(other.is_no_later(clocks) for other in others):
            return
        others[:] = [other for other in others if not clocks.is_no_later(other)]
        others.append(clocks)
        heapq.heappush(self.heap, (seconds, len(self.labels)))
        self.labels.append(_Label(state, clocks, came, instructions))

    def _computations(self, label: _Label) -> Iterator[tuple[State, Clocks, tuple[Instruction, ...]]]:
        """Every op that can be computed next, what is dropped for it, and what it writes over."""
        state, small = label.state, self.small
        for op in small.computable(state.done, state.live):
            needed = small.bytes_of(state.live) + small.bytes_of(small.writes[op])
            needed += self.graph.ops[op].workspace_bytes or 0
            overs = [(None, 0, 0)] + [
                (read, 1 << written & state.live, small.sizes[read])
                for read, written in self.graph.ops[op].reuses
                if state.live >> read & 1 and small.sizes[read] == small.sizes[written] > 0
            ]
            for taken, first, taken_bytes in overs:
                if (taken is not None and needed <= small.room_bytes) or first & state.back:
                    continue  # there is room, and keeping is no worse; or nothing has read what would have to go
                excess = needed - taken_bytes - small.bytes_of(first) - small.room_bytes
                for dropped in self._droppable(state, small.reads[op] | first, excess):
                    yield self._computed(label, op, dropped | first, taken)

    def _computed(
        self, label: _Label, op: int, dropped: int, taken: int | None
    ) -> tuple[State, Clocks, tuple[Instruction, ...]]:
        gone = dropped | (0 if taken is None else 1 << taken)
        state, clocks, instructions = self._waited(label.state, label.clocks, gone, dropped)
        reads, ends = self.small.reads[op], dict(zip(members(state.back), clocks.back, strict=True))
        start = max([clocks.now, *(end for storage, end in ends.items() if reads >> storage & 1)])
        written = self.small.writes[op] & ~state.live
        may_copy = written if self.has_host_room else _OPEN
        after = State(
            done=state.done | 1 << op,
            live=state.live | self.small.writes[op],
            host=state.host,
            out=state.out,
            back=state.back & ~reads,
            may_copy=may_copy,
        )
        now = start + self.graph.ops[op].seconds
        back = tuple(end for storage, end in ends.items() if not reads >> storage & 1)
        return after, _settled(clocks._replace(now=now, back=back)), (*instructions, Compute(op=op, in_place_of=taken))

    def _returns(self, label: _Label) -> Iterator[tuple[State, Clocks, tuple[Instruction, ...]]]:
        """Every copy back that can start next, and what is dropped for it."""
        for storage in members(label.state.host & ~label.state.live & ~label.state.out):
            excess = self.small.bytes_of(label.state.live | 1 << storage) - self.small.room_bytes
            for dropped in self._droppable(label.state, 0, excess):
                state, clocks, instructions = self._waited(label.state, label.clocks, dropped, dropped)
                end = max(clocks.now, clocks.back_free) + self.back_seconds[storage]
                ends = dict(zip(members(state.back), clocks.back, strict=True)) | {storage: end}
                back = tuple(ends[s] for s in sorted(ends))
                bit = 1 << storage
                after = state._replace(live=state.live | bit, back=state.back | bit, may_copy=_CLOSED)
                yield after, clocks._replace(back_free=end, back=back), (*instructions, Prefetch(storage=storage))

    def _departures(self, label: _Label) -> Iterator[tuple[State, Clocks, tuple[Instruction, ...]]]:
        """Every copy to the host that can start next, and the copies that it lets go for that."""
        state, clocks = label.state, label.clocks
        if state.may_copy == _CLOSED:
            return
        for storage in members(state.live & ~state.host & (-1 if state.may_copy == _OPEN else state.may_copy)):
            if self.small.sizes[storage] == 0:
                continue
            excess = sum(self.host_sizes[s] for s in members(state.host)) + self.host_sizes[storage]
            others = [s for s in members(state.host & ~state.out & ~state.back) if self.host_sizes[s] > 0]
            for released in smallest(others, self.host_sizes, excess - self.host_budget_bytes):
                end = max(clocks.now, clocks.out_free) + self.out_seconds[storage]
                ends = dict(zip(members(state.out), clocks.out, strict=True)) | {storage: end}
                bit = 1 << storage
                after = state._replace(host=state.host & ~released | bit, out=state.out | bit, may_copy=_OPEN)
                instructions = (*(DropHost(storage=s) for s in members(released)), Offload(storage=storage))
                yield after, clocks._replace(out_free=end, out=tuple(ends[s] for s in sorted(ends))), instructions

    def _droppable(self, state: State, wanted: int, excess: int) -> Iterator[int]:
        others = [s for s in members(state.live & ~wanted & ~state.back) if self.small.sizes[s] > 0]
        return smallest(others, self.small.sizes, excess)

    def _waited(
        self, state: State, clocks: Clocks, gone: int, dropped: int
    ) -> tuple[State, Clocks, tuple[Instruction, ...]]:
        """Wait for the copies of what goes, and drop what is dropped."""
        ends = dict(zip(members(state.out), clocks.out, strict=True))
        waits = [storage for storage in ends if gone >> storage & 1]
        now = max([clocks.now, *(ends[storage] for storage in waits)])
        out = tuple(end for storage, end in ends.items() if not gone >> storage & 1)
        instructions = (*(Wait(storage=s) for s in waits), *(Drop(storage=s) for s in members(dropped)))
        after = state._replace(live=state.live & ~gone, out=state.out & ~gone)
        return after, _settled(clocks._replace(now=now, out=out)), instructions

    def _schedule(self, number: int) -> Schedule:
        parts: list[tuple[Instruction, ...]] = []
        while number >= 0:
            parts.append(self.labels[number].instructions)
            number = self.labels[number].came
        return Schedule.of(instruction for part in reversed(parts) for instruction in part)


def _settled(clocks: Clocks) -> Clocks:
    """Return the clocks with nothing earlier than now: what has ended already can be waited for in no time."""
    now = clocks.now
    return Clocks(
        now,
        max(now, clocks.out_free),
        max(now, clocks.back_free),
        tuple(max(now, end) for end in clocks.out),
        tuple(max(now, end) for end in clocks.back),
    )
