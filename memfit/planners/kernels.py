"""The compiled inner loops: from decisions to the sequence of computations, and from the sequence to its bytes.

`unroll` walks the positions forward and computes on demand; `measure` walks its sequence backward, so that everything is
freed right after its last use, exactly as `memfit.planners.emit` writes it down. The two never allocate: `Scratch` is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from memfit.planners.program import Arrays, Flags, Integers, Program

P = ParamSpec("P")
R = TypeVar("R")

TOO_LONG = -1  # `unroll`: over the limit of seconds, or of the sequence's capacity
NOT_AGAIN = -2  # `unroll`: `scratch.blocked[0]` would have to be computed again, and may not be

_SEQUENCE_PER_POSITION = 16  # a schedule that computes each op 16 times on average is of no use to anybody
_SORT_BY_INSERTION = 24


class Scratch(NamedTuple):
    """Room for one evaluation.

    Attributes:
        until: last position at which each storage is available, as things stand.
        open_gap: the gap that each storage is in.
        mark: the last position whose rematerializations included this one.
        stack: positions to look at.
        sequence, anchor: the positions computed, and the position for whose sake each was.
        needed: storages that are used later; all False between evaluations.
        blocked: [0] is the position that may not be computed again.
    """

    until: Integers
    open_gap: Integers
    mark: Integers
    stack: Integers
    sequence: Integers
    anchor: Integers
    needed: Flags
    blocked: Integers


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba; the machine code is kept on disk, so that a machine compiles once."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)  # pyright: ignore


def make_scratch(program: Program) -> Scratch:
    """Return room to evaluate decisions on `program`."""
    positions, storages = len(program.op_at), len(program.storage_of)
    capacity = _SEQUENCE_PER_POSITION * positions + 1
    return Scratch(
        until=np.zeros(storages, np.int32),
        open_gap=np.zeros(storages, np.int32),
        mark=np.zeros(positions, np.int32),
        stack=np.zeros(positions + 1, np.int32),
        sequence=np.zeros(capacity, np.int32),
        anchor=np.zeros(capacity, np.int32),
        needed=np.zeros(storages, np.bool_),
        blocked=np.zeros(1, np.int32),
    )


@compiled
def available_until(release: int, hold: int, position: int, forever: int) -> int:
    """Return how long a storage stays that is there at the end of `position`, in a gap with this window."""
    if release >= hold or position >= hold:
        return forever
    return max(release, position)


@compiled
def unroll(
    arrays: Arrays, release: Integers, hold: Integers, scratch: Scratch, limit_seconds: float
) -> tuple[int, float]:
    """Fill `scratch.sequence` with all computations that the windows ask for; return (length, seconds).

    The length is TOO_LONG or NOT_AGAIN where there is no such sequence.
    """
    (read_start, reads, read_gap, write_start, writes, write_gap) = arrays[:6]
    until, open_gap, mark, sequence = scratch.until, scratch.open_gap, scratch.mark, scratch.sequence
    positions = len(arrays.seconds)
    until[:] = -1
    mark[:] = -1
    count, seconds = 0, 0.0
    for position in range(positions):
        waits = arrays.may_wait[position]
        if waits:
            for slot in range(write_start[position], write_start[position + 1]):
                gap = write_gap[slot]
                waits = waits and release[gap] <= position and hold[gap] > position
        if not waits:
            added = rematerialize(arrays, release, hold, scratch, position, count)
            if added < 0:
                return added, seconds
            for index in range(count, count + added):
                seconds += arrays.seconds[sequence[index]]
            count += added
            sequence[count] = position
            scratch.anchor[count] = position
            count += 1
            seconds += arrays.seconds[position]
            if seconds > limit_seconds:
                return TOO_LONG, seconds
        for slot in range(read_start[position], read_start[position + 1]):
            storage, gap = reads[slot], read_gap[slot]
            open_gap[storage] = gap
            if until[storage] >= position:
                until[storage] = available_until(release[gap], hold[gap], position, positions)
        for slot in range(write_start[position], write_start[position + 1]):
            storage, gap = writes[slot], write_gap[slot]
            open_gap[storage] = gap
            until[storage] = -1 if waits else available_until(release[gap], hold[gap], position, positions)
    return count, seconds


@compiled
def rematerialize(
    arrays: Arrays, release: Integers, hold: Integers, scratch: Scratch, position: int, count: int
) -> int:
    """Write from `scratch.sequence[count]` on all that must be computed before `position` can be; return how many.

    In the order of positions, which is a topological one.
    """
    (read_start, reads, _, write_start, writes) = arrays[:5]
    until, mark, stack, sequence = scratch.until, scratch.mark, scratch.stack, scratch.sequence
    top, added, reader = 0, 0, position
    while True:
        for slot in range(read_start[reader], read_start[reader + 1]):
            storage = reads[slot]
            writer = arrays.writer[storage]
            if until[storage] < position and mark[writer] != position:
                if arrays.last_rematerialization[writer] < position:
                    scratch.blocked[0] = writer
                    return NOT_AGAIN
                mark[writer] = position
                stack[top] = writer
                top += 1
        if top == 0:
            break
        top -= 1
        reader = stack[top]
        if count + added + 2 >= len(sequence):
            return TOO_LONG
        sequence[count + added] = reader
        added += 1
    sort(sequence, count, count + added)
    for index in range(count, count + added):
        scratch.anchor[index] = position
        again = sequence[index]
        for slot in range(write_start[again], write_start[again + 1]):
            storage = writes[slot]
            gap = scratch.open_gap[storage]
            until[storage] = available_until(release[gap], hold[gap], position, len(arrays.seconds))
    return added


@compiled
def sort(values: Integers, start: int, end: int) -> None:
    """Sort `values[start:end]` in place."""
    if end - start > _SORT_BY_INSERTION:
        values[start:end].sort()
        return
    for index in range(start + 1, end):
        value = values[index]
        place = index
        while place > start and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@compiled
def measure(arrays: Arrays, scratch: Scratch, count: int, budget_bytes: int) -> tuple[int, int, float]:
    """Return (peak bytes, its index, sum over the sequence of the bytes above the budget) of managed storages.

    Everything is freed after its last use. A storage that is written again before its next use is freed in between.
    """
    (read_start, reads, _, write_start, writes) = arrays[:5]
    needed, size = scratch.needed, arrays.size_bytes
    live, peak, peak_index, excess = 0, -1, 0, 0.0
    for index in range(count - 1, -1, -1):
        position = scratch.sequence[index]
        before, held = live, live + arrays.workspace_bytes[position] - taken_over(arrays, needed, position)
        for slot in range(write_start[position], write_start[position + 1]):
            storage = writes[slot]
            if needed[storage]:
                needed[storage] = False
                before -= size[storage]
            else:
                held += size[storage]
        for slot in range(read_start[position], read_start[position + 1]):
            storage = reads[slot]
            if not needed[storage]:
                needed[storage] = True
                before += size[storage]
                held += size[storage]
        live = before
        if held >= peak:
            peak, peak_index = held, index
        if held > budget_bytes:
            excess += held - budget_bytes
    return peak, peak_index, excess


@compiled
def taken_over(arrays: Arrays, needed: Flags, position: int) -> int:
    """Return the bytes of the read that one write of `position` takes over: the largest that dies there."""
    most = 0
    for slot in range(arrays.reuse_start[position], arrays.reuse_start[position + 1]):
        storage = arrays.reuse_reads[slot]
        if not needed[storage]:
            most = max(most, arrays.size_bytes[storage])
    return most
