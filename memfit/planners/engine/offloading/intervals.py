"""Offload intervals: where a schedule lets a storage be on the host, and the schedule that uses the chosen ones.

A *stop* is a Compute or a CrossBoundary of a schedule, or its end; between two stops there are only drops. An *offload
interval* lasts from stop a, which writes or reads a storage, to stop b, the next that reads it. If a planner chooses
the interval, the copy to the host starts right after a, the storage leaves the device when that copy is done, and it is
back before b. The exact stops follow from the streams (see `memfit.planners.engine.offloading.streams`).

One *host copy* serves all chosen intervals of a storage until an op mutates it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.graph import Graph
from memfit.plan import Problem
from memfit.schedule import Code, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait
from memfit.simulate import simulate
from memfit.simulate.live_ranges import LiveRanges, live_ranges
from memfit.system.records import Integers, Table, record

_STOP = record("held_bytes", floats="seconds done_seconds")
_INTERVAL = record(
    "storage host_copy start end made size_bytes host_bytes left returned",
    floats="offload_seconds prefetch_seconds due_seconds offload_end prefetch_end",
    flags="chosen copied",
)
_HOST_COPY = record("last", flags="is_made")
LEAVE, RETURN, AHEAD, RELEASE, BEHIND = range(5)
"""Where instructions are added, in this order: three places before a stop, two behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadIntervals:
    """All offload intervals of a schedule without copies.

    Attributes:
        schedule: the schedule; every storage stays on the device from its first use to its last.
        stops: record[stops]: bytes on the device at each stop, bytes outside the graph included; its seconds, and the
            seconds of all stops before it. The last one is the end.
        position: int64[stops], the instruction of each stop; the end's is one past the last.
        intervals: record[intervals], by `start`. `made` is the stop that made the version of the storage that is
            copied. `chosen` is the planner's decision.
            `memfit.planners.engine.offloading.streams.run` writes `left` and `returned`, the stops before which the
            storage leaves and returns; `copied`, whether a copy to the host starts for this interval; `due_seconds`;
            and the ends of both copies. The other fields describe the interval.
        by_end: int64[intervals], the same by `end`.
        host_copies: record[host copies], scratch of the streams.
    """

    schedule: Schedule
    stops: Table
    position: NDArray[np.int64]
    intervals: Table
    by_end: NDArray[np.int64]
    host_copies: Table


def find_offload_intervals(problem: Problem, schedule: Schedule) -> OffloadIntervals:
    """Return the offload intervals of `schedule`, which is legal and has no copies, over the problem's link.

    Args:
        problem: gives the graph, the link and the bytes outside.
        schedule: legal, without copies.
    """
    graph, device = problem.graph, problem.device
    found = live_ranges(graph, schedule)
    position = np.flatnonzero(np.isin(schedule.codes, (Code.COMPUTE, Code.BOUNDARY)))
    live_at_end = [stay.storage for stay in found.ranges if stay.last == len(schedule)]
    stops = np.zeros(len(position) + 1, _STOP)
    stops["held_bytes"][:-1] = simulate(graph, schedule, device).device_bytes[position] + problem.always_outside_bytes
    stops["held_bytes"][-1] = problem.bytes_outside + sum(device.aligned(graph.storages[s].bytes) for s in live_at_end)
    is_op = schedule.codes[position] == Code.COMPUTE
    ops: list[int] = schedule.operands[position[is_op]].tolist()
    stops["seconds"][:-1][is_op] = [graph.ops[op].compute_seconds for op in ops]
    stops["done_seconds"][1:] = np.cumsum(stops["seconds"][:-1])
    rows, host_copies = _rows(graph, schedule, found, position)
    intervals = np.zeros(len(rows), _INTERVAL)
    for column, name in enumerate(("storage", "host_copy", "start", "end", "made")):
        intervals[name] = [row[column] for row in rows]
    intervals["host_bytes"] = [graph.storages[row[0]].bytes for row in rows]
    intervals["size_bytes"] = [device.aligned(graph.storages[row[0]].bytes) for row in rows]
    rates = (device.to_host_bytes_per_second or np.inf, device.to_device_bytes_per_second or np.inf)
    intervals["offload_seconds"] = device.copy_latency_seconds + intervals["host_bytes"] / rates[0]
    intervals["prefetch_seconds"] = device.copy_latency_seconds + intervals["host_bytes"] / rates[1]
    return OffloadIntervals(
        schedule=schedule,
        stops=stops,
        position=np.append(position, len(schedule)).astype(np.int64),
        intervals=intervals,
        by_end=np.argsort(intervals["end"], kind="stable").astype(np.int64),
        host_copies=np.zeros(host_copies + 1, _HOST_COPY),
    )


