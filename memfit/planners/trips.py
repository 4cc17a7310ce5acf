"""Trips: the intervals between two uses of a storage in which it may be on the host, and schedules that make them.

A *stop* is a Compute or a Boundary of a schedule, or its end; between two stops there are only drops. A storage that is
live from stop a, which uses it, to stop b, the next one that does, may go on a *trip*: its copy to the host starts
right after a, it leaves the device once that is done, and it is back before b. Whether a trip is made is a planner's
decision; when exactly it leaves and comes back follows from the streams (see `memfit.planners.streams`).

What is copied to the host once is there for all later trips of that storage, unless an op mutates it in between: the
trips that share a copy are a *family*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.graph import Graph
from memfit.plan import Problem
from memfit.planners.program import Table
from memfit.schedule import (
    Boundary,
    Compute,
    Drop,
    DropHost,
    Instruction,
    Offload,
    Prefetch,
    Schedule,
    Wait,
)
from memfit.simulate import simulate

_STOP = np.dtype([("held_bytes", np.int64), ("seconds", np.float64), ("done_seconds", np.float64)], align=True)
_TRIP = np.dtype(
    [
        ("storage", np.int64),
        ("family", np.int64),
        ("start", np.int64),
        ("end", np.int64),
        ("size_bytes", np.int64),
        ("host_bytes", np.int64),
        ("out_seconds", np.float64),
        ("back_seconds", np.float64),
        ("made", np.bool_),
        ("left", np.int64),
        ("returned", np.int64),
        ("copied", np.bool_),
        ("due_seconds", np.float64),
        ("out_end", np.float64),
        ("back_end", np.float64),
    ],
    align=True,
)
_FAMILY = np.dtype([("is_copied", np.bool_), ("last", np.int64)], align=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trips:
    """All trips that a schedule without copies could make.

    Attributes:
        schedule: the schedule; every storage stays on the device from its first use to its last.
        stops: record[stops]: bytes on the device at each, with everything that is not the graph's; its seconds, and
            the seconds of all stops before it. The last one is the end.
        position: int64[stops], the instruction of each stop; the end's is one past the last.
        trips: record[trips], by `start`. The first eight fields say what each trip is; `made` is the planner's
            decision; the others are what `memfit.planners.streams.run` finds: the stops before which the storage
            leaves and comes back, and whether its bytes are copied for this trip.
        by_end: int64[trips], the same by `end`.
        families: record[families], room for the streams.
    """

    schedule: Schedule
    stops: Table
    position: NDArray[np.int64]
    trips: Table
    by_end: NDArray[np.int64]
    families: Table


def find_trips(problem: Problem, schedule: Schedule) -> Trips:
    """Return the trips that `schedule`, which is legal and has no copies, could make over the problem's link."""
    graph, device = problem.graph, problem.device
    walk = _Walk(graph)
    for each in schedule:
        walk.follow(each)
    walk.finish()
    timeline = simulate(graph, schedule, device)
    outside_bytes = 0 if graph.boundaries else problem.bytes_outside
    stops = np.zeros(len(walk.position) + 1, _STOP)
    stops["held_bytes"][:-1] = timeline.device_bytes[walk.position] + outside_bytes
    stops["held_bytes"][-1] = problem.bytes_outside + sum(device.aligned(graph.storages[s].bytes) for s in walk.live)
    stops["seconds"][:-1] = [graph.ops[op].seconds if op is not None else 0.0 for op in walk.op]
    stops["done_seconds"][1:] = np.cumsum(stops["seconds"][:-1])
    rows = sorted(walk.rows, key=lambda row: (row[2], row[0]))
    trips = np.zeros(len(rows), _TRIP)
    for column, name in enumerate(("storage", "family", "start", "end")):
        trips[name] = [row[column] for row in rows]
    trips["host_bytes"] = [graph.storages[row[0]].bytes for row in rows]
    trips["size_bytes"] = [device.aligned(graph.storages[row[0]].bytes) for row in rows]
    trips["out_seconds"] = trips["host_bytes"] / (device.to_host_bytes_per_second or np.inf)
    trips["back_seconds"] = trips["host_bytes"] / (device.to_device_bytes_per_second or np.inf)
    return Trips(
        schedule=schedule,
        stops=stops,
        position=np.array([*walk.position, len(schedule)], np.int64),
        trips=trips,
        by_end=np.argsort(trips["end"], kind="stable").astype(np.int64),
        families=np.zeros(walk.families + 1, _FAMILY),
    )


