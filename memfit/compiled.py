"""How hot loops are compiled: for each other, and for Python to call. Planners and packers share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for other compiled functions to call.

    `_nrt=False` leaves out the counting of references to arrays, which makes calls cost ten times the work in them;
    compiled code can then not allocate: every array comes in from Python. Leaving out the wrappers for callers from
    outside halves the time to compile.
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
