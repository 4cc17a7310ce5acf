"""What all compiled code of the planners shares: how it is compiled, a sort, a heap of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for other compiled functions to call.

    `_nrt=False` leaves out the counting of references to arrays, which makes calls cost ten times the work in them;
    compiled code can then not allocate. Leaving out the wrappers for callers from outside halves the time to compile.
    """
    options = {
        "nogil": True,
        "error_model": "numpy",
        "_nrt": False,
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
    }
    return numba.njit(**options)(function)  # pyright: ignore


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for Python to call; the machine code is kept on disk, so that a machine compiles once."""
    options = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
    return numba.njit(cache=True, **options)(function)  # pyright: ignore


@compiled
def sort(values: Any, start: int, end: int) -> None:
    """Sort `values[start:end]` in place (Shell 1959, with Knuth's distances)."""
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
def push(work: Any, count: int, value: int) -> None:
    """Add `value` to the heap of `count` entries in `work.heap`, least first."""
    place = count
    while place > 0 and work[(place - 1) // 2].heap > value:
        work[place].heap = work[(place - 1) // 2].heap
        place = (place - 1) // 2
    work[place].heap = value


@compiled
def pop(work: Any, count: int) -> int:
    """Take the least entry off the heap of `count` entries, and return it."""
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
