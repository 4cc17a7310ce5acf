"""The hot loop of `memfit.report.edits`, compiled by numba: what is computed and copied, made a schedule with drops."""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point
from memfit.in_place import taken_over
from memfit.schedule import Code
from memfit.simulate_loop import GraphArrays

_COMPUTE, _DROP, _OFFLOAD, _WAIT, _PREFETCH, _BOUNDARY = (
    int(code) for code in (Code.COMPUTE, Code.DROP, Code.OFFLOAD, Code.WAIT, Code.PREFETCH, Code.BOUNDARY)
)
FIRST, AGAIN = 0, 1  # in `extras` of a Compute: whether it is its op's first
_NONE = -1


class Events(NamedTuple):
    """All instructions but the drops: codes, operands, and extras as in a schedule, FIRST or AGAIN for a Compute."""

    codes: NDArray[np.int8]
    operands: NDArray[np.int32]
    extras: NDArray[np.int64]


class Rules(NamedTuple):
    """What settles where drops go.

    `kept` are flags of storages: what a second computation does not bring again. `user_from` is the boundary from which
    a storage is the user's, or more than there are. `writes_over` are flags of ops: whether they may write over what
    they read.
    """

    kept: NDArray[np.uint8]
    user_from: NDArray[np.int64]
    writes_over: NDArray[np.uint8]


class Settled(NamedTuple):
    """The schedule, filled in from the end of its arrays; `places` are the events' own in them, or -1.

    `needed` are flags of what is there at the end, and changes; `dying` is room for what one event drops.
    """

    codes: NDArray[np.int8]
    operands: NDArray[np.int32]
    extras: NDArray[np.int64]
    places: NDArray[np.int64]
    needed: NDArray[np.uint8]
    dying: NDArray[np.int32]


@compiled
def _is_wanted(op: int, crossed: int, graph: GraphArrays, rules: Rules, needed: NDArray[np.uint8]) -> bool:
    """Whether something that `op` writes is read later, and is there only if `op` is computed again."""
    for k in range(graph.write_starts[op], graph.write_starts[op + 1]):
        storage = graph.writes[k]
        if needed[storage] and not rules.kept[storage] and rules.user_from[storage] >= crossed:
            return True
    return False


@compiled
def _sort(values: NDArray[np.int32], count: int) -> None:
    for index in range(1, count):
        value = values[index]
        place = index
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@compiled
def _compute(op: int, again: bool, crossed: int, graph: GraphArrays, rules: Rules, settled: Settled) -> tuple[int, int]:
    """Turn what is needed after a Compute into what is needed before it; return (count of what dies, what it takes
    over).
    """
    needed, dying, count = settled.needed, settled.dying, 0
    for k in range(graph.read_starts[op], graph.read_starts[op + 1]):
        if not needed[graph.reads[k]]:
            dying[count] = graph.reads[k]
            count += 1
    reads = count
    for k in range(graph.write_starts[op], graph.write_starts[op + 1]):
        storage = graph.writes[k]
        if not needed[storage]:
            dying[count] = storage
            count += 1
        if rules.user_from[storage] >= crossed and not (again and rules.kept[storage]):
            needed[storage] = 0
    for k in range(graph.read_starts[op], graph.read_starts[op + 1]):
        needed[graph.reads[k]] = 1
    over = taken_over(op, graph, needed, dying, reads) if rules.writes_over[op] else _NONE
    if over != _NONE:
        for index in range(reads):
            if dying[index] == over:
                dying[index] = dying[count - 1]
                count -= 1
                break
    return count, over


@compiled
def _cross(boundary: int, graph: GraphArrays, rules: Rules, settled: Settled) -> int:
    """As `_compute`, for a Boundary: what arrives and is read by nobody goes at once."""
    needed, count = settled.needed, 0
    for k in range(graph.arrival_starts[boundary], graph.arrival_starts[boundary + 1]):
        storage = graph.arrivals[k]
        if not needed[storage]:
            settled.dying[count] = storage
            count += 1
        if rules.user_from[storage] >= boundary:
            needed[storage] = 0
    for k in range(graph.departure_starts[boundary], graph.departure_starts[boundary + 1]):
        needed[graph.departures[k]] = 1
    return count


@entry_point
def settle(events: Events, graph: GraphArrays, rules: Rules, settled: Settled) -> int:
    """Fill in the schedule that carries out `events` with the fewest bytes; return where it begins in its arrays.

    A storage is dropped right after its last use, and taken over where it may be; what is computed again and wanted by
    nobody is left out, and so is a prefetch that nothing reads.
    """
    needed, at = settled.needed, len(settled.codes)
    crossed = len(graph.arrival_starts) - 1
    for index in range(len(events.codes) - 1, -1, -1):
        code, operand, extra = events.codes[index], events.operands[index], events.extras[index]
        settled.places[index] = _NONE
        count = 0
        if code == _COMPUTE:
            again = extra == AGAIN
            if again and not _is_wanted(operand, crossed, graph, rules, needed):
                continue
            count, extra = _compute(operand, again, crossed, graph, rules, settled)
        elif code == _BOUNDARY:
            crossed = operand
            count = _cross(operand, graph, rules, settled)
        elif code == _PREFETCH:
            if not needed[operand]:
                continue
            needed[operand] = 0
        elif code in (_OFFLOAD, _WAIT):
            if not needed[operand]:
                settled.dying[0] = operand
                count = 1
            needed[operand] = 1
        _sort(settled.dying, count)
        for last in range(count - 1, -1, -1):
            at -= 1
            settled.codes[at], settled.operands[at], settled.extras[at] = _DROP, settled.dying[last], _NONE
        at -= 1
        settled.codes[at], settled.operands[at], settled.extras[at] = code, operand, extra
        settled.places[index] = at
    return at
