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
_NONE = -1  # no position, no storage, no legal state
_MOST_BYTES_OUTSIDE = 1 << 60  # sums of bytes stay below what int64 holds


class GraphArrays(NamedTuple):
    """A graph as numpy arrays, for compiled code. `xs[x_starts[i]:x_starts[i + 1]]` are the xs of op or boundary i.

    `device_bytes` are aligned, `host_bytes` exact; unknown workspace is 0; `reads` include what is only mutated;
    `reuses` are (read, written) pairs end to end.
    """

    device_bytes: NDArray[np.int64]
    host_bytes: NDArray[np.int64]
    resident: NDArray[np.uint8]
    seconds: NDArray[np.float64]
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
def _trace_seconds(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    graph: GraphArrays,
    to_host_rate: float,
    to_device_rate: float,
    start_seconds: NDArray[np.float64],
    end_seconds: NDArray[np.float64],
) -> Seconds:
    """Fill in when each instruction starts and ends; `codes` have passed `_trace_memory`; a rate of 0 is no link."""
    op_seconds, host_sizes, read_starts, reads = graph.seconds, graph.host_bytes, graph.read_starts, graph.reads
    departure_starts, departures = graph.departure_starts, graph.departures
    # When the last copy of each storage ends. None is cleared: waiting for a copy that has ended takes no time.
    offload_ends, prefetch_ends = np.zeros(len(host_sizes)), np.zeros(len(host_sizes))
    now, to_host_end, to_device_end = 0.0, 0.0, 0.0
    compute, to_host, to_device, stall = 0.0, 0.0, 0.0, 0.0
    for position in range(len(codes)):
        code, operand = codes[position], operands[position]
        start = now
        if (code == _OFFLOAD and to_host_rate <= 0) or (code == _PREFETCH and to_device_rate <= 0):
            return Seconds(position, 0.0, 0.0, 0.0, 0.0, 0.0)
        if code == _COMPUTE:
            if to_device_end > now:
                for k in range(read_starts[operand], read_starts[operand + 1]):
                    start = max(start, prefetch_ends[reads[k]])
            stall += start - now
            compute += op_seconds[operand]
            now = end = start + op_seconds[operand]
        elif code == _OFFLOAD:
            start = max(now, to_host_end)
            to_host += host_sizes[operand] / to_host_rate
            to_host_end = end = offload_ends[operand] = start + host_sizes[operand] / to_host_rate
        elif code == _PREFETCH:
            start = max(now, to_device_end)
            to_device += host_sizes[operand] / to_device_rate
            to_device_end = end = prefetch_ends[operand] = start + host_sizes[operand] / to_device_rate
        else:
            end = now
            if code == _WAIT:
                end = max(now, offload_ends[operand])
            elif code == _BOUNDARY:
                for k in range(departure_starts[operand], departure_starts[operand + 1]):
                    end = max(end, prefetch_ends[departures[k]])
            stall += end - now
            now = end
        start_seconds[position], end_seconds[position] = start, end
    return Seconds(_NONE, compute, to_host, to_device, stall, max(now, to_host_end, to_device_end))


@_compiled
def trace(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    extras: NDArray[np.int64],
    graph: GraphArrays,
    rates: tuple[float, float],
    in_bytes: tuple[NDArray[np.int64], NDArray[np.int64]],
    in_seconds: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> tuple[Memory, Seconds]:
    """Fill in bytes (device, host) and seconds (start, end) of each instruction.

    Args:
        codes: with `operands` and `extras`, the schedule.
        graph: what it carries out.
        rates: bytes per second to the host and to the device, 0 where there is no link.
        in_bytes: filled with the bytes on device and host while each instruction runs.
        in_seconds: filled with the start and end of each instruction, unless the first pass fails.
    """
    memory = _trace_memory(codes, operands, extras, graph, in_bytes[0], in_bytes[1])
    if memory.failed_at != _NONE:
        return memory, Seconds(_NONE, 0.0, 0.0, 0.0, 0.0, 0.0)
    return memory, _trace_seconds(codes, operands, graph, rates[0], rates[1], in_seconds[0], in_seconds[1])
