"""Copies of what a step can reach in Python, made before it runs: held against the same places later, and put back."""

from __future__ import annotations

import array
import ctypes
import functools
import operator
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import numpy as np
import torch

from memfit.capture.code_reads import global_reads, only_counted

MISSING: Any = type("Missing", (), {"__repr__": lambda _self: "nothing"})()
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)


BUFFERS = (np.ndarray, bytearray, memoryview, array.array, ctypes.c_byte.__mro__[2])  # the last: of all ctypes' data
_KINDS = (OrderedDict, dict, list, deque, set, tuple, frozenset)


class Table:
    """A dictionary of values that a step reads: attributes, globals, a class's, or a user's own.

    Attributes:
        path: names it in messages.
        table: the dictionary.
        before: its entries before the step ran; of globals and classes those that the step names.
        names: the keys that the step read before it set them; None stands for all.
        counted: the numbers among them that it only counts up, with the places in the code that read them.
        owner: the class whose attributes they are, which are set by setattr.
        is_librarys: whether they are attributes of a library's object, which may change but for those that were read.
    """

    def __init__(
        self, path: str, table: dict[Any, Any], before: dict[Any, Any], names: set[Any] | None, owner: Any = None
    ) -> None:
        self.path = path
        self.table = table
        self.before = before
        self.names = names
        self.owner = owner
        self.is_librarys = False
        self.settled: set[str] = set()
        self.counted: dict[str, set[tuple[CodeType, int]]] = {}
        self.left: dict[Any, Any] = {}  # values that the step sets for good, which were seen to give the same ops
        self.logged: set[Any] = set()  # keys that it sets anew in each run, of which the same was seen
        self.is_log = False  # the step changes its keys or their order, of which the same was seen

    def name(self, key: Any) -> str:
        """Return the name of an entry, for messages."""
        return f"{self.path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{self.path}[{key!r}]"

    def read_entries(self) -> dict[Any, Any]:
        """Return the entries that the step read as they were before it, MISSING for one that was not there."""
        return {
            name: self.before.get(name, MISSING)
            for name in ({**self.before, **self.left} if self.names is None else self.names)
            if name not in self.logged and not self.only_counts(name)
        }

    def only_counts(self, name: Any) -> bool:
        """Return whether the step does no more with a number than to add to it."""
        return name in self.counted and all(only_counted(code, name, at) for code, at in self.counted[name])

    def changed(self) -> list[Any]:
        """Return the keys whose values are others than before."""
        now = entries_of(self.table)
        watched = self.names if self.is_librarys and self.names is not None else self.before
        keys = [key for key in watched if not is_same(self.before.get(key, MISSING), now.get(key, MISSING))]
        if self.is_whole and not self.is_librarys:
            keys += [key for key in now if key not in self.before]
        return keys

    @property
    def is_whole(self) -> bool:
        """Whether the copy holds all entries of the dictionary."""
        return self.owner is None and not isinstance(self, Globals)

    @property
    def is_reordered(self) -> bool:
        """Whether the keys of a dictionary that is read as a whole are those from before, in another order."""
        if self.names is not None or self.is_librarys:
            return False
        now = list(entries_of(self.table))
        return now != list(self.before) and self.before.keys() == set(now)

    def put_back(self) -> None:
        """Reset the dictionary to the copy."""
        for key in self.changed():
            self.write(key, self.before.get(key, MISSING))
        if self.is_reordered:
            _own_kind(self.table).clear(self.table)
            _own_kind(self.table).update(self.table, self.before)

    def write(self, key: Any, value: Any) -> None:
        """Set or delete an entry; no method of a user's dictionary is called.

        Args:
            key: of the entry; the name of an attribute if the table has an owner.
            value: MISSING deletes the entry, which has to be there.
        """
        if self.owner is not None:
            delattr(self.owner, key) if value is MISSING else setattr(self.owner, key, value)
        elif value is MISSING:
            _own_kind(self.table).__delitem__(self.table, key)
        else:
            _own_kind(self.table).__setitem__(self.table, key, value)


class Globals(Table):
    """The globals of a Python file that a step names, or sets.

    Attributes:
        codes: the functions that name them.
        by_attribute: the names that are read as attributes of the file's module.
    """

    def __init__(self, path: str, table: dict[Any, Any]) -> None:
        super().__init__(path, table, {}, set())
        self.codes: set[CodeType] = set()
        self.by_attribute: set[str] = set()

    def only_counts(self, name: Any) -> bool:
        """Return whether all functions that read a global number do no more than add to it."""
        return (
            isinstance(self.before[name], int | float)
            and name not in self.by_attribute
            and all(only_counted(code, name) for code in self.codes if name in global_reads(code))
        )


