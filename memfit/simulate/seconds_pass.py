"""The second pass of the simulator: when each instruction starts and ends, on compute, on the link, between ranks.

The pass is one loop in one function, and a shorter one for schedules without copies, which compiles in a tenth of the
time. Both get all of their arrays from Python.
"""

# Numba infers the types in here; pyright sees other types for elements of arrays.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.schedule import Code, Schedule
from memfit.simulate.arrays import GraphArrays, Link
from memfit.system.compiled import compiled, entry_point

_COMPUTE, _OFFLOAD, _WAIT = int(Code.COMPUTE), int(Code.OFFLOAD), int(Code.WAIT)
_PREFETCH, _BOUNDARY = int(Code.PREFETCH), int(Code.BOUNDARY)
_NOW, _HEAD, _TAIL = 0, 0, 1  # places in `Copies.clock` and `Copies.queues`
_NONE = -1  # no position


_Found = tuple[int, float, float, float, float, float, float]  # the fields of `Seconds`


class Copies(NamedTuple):
    """The copies of a schedule: two queues (to host, to device), of which only the heads are carried out.

    `queues[direction]` are the places of head and tail; `positions` and `seconds` of each place are the instruction and
    its time alone; `ends[direction]` is when the head ends as things are, infinite without one. `starts` and `finished`
    are arrays for all instructions; `finished` is negative until a copy has ended. `clock` holds the time now.
    """

    clock: NDArray[np.float64]
    queues: NDArray[np.int64]
    positions: NDArray[np.int64]
    seconds: NDArray[np.float64]
    ends: NDArray[np.float64]
    busy: NDArray[np.float64]
    starts: NDArray[np.float64]
    finished: NDArray[np.float64]


class Seconds(NamedTuple):
    """Result of the second pass; `failed_at` is -1, or the copy for which the device has no rate."""

    failed_at: int
    compute: float
    to_host: float
    to_device: float
    communication: float
    stall: float
    makespan: float


def _no_copies(count: int, starts: NDArray[np.float64], finished: NDArray[np.float64]) -> Copies:
    """Return empty queues with room for a schedule's copies.

    Args:
        count: of the copies.
        starts, finished: of all instructions.
    """
    return Copies(
        np.zeros(1),
        np.zeros((2, 2), np.int64),
        np.empty((2, count), np.int64),
        np.empty((2, count)),
        np.full(2, np.inf),
        np.zeros(2),
        starts,
        finished,
    )


@compiled
def _active(copies: Copies, direction: int) -> bool:
    return copies.queues[direction, _HEAD] < copies.queues[direction, _TAIL]


@compiled
def _begin_next(copies: Copies, link: Link, direction: int) -> None:
    """Start the copy at the head of a direction's queue; both ends change where the directions share a rate."""
    copies.starts[copies.positions[direction, copies.queues[direction, _HEAD]]] = copies.clock[_NOW]
    copies.ends[direction] = copies.clock[_NOW] + copies.seconds[direction, copies.queues[direction, _HEAD]]
    other = 1 - direction
    for each in (direction, other):
        if _active(copies, other) and link.slower[each] > 1.0:
            copies.ends[each] = copies.clock[_NOW] + (copies.ends[each] - copies.clock[_NOW]) * link.slower[each]


@compiled
def _begin_copy(copies: Copies, link: Link, direction: int, position: int, size_bytes: int) -> None:
    """Put a copy into its direction's queue."""
    tail = copies.queues[direction, _TAIL]
    copies.positions[direction, tail] = position
    copies.seconds[direction, tail] = link.latency_seconds + size_bytes / link.rates[direction]
    was_active = _active(copies, direction)
    copies.queues[direction, _TAIL] = tail + 1
    if not was_active:
        _begin_next(copies, link, direction)


