"""What a step reads from Python while it is captured: attributes, globals, closures, and the containers in them.

A planned step runs no Python, so that all this is frozen in its ops. `Reads` follows the code of one capture: it copies
each attribute table, closure cell, global and container before the step can reach it, and notes which attributes are
read, by a `__getattribute__` that it gives to their classes meanwhile. `memfit.capture.guards` holds the copies against
later steps.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

from memfit.capture.code_reads import is_opaque, is_own
from memfit.capture.copies import MISSING, Table, entry_of, function_of, is_plain, is_same
from memfit.capture.discovery import Discovery
from memfit.capture.training_step import TrainingStep
from memfit.capture.unrecorded import Left, Unrecorded, holds_fakes
from memfit.errors import UnsupportedStepError

_OF_OPTIMIZERS = ("defaults", "param_groups", "state")
_NUMBERS = (bool, int, float, complex)
_TRACKING = threading.RLock()  # classes are changed while one capture runs
_CLASSES_OF_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes that Python code made, and whose attributes may be set


class Reads(Discovery):
    """Follows what one capture of a step reads from Python; at the end of a `with` block all is reset."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self._is_tracking = False
        self._discover(step.model, "model")
        self._discover(step.loss, "loss")

    def __enter__(self) -> Reads:
        return self

    def __exit__(self, *_error: object) -> None:
        self.put_back()

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Note the attributes that are read inside the block."""
        with _TRACKING:
            self._is_tracking = True
            for table, owner in tuple(self._objects.values()):
                self._track(table, owner)
            try:
                yield
            finally:
                self._is_tracking = False
                for cls in reversed(self._patched):
                    del cls.__getattribute__
                self._patched.clear()

    def look_at_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what the optimizer's own attributes and its hooks hold, but for its groups and its state.

        Args:
            optimizer: the step's.
        """
        attributes = vars(optimizer)
        self.tables[id(attributes)] = Table("optimizer", attributes, dict(attributes), None)
        self._seen |= {id(attributes[name]): attributes[name] for name in _OF_OPTIMIZERS}
        for name, value in attributes.items():
            self._discover(value, f"optimizer.{name}")

    def put_back(self) -> None:
        """Reset all that was copied."""
        for held in self.tables.values():
            held.put_back()
        for held in (*self.cells, *self.items):
            if held.is_changed:
                held.put_back()

    def put_iterators_back(self) -> None:
        """Set iterators back: the step will be run as it is, from the state before.

        Raises:
            UnsupportedStepError: a value was taken from an iterator that cannot be set back.
        """
        for position in self.positions:
            if position.is_changed and not position.put_back():
                raise UnsupportedStepError(
                    f"the step takes values from {position.path}, an iterator, and so do steps that memfit takes by "
                    "itself, which cannot be put back: take the value outside of the step, and pass it in the batch"
                )

    def left(self) -> list[Left]:
        """Return what each step leaves in Python; to be asked before `put_back`.

        These are the values that it sets for good or does not read, and in the place of tensors what refuses to be
        used. What it sets anew in each run and reads is none of them, nor what a library's objects hold.
        """
        found: list[Left] = []
        for table in self.tables.values():
            read = table.read_entries()
            for key in table.changed():
                value = entry_of(table.table, key)
                is_set = key in table.left if key in read else key not in table.logged
                if key not in read and holds_fakes(value):
                    value = Unrecorded(table.name(key))
                elif not is_set or table.is_librarys or table.only_counts(key) or not is_plain(value):
                    continue
                found.append(Left(value, _holder(partial(entry_of, table.table, key)), partial(table.write, key)))
        for cell in self.cells:
            if cell.is_log and holds_fakes(cell.read()):
                found.append(Left(Unrecorded(cell.path), _holder(cell.read), cell.write))
            elif cell.left is not MISSING:
                found.append(Left(cell.left, _holder(cell.read), cell.write))
        return found + [Left(items.left, items.holds, items.write) for items in self.items if items.left is not MISSING]

    def carried(self) -> dict[str, Any]:
        """Return what the step set after it had read it, by name: its next run would read the new value.

        A number that is only counted up is none of them.
        """
        found: dict[str, Any] = {}
        for table in self.tables.values():
            entries = table.read_entries()
            for key in table.changed():
                if table.names is None or key in entries:
                    found[table.name(key)] = entry_of(table.table, key)
            if table.is_reordered:
                found[table.path] = table.table
        found |= {cell.path: cell.read() for cell in self.cells if cell.is_changed and not cell.only_counts()}
        return found | {items.path: items.items for items in self.items if items.is_changed}

    def held(self) -> list[Any]:
        """Return what the lists, sets and arrays that the step has changed hold now, MISSING for the others."""
        return [items.read() if items.is_changed else MISSING for items in self.items]

    def accept_present(self, before: Mapping[str, Any], held: Sequence[Any]) -> None:
        """Let later steps start with what the step has set, too.

        Args:
            before: what `carried` returned before the step ran again.
            held: what `held` returned then.
        """
        for table in self.tables.values():
            for key in table.changed():
                value = entry_of(table.table, key)
                if _is_left(value, before.get(table.name(key), MISSING)):
                    table.left[key] = value
                elif table.names is None or key in table.names:
                    table.logged.add(key)
            table.is_log = bool(table.logged) or table.is_reordered
        for cell in self.cells:
            if cell.is_changed and _is_left(cell.read(), before.get(cell.path, MISSING)):
                cell.left = cell.read()
            else:
                cell.is_log = cell.is_changed
        for number, items in enumerate(self.items):
            first = held[number] if number < len(held) else MISSING
            if _is_left(first, first) and items.holds(first):
                items.left = first
            else:
                items.is_log = items.is_changed

    def _object_found(self, table: Table, owner: Any) -> None:
        if self._is_tracking:
            self._track(table, owner)

    def _track(self, table: Table, owner: Any) -> None:
        """Note the attributes that are read of an object; where its class forbids that, all count as read."""
        if table.names is None or self._patch(torch.nn.Module if isinstance(owner, torch.nn.Module) else type(owner)):
            return
        table.names = None
        self._discover_entries(table)

    def _patch(self, cls: type) -> bool:
        if cls in self._patched:
            return True
        if "__getattribute__" in cls.__dict__ or not cls.__flags__ & _CLASSES_OF_HEAP:
            return False
        original: Callable[[Any, str], Any] = cls.__getattribute__
        objects, record = self._objects, self._record

        def tracked(owner: Any, name: str) -> Any:
            try:
                return original(owner, name)
            finally:
                known = objects.get(id(owner))
                if known is not None and name not in known[0].settled:
                    record(known[0], owner, name)

        try:
            cls.__getattribute__ = tracked
        except (TypeError, AttributeError):
            return False
        self._patched.append(cls)
        return True

    def _record(self, table: Table, owner: Any, name: str) -> None:
        """Note that the attribute `name` of an object is read; of a library's object, by the user's own code."""
        if table.names is None or (is_opaque(type(owner)) and not is_own(_reader().f_code.co_filename)):
            return
        if name.startswith("__") and name.endswith("__"):
            # vars(object), object.__dict__: all may be read; torch's own modules look attributes up so
            if name == "__dict__" and _reader().f_globals.get("__name__") != "torch.nn.modules.module":
                table.names.update(table.before)
                self._discover_entries(table)
            return
        value = entry_of(table.table, name)
        first = name not in table.names
        if value is MISSING:
            table.names.add(name)
            table.settled.add(name)
            self._class_attribute(owner, name, table)
            return
        if first:
            if table.before.get(name, MISSING) is not value:  # the step had set it, or a cached property does now
                table.settled.add(name)
                self._class_attribute(owner, name, table)
                return
            table.names.add(name)
            self._discover(value, table.name(name))
        if not isinstance(table.before[name], _NUMBERS):
            table.settled.add(name)
            return
        frame = _reader()
        table.counted.setdefault(name, set()).add((frame.f_code, frame.f_lasti))

    def _class_attribute(self, owner: Any, name: str, table: Table) -> None:
        """Note a name that was found in the object's class: there, and in each base class, which super() reaches."""
        for cls in type(owner).__mro__:
            if cls in (object, torch.nn.Module) or is_opaque(cls) or name not in cls.__dict__:
                continue
            raw = cls.__dict__[name]
            self._add_class_attribute(cls, name, raw)
            self._discover(function_of(raw), table.name(name))


def _is_left(value: Any, before: Any) -> bool:
    """Return whether a value is set for good: it is there after two runs, and can be put there by a planned step."""
    return is_plain(value) and is_same(before, value)


def _holder(read: Callable[[], Any]) -> Callable[[Any], bool]:
    """Return what says whether a value is where `read` finds it."""
    return lambda value: is_same(read(), value)


def _reader() -> FrameType:
    """Return the frame of the code that reads the attribute which is being recorded."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame
