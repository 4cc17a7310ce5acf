"""Machine code of searches and packers that comes with memfit: a library that the build of the wheel made.

The library holds each function for one combination of types, for any processor of its architecture, and needs neither
numba nor a compiler. A file beside it describes the functions, and names the digest of the sources that it was made
from: where these differ, or where there is no library, numba compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as numpy_format

FOLDER = Path(__file__).parent
LIBRARY, DESCRIPTION = "searches.so", "searches.json"
RESULT_BYTES = 64  # of the largest result

_log = logging.getLogger(__name__)


class UnlikeShippedError(TypeError):
    """The library has no machine code for arguments of these types."""


class Kind(Protocol):
    """The type of an argument: how its value becomes numbers of 8 bytes."""

    letters: str  # as in `struct`

    def enter(self, value: Any, numbers: list[Any]) -> None:
        """Append the numbers of a value.

        Args:
            value: of an argument, or of a part of one.
            numbers: of all arguments so far.

        Raises:
            UnlikeShippedError: it is of another type.
        """
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number of 64 bits."""

    letters: str = "q"

    def enter(self, value: Any, numbers: list[Any]) -> None:
        """See `Kind`."""
        if not isinstance(value, int | np.int64):
            raise UnlikeShippedError
        numbers.append(value)


@dataclass(frozen=True, slots=True)
class Real:
    """A number in double precision."""

    letters: str = "d"

    def enter(self, value: Any, numbers: list[Any]) -> None:
        """See `Kind`."""
        if not isinstance(value, float):  # np.float64 is one
            raise UnlikeShippedError
        numbers.append(value)


@dataclass(slots=True)
class Array:
    """A contiguous array: as numba passes it, without an owner."""

    dtype: np.dtype[Any]
    ndim: int
    is_written: bool
    is_aligned: bool  # packed records are not
    letters: str = field(init=False)
    _same: np.dtype[Any] = field(init=False)  # the object that was equal last: equality of records takes microseconds

    def __post_init__(self) -> None:
        self.letters, self._same = "q" * (5 + 2 * self.ndim), self.dtype

    def enter(self, value: Any, numbers: list[Any]) -> None:
        """See `Kind`."""
        if type(value) is not np.ndarray or value.ndim != self.ndim:  # pyright: ignore
            raise UnlikeShippedError
        array: np.ndarray[Any, Any] = value
        if array.dtype is not self._same:
            if array.dtype != self.dtype:
                raise UnlikeShippedError
            self._same = array.dtype
        flags = array.flags
        if not flags.c_contiguous or (self.is_written > flags.writeable) or (self.is_aligned > flags.aligned):
            raise UnlikeShippedError
        address: int = array.__array_interface__["data"][0]
        numbers += (0, 0, array.size, array.itemsize, address, *array.shape, *array.strides)


@dataclass(slots=True)
class Several:
    """A named tuple. The numbers of the last one are kept: a search passes the same arrays each time."""

    parts: tuple[Kind, ...]
    letters: str = field(init=False)
    _last: tuple[Any, list[Any]] = (None, [])

    def __post_init__(self) -> None:
        self.letters = "".join(part.letters for part in self.parts)

    def enter(self, value: Any, numbers: list[Any]) -> None:
        """See `Kind`."""
        last, known = self._last
        if value is not last:
            if not isinstance(value, tuple) or len(value) != len(self.parts):  # pyright: ignore
                raise UnlikeShippedError
            known: list[Any] = []
            for part, each in zip(self.parts, value, strict=True):  # pyright: ignore
                part.enter(each, known)
            self._last = value, known
        numbers += known


@dataclass(frozen=True, slots=True)
class ShippedFunction:
    """A function of the library.

    Args:
        call: the function: addresses of the arguments' numbers, and of those of the result.
        arguments: their types.
        result: letters of the result's parts, as in `struct`; `?` is a boolean, an empty text is None.
        is_tuple: whether the result is a tuple.
    """

    call: Callable[[bytes, Any], int]
    arguments: tuple[Kind, ...]
    packed: struct.Struct
    result: struct.Struct | None
    is_tuple: bool

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        """Call it.

        Raises:
            UnlikeShippedError: there is no machine code for these types.
        """
        if len(arguments) != len(self.arguments):
            raise UnlikeShippedError
        numbers: list[Any] = []
        for kind, value in zip(self.arguments, arguments, strict=True):
            kind.enter(value, numbers)
        result = ctypes.create_string_buffer(RESULT_BYTES)
        try:
            packed = self.packed.pack(*numbers)
        except struct.error as error:  # a whole number of more than 64 bits
            raise UnlikeShippedError from error
        status = self.call(packed, result)
        if status:
            raise RuntimeError(f"machine code ended with status {status}")
        if self.result is None:
            return None
        values = self.result.unpack_from(result)
        return values if self.is_tuple else values[0]


@cache
def shipped_functions() -> dict[str, ShippedFunction]:
    """Return the functions of the library by their full names; none where there is none for these sources."""
    try:
        description = json.loads((FOLDER / DESCRIPTION).read_text("utf-8"))
        if description["sources"] != sources_digest(description["files"]):
            _log.info("the compiled searches are of other sources: numba compiles them")
            return {}
        library = ctypes.CDLL(str(FOLDER / LIBRARY))
        return {each["name"]: _function(library, each) for each in description["functions"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        _log.warning("the compiled searches cannot be used, and numba compiles them: %s", error)
        return {}


def sources_digest(files: Iterable[str]) -> str:
    """Return the digest of these files of memfit.

    Args:
        files: below the folder of the package.
    """
    digest = hashlib.sha256()
    for name in files:
        content = (FOLDER.parent / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _function(library: ctypes.CDLL, described: dict[str, Any]) -> ShippedFunction:
    call: Any = library[described["symbol"]]
    call.argtypes, call.restype = [ctypes.c_char_p, ctypes.c_char_p], ctypes.c_int
    arguments = tuple(_kind(each) for each in described["arguments"])
    letters: str = described["result"]
    return ShippedFunction(
        call=call,
        arguments=arguments,
        packed=struct.Struct("=" + "".join(each.letters for each in arguments)),
        result=struct.Struct("=" + letters) if letters else None,
        is_tuple=described["is_tuple"],
    )


def _kind(described: Any) -> Kind:
    if isinstance(described, str):
        return {"whole": Whole, "real": Real}[described]()
    if "parts" in described:
        return Several(tuple(_kind(each) for each in described["parts"]))
    dtype = numpy_format.descr_to_dtype(_as_tuples(described["dtype"]))
    return Array(dtype, described["ndim"], described["is_written"], described["is_aligned"])


def _as_tuples(described: Any) -> Any:
    """Return a description of a dtype as NumPy wrote it; JSON made lists of its tuples."""
    if isinstance(described, str):
        return described
    if len(described) == 2 and not isinstance(described[0], list):  # a dtype and a shape
        return _as_tuples(described[0]), tuple(described[1])
    return [
        (tuple(name) if isinstance(name, list) else name, _as_tuples(kind), *(tuple(shape) for shape in more))
        for name, kind, *more in described
    ]