@compiled
def _end_next(copies: Copies, link: Link) -> None:
    """Go on to the next end of a copy."""
    direction = 0 if copies.ends[0] <= copies.ends[1] else 1
    other = 1 - direction
    now = copies.ends[direction]
    copies.clock[_NOW] = now
    position = copies.positions[direction, copies.queues[direction, _HEAD]]
    copies.finished[position] = now
    copies.busy[direction] += now - copies.starts[position]
    copies.queues[direction, _HEAD] += 1
    copies.ends[direction] = np.inf
    if _active(copies, other) and link.slower[other] > 1.0:
        copies.ends[other] = now + (copies.ends[other] - now) / link.slower[other]
    if _active(copies, direction):
        _begin_next(copies, link, direction)


@compiled
def _await_copy(copies: Copies, link: Link, position: int) -> None:
    """Let time pass until the copy that began at a position has ended, if any."""
    while position >= 0 and copies.finished[position] < 0:
        _end_next(copies, link)


@compiled
def _load(copies: Copies, link: Link, direction: int) -> float:
    """Return the share of compute's rate that a direction's copy takes away now."""
    if not _active(copies, direction):
        return 0.0
    return link.loads[direction] / (link.slower[direction] if _active(copies, 1 - direction) else 1.0)


@compiled
def _work(copies: Copies, link: Link, seconds: float) -> None:
    """Let time pass until compute has worked for `seconds` at its own rate; copies under way take a share of it."""
    while True:
        rate = 1.0 - _load(copies, link, 0) - _load(copies, link, 1)
        end, next_end = copies.clock[_NOW] + seconds / rate, min(copies.ends[0], copies.ends[1])
        if end <= next_end:
            copies.clock[_NOW] = end
            return
        seconds -= (next_end - copies.clock[_NOW]) * rate
        _end_next(copies, link)


@compiled
def _pass_until(copies: Copies, link: Link, until: float) -> None:
    """Let time pass while compute waits."""
    while min(copies.ends[0], copies.ends[1]) <= until:
        _end_next(copies, link)
    copies.clock[_NOW] = max(copies.clock[_NOW], until)


@compiled
def _send(op: int, ends: float, graph: GraphArrays, sent_at: NDArray[np.float64]) -> None:
    """Note when the collective of all that an op reads and writes ends."""
    for k in range(graph.read_starts[op], graph.read_starts[op + 1]):
        sent_at[graph.reads[k]] = ends
    for k in range(graph.write_starts[op], graph.write_starts[op + 1]):
        sent_at[graph.writes[k]] = ends


def trace_seconds(
    schedule: Schedule,
    graph: GraphArrays,
    link: Link,
    start_seconds: NDArray[np.float64],
    end_seconds: NDArray[np.float64],
) -> Seconds:
    """Fill in when each instruction starts and ends.

    Args:
        schedule: of n instructions, which has passed `trace_memory`.
        graph: what it carries out.
        link: to the host; a rate of 0 is none.
        start_seconds, end_seconds: float64[n], filled in.
    """
    rows = schedule.codes, schedule.operands
    sent_at = np.zeros(len(graph.resident))  # when the last collective of each storage ends
    copies = (schedule.codes == _OFFLOAD) | (schedule.codes == _PREFETCH)
    count = np.count_nonzero(copies)
    if count == 0:
        return Seconds(*_trace_compute(*rows, graph, sent_at, start_seconds, end_seconds))
    end_seconds[copies] = -1.0
    # Positions of the last copies of each storage. None is cleared: a copy that has ended is not waited for.
    latest = np.full((2, len(graph.host_bytes)), _NONE)
    queues = _no_copies(count, start_seconds, end_seconds)
    return Seconds(*_trace_copies(*rows, graph, link, queues, latest, sent_at, start_seconds, end_seconds))


