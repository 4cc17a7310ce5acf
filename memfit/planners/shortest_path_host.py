"""The fastest schedule of a small graph with copies on the host, proved: a shortest path with three clocks.

A state is what has been computed, what is on the device and on the host, and which copies are under way. A *label* is a
state with the times at which compute and the two directions of the link are free, and at which each copy under way
ends. Where one label can do all that another of the same ops can, and later in nothing, no instruction after it ends
later: what is dominated so is forgotten, and nothing else (see `memfit.planners.kept_labels`). The seconds are the
simulator's.

What the search does not try is no better than what it does:

- storages are dropped, after a Wait where their copy is under way, only where an op or a Prefetch would not fit
  otherwise, and then no more than it takes; a Wait earlier, or for nothing, only delays;
- a copy to the host starts right after a computation, and the first of several with what that computation wrote: else
  all could have started after the one before, in the same order, where the host has room for everything;
- a copy to the host is let go only where the host has no room for another one;
- what no op that is left can be of use for (see `memfit.planners.small_needs`) is dropped at once, and not computed;
- what is copied to the host leaves the device after that and comes back: without the copy, all that follows can be done
  as early. So a storage that will not be needed any more is never on its way, and a label ends no earlier than when
  all that has been copied and is still here can be back;
- a copy back starts before an op where there is room for it then, and not right after it;
- where all that is left fits beside all that is there, it is computed in its order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from memfit.plan import Problem
from memfit.planners.kept_labels import CLOSED, NONE, OPEN, Kept, forget, is_dominated
from memfit.planners.shortest_path import SmallGraph, is_small, members, smallest
from memfit.planners.small_needs import Needs
from memfit.schedule import Compute, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait

_MOST_LABELS = 500_000  # about a gigabyte; of 298 proved graphs of up to 10 ops the hardest takes 172,404


class State(NamedTuple):
    """All but `may_copy` are sets of ops or storages, as bits; `out` and `back` are the copies under way.

    `may_copy` is the set of storages with which copies to the host may begin, or CLOSED, or OPEN.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestSchedule:
    """The fastest schedule and its seconds; `schedule` is None where none is faster than was asked for."""

    schedule: Schedule | None
    seconds: float


