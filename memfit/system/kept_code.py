"""Machine code of numba on disk, keyed by the source of a function and of all that it calls."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

from memfit.system.compiled import source_digest
from memfit.system.files import cache_folder

_log = logging.getLogger(__name__)


def keep_on_disk(dispatcher: Any) -> None:
    """Keep the machine code of a function beside its source, in the folder for caches of numba, or in that of memfit.

    The first of these that can be written is taken. Where none can, each process compiles the function.
    """
    with suppress(RuntimeError):  # numba found no folder that it may write to
        dispatcher._cache = _CacheBySource(dispatcher.py_func)


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
