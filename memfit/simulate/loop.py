"""The simulator's hot loops, compiled by numba, over a graph and a schedule held as arrays.

There are two passes. The first computes bytes, which depend on positions only, and finds instructions that cannot be
carried out; the second computes seconds. Each pass is one loop in one function. The functions that it calls mostly take
numbers: the reference count of an array passed inside the loop would cost more than the loop itself.

This module stands alone because numba's files on disk name the module of the code: files written under another name
(by a doctest run on a path) would break every later import.
"""

# Numba infers the types in here; pyright sees other types for elements of arrays.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from memfit.schedule import Code

P = ParamSpec("P")
R = TypeVar("R")

# Flags of a storage's state; compiled code has neither enums nor None.
_ON_DEVICE, _ON_HOST, _OFFLOADING, _PREFETCHING, _RESIDENT = 1, 2, 4, 8, 16
_COMPUTE, _DROP, _OFFLOAD, _WAIT, _PREFETCH, _DROP_HOST, _BOUNDARY = (int(code) for code in Code)
_NOW, _HEAD, _TAIL = 0, 0, 1  # places in `Copies.clock` and `Copies.queues`
_NONE = -1  # no position, no storage, no legal state
_MOST_BYTES_OUTSIDE = 1 << 60  # sums of bytes stay below what int64 holds


class GraphArrays(NamedTuple):
    """A graph as numpy arrays, for compiled code. `xs[x_starts[i]:x_starts[i + 1]]` are the xs of op or boundary i.

    `collective` ops run between ranks. `device_bytes` are aligned, `host_bytes` exact; unknown workspace is 0; `reads`
    include what is only mutated; `reuses` are (read, written) pairs end to end.
    """

    device_bytes: NDArray[np.int64]
    host_bytes: NDArray[np.int64]
    resident: NDArray[np.uint8]
    seconds: NDArray[np.float64]
    collective: NDArray[np.uint8]
    workspace_bytes: NDArray[np.int64]
    read_starts: NDArray[np.uint32]
    reads: NDArray[np.uint32]
    write_starts: NDArray[np.uint32]
    writes: NDArray[np.uint32]
    reuse_starts: NDArray[np.uint32]
    reuses: NDArray[np.uint32]
    arrival_starts: NDArray[np.uint32]
    arrivals: NDArray[np.uint32]
    departure_starts: NDArray[np.uint32]
    departures: NDArray[np.uint32]


class Link(NamedTuple):
    """The link to the host; each pair is (to host, to device).

    `rates` are in bytes per second, 0 without a link; `slower` is how many times as long a copy takes while the other
    direction copies too; `loads` are the shares of compute's rate that a copy under way takes away when it is alone.
    """

    rates: tuple[float, float]
    slower: tuple[float, float]
    latency_seconds: float
    loads: tuple[float, float]


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


class Memory(NamedTuple):
    """Result of the first pass; `failed_at` is -1, or the instruction that cannot be carried out."""

    failed_at: int
    peak_bytes: int
    peak_position: int
    host_peak_bytes: int


class Seconds(NamedTuple):
    """Result of the second pass; `failed_at` is -1, or the copy for which the device has no rate."""

    failed_at: int
    compute: float
    to_host: float
    to_device: float
    communication: float
    stall: float
    makespan: float


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba; the machine code is kept on disk."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)  # pyright: ignore


@_compiled
def _moved(code: int, state: int) -> int:
    """Return a storage's state after a Drop, a copy, a Wait or a DropHost, or -1 if it is not allowed."""
    copying = state & (_OFFLOADING | _PREFETCHING)
    if code == _DROP and state & _ON_DEVICE and not copying and not state & _RESIDENT:
        return state & ~_ON_DEVICE
    if code == _OFFLOAD and state & _ON_DEVICE and not copying and not state & _RESIDENT:
        return state | _ON_HOST | _OFFLOADING
    if code == _WAIT and state & _OFFLOADING:
        return state & ~_OFFLOADING
    if code == _PREFETCH and state & _ON_HOST and not state & (_ON_DEVICE | _OFFLOADING):
        return state | _ON_DEVICE | _PREFETCHING
    if code == _DROP_HOST and state & _ON_HOST and not copying:
        return state & ~_ON_HOST
    return _NONE