class _Walk:
    """Follows a schedule and notes every pair of uses between which a storage is live and could be away."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.position: list[int] = []
        self.op: list[int | None] = []
        self.rows: list[tuple[int, int, int, int]] = []  # storage, family, start, end
        self.live = {storage.id for storage in graph.storages if storage.resident}
        self.last_use: dict[int, int] = {}  # of what may go on trips
        self.family: dict[int, int] = {}
        self.families = 0
        self._number = 0

    def follow(self, instruction: Instruction) -> None:
        """Take in the next instruction."""
        match instruction:
            case Compute(op=op_id, in_place_of=taken):
                op = self.graph.ops[op_id]
                for storage, _ in self.graph.read_versions[op_id]:
                    self._use(storage)
                for storage in op.mutates:
                    self._begin_family(storage)
                if taken is not None:
                    self._leave(taken)
                self._come(op.writes)
                self._stop(op_id)
            case Boundary(boundary=number):
                boundary = self.graph.boundaries[number]
                for storage in boundary.departures:
                    self._use(storage)
                    self.last_use.pop(storage, None)  # the user's from here on
                self._come(boundary.arrivals)
                self._stop(None)
            case Drop(storage=storage):
                self._leave(storage)
            case _:
                raise AssertionError("a schedule that makes trips already")
        self._number += 1

    def finish(self) -> None:
        """Take in the end, which uses what is required then."""
        for storage in self.graph.storages:
            if storage.required_at_end:
                self._use(storage.id)

    def _stop(self, op: int | None) -> None:
        self.position.append(self._number)
        self.op.append(op)

    def _come(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if storage not in self.live:
                self.live.add(storage)
                self._begin_family(storage)
                if self.graph.storages[storage].bytes > 0:
                    self.last_use[storage] = len(self.op)

    def _begin_family(self, storage: int) -> None:
        self.families += 1
        self.family[storage] = self.families

    def _use(self, storage: int) -> None:
        if storage in self.last_use:
            start, end = self.last_use[storage], len(self.op)
            if end > start + 1:
                self.rows.append((storage, self.family[storage], start, end))
            self.last_use[storage] = end

    def _leave(self, storage: int) -> None:
        self.live.discard(storage)
        self.last_use.pop(storage, None)


def with_trips(found: Trips) -> Schedule:
    """Return the schedule that makes the trips that are `made`, as the streams found that they go."""
    instructions = found.schedule.instructions
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    returning: dict[int, list[Instruction]] = {}
    released: dict[int, list[Instruction]] = {}
    trips = [found.trips[number] for number in np.flatnonzero(found.trips["made"])]
    last = {int(trip["family"]): int(trip["end"]) for trip in trips}
    for trip in trips:
        storage, left, end = int(trip["storage"]), int(trip["left"]), int(trip["end"])
        leaving = before.setdefault(left, [])
        if trip["copied"]:
            after.setdefault(int(trip["start"]), []).append(Offload(storage=storage))
            leaving.append(Wait(storage=storage))
        leaving.append(Drop(storage=storage))
        if last[int(trip["family"])] == end:
            released.setdefault(end, []).append(DropHost(storage=storage))
    for number in found.by_end:
        trip = found.trips[number]
        if trip["made"]:
            returning.setdefault(int(trip["returned"]), []).append(Prefetch(storage=int(trip["storage"])))
    return Schedule.of(_woven(instructions, found.position.tolist(), (before, returning, released, after)))


def _woven(
    instructions: Sequence[Instruction],
    position: Sequence[int],
    added: tuple[dict[int, list[Instruction]], ...],
) -> Iterator[Instruction]:
    """Yield the instructions, before each stop what leaves and returns, after it what the host lets go and takes."""
    before, returning, released, after = added
    stop = 0
    for number, instruction in enumerate(instructions):
        if number < position[stop]:
            yield instruction
            continue
        yield from before.get(stop, ())
        yield from returning.get(stop, ())
        yield instruction
        yield from released.get(stop, ())
        yield from after.get(stop, ())
        stop += 1
    yield from before.get(stop, ())
    yield from returning.get(stop, ())