def _rows(
    graph: Graph, schedule: Schedule, found: LiveRanges, position: NDArray[np.int64]
) -> tuple[list[tuple[int, int, int, int, int]], int]:
    """Return (storage, host copy, start, end, made) of each interval, by start and storage; and the host copies."""
    assert np.isin(schedule.codes, (Code.COMPUTE, Code.DROP, Code.BOUNDARY)).all(), "the schedule has copies already"
    stop_at = {at: stop for stop, at in enumerate(position.tolist())}
    rows: list[tuple[int, int, int, int, int]] = []
    host_copies = 0
    for stay in found.ranges:
        storage = graph.storages[stay.storage]
        if storage.resident or storage.bytes == 0:
            continue
        uses = [stop_at[at] for at in stay.reads if stay.departed_at is None or at < stay.departed_at]
        if stay.departed_at is not None:
            uses.append(stop_at[stay.departed_at])
        elif storage.required_at_end and stay.last == len(schedule):
            uses.append(len(position))
        mutations = {stop_at[at] for at in stay.mutations}
        start = made = stop_at[stay.first]
        host_copies += 1
        for end in uses:
            if end > start + 1:
                rows.append((stay.storage, host_copies, start, end, made))
            if end in mutations:
                host_copies, made = host_copies + 1, end
            start = end
    return sorted(rows, key=lambda row: (row[2], row[0])), host_copies


def with_offloads(found: OffloadIntervals, begun: Integers | None = None) -> Schedule:
    """Return the schedule that offloads in the chosen intervals, at the stops that the streams found.

    Args:
        found: its chosen intervals with `left`, `returned` and `copied`.
        begun: int64[intervals], the stop right after which each copy to the host starts, from `made` to just before
            `left`; by default the use that opens the interval.
    """
    begins: Integers = found.intervals["start"] if begun is None else begun
    added: defaultdict[tuple[int, int], list[Instruction]] = defaultdict(list)
    chosen = [(number, found.intervals[number]) for number in np.flatnonzero(found.intervals["chosen"])]
    last = {int(interval["host_copy"]): int(interval["end"]) for _, interval in chosen}
    for number, interval in chosen:
        storage, left, end = int(interval["storage"]), int(interval["left"]), int(interval["end"])
        if interval["copied"]:
            added[BEHIND, int(begins[number])].append(Offload(storage=storage))
            added[LEAVE, left].append(Wait(storage=storage))
        added[LEAVE, left].append(Drop(storage=storage))
        if last[int(interval["host_copy"])] == end:
            added[RELEASE, end].append(DropHost(storage=storage))
    for interval in found.intervals[found.by_end]:
        if interval["chosen"]:
            added[RETURN, int(interval["returned"])].append(Prefetch(storage=int(interval["storage"])))
    return Schedule.of(merged(found, added))


def merged(found: OffloadIntervals, added: Mapping[tuple[int, int], list[Instruction]]) -> Iterator[Instruction]:
    """Yield the instructions of the schedule, with those added at its stops.

    Args:
        found: the intervals of the schedule without copies.
        added: (place, stop) -> instructions.
    """

    def at(stop: int, *places: int) -> Iterator[Instruction]:
        return itertools.chain.from_iterable(added.get((place, stop), ()) for place in places)

    stop = 0
    for number, instruction in enumerate(found.schedule.instructions):
        if number < found.position[stop]:
            yield instruction
            continue
        yield from at(stop, LEAVE, RETURN, AHEAD)
        yield instruction
        yield from at(stop, RELEASE, BEHIND)
        stop += 1
    yield from at(stop, LEAVE, RETURN, AHEAD)
