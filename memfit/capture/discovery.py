"""What a step can reach in Python, copied before it does: attributes, globals, closures, and the containers in them.

Functions of the user are read for the globals and closure variables that they name; functions of libraries are not.
"""

from __future__ import annotations

import enum
import functools
import gc
import os
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, cast

import torch

from memfit.capture.code_reads import (
    attribute_reads,
    file_of,
    global_reads,
    global_writes,
    imported_modules,
    is_librarys,
    is_opaque,
    is_own,
    texts_in,
)
from memfit.capture.copies import (
    ATOMS,
    BUFFERS,
    MISSING,
    Cell,
    Globals,
    Items,
    Table,
    Variable,
    each_of,
    entries_of,
    function_of,
    function_parts,
    own_attributes,
    slot_names,
)
from memfit.capture.found import Found
from memfit.capture.iterators import Position, is_plain_iterator
from memfit.torch_private.modules import gradient_hooks, module_hooks
from memfit.torch_private.tensors import is_fake
from memfit.torch_private.tracing import stood_for

MODULE_NAMES = frozenset(vars(torch.nn.Module()))
_OWN = ("memfit.checkpointing.", "memfit.memory.")  # hooks on the model, and stand-ins for `forward`
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
_FUNCTIONS = (FunctionType, staticmethod, classmethod, property, functools.cached_property, *_SLOTS)
_MAKING = ("__init__", "__new__", "__init_subclass__")  # the class is found where it is called
_VIEWS = (MappingProxyType, *map(type, ({}.keys(), {}.values(), {}.items())), BuiltinMethodType, MethodWrapperType)