class Variable:
    """What holds one value: a slot of an object, what a weak reference refers to, a context variable.

    Args:
        path: names it in messages.
        read: returns its value, MISSING if there is none.
        write: sets it.
    """

    def __init__(self, path: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.path = path
        self.read = read
        self.write = write
        self.before = read()
        self.left: Any = MISSING  # what the step sets it to for good, which was seen to give the same ops
        self.is_log = False  # the step sets it anew in each run, of which the same was seen

    @property
    def is_changed(self) -> bool:
        return not is_same(self.before, self.read())

    def only_counts(self) -> bool:
        """Return whether the step does no more with a number than to add to it."""
        return False

    def put_back(self) -> None:
        self.write(self.before)


class Cell(Variable):
    """A closure variable."""

    def __init__(self, name: str, cell: CellType, code: CodeType) -> None:
        self.cell = cell
        self.codes = [code]
        self._name = name
        super().__init__(f"the closure variable {name!r}", self._read_cell, self._write_cell)

    def only_counts(self) -> bool:
        return isinstance(self.before, int | float) and all(only_counted(code, self._name) for code in self.codes)

    def _read_cell(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # it has no value, or was deleted
            return MISSING

    def _write_cell(self, value: Any) -> None:
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


class Items:
    """A list, deque or set of the user's, with a copy of what it held; or an array or other buffer, with its bytes."""

    def __init__(self, path: str, items: Any) -> None:
        self.path = path
        self.items = items
        self.before = self.read()
        self.left: Any = MISSING  # what the step lets it hold for good, which was seen to give the same ops
        self.is_log = False  # the step changes it in each run, which was seen to leave the next step's ops as they are

    def read(self) -> Any:
        """Return a copy of what it holds now."""
        if self._has_bytes:
            view = self.items if isinstance(self.items, np.ndarray) else memoryview(self.items)
            return view.shape, str(getattr(view, "dtype", "")), view.tobytes()
        return list(self.items.flat if isinstance(self.items, np.ndarray) else each_of(self.items))

    @property
    def _has_bytes(self) -> bool:
        """Whether it is a buffer of numbers; an array may be of objects."""
        is_of_objects = isinstance(self.items, np.ndarray) and self.items.dtype.hasobject
        return isinstance(self.items, BUFFERS) and not is_of_objects

    @property
    def is_changed(self) -> bool:
        return not self.holds(self.before)

    @property
    def has_left(self) -> bool:
        """Whether it holds what the step lets it hold."""
        return self.left is not MISSING and self.holds(self.left)

    def holds(self, held: Any) -> bool:
        """Return whether it holds what `read` has returned once."""
        now = self.read()
        if self._has_bytes:
            return now == held
        return len(now) == len(held) and (all(map(operator.is_, held, now)) or all(map(is_same, held, now)))

    def write(self, held: Any) -> None:
        """Let it hold what `read` has returned."""
        items = self.items
        if isinstance(items, np.ndarray) and items.dtype.hasobject:
            for number, value in enumerate(held):
                items.flat[number] = value
        elif isinstance(items, np.ndarray):
            items[...] = np.frombuffer(held[2], items.dtype).reshape(held[0])
        elif isinstance(items, bytearray):  # it may have grown
            items[:] = held[2]
        elif isinstance(items, array.array):
            items[:] = array.array(items.typecode, held[2])
        elif isinstance(items, BUFFERS):
            memoryview(items).cast("B")[:] = held[2]
        else:
            kind = _own_kind(items)
            kind.clear(items)
            (kind.update if kind is set else kind.extend)(items, held)

    def put_back(self) -> None:
        self.write(self.before)


def own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the dictionary of an object's attributes, None where it has none; none of the user's code runs.

    A number, text, container or tensor has attributes only if its class is the user's, or it was given them.
    """
    kind = threading.local if isinstance(value, threading.local) else object
    try:
        attributes = kind.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return cast("dict[str, Any]", attributes) if isinstance(attributes, dict) else None


def entries_of(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dictionary's entries; a class of the user's, which may compute them, is not asked."""
    return dict(_own_kind(table).items(table))  # of an OrderedDict in its own order


def entry_of(table: dict[Any, Any], key: Any) -> Any:
    """Return an entry of a dictionary, of which no method of the user's is called; MISSING if there is none."""
    return dict.get(table, key, MISSING)


def each_of(values: Any) -> Iterator[Any]:
    """Yield what a list, tuple, deque or set holds; a class of the user's, which may compute it, is not asked."""
    return _own_kind(values).__iter__(values)


def _own_kind(values: Any) -> Any:
    """Return the container of Python's own that a container is, or is derived from."""
    return next(kind for kind in _KINDS if isinstance(values, kind))


def function_of(raw: Any) -> Any:
    """Return the function of a static method, a class method or a property, and any other value itself."""
    if isinstance(raw, staticmethod | classmethod):
        return cast("Any", raw).__func__
    if isinstance(raw, property):
        return raw.fget
    return raw.func if isinstance(raw, functools.cached_property) else raw


def function_parts(function: FunctionType) -> tuple[Any, ...]:
    """Return the parts of a function that can be set: its code and its defaults."""
    return function.__code__, function.__defaults__, function.__kwdefaults__


def is_same(before: Any, after: Any) -> bool:
    """Return whether a value is the one from before: itself, or an equal number, text, or tuple of such."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple) and not isinstance(before, torch.Size) and not own_attributes(before):
        return len(before) == len(after) and all(map(is_same, before, after))
    if not isinstance(before, (*ATOMS, frozenset)) or own_attributes(before):
        return False
    # repr tells -0.0 from 0.0, and holds for nan
    return repr(before) == repr(after) if isinstance(before, float | complex) else bool(before == after)


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, or a container with such values only."""
    if type(value) in ATOMS:
        return True
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        entries = cast("dict[Any, Any]", value)
        return all(map(is_plain, (*entries.keys(), *entries.values())))
    return type(value) in (list, deque, set, tuple, frozenset) and all(map(is_plain, value))


def is_fixed(value: Any) -> bool:
    """Return whether a plain value can't be changed in place."""
    return type(value) in ATOMS or (type(value) in (tuple, frozenset) and all(map(is_fixed, value)))


def slot_names(cls: type) -> list[str]:
    """Return the names of the values that a class keeps in slots of its own."""
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