@_compiled
def _reuse_in_place(op: int, taken: int, states: NDArray[np.uint8], graph: GraphArrays) -> int:
    """Give the memory of `taken` to a write of `op`; return that write, or -1 if none may have it."""
    if taken >= len(states) or states[taken] & (_OFFLOADING | _RESIDENT) or not states[taken] & _ON_DEVICE:
        return _NONE
    for k in range(graph.reuse_starts[op], graph.reuse_starts[op + 1], 2):
        if graph.reuses[k] == taken and not states[graph.reuses[k + 1]] & _ON_DEVICE:
            states[taken] &= ~_ON_DEVICE
            states[graph.reuses[k + 1]] |= _ON_DEVICE
            return graph.reuses[k + 1]
    return _NONE


@_compiled
def _is_unknown(code: int, operand: int, op_count: int, storage_count: int, boundary_count: int) -> bool:
    count = np.int32(op_count if code == _COMPUTE else boundary_count if code == _BOUNDARY else storage_count)
    return (operand < 0) | (operand >= count)


@_compiled
def _first_unknown(codes: NDArray[np.int8], operands: NDArray[np.int32], graph: GraphArrays) -> int:
    """Return the first instruction whose operand does not exist, or -1."""
    op_count, storage_count, boundary_count = len(graph.seconds), len(graph.resident), len(graph.arrival_starts) - 1
    unknown_count = 0  # most schedules have none, and a count has no branch, so that it is vectorized
    for position in range(len(codes)):
        unknown_count += _is_unknown(codes[position], operands[position], op_count, storage_count, boundary_count)
    if unknown_count == 0:
        return _NONE
    position = 0
    while not _is_unknown(codes[position], operands[position], op_count, storage_count, boundary_count):
        position += 1
    return position


@_compiled
def _cross(boundary: int, states: NDArray[np.uint8], graph: GraphArrays) -> int:
    """Cross a boundary; return the bytes of its arrivals, or -1 if one is on the device already."""
    for k in range(graph.departure_starts[boundary], graph.departure_starts[boundary + 1]):
        states[graph.departures[k]] &= ~_PREFETCHING
    arrived_bytes = 0
    for k in range(graph.arrival_starts[boundary], graph.arrival_starts[boundary + 1]):
        if states[graph.arrivals[k]] & _ON_DEVICE:
            return _NONE
        states[graph.arrivals[k]] |= _ON_DEVICE
        arrived_bytes += graph.device_bytes[graph.arrivals[k]]
    return arrived_bytes