class Discovery(Found):
    """Finds what can be reached from a step's model and loss."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead: deque[tuple[Any, str]] = deque()
        self._is_discovering = False
        self._known_cells: dict[int, Cell] = {}
        self._objects: dict[int, tuple[Table, Any]] = {}
        self._held_files: list[ModuleType] = []
        self._described: dict[int, type] = {}
        self._patched: list[type] = []  # classes that have a `__getattribute__` of memfit's for now

    def look_everywhere(self) -> None:
        """Copy what the attributes and the classes of modules and objects hold, too; else that is done when the step
        reads them."""
        seen: set[int] = set()
        while ahead := [table for key, table in self.tables.items() if key not in seen]:
            seen.update(self.tables)
            for table in ahead:
                if table.is_whole and id(table.table) in self._seen:  # it is a dictionary that the step may reorder
                    table.names = None
                for key, value in tuple(table.before.items()):
                    self._discover(value, table.name(key))
            for _, owner in tuple(self._objects.values()):
                self._discover(type(owner), type(owner).__qualname__)

    def _object_found(self, table: Table, owner: Any) -> None:
        """Called for each object whose attributes have been copied."""

    def _discover(self, value: Any, path: str) -> None:
        """Copy what a value holds, at all depths, before the step reads it.

        What holds what is followed in a queue: chains of objects are longer than Python's stack.
        """
        self._ahead.append((value, path))
        if self._is_discovering:
            return
        self._is_discovering = True
        try:
            while self._ahead:
                self._discover_one(*self._ahead.popleft())
        finally:
            self._is_discovering = False
            self._ahead.clear()

    def _discover_one(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), (path, value))
        if type(value) in ATOMS or id(value) in self._seen:
            return
        if str(type(value).__module__).startswith(_OWN):  # classes in C may have no text there
            self._discover(getattr(value, "forward", None), path)
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._discover_modules(value, path)
        elif isinstance(value, FunctionType):
            self._discover_function(value, path)
        elif isinstance(value, type):
            self._discover_class(value)
        elif isinstance(value, ModuleType):
            self._held_files.append(value)
            for _, function, _ in tuple(self.functions):
                self._discover_file(value, function.__code__)
        else:
            self._discover_held(value, path)
            self._discover_object(value, path)

    def _discover_entries(self, table: Table) -> None:
        for key, inner in table.before.items():
            self._discover(inner, table.name(key))

    def _discover_held(self, value: Any, path: str) -> None:
        """Copy what an object of one of Python's own types holds beside its attributes."""
        if isinstance(value, dict):
            known = self.tables.get(id(value))
            if known is not None and known.is_whole:  # an object's attributes, copied before the step could set any
                table, known.names = known, None
            else:
                table = self.tables[id(value)] = Table(path, value, entries_of(value), None)
            self._discover_entries(table)
            if isinstance(value, defaultdict):
                self._add_slots(path, value, ["default_factory"])
        elif isinstance(value, BUFFERS):
            self.items.append(Items(path, value))
        elif isinstance(value, (list, deque, set, tuple, frozenset)):
            if not isinstance(value, tuple | frozenset):
                self.items.append(Items(path, value))
            for number, inner in enumerate(each_of(value)):
                self._discover(inner, f"{path}[{number}]")
        elif isinstance(value, MethodType):
            self._discover(value.__self__, path)
            self._discover(value.__func__, path)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            for number, inner in enumerate((value.func, *value.args)):
                self._discover(inner, f"{path} (partial, {number})")
            self._discover(value.keywords, path)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._discover(value.__wrapped__, path)
        elif isinstance(value, _VIEWS):
            for inner in gc.get_referents(value):
                self._discover(inner, path)
        elif isinstance(value, weakref.ProxyTypes):
            self._discover(value.__init__.__self__, path)  # what it stands for: an object that is there gives no other
        elif isinstance(value, weakref.ref):
            self._add_place(f"what {path} refers to", value, lambda _gone: None)
        elif isinstance(value, ContextVar):
            self._add_place(
                f"the context variable {value.name!r}",
                lambda: value.get(MISSING),
                functools.partial(_set_variable, value),
            )
        elif isinstance(value, type(os.environ)):
            self._discover(value._data, path)
        elif is_plain_iterator(value):
            self.positions.append(Position(path, value))

    def _add_place(self, path: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.cells.append(Variable(path, read, write))
        self._discover(self.cells[-1].before, path)

    def _discover_object(self, value: Any, path: str) -> None:
        cls = type(value)
        attributes = own_attributes(value)
        if not attributes and isinstance(value, (*ATOMS, torch.Tensor)):
            return
        if attributes is not None:
            self._add_object(value, attributes, path)
        if is_opaque(cls):
            return
        read, write = functools.partial(getattr, value, "__class__"), functools.partial(_set_slot, value, "__class__")
        self.cells.append(Variable(f"{path}.__class__", read, write))  # for `isinstance`, which reads no attribute
        self._add_slots(path, value, [name for c in cls.__mro__ for name in slot_names(c)])
        for base in cls.__mro__:
            self._discover_descriptors(base)

    def _add_slots(self, path: str, owner: Any, names: list[str]) -> None:
        for name in names:
            read, write = functools.partial(getattr, owner, name, MISSING), functools.partial(_set_slot, owner, name)
            self._add_place(f"{path}.{name}", read, write)

    def _add_object(self, value: Any, attributes: dict[str, Any], path: str) -> None:
        ours = (object, torch.nn.Module, *self._patched)
        overrides = any("__getattribute__" in c.__dict__ for c in type(value).__mro__ if c not in ours)
        is_whole = overrides or isinstance(value, torch.Tensor)
        table = Table(path, attributes, dict(attributes), None if is_whole else set())
        table.is_librarys = is_opaque(type(value))
        self.tables[id(attributes)] = table
        self._objects[id(value)] = table, value
        if isinstance(value, torch.nn.Module):
            table.settled.update(MODULE_NAMES)  # hooks and tables, which guards compare themselves
        if is_whole:
            self._discover_entries(table)
        else:
            self._object_found(table, value)
        for cls in type(value).__mro__:
            self._discover_descriptors(cls)

    def _discover_descriptors(self, cls: type) -> None:
        """Look at the objects that compute attributes of a class, before they do; functions are read as they run.

        But those with special names (`__call__`, `__getattr__`, `__bool__`) are looked up where no attribute is read.
        """
        if id(cls) in self._described or is_opaque(cls):
            return
        self._described[id(cls)] = cls
        for name, raw in list(cls.__dict__.items()):
            is_special = name.startswith("__") and callable(raw) and not isinstance(raw, type) and name not in _MAKING
            if is_special or (hasattr(type(raw), "__get__") and not isinstance(raw, _FUNCTIONS)):
                self._discover(raw, f"{cls.__qualname__}.{name}")

    def _discover_modules(self, root: torch.nn.Module, path: str) -> None:
        for name, module in root.named_modules():
            inner = f"{path}.{name}" if name else path
            if id(module) in self._objects:
                continue
            self._seen[id(module)] = module
            self.modules.append((inner, module))
            self._add_object(module, module.__dict__, inner)
            self._copy_own_tables(module, inner)
            for hooks in module_hooks(module):
                for hook in hooks.values():
                    self._discover(hook, f"a hook of {inner}")
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            for hook in gradient_hooks(tensor).values():
                self._discover(hook, f"a hook of {path}.{name}")
            self._discover_tensor(tensor, f"{path}.{name}")

    def _discover_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Copy the attributes of a model's tensor, which its fake has, too; there may be more in a later step."""
        attributes = None if is_fake(tensor) else own_attributes(tensor)
        if attributes is None or id(attributes) in self.tables:
            return
        self._seen[id(tensor)] = tensor
        table = self.tables[id(attributes)] = Table(path, attributes, dict(attributes), None)
        self._discover_entries(table)

    def _copy_own_tables(self, module: torch.nn.Module, path: str) -> None:
        """Copy a module's tables of parameters, buffers, modules and hooks: none is copied again later.

        They hold fakes while a step is captured. A first forward may add hooks, and note in an attribute that it has.
        """
        for name, own in module.__dict__.items():
            if name in MODULE_NAMES and isinstance(own, dict):
                entries = cast("dict[Any, Any]", own)
                self._seen[id(entries)] = entries
                self.tables[id(entries)] = Table(f"{path}.{name}", entries, dict(entries), set())

    def _discover_class(self, cls: type) -> None:
        """Copy the values in a class of the user's, and look at its functions."""
        if is_librarys(cls.__module__):
            return
        if issubclass(cls, enum.Enum):
            for member in cls:
                if not isinstance(member.value, ATOMS):
                    self._discover(member.value, f"{cls.__qualname__}.{member.name}.value")
            return
        self._discover(type(cls), type(cls).__qualname__)
        for base in cls.__mro__:
            if is_librarys(base.__module__):
                continue
            for name, raw in list(base.__dict__.items()):
                function = function_of(raw)
                if isinstance(function, FunctionType):
                    self._discover(function, f"{cls.__qualname__}.{name}")
                elif not name.startswith("__"):
                    self._add_class_attribute(base, name, raw)
                    self._discover(raw, f"{cls.__qualname__}.{name}")

    def _discover_bases(self, cls: type, names: frozenset[str]) -> None:
        """Copy what code that calls `super()` may read of the classes behind it: no object is asked there."""
        for base in cls.__mro__[1:]:
            for name in names & base.__dict__.keys() if not is_librarys(base.__module__) else ():
                raw = base.__dict__[name]
                if not isinstance(function_of(raw), FunctionType):
                    self._add_class_attribute(base, name, raw)
                self._discover(function_of(raw), f"{base.__qualname__}.{name}")

    def _discover_function(self, function: FunctionType, path: str) -> None:
        code = function.__code__
        if not is_own(code.co_filename):
            self._discover(function.__dict__.get("__wrapped__"), path)  # torch.no_grad() around a user's function
            return
        self.functions.append((path, function, function_parts(function)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            known = self._known_cells.get(id(cell))
            if known is not None:
                known.codes.append(code)
            elif name == "__class__":
                self._discover_bases(cell.cell_contents, attribute_reads(code))
            else:
                known = self._known_cells[id(cell)] = Cell(name, cell, code)
                self.cells.append(known)
                self._discover(known.before, name)
        self._discover(function.__defaults__ or (), f"the defaults of {path}")
        self._discover(function.__kwdefaults__ or (), f"the defaults of {path}")
        if function.__dict__:
            self._discover(function.__dict__, path)
        for module in self._held_files:
            self._discover_file(module, code)
        wanted, by_name = global_reads(code), frozenset[str]()
        if "globals" in wanted or "modules" in attribute_reads(code):  # of sys
            by_name = attribute_reads(code) | texts_in(code)
        if not {"environ", "getenv"}.isdisjoint(wanted | attribute_reads(code)):
            self._discover(os.environ, "os.environ")
        table = self._globals(function.__globals__)
        table.codes.add(code)
        table.by_attribute |= by_name & table.table.keys()
        for name in (wanted | by_name) & table.table.keys():
            value = table.table[name]
            if isinstance(value, ModuleType):
                self._discover_file(value, code)
            self._name_global(table, name)
        for name in global_writes(code):
            table.before.setdefault(name, table.table.get(name, MISSING))
        for name in imported_modules(code):
            if name in sys.modules:
                self._discover_file(sys.modules[name], code)

    def _discover_file(self, module: ModuleType, code: CodeType) -> None:
        """Copy the globals of a file of the user's whose names are read as attributes in a function's code."""
        filename = file_of(module)
        if is_librarys(module.__dict__.get("__name__")) or (filename is not None and not is_own(filename)):
            return
        table = self._globals(module.__dict__)
        for name in (attribute_reads(code) | {"__getattr__"}) & table.table.keys():
            table.by_attribute.add(name)
            self._name_global(table, name)

    def _name_global(self, table: Globals, name: str) -> None:
        names = cast("set[Any]", table.names)
        if name not in names:
            names.add(name)
            # a stand-in is there only while the step is captured
            value = table.before.setdefault(name, stood_for(table.table[name]))
            self._discover(value, table.name(name))


def _set_slot(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)


def _set_variable(variable: ContextVar[Any], value: Any) -> None:
    if value is not MISSING:  # one that had no value keeps what the step has set: only its own token could undo that
        variable.set(value)
