"""The simulator's hot loop, compiled by numba, over a graph and a schedule held as arrays.

A module of its own, that nothing runs as a script: numba's files on disk name the module that the code came from, and
files written under another name (by a doctest run on a path) would break every later import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from memfit.schedule import Code

P = ParamSpec("P")
R = TypeVar("R")

_COMPUTE_STREAM, _TO_HOST, _TO_DEVICE = 0, 1, 2
_STALL = 3  # in `seconds`: time that compute waits
_LIVE, _HOST_LIVE, _PREFETCHING, _OUTSIDE = 0, 1, 2, 3  # in `counters`
_IDLE = -1.0  # when a copy ends that is not under way; compiled code has no None
_ILLEGAL = -1.0  # a start that says that the instruction cannot be carried out
_MOST_BYTES = 1 << 61  # sums of bytes stay below what int64 holds
_COMPUTE, _DROP, _OFFLOAD, _WAIT, _PREFETCH, _DROP_HOST, _BOUNDARY = (
    int(code) for code in Code
)  # numba knows no enums


class GraphArrays(NamedTuple):
    """A graph as numpy arrays, for compiled code. `xs[x_starts[i]:x_starts[i + 1]]` are the xs of op or boundary i.

    `device_bytes` are aligned, `host_bytes` exact; unknown workspace is 0; `reads` include what is only mutated.
    """

    device_bytes: NDArray[np.int64]
    host_bytes: NDArray[np.int64]
    resident: NDArray[np.uint8]
    seconds: NDArray[np.float64]
    workspace_bytes: NDArray[np.int64]
    read_starts: NDArray[np.int32]
    reads: NDArray[np.int32]
    write_starts: NDArray[np.int32]
    writes: NDArray[np.int32]
    reuse_starts: NDArray[np.int32]
    reuses: NDArray[np.int32]
    arrival_starts: NDArray[np.int32]
    arrivals: NDArray[np.int32]
    departure_starts: NDArray[np.int32]
    departures: NDArray[np.int32]


class _State(NamedTuple):
    """Where everything is and what time it is; a copy that is not under way ends at `_IDLE`."""

    on_device: NDArray[np.uint8]
    on_host: NDArray[np.uint8]
    offload_ends: NDArray[np.float64]
    prefetch_ends: NDArray[np.float64]
    clocks: NDArray[np.float64]
    seconds: NDArray[np.float64]
    counters: NDArray[np.int64]


class TimelineArrays(NamedTuple):
    """The arrays of a Timeline, to be filled."""

    start_seconds: NDArray[np.float64]
    end_seconds: NDArray[np.float64]
    device_bytes: NDArray[np.int64]
    host_bytes: NDArray[np.int64]


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba; the machine code is kept on disk."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)  # pyright: ignore


@_compiled
def _await(entries: NDArray[np.int32], first: int, last: int, state: _State) -> None:
    """Make compute wait for every prefetch of the given storages."""
    for k in range(first, last):
        end = state.prefetch_ends[entries[k]]
        if end >= 0:
            state.seconds[_STALL] += max(0.0, end - state.clocks[_COMPUTE_STREAM])
            state.clocks[_COMPUTE_STREAM] = max(end, state.clocks[_COMPUTE_STREAM])
            state.prefetch_ends[entries[k]] = _IDLE
            state.counters[_PREFETCHING] -= 1


@_compiled
def _copy(stream: int, duration: float, state: _State) -> tuple[float, float]:
    """Put a copy at the end of its stream, no earlier than compute has come; return its start and end."""
    start = max(state.clocks[stream], state.clocks[_COMPUTE_STREAM])
    state.clocks[stream] = start + duration
    state.seconds[stream] += duration
    return start, start + duration


@_compiled
def _move(
    code: int, storage: int, graph: GraphArrays, rates: tuple[float, float], state: _State
) -> tuple[float, float]:
    """Drop, offload, wait, prefetch or drop the host's copy; return start and end, below 0 where it cannot be."""
    counters, device_bytes, host_bytes = state.counters, graph.device_bytes[storage], graph.host_bytes[storage]
    here, there, resident = state.on_device[storage], state.on_host[storage], graph.resident[storage]
    offloading, prefetching = state.offload_ends[storage] >= 0, state.prefetch_ends[storage] >= 0
    start = end = state.clocks[_COMPUTE_STREAM]
    if code == _DROP and here and not (resident or offloading or prefetching):
        state.on_device[storage] = 0
        counters[_LIVE] -= device_bytes
    elif code == _OFFLOAD and here and rates[0] > 0 and not (resident or offloading or prefetching):
        counters[_HOST_LIVE] += 0 if there else host_bytes
        state.on_host[storage] = 1
        start, end = _copy(_TO_HOST, host_bytes / rates[0], state)
        state.offload_ends[storage] = end
    elif code == _WAIT and offloading:
        end = max(start, state.offload_ends[storage])
        state.seconds[_STALL] += end - start
        state.clocks[_COMPUTE_STREAM], state.offload_ends[storage] = end, _IDLE
    elif code == _PREFETCH and there and rates[1] > 0 and not (here or offloading):
        state.on_device[storage] = 1
        counters[_LIVE] += device_bytes
        counters[_PREFETCHING] += 1
        start, end = _copy(_TO_DEVICE, host_bytes / rates[1], state)
        state.prefetch_ends[storage] = end
    elif code == _DROP_HOST and there and not (offloading or prefetching):
        state.on_host[storage] = 0
        counters[_HOST_LIVE] -= host_bytes
    else:
        return _ILLEGAL, 0.0
    return start, end


