"""How hot loops are compiled: for each other, and for Python to call. Planners and packers share it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

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
    """Compile a function for Python to call; the machine code is kept on disk, so that a machine compiles once.

    It is compiled again when the source of the function, or of anything that it calls, has changed.
    """
    options = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
    dispatcher = numba.njit(**options)(function)  # pyright: ignore
    dispatcher._cache = _CacheBySource(function)  # pyright: ignore
    return dispatcher  # pyright: ignore


class _CacheBySource(FunctionCache):
    """numba's machine code on disk, kept for one source of all that is in it; numba itself looks at one file only."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), source_digest(self._py_func))  # pyright: ignore


@cache
def source_digest(function: Callable[..., Any]) -> str:
    """Return a digest of the source of a function, of all compiled functions that it calls, and of their constants."""
    digest = hashlib.sha256()
    seen: set[Callable[..., Any]] = {function}
    ahead: list[Callable[..., Any]] = [function]
    while ahead:
        caller = ahead.pop()
        digest.update(inspect.getsource(caller).encode())
        for name, value in sorted(inspect.getclosurevars(caller).globals.items()):
            if isinstance(value, Dispatcher):
                callee = cast("Callable[..., Any]", value.py_func)  # pyright: ignore
                if callee not in seen:
                    seen.add(callee)
                    ahead.append(callee)
            elif not inspect.ismodule(value):
                digest.update(f"{name} = {value!r}\n".encode())
    return digest.hexdigest()