class _Label(NamedTuple):
    state: State
    clocks: Clocks
    instructions: tuple[Instruction, ...]
    slack_bytes: int = -1  # that were free while the op just before was computed; -1 behind anything else
    came: int = -1  # the label before


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
        self.needs = Needs(self.small)
        self.largest_workspace = max((op.workspace_bytes or 0 for op in problem.graph.ops), default=0)
        self.labels: list[_Label] = []
        self.kept = Kept.none_of(len(problem.graph.storages))
        self.chains: dict[int, dict[int, int]] = {}  # by what is computed, and is on the device: the last label
        self.heap: list[tuple[float, int, int]] = []  # least seconds, ops left, number of the label

    def run(self) -> FastestSchedule | None:
        """Labels by the least time that their schedules can take, until one has computed everything."""
        everything, at_end = (1 << len(self.graph.ops)) - 1, self.small.at_end
        self._reach(_Label(State(0, 0, 0, 0, 0, CLOSED), Clocks(0.0, 0.0, 0.0, (), ()), ()))
        while self.heap:
            seconds, _, number = heapq.heappop(self.heap)
            label = self.labels[number]
            if self.kept.is_forgotten[number]:
                continue
            if label.state.done == everything and label.state.live & at_end == at_end:
                return FastestSchedule(schedule=self._schedule(number), seconds=seconds)
            if len(self.labels) > _MOST_LABELS or self.clock() > self.until_seconds:
                return None
            for following in self._following(label):
                self._reach(following._replace(came=number))
        return FastestSchedule(schedule=None, seconds=self.below_seconds)

    def _following(self, label: _Label) -> Iterator[_Label]:
        """Every label that comes next."""
        state = label.state
        if not state.back and self._fits_to_the_end(state):
            op = next(op for op in range(len(self.graph.ops)) if not state.done >> op & 1)
            following = None if state.out else self._computed(label, op, 0, None, 0)
            if following is not None:
                yield following
            return
        yield from self._computations(label)
        yield from self._returns(label)
        yield from self._departures(label)

    def _fits_to_the_end(self, state: State) -> bool:
        """Whether all ops that are left can be computed in their order with everything kept."""
        needed, _, _ = self.needs.of(state.done)
        if needed & ~state.live:
            return False
        left = [op for op in range(len(self.graph.ops)) if not state.done >> op & 1]
        needed_bytes = self.small.bytes_of(state.live) + sum(self.small.bytes_of(self.small.writes[op]) for op in left)
        return needed_bytes + self.largest_workspace <= self.small.room_bytes

    def _reach(self, label: _Label) -> None:
        """Note a label, unless it leads nowhere, is dominated, or too late."""
        state, seconds = label.state, self._least_seconds(label)
        if seconds >= self.below_seconds:
            return
        number = len(self.labels)
        self.kept = self.kept.with_room_for(number)
        self._write(number, label)
        chains = self.chains.setdefault(state.done, {})
        if any(
            not state.live & ~live and is_dominated(self.kept, number, latest, self.has_host_room)
            for live, latest in chains.items()
        ):
            return
        for live, latest in chains.items():
            if not live & ~state.live:
                chains[live] = forget(self.kept, number, latest, self.has_host_room)
        self.kept.before[number] = chains.get(state.live, NONE)
        chains[state.live] = number
        heapq.heappush(self.heap, (seconds, -state.done.bit_count(), number))
        self.labels.append(label)

    def _write(self, number: int, label: _Label) -> None:
        """Write the label to its row; what has ended, or is not under way, ends now."""
        state, clocks = label.state, label.clocks
        self.kept.sets[number] = state[1:]
        row = self.kept.seconds[number]
        row[:] = clocks.now
        row[1:3] = clocks.out_free, clocks.back_free
        for first, under_way, ends in ((3, state.out, clocks.out), (3 + len(self.host_sizes), state.back, clocks.back)):
            for storage, end in zip(members(under_way), ends, strict=True):
                row[first + storage] = end

    def _least_seconds(self, label: _Label) -> float:
        """Return a time before which no schedule that goes on from here, and has use for its copies, ends.

        What has been copied to the host will leave and come back, or else a label without the copy can do as much.
        """
        state, clocks = label.state, label.clocks
        missing = self.needs.missing(state.done, state.live, state.host)
        computing = clocks.now + self.needs.of(state.done)[2] + missing.again_seconds
        leaves = dict(zip(members(state.out), clocks.out, strict=True))
        back = clocks.back_free
        for begins, storage in sorted((leaves.get(s, clocks.now), s) for s in members(missing.back | state.out)):
            back = max(back, begins) + self.back_seconds[storage]
        pending = [
            end + self.needs.behind_seconds(storage, state.done)
            for storage, end in zip(members(state.back), clocks.back, strict=True)
        ]
        return max(computing, clocks.out_free, back, *pending)

    def _computations(self, label: _Label) -> Iterator[_Label]:
        """Every op that can be computed next, what is dropped for it, and what it writes over."""
        state, small = label.state, self.small
        wanted = self.needs.of(state.done)[1]
        for op in small.computable(state.done, state.live):
            if state.done >> op & 1 and not small.writes[op] & ~state.live & wanted:
                continue
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
                    following = self._computed(label, op, dropped | first, taken, small.bytes_of(dropped) - excess)
                    if following is not None:
                        yield following

    def _computed(self, label: _Label, op: int, dropped: int, taken: int | None, slack_bytes: int) -> _Label | None:
        """Return the label behind an op; None where copies that have been made were for nothing."""
        waited = self._waited(label, dropped | (0 if taken is None else 1 << taken), dropped)
        state, clocks = waited.state, waited.clocks
        reads, ends = self.small.reads[op], dict(zip(members(state.back), clocks.back, strict=True))
        start = max([clocks.now, *(end for storage, end in ends.items() if reads >> storage & 1)])
        done, live, unread = state.done | 1 << op, state.live | self.small.writes[op], state.back & ~reads
        useless = ~self.needs.of(done)[1]
        if useless & (unread | state.out):
            return None
        written = self.small.writes[op] & ~state.live & ~useless
        released = state.host & useless & ~state.out & ~unread
        after = State(
            done=done,
            live=live & ~useless,
            host=state.host & ~released,
            out=state.out,
            back=unread,
            may_copy=written if self.has_host_room else OPEN,
        )
        now = start + self.graph.ops[op].seconds
        back = tuple(end for storage, end in ends.items() if not reads >> storage & 1)
        instructions = (
            *waited.instructions,
            Compute(op=op, in_place_of=taken),
            *(Drop(storage=s) for s in members(live & useless)),
            *(DropHost(storage=s) for s in members(released)),
        )
        settled = _settled(clocks._replace(now=now, back=back))
        return _Label(after, settled, instructions, slack_bytes)

    def _returns(self, label: _Label) -> Iterator[_Label]:
        """Every copy back that can start next, and what is dropped for it.

        Not where the copy could have started before the computation that has just been.
        """
        coming = label.state.host & ~label.state.live & ~label.state.out & self.needs.of(label.state.done)[1]
        for storage in members(coming):
            excess = self.small.bytes_of(label.state.live | 1 << storage) - self.small.room_bytes
            if excess <= 0 and self.small.sizes[storage] <= label.slack_bytes:
                continue
            for dropped in self._droppable(label.state, 0, excess):
                waited = self._waited(label, dropped, dropped)
                state, clocks = waited.state, waited.clocks
                end = max(clocks.now, clocks.back_free) + self.back_seconds[storage]
                ends = dict(zip(members(state.back), clocks.back, strict=True)) | {storage: end}
                back = tuple(ends[s] for s in sorted(ends))
                bit = 1 << storage
                after = state._replace(live=state.live | bit, back=state.back | bit, may_copy=CLOSED)
                instructions = (*waited.instructions, Prefetch(storage=storage))
                yield _Label(after, clocks._replace(back_free=end, back=back), instructions)

    def _departures(self, label: _Label) -> Iterator[_Label]:
        """Every copy to the host that can start next, and the copies that it lets go for that."""
        state, clocks = label.state, label.clocks
        if state.may_copy == CLOSED:
            return
        for storage in members(state.live & ~state.host & (-1 if state.may_copy == OPEN else state.may_copy)):
            if self.small.sizes[storage] == 0:
                continue
            excess = sum(self.host_sizes[s] for s in members(state.host)) + self.host_sizes[storage]
            idle = state.host & ~state.out & ~state.back
            others = [s for s in members(idle) if self.host_sizes[s] > 0]
            for released in smallest(others, self.host_sizes, excess - self.host_budget_bytes):
                end = max(clocks.now, clocks.out_free) + self.out_seconds[storage]
                ends = dict(zip(members(state.out), clocks.out, strict=True)) | {storage: end}
                bit = 1 << storage
                after = state._replace(host=state.host & ~released | bit, out=state.out | bit, may_copy=OPEN)
                instructions = (*(DropHost(storage=s) for s in members(released)), Offload(storage=storage))
                copying = clocks._replace(out_free=end, out=tuple(ends[s] for s in sorted(ends)))
                yield _Label(after, copying, instructions, label.slack_bytes)

    def _droppable(self, state: State, wanted: int, excess: int) -> Iterator[int]:
        others = [s for s in members(state.live & ~wanted & ~state.back) if self.small.sizes[s] > 0]
        return smallest(others, self.small.sizes, excess)

    def _waited(self, label: _Label, gone: int, dropped: int) -> _Label:
        """Wait for the copies of what goes, and drop what is dropped."""
        state, clocks = label.state, label.clocks
        ends = dict(zip(members(state.out), clocks.out, strict=True))
        waits = [storage for storage in ends if gone >> storage & 1]
        now = max([clocks.now, *(ends[storage] for storage in waits)])
        out = tuple(end for storage, end in ends.items() if not gone >> storage & 1)
        instructions = (*(Wait(storage=s) for s in waits), *(Drop(storage=s) for s in members(dropped)))
        after = state._replace(live=state.live & ~gone, out=state.out & ~gone)
        return _Label(after, _settled(clocks._replace(now=now, out=out)), instructions)

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
