"""Copies of what a step can reach in Python, made before it runs: held against the same places later, and put back."""

from __future__ import annotations

import operator
from collections.abc import MutableSequence
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import numpy as np
import torch

from memfit.capture.code_reads import global_reads, only_counted

MISSING: Any = type("Missing", (), {"__repr__": lambda _self: "nothing"})()
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)


class Table:
    """A dictionary of values that a step reads: attributes, globals, a class's, or a user's own.

    Attributes:
        path: names it in messages.
        table: the dictionary.
        before: its entries before the step ran; of globals and classes those that the step names.
        names: the keys that the step read before it set them; None stands for all.
        counted: the numbers among them that it only counts up, with the places in the code that read them.
        owner: the class whose attributes they are, which are set by setattr.
    """

    def __init__(
        self, path: str, table: dict[Any, Any], before: dict[Any, Any], names: set[Any] | None, owner: Any = None
    ) -> None:
        self.path = path
        self.table = table
        self.before = before
        self.names = names
        self.owner = owner
        self.settled: set[str] = set()
        self.counted: dict[str, set[tuple[CodeType, int]]] = {}
        self.accepted: dict[Any, Any] = {}  # numbers and texts that the step set, which were seen to give the same ops
        self.logged: set[Any] = set()  # keys of other values that it set, of which the same was seen

    def name(self, key: Any) -> str:
        """Return the name of an entry, for messages."""
        return f"{self.path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{self.path}[{key!r}]"

    def read_entries(self) -> dict[Any, Any]:
        """Return the entries that the step read as they were before it, MISSING for one that was not there."""
        return {
            name: self.before.get(name, MISSING)
            for name in (self.before if self.names is None else self.names)
            if name not in self.logged and not self.only_counts(name)
        }

    def only_counts(self, name: Any) -> bool:
        """Return whether the step does no more with a number than to add to it."""
        return name in self.counted and all(only_counted(code, name, at) for code, at in self.counted[name])

    def changed(self) -> list[Any]:
        """Return the keys whose values are others than before."""
        now = self.table
        keys = [key for key, value in self.before.items() if not is_same(value, now.get(key, MISSING))]
        if self.is_whole:
            keys += [key for key in now if key not in self.before]
        return keys

    @property
    def is_whole(self) -> bool:
        """Whether the copy holds all entries of the dictionary."""
        return self.owner is None and not isinstance(self, Globals)

    def put_back(self) -> None:
        """Reset the dictionary to the copy."""
        for key in self.changed():
            value = self.before.get(key, MISSING)
            if self.owner is not None:
                delattr(self.owner, key) if value is MISSING else setattr(self.owner, key, value)
            elif value is MISSING:
                del self.table[key]
            else:
                self.table[key] = value


class Globals(Table):
    """The globals of a Python file that a step names.

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


class Cell:
    """A closure variable, or another single place: `read` returns its value."""

    def __init__(self, name: str, cell: CellType, code: CodeType) -> None:
        self.path = f"the closure variable {name!r}"
        self.cell = cell
        self._name = name
        self.before = cell.cell_contents
        self.codes = [code]
        self.accepted: Any = MISSING

    @property
    def is_changed(self) -> bool:
        return not is_same(self.before, self.read())

    def read(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # the variable was deleted
            return MISSING

    def only_counts(self) -> bool:
        return isinstance(self.before, int | float) and all(only_counted(code, self._name) for code in self.codes)

    def put_back(self) -> None:
        self.cell.cell_contents = self.before


class Items:
    """A list, deque or set of the user's, with a copy of what it held; or an array, with its bytes."""

    def __init__(self, path: str, items: Any) -> None:
        self.path = path
        self.items = items
        self.before = self.read()
        self.is_log = False  # the step changes it, which was seen to leave the next step's ops as they are

    def read(self) -> Any:
        """Return a copy of what it holds now."""
        if isinstance(self.items, np.ndarray):
            return self.items.shape, str(self.items.dtype), self.items.tobytes()
        return list(self.items)

    @property
    def is_changed(self) -> bool:
        now = self.read()
        if isinstance(self.items, np.ndarray):
            return now != self.before
        return len(now) != len(self.before) or not (
            all(map(operator.is_, self.before, now)) or all(map(is_same, self.before, now))
        )

    def put_back(self) -> None:
        if isinstance(self.items, np.ndarray):
            return  # numbers that a step writes into an array are the user's results
        if isinstance(self.items, MutableSequence):
            self.items.clear()
            self.items.extend(cast("list[Any]", self.before))
        else:
            self.items.clear()
            self.items.update(self.before)


class Slots:
    """The values of an object's `__slots__`."""

    def __init__(self, path: str, owner: Any) -> None:
        self.path = path
        self.owner = owner
        names = [n for c in type(owner).__mro__ for n in slot_names(c)]
        self.before = {name: getattr(owner, name, MISSING) for name in names}

    def changed(self) -> list[str]:
        return [name for name, value in self.before.items() if not is_same(value, getattr(self.owner, name, MISSING))]

    def put_back(self) -> None:
        for name in self.changed():
            object.__setattr__(self.owner, name, self.before[name])


def function_parts(function: FunctionType) -> tuple[Any, ...]:
    """Return the parts of a function that can be set: its code and its defaults."""
    return function.__code__, function.__defaults__, function.__kwdefaults__


def is_same(before: Any, after: Any) -> bool:
    """Return whether a value is the one from before: itself, or an equal number, text, or tuple of such."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple) and not isinstance(before, torch.Size):
        return len(before) == len(after) and all(map(is_same, before, after))
    if not isinstance(before, (*ATOMS, frozenset)):
        return False
    # repr tells -0.0 from 0.0, and holds for nan
    return repr(before) == repr(after) if isinstance(before, float | complex) else bool(before == after)


def slot_names(cls: type) -> list[str]:
    """Return the names of the values that a class keeps in slots of its own."""
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
