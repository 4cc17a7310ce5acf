"""The first pass of the simulator: bytes at each instruction, and the first instruction that cannot be carried out.

Bytes depend on positions only. The pass is one loop in one function, which gets all of its arrays from Python.
"""

# Numba infers the types in here; pyright sees other types for elements of arrays.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.schedule import Code, Schedule
from memfit.simulate.arrays import GraphArrays
from memfit.system.compiled import compiled, entry_point

# Flags of a storage's state; compiled code has neither enums nor None.
_ON_DEVICE, _ON_HOST, _OFFLOADING, _PREFETCHING, _RESIDENT = 1, 2, 4, 8, 16
_COMPUTE, _DROP, _OFFLOAD, _WAIT, _PREFETCH, _DROP_HOST, _BOUNDARY = (int(code) for code in Code)
_NONE = -1  # no position, no storage, no legal state
_MOST_BYTES_OUTSIDE = 1 << 60  # sums of bytes stay below what int64 holds


class Memory(NamedTuple):
    """Result of the first pass; `failed_at` is -1, or the instruction that cannot be carried out."""

    failed_at: int
    peak_bytes: int
    peak_position: int
    host_peak_bytes: int


@compiled
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


@compiled
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


@compiled
def _is_unknown(code: int, operand: int, op_count: int, storage_count: int, boundary_count: int) -> bool:
    count = np.int32(op_count if code == _COMPUTE else boundary_count if code == _BOUNDARY else storage_count)
    return (operand < 0) | (operand >= count)


@compiled
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


@compiled
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


def trace_memory(
    schedule: Schedule, graph: GraphArrays, device_bytes: NDArray[np.int64], host_bytes: NDArray[np.int64]
) -> Memory:
    """Fill in the bytes on device and host while each instruction runs.

    Args:
        schedule: of n instructions.
        graph: what it carries out.
        device_bytes, host_bytes: int64[n], filled in.
    """
    states = graph.resident * np.uint8(_ON_DEVICE | _RESIDENT)
    rows = schedule.codes, schedule.operands, schedule.extras
    return Memory(*_trace_memory(*rows, graph, states, device_bytes, host_bytes))


@entry_point
def _trace_memory(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    extras: NDArray[np.int64],
    graph: GraphArrays,
    states: NDArray[np.uint8],
    device_bytes: NDArray[np.int64],
    host_bytes: NDArray[np.int64],
) -> tuple[int, int, int, int]:
    unknown = _first_unknown(codes, operands, graph)
    sizes, host_sizes, read_starts, reads = graph.device_bytes, graph.host_bytes, graph.read_starts, graph.reads
    workspace, write_starts, writes = graph.workspace_bytes, graph.write_starts, graph.writes
    live, host_live, outside = 0, 0, 0
    for storage in range(len(sizes)):
        live += sizes[storage] * graph.resident[storage]
    peak, peak_position, host_peak = live, 0, 0
    for position in range(len(codes) if unknown == _NONE else unknown):
        code, operand, extra = codes[position], operands[position], extras[position]
        briefly, legal = 0, True
        if code == _COMPUTE:
            for k in range(read_starts[operand], read_starts[operand + 1]):
                if not states[reads[k]] & _ON_DEVICE:
                    return position, 0, 0, 0
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
            return position, 0, 0, 0
        device_bytes[position], host_bytes[position] = live + briefly, host_live
        if live + briefly > peak:
            peak, peak_position = live + briefly, position
        host_peak = max(host_peak, host_live)
    return unknown, peak, peak_position, host_peak
