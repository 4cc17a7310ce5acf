"""What a step reads from Python while it is captured: attributes, globals, closures, and the containers in them.

A planned step runs no Python, so that all this is frozen in its ops. `Reads` follows the code of one capture: it copies
each attribute table, closure cell, global and container before the step can reach it, and notes which attributes are
read, by a `__getattribute__` that it gives to their classes meanwhile. Functions of the user are read for the globals
and closure variables that they name; functions of libraries are not. `memfit.capture.guards` holds the copies against
later steps.
"""

from __future__ import annotations

import argparse
import enum
import functools
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from memfit.capture.code_reads import attribute_reads, global_reads, imported_modules, is_own
from memfit.capture.copies import ATOMS, MISSING, Cell, Globals, Items, Slots, Table, function_parts, slot_names
from memfit.capture.training_step import TrainingStep
from memfit.torch_private import gradient_hooks, module_hooks, stood_for

MODULE_NAMES = frozenset(vars(torch.nn.Module()))
_OF_OPTIMIZERS = ("defaults", "param_groups", "state")
_NUMBERS = (bool, int, float, complex)
_OPAQUE = (sys.stdlib_module_names | {"torch", "numpy", "memfit"}) - {"collections", "types"}
_TRACKING = threading.RLock()  # classes are changed while one capture runs
_CLASSES_OF_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes that Python code made, and whose attributes may be set