@_compiled
def _trace_memory(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    extras: NDArray[np.int64],
    graph: GraphArrays,
    device_bytes: NDArray[np.int64],
    host_bytes: NDArray[np.int64],
) -> Memory:
    """Fill in the bytes on device and host while each instruction runs."""
    unknown = _first_unknown(codes, operands, graph)
    sizes, host_sizes, read_starts, reads = graph.device_bytes, graph.host_bytes, graph.read_starts, graph.reads
    workspace, write_starts, writes = graph.workspace_bytes, graph.write_starts, graph.writes
    states = graph.resident * np.uint8(_ON_DEVICE | _RESIDENT)
    live, host_live, outside = (sizes * graph.resident).sum(), 0, 0
    peak, peak_position, host_peak = live, 0, 0
    for position in range(len(codes) if unknown == _NONE else unknown):
        code, operand, extra = codes[position], operands[position], extras[position]
        briefly, legal = 0, True
        if code == _COMPUTE:
            for k in range(read_starts[operand], read_starts[operand + 1]):
                if not states[reads[k]] & _ON_DEVICE:
                    return Memory(position, 0, 0, 0)
                states[reads[k]] &= ~_PREFETCHING
            taker = _reuse_in_place(operand, extra, states, graph) if extra >= 0 else _NONE
            legal = extra < 0 or taker >= 0
            briefly = workspace[operand]
            for k in range(write_starts[operand], write_starts[operand + 1]):
                if not states[writes[k]] & _ON_DEVICE:
                    states[writes[k]] |= _ON_DEVICE
                    live += sizes[writes[k]]
                elif writes[k] != taker:
                    briefly += sizes[writes[k]]
        elif code == _BOUNDARY:
            arrived = _cross(operand, states, graph)
            legal = arrived >= 0 and 0 <= extra <= _MOST_BYTES_OUTSIDE - outside
            outside, live = outside + extra, live + arrived + extra
        else:
            before = states[operand]
            after = _moved(code, before)
            legal = after >= 0
            states[operand] = after
            live += sizes[operand] * ((after & _ON_DEVICE) - (before & _ON_DEVICE))
            host_live += host_sizes[operand] * ((after & _ON_HOST) - (before & _ON_HOST)) // _ON_HOST
        if not legal:
            return Memory(position, 0, 0, 0)
        device_bytes[position], host_bytes[position] = live + briefly, host_live
        if live + briefly > peak:
            peak, peak_position = live + briefly, position
        host_peak = max(host_peak, host_live)
    return Memory(unknown, peak, peak_position, host_peak)


@_compiled
def _no_copies(codes: NDArray[np.int8], starts: NDArray[np.float64], finished: NDArray[np.float64]) -> Copies:
    """Return empty queues with room for a schedule's copies."""
    count = 0
    for position in range(len(codes)):
        if codes[position] in (_OFFLOAD, _PREFETCH):
            finished[position] = -1.0
            count += 1
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


@_compiled
def _active(copies: Copies, direction: int) -> bool:
    return copies.queues[direction, _HEAD] < copies.queues[direction, _TAIL]


@_compiled
def _begin_next(copies: Copies, link: Link, direction: int) -> None:
    """Start the copy at the head of a direction's queue; both ends change where the directions share a rate."""
    copies.starts[copies.positions[direction, copies.queues[direction, _HEAD]]] = copies.clock[_NOW]
    copies.ends[direction] = copies.clock[_NOW] + copies.seconds[direction, copies.queues[direction, _HEAD]]
    other = 1 - direction
    for each in (direction, other):
        if _active(copies, other) and link.slower[each] > 1.0:
            copies.ends[each] = copies.clock[_NOW] + (copies.ends[each] - copies.clock[_NOW]) * link.slower[each]


@_compiled
def _begin_copy(copies: Copies, link: Link, direction: int, position: int, size_bytes: int) -> None:
    """Put a copy into its direction's queue."""
    tail = copies.queues[direction, _TAIL]
    copies.positions[direction, tail] = position
    copies.seconds[direction, tail] = link.latency_seconds + size_bytes / link.rates[direction]
    was_active = _active(copies, direction)
    copies.queues[direction, _TAIL] = tail + 1
    if not was_active:
        _begin_next(copies, link, direction)


@_compiled
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


@_compiled
def _await_copy(copies: Copies, link: Link, position: int) -> None:
    """Let time pass until the copy that began at a position has ended, if any."""
    while position >= 0 and copies.finished[position] < 0:
        _end_next(copies, link)


@_compiled
def _load(copies: Copies, link: Link, direction: int) -> float:
    """Return the share of compute's rate that a direction's copy takes away now."""
    if not _active(copies, direction):
        return 0.0
    return link.loads[direction] / (link.slower[direction] if _active(copies, 1 - direction) else 1.0)


@_compiled
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


