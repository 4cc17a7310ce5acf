"""Compilation of hot loops by numba, with machine code kept on disk; planners and packers share it."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.dispatcher import Dispatcher

from memfit.system.files import cache_folder

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)
_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for other compiled functions to call.

    `_nrt=False` leaves out reference counts of arrays, which would make a call ten times as expensive as its work.
    Compiled code then cannot allocate, so that Python passes every array. Leaving out the wrappers for calls from
    Python and C halves the time to compile.
    """
    return numba.njit(**_OPTIONS, no_cpython_wrapper=True)(function)  # pyright: ignore


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for Python to call; the machine code is kept on disk, so that a machine compiles once.

    The function is compiled again if its source, or that of a compiled function it calls, has changed. The code is
    beside the source, in the folder for caches of numba, or in that of memfit, whichever can be written. Where none
    can, each process compiles it.
    """
    dispatcher = numba.njit(**_OPTIONS)(function)  # pyright: ignore
    with suppress(RuntimeError):  # numba found no folder that it may write to
        dispatcher._cache = _CacheBySource(function)  # pyright: ignore
    return dispatcher  # pyright: ignore


class _InMemfitsFolder(UserProvidedCacheLocator):
    """The place of machine code where neither the source's folder nor a home can be written."""

    def __init__(self, py_func: Any, py_file: Any) -> None:
        self._py_file = py_file
        self._lineno = py_func.__code__.co_firstlineno
        folder: str = self.get_suitable_cache_subpath(py_file)  # pyright: ignore
        self._cache_path = str(cache_folder() / "compiled" / folder)

    @classmethod
    def from_function(cls, py_func: Any, py_file: Any) -> Any:
        """Return the place for a function, or None if it cannot be written either."""
        return super(UserProvidedCacheLocator, cls).from_function(py_func, py_file)  # pyright: ignore


class _Places(CompileResultCacheImpl):
    _locator_classes = [*CompileResultCacheImpl._locator_classes, _InMemfitsFolder]  # pyright: ignore # noqa: RUF012


class _CacheBySource(FunctionCache):
    """numba's machine code on disk, keyed by the source of a function and its callees; numba itself uses one file's."""

    _impl_class = _Places

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), source_digest(self._py_func))  # pyright: ignore

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the machine code for a signature, or None; a damaged file is as none."""
        try:
            return super().load_overload(sig, target_context)  # pyright: ignore
        except Exception as error:  # noqa: BLE001 - numba unpickles the file, which may raise anything
            _log.warning("compiled code cannot be read and is compiled again: %s", error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep machine code; a disk that is full costs the next process the time to compile."""
        try:
            super().save_overload(sig, data)  # pyright: ignore
        except OSError as error:
            _log.warning("compiled code is not kept: %s", error)


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
