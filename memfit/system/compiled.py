"""Compilation of hot loops by numba, with machine code kept on disk; planners and packers share it.

Functions that Python calls are taken from the library that came with memfit, if it is there (`memfit.system.shipped`).
numba is imported where a function is not in it, and compiles that one when it is first called.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from memfit.system.shipped import UnlikeShippedError, shipped_functions

P = ParamSpec("P")
R = TypeVar("R")

_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}

_MAKING = threading.RLock()

ENTRY_POINTS: list[EntryPoint[..., Any]] = []
"""All functions that Python calls, of the modules that are imported."""


class Compiled(Generic[P, R]):
    """A function that numba compiles when it is first needed.

    Attributes:
        py_func: the function in Python.
    """

    def __init__(self, function: Callable[P, R], **options: object) -> None:
        update_wrapper(self, function)
        self.py_func = function
        self._options = options

    @cached_property
    def dispatcher(self) -> Any:
        """numba's own object of this function."""
        with _MAKING:  # threads that call first at once share one
            return self.__dict__.get("dispatcher") or self._made()

    def _made(self) -> Any:
        import numba

        return numba.njit(**_OPTIONS, **self._options)(self.py_func)  # pyright: ignore

    @property
    def _numba_type_(self) -> Any:  # what numba asks an object for that compiled code names
        return self.dispatcher._numba_type_

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """Call numba's machine code; it is compiled for each new combination of types."""
        return self.dispatcher(*arguments, **named)


class EntryPoint(Compiled[P, R]):
    """A function for Python to call: the machine code of memfit's library, or that which numba keeps on disk."""

    def __init__(self, function: Callable[P, R], prepare: Callable[[], None] | None = None) -> None:
        super().__init__(function)
        self._prepare = prepare

    def _made(self) -> Any:
        from memfit.system.kept_code import keep_on_disk

        if self._prepare is not None:
            self._prepare()
        dispatcher = super()._made()
        keep_on_disk(dispatcher)
        return dispatcher

    @cached_property
    def _shipped(self) -> Callable[..., Any] | None:
        return shipped_functions().get(f"{self.py_func.__module__}.{self.py_func.__name__}")

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """Call the machine code for these types of arguments."""
        if self._shipped is not None and not named:
            try:
                return self._shipped(arguments)
            except UnlikeShippedError:
                pass  # numba compiles it for these types
        return self.dispatcher(*arguments, **named)


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile a function for other compiled functions to call.

    `_nrt=False` leaves out reference counts of arrays, which would make a call ten times as expensive as its work.
    Compiled code then cannot allocate, so that Python passes every array. Leaving out the wrappers for calls from
    Python and C halves the time to compile.
    """
    return Compiled(function, no_cpython_wrapper=True)


def entry_point(function: Callable[P, R], prepare: Callable[[], None] | None = None) -> EntryPoint[P, R]:
    """Compile a function for Python to call; the machine code is kept on disk, so that a machine compiles once.

    The function is compiled again if its source, or that of a compiled function it calls, has changed. The code is
    beside the source, in the folder for caches of numba, or in that of memfit, whichever can be written. Where none
    can, each process compiles it.

    Args:
        function: what is compiled, if the library that came with memfit does not hold it.
        prepare: called before it is compiled; defines what the function names and numba is needed for.
    """
    made = EntryPoint(function, prepare)
    ENTRY_POINTS.append(made)
    return made


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
            if isinstance(value, Compiled):
                callee: Callable[..., Any] = value.py_func  # pyright: ignore
                if callee not in seen:
                    seen.add(callee)
                    ahead.append(callee)
            elif not inspect.ismodule(value):
                digest.update(f"{name} = {value!r}\n".encode())
    return digest.hexdigest()