@_compiled
def _pass_until(copies: Copies, link: Link, until: float) -> None:
    """Let time pass while compute waits."""
    while min(copies.ends[0], copies.ends[1]) <= until:
        _end_next(copies, link)
    copies.clock[_NOW] = max(copies.clock[_NOW], until)


@_compiled
def _trace_compute(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    graph: GraphArrays,
    start_seconds: NDArray[np.float64],
    end_seconds: NDArray[np.float64],
) -> Seconds:
    """Fill in when each instruction of a schedule without copies starts and ends."""
    now, stall, sent, sending = 0.0, 0.0, 0.0, 0.0
    op_seconds, collective = graph.seconds, graph.collective
    read_starts, reads, write_starts, writes = graph.read_starts, graph.reads, graph.write_starts, graph.writes
    departure_starts, departures = graph.departure_starts, graph.departures
    sent_at = np.zeros(len(graph.resident))  # when the last collective of each storage ends
    for position in range(len(codes)):
        code, operand, ready = codes[position], operands[position], now
        if code == _COMPUTE and collective[operand]:
            start_seconds[position] = max(now, sent)
            sent = start_seconds[position] + op_seconds[operand]
            sending += op_seconds[operand]
            for k in range(read_starts[operand], read_starts[operand + 1]):
                sent_at[reads[k]] = sent
            for k in range(write_starts[operand], write_starts[operand + 1]):
                sent_at[writes[k]] = sent
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
    return Seconds(_NONE, now - stall, 0.0, 0.0, sending, stall, max(now, sent))


@_compiled
def _trace_seconds(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    graph: GraphArrays,
    link: Link,
    start_seconds: NDArray[np.float64],
    end_seconds: NDArray[np.float64],
) -> Seconds:
    """Fill in when each instruction starts and ends; `codes` have passed `_trace_memory`; a rate of 0 is no link."""
    copies = _no_copies(codes, start_seconds, end_seconds)
    if copies.positions.shape[1] == 0:
        return _trace_compute(codes, operands, graph, start_seconds, end_seconds)
    op_seconds, read_starts, reads = graph.seconds, graph.read_starts, graph.reads
    collective, write_starts, writes = graph.collective, graph.write_starts, graph.writes
    sent_at, sent, sending = np.zeros(len(graph.resident)), 0.0, 0.0  # as in `_trace_compute`
    departure_starts, departures = graph.departure_starts, graph.departures
    # Positions of the last copies of each storage. None is cleared: a copy that has ended is not waited for.
    offloads, prefetches = np.full(len(graph.host_bytes), _NONE), np.full(len(graph.host_bytes), _NONE)
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
            for k in range(read_starts[operand], read_starts[operand + 1]):
                sent_at[reads[k]] = sent
            for k in range(write_starts[operand], write_starts[operand + 1]):
                sent_at[writes[k]] = sent
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
                return Seconds(position, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
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
    return Seconds(_NONE, compute, copies.busy[0], copies.busy[1], sending, stall, max(clock[_NOW], sent))


@_compiled
def trace(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    extras: NDArray[np.int64],
    graph: GraphArrays,
    link: Link,
    in_bytes: tuple[NDArray[np.int64], NDArray[np.int64]],
    in_seconds: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> tuple[Memory, Seconds]:
    """Fill in bytes (device, host) and seconds (start, end) of each instruction.

    Args:
        codes: with `operands` and `extras`, the schedule.
        graph: what it carries out.
        link: to the host.
        in_bytes: filled with the bytes on device and host while each instruction runs.
        in_seconds: filled with the start and end of each instruction, unless the first pass fails.
    """
    memory = _trace_memory(codes, operands, extras, graph, in_bytes[0], in_bytes[1])
    if memory.failed_at != _NONE:
        return memory, Seconds(_NONE, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return memory, _trace_seconds(codes, operands, graph, link, in_seconds[0], in_seconds[1])