@entry_point
def _trace_compute(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    graph: GraphArrays,
    sent_at: NDArray[np.float64],
    start_seconds: NDArray[np.float64],
    end_seconds: NDArray[np.float64],
) -> _Found:
    """Fill in when each instruction of a schedule without copies starts and ends."""
    now, stall, sent, sending = 0.0, 0.0, 0.0, 0.0
    op_seconds, collective = graph.seconds, graph.collective
    read_starts, reads = graph.read_starts, graph.reads
    departure_starts, departures = graph.departure_starts, graph.departures
    for position in range(len(codes)):
        code, operand, ready = codes[position], operands[position], now
        if code == _COMPUTE and collective[operand]:
            start_seconds[position] = max(now, sent)
            sent = start_seconds[position] + op_seconds[operand]
            sending += op_seconds[operand]
            _send(operand, sent, graph, sent_at)
            end_seconds[position] = sent
            continue
        if code == _COMPUTE:
            for k in range(read_starts[operand], read_starts[operand + 1] if sent > now else 0):
                ready = max(ready, sent_at[reads[k]])
            start_seconds[position] = ready
            end_seconds[position] = ready + op_seconds[operand]
        else:
            if code == _BOUNDARY:
                for k in range(departure_starts[operand], departure_starts[operand + 1]):
                    ready = max(ready, sent_at[departures[k]])
            start_seconds[position], end_seconds[position] = now, ready
        stall += ready - now
        now = end_seconds[position]
    return _NONE, now - stall, 0.0, 0.0, sending, stall, max(now, sent)


@entry_point
def _trace_copies(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    graph: GraphArrays,
    link: Link,
    copies: Copies,
    latest: NDArray[np.int64],
    sent_at: NDArray[np.float64],
    start_seconds: NDArray[np.float64],
    end_seconds: NDArray[np.float64],
) -> _Found:
    """Fill in when each instruction of any schedule starts and ends."""
    op_seconds, read_starts, reads = graph.seconds, graph.read_starts, graph.reads
    collective = graph.collective
    sent, sending = 0.0, 0.0  # as in `_trace_compute`
    departure_starts, departures = graph.departure_starts, graph.departures
    offloads, prefetches = latest[0], latest[1]
    clock = copies.clock
    compute, stall = 0.0, 0.0
    for position in range(len(codes)):
        code, operand, arrived = codes[position], operands[position], clock[_NOW]
        if code == _COMPUTE:
            for k in range(read_starts[operand], read_starts[operand + 1] if _active(copies, 1) else 0):
                _await_copy(copies, link, prefetches[reads[k]])
        if code == _COMPUTE and collective[operand]:
            stall += clock[_NOW] - arrived
            start_seconds[position] = max(clock[_NOW], sent)
            sent = start_seconds[position] + op_seconds[operand]
            sending += op_seconds[operand]
            _send(operand, sent, graph, sent_at)
            end_seconds[position] = sent
            continue
        if code == _COMPUTE:
            for k in range(read_starts[operand], read_starts[operand + 1] if sent > clock[_NOW] else 0):
                _pass_until(copies, link, sent_at[reads[k]])
            start_seconds[position] = clock[_NOW]
            _work(copies, link, op_seconds[operand])
            compute += clock[_NOW] - start_seconds[position]
            stall += start_seconds[position] - arrived
        elif code in (_OFFLOAD, _PREFETCH):
            direction = 0 if code == _OFFLOAD else 1
            if link.rates[direction] <= 0:
                return position, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            _begin_copy(copies, link, direction, position, graph.host_bytes[operand])
            if code == _OFFLOAD:
                offloads[operand] = position
            else:
                prefetches[operand] = position
            continue
        else:
            if code == _WAIT:
                _await_copy(copies, link, offloads[operand])
            elif code == _BOUNDARY:
                for k in range(departure_starts[operand], departure_starts[operand + 1]):
                    _await_copy(copies, link, prefetches[departures[k]])
                    _pass_until(copies, link, sent_at[departures[k]])
            start_seconds[position] = arrived
            stall += clock[_NOW] - arrived
        end_seconds[position] = clock[_NOW]
    while _active(copies, 0) or _active(copies, 1):
        _end_next(copies, link)
    return _NONE, compute, copies.busy[0], copies.busy[1], sending, stall, max(clock[_NOW], sent)
