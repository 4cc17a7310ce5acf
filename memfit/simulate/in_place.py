"""In-place reuse: one rule for which input an op overwrites.

An op may reuse the memory of an input that is dropped right after it, if its `reuses` allow that and the write that
gets the memory is not on the device already. Of several inputs, it reuses the one with the most bytes.

Source: Chen 2016, section 3, Figure 2 (the counter of an input that is 0 after the op); MXNet's memory note, whose trap
is an input that another op still needs.
"""

# Numba infers the types in here; pyright sees other types for elements of arrays.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.graph import Graph, Op
from memfit.schedule import Code, Compute, Drop, Instruction, Schedule
from memfit.simulate.arrays import GraphArrays, arrays_of
from memfit.system.compiled import compiled, entry_point

_COMPUTE, _DROP, _PREFETCH, _BOUNDARY = (int(code) for code in (Code.COMPUTE, Code.DROP, Code.PREFETCH, Code.BOUNDARY))
_NONE = -1


class _Rows(NamedTuple):
    """A schedule's arrays."""

    codes: NDArray[np.int8]
    operands: NDArray[np.int32]
    extras: NDArray[np.int64]


def in_place(graph: Graph, schedule: Schedule) -> Schedule:
    """Return `schedule` with inputs that are dropped right after an op reused in place, where its `reuses` allow it.

    An input that another op still needs is dropped later, so that the op writes elsewhere (the note's trap).

    Args:
        graph: gives the `reuses` of its ops.
        schedule: legal on `graph`.
    """
    arrays = arrays_of(graph)
    before = _Rows(schedule.codes, schedule.operands, schedule.extras)
    after = _Rows(*(np.empty_like(column) for column in before))
    takers = np.array([may_reuse_in_place(op) for op in graph.ops], np.uint8)
    there = arrays.resident.copy()
    dying = np.empty(len(schedule), np.int32)
    count = _reuse_in_place(before, arrays, takers, there, dying, after)
    return Schedule(*(column[:count] for column in after))


def apart(schedule: Schedule) -> Schedule:
    """Return the schedule without in-place reuse: an input that would be written over is dropped right after."""
    rows: list[Instruction] = []
    for instruction in schedule:
        if isinstance(instruction, Compute) and instruction.in_place_of is not None:
            rows += [Compute(op=instruction.op), Drop(storage=instruction.in_place_of)]
        else:
            rows.append(instruction)
    return Schedule.of(rows)


def may_reuse_in_place(op: Op) -> bool:
    """Return whether schedules made here let `op` reuse an input in place: only if it mutates none."""
    return not op.mutates


@compiled
def taken_over(op: int, graph: GraphArrays, there: NDArray[np.uint8], dying: NDArray[np.int32], count: int) -> int:
    """Return the storage whose memory an op reuses in place, or -1.

    Args:
        op: the op's id.
        graph: gives `reuses` and bytes.
        there: flags of storages on the device when the op begins to write.
        dying: storages dropped right after the op; the first `count` entries count.
        count: how many of them there are.
    """
    best = _NONE
    for k in range(graph.reuse_starts[op], graph.reuse_starts[op + 1], 2):
        read = graph.reuses[k]
        is_dying = False
        for index in range(count):
            is_dying |= dying[index] == read
        if not is_dying or there[graph.reuses[k + 1]]:
            continue
        size = graph.device_bytes[read]
        if best == _NONE or size > graph.device_bytes[best] or (size == graph.device_bytes[best] and read < best):
            best = read
    return best


@compiled
def _dropped_after(position: int, rows: _Rows, dying: NDArray[np.int32]) -> int:
    """Write the storages dropped right after a position into `dying`; return how many."""
    count = 0
    for place in range(position + 1, len(rows.codes)):
        if rows.codes[place] != _DROP:
            break
        dying[count] = rows.operands[place]
        count += 1
    return count


@entry_point
def _reuse_in_place(
    rows: _Rows,
    graph: GraphArrays,
    takers: NDArray[np.uint8],
    there: NDArray[np.uint8],
    dying: NDArray[np.int32],
    result: _Rows,
) -> int:
    """Write the schedule with in-place reuse into `result`; return its length."""
    at, taken = 0, _NONE
    for position in range(len(rows.codes)):
        code, operand, extra = rows.codes[position], rows.operands[position], rows.extras[position]
        if code == _DROP:
            if operand == taken:
                taken = _NONE
                continue
            there[operand] = 0
        elif code == _COMPUTE:
            if extra == _NONE and takers[operand]:
                extra = taken = taken_over(operand, graph, there, dying, _dropped_after(position, rows, dying))
            if extra != _NONE:
                there[extra] = 0
            for k in range(graph.write_starts[operand], graph.write_starts[operand + 1]):
                there[graph.writes[k]] = 1
        elif code == _PREFETCH:
            there[operand] = 1
        elif code == _BOUNDARY:
            for k in range(graph.arrival_starts[operand], graph.arrival_starts[operand + 1]):
                there[graph.arrivals[k]] = 1
        result.codes[at], result.operands[at], result.extras[at] = code, operand, extra
        at += 1
    return at