@_compiled
def _cross(boundary: int, bytes_outside: int, graph: GraphArrays, state: _State) -> tuple[float, float, int]:
    """Hand departures out and take arrivals in; return as `_compute` does."""
    start, counters = state.clocks[_COMPUTE_STREAM], state.counters
    if bytes_outside < 0 or bytes_outside > _MOST_BYTES - counters[_OUTSIDE]:
        return _ILLEGAL, 0.0, 0
    counters[_OUTSIDE] += bytes_outside
    counters[_LIVE] += bytes_outside
    _await(graph.departures, graph.departure_starts[boundary], graph.departure_starts[boundary + 1], state)
    for k in range(graph.arrival_starts[boundary], graph.arrival_starts[boundary + 1]):
        arrival = graph.arrivals[k]
        if state.on_device[arrival]:
            return _ILLEGAL, 0.0, 0
        state.on_device[arrival] = 1
        counters[_LIVE] += graph.device_bytes[arrival]
    return start, state.clocks[_COMPUTE_STREAM], counters[_LIVE]


@_compiled
def _compute(op: int, in_place_of: int, graph: GraphArrays, state: _State) -> tuple[float, float, int]:
    """Run an op; return its start, its end and the bytes held meanwhile; a start below 0 says that it cannot be."""
    on_device, clocks = state.on_device, state.clocks
    first, last = graph.read_starts[op], graph.read_starts[op + 1]
    for k in range(first, last):
        if not on_device[graph.reads[k]]:
            return _ILLEGAL, 0.0, 0
    if state.counters[_PREFETCHING]:
        _await(graph.reads, first, last, state)
    taker = -1
    if in_place_of >= 0:
        for k in range(graph.reuse_starts[op], graph.reuse_starts[op + 1], 2):
            if taker < 0 and graph.reuses[k] == in_place_of and not on_device[graph.reuses[k + 1]]:
                taker = graph.reuses[k + 1]
        if taker < 0 or graph.resident[in_place_of] or state.offload_ends[in_place_of] >= 0:
            return _ILLEGAL, 0.0, 0
        on_device[in_place_of], on_device[taker] = 0, 1
    transient = graph.workspace_bytes[op]
    for k in range(graph.write_starts[op], graph.write_starts[op + 1]):
        written = graph.writes[k]
        if written == taker:
            continue
        if on_device[written]:
            transient += graph.device_bytes[written]
        else:
            on_device[written] = 1
            state.counters[_LIVE] += graph.device_bytes[written]
    start = clocks[_COMPUTE_STREAM]
    clocks[_COMPUTE_STREAM] += graph.seconds[op]
    state.seconds[_COMPUTE_STREAM] += graph.seconds[op]
    return start, clocks[_COMPUTE_STREAM], state.counters[_LIVE] + transient


@_compiled
def _start(graph: GraphArrays) -> _State:
    """Return the state before the first instruction: only residents are there."""
    count = len(graph.device_bytes)
    counters = np.zeros(4, np.int64)
    for storage in range(count):
        counters[_LIVE] += graph.device_bytes[storage] * graph.resident[storage]
    return _State(
        graph.resident.copy(),
        np.zeros(count, np.uint8),
        np.full(count, _IDLE),
        np.full(count, _IDLE),
        np.zeros(3),
        np.zeros(4),
        counters,
    )


@_compiled
def replay(
    codes: NDArray[np.int8],
    operands: NDArray[np.int32],
    extras: NDArray[np.int64],
    graph: GraphArrays,
    rates: tuple[float, float],
    out: TimelineArrays,
) -> tuple[int, int, int, float, float, float, float, float]:
    """Fill `out`; return (failed position or -1, peak position, host peak, busy seconds x 3, stall, makespan).

    `rates` are bytes per second to the host and to the device, 0 where there is no link.
    """
    state = _start(graph)
    counters, seconds = state.counters, state.seconds
    storage_count, op_count, boundary_count = len(graph.device_bytes), len(graph.seconds), len(graph.arrival_starts) - 1
    peak_position, peak, host_peak = 0, -1, 0
    for position in range(len(codes)):
        code, operand, extra = codes[position], operands[position], extras[position]
        limit = op_count if code == _COMPUTE else boundary_count if code == _BOUNDARY else storage_count
        if operand < 0 or operand >= limit:
            return position, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0
        if code == _COMPUTE:
            start, end, held = _compute(operand, extra, graph, state)
        elif code == _BOUNDARY:
            start, end, held = _cross(operand, extra, graph, state)
        else:
            start, end = _move(code, operand, graph, rates, state)
            held = counters[_LIVE]
        if start < 0:
            return position, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0
        out.start_seconds[position], out.end_seconds[position] = start, end
        out.device_bytes[position], out.host_bytes[position] = held, counters[_HOST_LIVE]
        if held > peak:
            peak, peak_position = held, position
        host_peak = max(host_peak, counters[_HOST_LIVE])
    return -1, peak_position, host_peak, seconds[0], seconds[1], seconds[2], seconds[3], state.clocks.max()
