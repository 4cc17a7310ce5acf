"""Compiled helpers of the planners: a sort, and a heap of stages."""

from __future__ import annotations

from memfit.system.compiled import compiled
from memfit.system.records import Integers, Table


@compiled
def sort(values: Integers, start: int, end: int) -> None:
    """Sort `values[start:end]` in place (Shell 1959, with Knuth's distances).

    Args:
        values: int64[values]; changed.
        start: the first index.
        end: one past the last index.
    """
    distance = 1
    while distance < (end - start) // 3:
        distance = 3 * distance + 1
    while distance > 0:
        for index in range(start + distance, end):
            value = values[index]
            place = index
            while place - distance >= start and values[place - distance] > value:
                values[place] = values[place - distance]
                place -= distance
            values[place] = value
        distance //= 3


@compiled
def push(work: Table, count: int, value: int) -> None:
    """Add `value` to the min-heap of `count` entries in `work.heap`.

    Args:
        work: record[entries], its field `heap` is changed.
        count: entries before.
        value: the new entry.
    """
    place = count
    while place > 0 and work[(place - 1) // 2].heap > value:
        work[place].heap = work[(place - 1) // 2].heap
        place = (place - 1) // 2
    work[place].heap = value


@compiled
def pop(work: Table, count: int) -> int:
    """Remove the least of `count` heap entries, and return it.

    Args:
        work: record[entries], its field `heap` is changed.
        count: entries before, at least one.
    """
    first, moved = work[0].heap, work[count - 1].heap
    place = 0
    while 2 * place + 1 < count - 1:
        child = 2 * place + 1
        if child + 1 < count - 1 and work[child + 1].heap < work[child].heap:
            child += 1
        if work[child].heap >= moved:
            break
        work[place].heap = work[child].heap
        place = child
    work[place].heap = moved
    return first