class Reads:
    """Follows what one capture of a step reads from Python.

    Attributes:
        tables, cells, items, slots: copies of all that the step can reach, made before it does.
        functions: (path, function, its parts) of the user's functions.
        modules: (path, module) of the model's modules, and of those that the loss reaches beside it.
        tensors: (path, tensor) of what these hold, by the tensor's id.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.tables: dict[int, Table] = {}
        self.cells: list[Cell] = []
        self.items: list[Items] = []
        self.slots: list[Slots] = []
        self.functions: list[tuple[str, FunctionType, tuple[Any, ...]]] = []
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._seen: dict[int, Any] = {}
        self._objects: dict[int, tuple[Table, Any]] = {}
        self._classes: dict[type, Table] = {}
        self._patched: list[type] = []
        self._is_tracking = False
        self._discover(step.model, "model")
        self._discover(step.loss, "loss")

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

    def look_everywhere(self) -> None:
        """Copy what the attributes and the classes of modules and objects hold, too; else that is done when the step
        reads them."""
        seen: set[int] = set()
        while ahead := [table for key, table in self.tables.items() if key not in seen]:
            seen.update(self.tables)
            for table in ahead:
                for key, value in tuple(table.before.items()):
                    self._discover(value, table.name(key))
            for _, owner in tuple(self._objects.values()):
                self._discover(type(owner), type(owner).__qualname__)

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

    @property
    def generators(self) -> list[torch.Generator]:
        """Torch's generators that model and loss hold."""
        return [value for value in self._seen.values() if isinstance(value, torch.Generator)]

    def put_back(self) -> None:
        """Reset all that was copied."""
        for held in (*self.tables.values(), *self.slots):
            held.put_back()
        for held in (*self.cells, *self.items):
            if held.is_changed:
                held.put_back()

    def carried(self) -> dict[str, Any]:
        """Return what the step set after it had read it, by name: its next run would read the new value.

        A number that is only counted up is none of them.
        """
        found: dict[str, Any] = {}
        for table in self.tables.values():
            entries = table.read_entries()
            for key in table.changed():
                if table.names is None or key in entries:
                    found[table.name(key)] = table.table.get(key, MISSING)
        for held in self.slots:
            found |= {f"{held.path}.{name}": getattr(held.owner, name, MISSING) for name in held.changed()}
        found |= {cell.path: cell.read() for cell in self.cells if cell.is_changed and not cell.only_counts()}
        return found | {items.path: items.items for items in self.items if items.is_changed}

    def accept_present(self) -> None:
        """Let later steps start with what the step has set, too."""
        for table in self.tables.values():
            for key in table.changed():
                value = table.table.get(key, MISSING)
                if isinstance(value, ATOMS) and key in table.before:
                    table.accepted[key] = value
                else:
                    table.logged.add(key)
        for cell in self.cells:
            if cell.is_changed:
                cell.accepted = cell.read()
        for items in self.items:
            items.is_log = items.is_changed

    def _track(self, table: Table, owner: Any) -> None:
        """Note the attributes that are read of an object; where its class forbids that, all count as read."""
        if table.names is None or self._patch(torch.nn.Module if isinstance(owner, torch.nn.Module) else type(owner)):
            return
        table.names = None
        for key, value in table.before.items():
            self._discover(value, table.name(key))

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
        """Note that the attribute `name` of an object is read."""
        if table.names is None:
            return
        if name.startswith("__") and name.endswith("__"):
            # vars(object), object.__dict__: all may be read; torch's own modules look attributes up so
            if name == "__dict__" and _reader().f_globals.get("__name__") != "torch.nn.modules.module":
                table.names.update(table.before)
                for key, value in table.before.items():
                    self._discover(value, table.name(key))
            return
        value = table.table.get(name, MISSING)
        first = name not in table.names
        if value is MISSING:
            table.names.add(name)
            table.settled.add(name)
            self._class_attribute(owner, name, table)
            return
        if first:
            if table.before.get(name, MISSING) is not value:  # the step had set it
                table.settled.add(name)
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
            if cls in (object, torch.nn.Module) or name not in cls.__dict__:
                continue
            raw = cls.__dict__[name]
            self._add_class_attribute(cls, name, raw)
            self._discover(_function_of(raw), table.name(name))

    def _add_class_attribute(self, cls: type, name: str, value: Any) -> None:
        table = self._class_table(cls)
        table.before.setdefault(name, value)
        cast("set[Any]", table.names).add(name)

    def _class_table(self, cls: type) -> Table:
        if cls not in self._classes:
            # `cls.__dict__` is a proxy; the garbage collector names the dictionary behind it
            (table,) = (d for d in gc.get_referents(cls.__dict__) if isinstance(d, dict))
            self._classes[cls] = self.tables[id(table)] = Table(cls.__qualname__, table, {}, set(), owner=cls)
        return self._classes[cls]

    def _discover(self, value: Any, path: str) -> None:
        """Copy what a value holds, at all depths, before the step reads it."""
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), (path, value))
        if isinstance(value, (*ATOMS, torch.Tensor, enum.Enum)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._discover_modules(value, path)
        elif isinstance(value, FunctionType):
            self._discover_function(value, path)
        elif isinstance(value, MethodType):
            self._discover(value.__self__, path)
            self._discover(value.__func__, path)
        elif isinstance(value, functools.partial):
            part = cast("functools.partial[Any]", value)
            for number, inner in enumerate((part.func, *part.args)):
                self._discover(inner, f"{path} (partial, {number})")
            self._discover(part.keywords, path)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._discover(value.__wrapped__, path)
        elif isinstance(value, type):
            self._discover_class(value)
        elif isinstance(value, dict):
            entries = cast("dict[Any, Any]", value)
            table = self.tables[id(entries)] = Table(path, entries, dict(entries), None)
            for key, inner in table.before.items():
                self._discover(inner, table.name(key))
        elif isinstance(value, list | deque | set | np.ndarray):
            self.items.append(Items(path, value))
            if not isinstance(value, np.ndarray):
                self._discover_each(value, path)
        elif isinstance(value, tuple | frozenset):
            self._discover_each(value, path)
        elif not isinstance(value, ModuleType):
            self._discover_object(value, path)

    def _discover_each(self, values: Any, path: str) -> None:
        for number, inner in enumerate(values):
            self._discover(inner, f"{path}[{number}]")

    def _discover_object(self, value: Any, path: str) -> None:
        cls = type(value)
        is_plain = isinstance(value, SimpleNamespace | argparse.Namespace)
        if not is_plain and cls.__module__.partition(".")[0] in _OPAQUE:
            return
        attributes = getattr(value, "__dict__", None)
        if any(True for c in cls.__mro__ for _ in slot_names(c)):
            held = Slots(path, value)
            self.slots.append(held)
            for name, inner in held.before.items():
                self._discover(inner, f"{path}.{name}")
        if isinstance(attributes, dict):
            self._add_object(value, path)
        call = next((c.__dict__["__call__"] for c in cls.__mro__ if "__call__" in c.__dict__), None)
        if call is not None:  # looked up in the class, where no attribute is read
            self._discover(call, path)

    def _add_object(self, value: Any, path: str) -> None:
        attributes = object.__getattribute__(value, "__dict__")
        ours = (object, torch.nn.Module, *self._patched)
        overrides = any("__getattribute__" in c.__dict__ for c in type(value).__mro__ if c not in ours)
        table = Table(path, attributes, dict(attributes), None if overrides else set())
        self.tables[id(attributes)] = table
        self._objects[id(value)] = table, value
        if isinstance(value, torch.nn.Module):
            table.settled.update(MODULE_NAMES)  # hooks and tables, which guards compare themselves
        if overrides:
            for key, inner in table.before.items():
                self._discover(inner, table.name(key))
        elif self._is_tracking:
            self._track(table, value)

    def _discover_modules(self, root: torch.nn.Module, path: str) -> None:
        for name, module in root.named_modules():
            inner = f"{path}.{name}" if name else path
            if id(module) in self._objects:
                continue
            self._seen[id(module)] = module
            self.modules.append((inner, module))
            self._add_object(module, inner)
            self._copy_hooks(module, inner)
            for hooks in module_hooks(module):
                for hook in hooks.values():
                    self._discover(hook, f"a hook of {inner}")
        for name, parameter in root.named_parameters():
            for hook in gradient_hooks(parameter).values():
                self._discover(hook, f"a hook of {path}.{name}")

    def _copy_hooks(self, module: torch.nn.Module, path: str) -> None:
        """Copy the hooks of a module: a first forward may add some, and note in an attribute that it has."""
        for name, hooks in module.__dict__.items():
            if name in MODULE_NAMES and "hooks" in name and isinstance(hooks, dict):
                entries = cast("dict[Any, Any]", hooks)
                self.tables[id(entries)] = Table(f"{path}.{name}", entries, dict(entries), set())

    def _discover_class(self, cls: type) -> None:
        """Copy the values in a class of the user's, and look at its functions."""
        if cls.__module__.partition(".")[0] in _OPAQUE or issubclass(cls, enum.Enum):
            return
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in _OPAQUE:
                continue
            for name, raw in list(base.__dict__.items()):
                function = _function_of(raw)
                if isinstance(function, FunctionType):
                    self._discover(function, f"{cls.__qualname__}.{name}")
                elif not name.startswith("__"):
                    self._add_class_attribute(base, name, raw)
                    self._discover(raw, f"{cls.__qualname__}.{name}")

    def _discover_function(self, function: FunctionType, path: str) -> None:
        code = function.__code__
        if not is_own(code.co_filename):
            self._discover(function.__dict__.get("__wrapped__"), path)  # torch.no_grad() around a user's function
            return
        self.functions.append((path, function, function_parts(function)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            known = next((held for held in self.cells if held.cell is cell), None)
            if known is not None:
                known.codes.append(code)
            elif name != "__class__":
                with suppress(ValueError):  # a variable that has no value yet
                    self.cells.append(Cell(name, cell, code))
                    self._discover(self.cells[-1].before, name)
        self._discover(function.__defaults__ or (), f"the defaults of {path}")
        self._discover(function.__kwdefaults__ or (), f"the defaults of {path}")
        if function.__dict__:
            self._discover(function.__dict__, path)
        wanted = global_reads(code)
        table = self._globals(function.__globals__)
        table.codes.add(code)
        for name in wanted & table.table.keys():
            value = table.table[name]
            if isinstance(value, ModuleType):
                self._discover_file(value, code)
            self._name_global(table, name)
        for name in imported_modules(code):
            if name in sys.modules:
                self._discover_file(sys.modules[name], code)

    def _discover_file(self, module: ModuleType, code: CodeType) -> None:
        """Copy the globals of a file of the user's whose names are read as attributes in a function's code."""
        filename = getattr(module, "__file__", None)
        if module.__name__.partition(".")[0] in _OPAQUE or (filename is not None and not is_own(filename)):
            return
        table = self._globals(module.__dict__)
        for name in attribute_reads(code) & table.table.keys():
            table.by_attribute.add(name)
            self._name_global(table, name)

    def _name_global(self, table: Globals, name: str) -> None:
        if name not in table.before:
            value = stood_for(table.table[name])  # a stand-in is there only while the step is captured
            table.before[name] = value
            cast("set[Any]", table.names).add(name)
            self._discover(value, table.name(name))

    def _globals(self, names: dict[str, Any]) -> Globals:
        found = self.tables.get(id(names))
        if not isinstance(found, Globals):
            found = self.tables[id(names)] = Globals(str(names.get("__name__", "the globals")), names)
        return found


def _reader() -> FrameType:
    """Return the frame of the code that reads the attribute which is being recorded."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _function_of(raw: Any) -> Any:
    """Return the function of a static method, a class method or a property, and any other value itself."""
    if isinstance(raw, staticmethod | classmethod):
        return cast("Any", raw).__func__
    if isinstance(raw, property):
        return raw.fget
    return raw.func if isinstance(raw, functools.cached_property) else raw
