"""From decisions to a schedule: offloads where the agent starts them, and the rule of prefetches.

The rule, `earliest_reused_first` (section 4.5: "We first prefetch the earliest reused variable which is not in the GPU
memory"): before each stop, of the storages on the host, the one that is read first is copied back, if having it on the
device exceeds the budget nowhere until it is read; from there on it has to be there anyway. Then follows the next one.
A storage that the stop itself reads is copied back in any case. Compute waits for the copies back that it reads.

Waiting for memory (section 4.6: "We will not malloc new variables before the GPU memory has enough space"): at a stop
that does not fit, compute waits for the copies to the host that are under way, the oldest first, until it fits.

A *stop* is a Compute or a CrossBoundary of a schedule, or its end (see `memfit.planners.engine.offloading.intervals`).
The walk keeps the clocks of the three streams to know which copies have ended; its seconds are the simulator's.

Where the paper is silent:
- A copy starts before the op at which the agent decides, and after the use that opens the interval; if that use is the
  agent's op, and only reads, the copy starts with it.
- An offload whose copy would end only when the storage is used again is not carried out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memfit.graph import Graph
from memfit.planners.engine.offloading.intervals import (
    AHEAD,
    BEHIND,
    LEAVE,
    RELEASE,
    RETURN,
    OffloadIntervals,
    merged,
)
from memfit.schedule import Code, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait
from memfit.system.records import Integers


@dataclass(slots=True, kw_only=True)
class Trip:
    """One offload, and its way back.

    Attributes:
        storage: by id.
        start, end: the stops of the uses before and after.
        begin: the stop at which the copy starts.
        ahead: whether it starts before that stop's op, else right behind it.
        host_copy: number of the host copy; trips of one number share it.
        size_bytes: aligned, on the device.
        offload_seconds, prefetch_seconds: of the copies.
        copied: whether a copy to the host starts; the others find it there.
        ends_seconds: when that copy has ended.
        left, returned: the stops before which the storage leaves, and its copy back starts.
        back_seconds: when the copy back has ended.
    """

    storage: int
    start: int
    end: int
    begin: int
    ahead: bool
    host_copy: int
    size_bytes: int
    offload_seconds: float
    prefetch_seconds: float
    copied: bool = True
    ends_seconds: float = 0.0
    left: int | None = None
    returned: int | None = None
    back_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Walk:
    """One pass over the stops; see the module."""

    held_bytes: Integers
    seconds: Sequence[float]
    budget_bytes: int
    now: float = 0.0
    offload_end: float = 0.0
    prefetch_end: float = 0.0
    under_way: list[Trip] = field(default_factory=list[Trip])
    on_host: list[Trip] = field(default_factory=list[Trip])
    returning: list[Trip] = field(default_factory=list[Trip])
    made: set[int] = field(default_factory=set[int])

    def run(self, trips: Sequence[Trip]) -> list[Trip]:
        """Fill in the trips; return those whose copy ends too late, after which nothing else holds.

        Args:
            trips: as they were chosen.
        """
        ahead: defaultdict[int, list[Trip]] = defaultdict(list)
        behind: defaultdict[int, list[Trip]] = defaultdict(list)
        for trip in trips:
            (ahead if trip.ahead else behind)[trip.begin].append(trip)
        for stop, seconds in enumerate(self.seconds):
            self._release(stop)
            late = [trip for trip in self.under_way if trip.end == stop]
            if late:
                return late
            self._prefetch(stop)
            self._start(ahead[stop], stop)
            for trip in self.returning:
                self.now = max(self.now, trip.back_seconds if trip.end == stop else 0.0)
            self.returning = [trip for trip in self.returning if trip.end > stop]
            self.now += seconds
            self._start(behind[stop], stop + 1)
        return []

    def _release(self, stop: int) -> None:
        """Free the storages whose copy has ended, and wait for more copies where the stop does not fit."""
        while self.under_way:
            trip = self.under_way[0]
            if trip.ends_seconds > self.now and self.held_bytes[stop] <= self.budget_bytes:
                return
            if trip.end == stop:
                return  # too late: `run` refuses it
            self.now = max(self.now, trip.ends_seconds)
            self._leave(self.under_way.pop(0), stop)

    def _leave(self, trip: Trip, stop: int) -> None:
        trip.left = stop
        self.held_bytes[stop : trip.end] -= trip.size_bytes
        self.on_host.append(trip)
        self.on_host.sort(key=lambda each: each.end)

    def _prefetch(self, stop: int) -> None:
        """Start the copies back: the earliest reused first, as soon as it exceeds nothing."""
        while self.on_host:
            trip = self.on_host[0]
            until = self.held_bytes[stop : trip.end]
            if trip.end > stop and int(until.max()) + trip.size_bytes > self.budget_bytes:
                return
            until += trip.size_bytes
            self.prefetch_end = max(self.now, self.prefetch_end) + trip.prefetch_seconds
            trip.returned, trip.back_seconds = stop, self.prefetch_end
            self.returning.append(self.on_host.pop(0))

    def _start(self, trips: Sequence[Trip], next_stop: int) -> None:
        """Start copies to the host; a storage whose copy is there already leaves before the next stop."""
        for trip in trips:
            trip.copied = trip.host_copy not in self.made
            if trip.copied:
                self.made.add(trip.host_copy)
                self.offload_end = max(self.now, self.offload_end) + trip.offload_seconds
                trip.ends_seconds = self.offload_end
                self.under_way.append(trip)
            else:
                self._leave(trip, max(next_stop, trip.start + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The agent's decision to offload: the instance's storage by id, and the stop at which it was made."""

    storage: int
    stop: int


def make_trips(graph: Graph, found: OffloadIntervals, choices: Iterable[Choice]) -> list[Trip]:
    """Return the trips that carry out the choices: each in the interval that contains its stop, if there is one.

    Args:
        graph: the step.
        found: the intervals of the schedule without copies.
        choices: in the order in which they were made.
    """
    by_storage: defaultdict[int, list[int]] = defaultdict(list)
    for number, storage in enumerate(found.intervals["storage"].tolist()):
        by_storage[storage].append(number)
    trips: list[Trip] = []
    taken: set[int] = set()
    for choice in choices:
        for number in by_storage[choice.storage]:
            interval = found.intervals[number]
            start, end = int(interval["start"]), int(interval["end"])
            if start <= choice.stop < end and number not in taken:
                taken.add(number)
                is_ahead = choice.stop == start and _only_reads(graph, found, start, choice.storage)
                trips.append(_trip(interval, max(start, choice.stop - 1), is_ahead=is_ahead))
    ends = {(trip.storage, trip.end) for trip in trips}
    for trip in trips:  # before its op reads it, a storage is still on its way back
        trip.ahead &= (trip.storage, trip.begin) not in ends
    return trips


def _trip(interval: np.void, begin: int, *, is_ahead: bool) -> Trip:
    return Trip(
        storage=int(interval["storage"]),
        start=int(interval["start"]),
        end=int(interval["end"]),
        begin=begin,
        ahead=is_ahead,
        host_copy=int(interval["host_copy"]),
        size_bytes=int(interval["size_bytes"]),
        offload_seconds=float(interval["offload_seconds"]),
        prefetch_seconds=float(interval["prefetch_seconds"]),
    )


def _only_reads(graph: Graph, found: OffloadIntervals, stop: int, storage: int) -> bool:
    """Return whether a stop reads a storage that is on the device before it, and leaves it as it is."""
    at = int(found.position[stop])
    if found.schedule.codes[at] != Code.COMPUTE:
        return False
    op = graph.ops[int(found.schedule.operands[at])]
    return storage not in op.writes and storage not in op.mutates


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Choices as they are carried out: the schedule, its trips, and the bytes on the device at each stop."""

    schedule: Schedule
    trips: Sequence[Trip]
    held_bytes: Integers


def with_trips(graph: Graph, found: OffloadIntervals, choices: Sequence[Choice], budget_bytes: int) -> Carried:
    """Return the schedule that carries out the choices.

    Args:
        graph: the step.
        found: the intervals of the schedule without copies.
        choices: in the order in which they were made.
        budget_bytes: most bytes on the device.
    """
    trips = make_trips(graph, found, choices)
    seconds = found.stops["seconds"].tolist()
    while True:
        walk = Walk(held_bytes=found.stops["held_bytes"].copy(), seconds=seconds, budget_bytes=budget_bytes)
        late = walk.run(trips)
        if not late:
            schedule = _with_copies(found, trips) if trips else found.schedule
            return Carried(schedule=schedule, trips=trips, held_bytes=walk.held_bytes)
        for trip in late:
            trips.remove(trip)


def _with_copies(found: OffloadIntervals, trips: Sequence[Trip]) -> Schedule:
    """Return the schedule without copies, with those of the trips."""
    added: defaultdict[tuple[int, int], list[Instruction]] = defaultdict(list)
    last: dict[int, int] = {}
    for trip in trips:
        last[trip.host_copy] = max(trip.end, last.get(trip.host_copy, 0))
    for trip in trips:
        assert trip.left is not None, "a trip that does not leave was dropped as late"
        if trip.copied:
            added[AHEAD if trip.ahead else BEHIND, trip.begin].append(Offload(storage=trip.storage))
            added[LEAVE, trip.left].append(Wait(storage=trip.storage))
        added[LEAVE, trip.left].append(Drop(storage=trip.storage))
        if last[trip.host_copy] == trip.end:
            added[RELEASE, trip.end].append(DropHost(storage=trip.storage))
    for trip in sorted(trips, key=lambda each: each.back_seconds):
        assert trip.returned is not None, "every trip ends at a use"
        added[RETURN, trip.returned].append(Prefetch(storage=trip.storage))
    return Schedule.of(merged(found, added))
