"""What a block's forward pass can read and change in Python: found in a lean pass, by the discovery that captures use.

Attributes and tables of its modules; containers, globals, closures, attributes of other objects, arrays; and the
generators of random numbers that a checkpoint does not set back by itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from memfit.capture.code_reads import is_own, is_users
from memfit.capture.copies import ATOMS, BUFFERS, MISSING, Items, Table, each_of, entries_of, entry_of, is_same
from memfit.capture.discovery import MODULE_NAMES, Discovery
from memfit.capture.draws import GENERATORS, HostGenerators, differ, place_of
from memfit.capture.iterators import Position
from memfit.torch_private.modules import global_module_hooks, module_tables, tables_of
from memfit.torch_private.tensors import BatchNormBase, is_plain_dense, storage_key

_MOST_ENTRIES = 10_000  # of a container that is copied for each call
_MOST_BYTES = 1 << 20  # of an array
_CODE = (FunctionType, type, ModuleType, torch.nn.Module)
_CALLED = (FunctionType, MethodType, partial)
_CONTAINERS = (dict, list, deque, set, frozenset, *BUFFERS)


@dataclass(frozen=True, slots=True, eq=False)
class ReachedPlace:
    """A place outside of a module's tables that a forward pass can read and change.

    Attributes:
        held: returns a copy of what it holds now.
        put: lets it hold what `held` has returned.
        is_equal: whether two copies are the same.
        of: the container whose entries they are; None of another place.
    """

    held: Callable[[], Any]
    put: Callable[[Any], Any]
    is_equal: Callable[[Any, Any], bool]
    of: Any = None


class _Found(Discovery):
    """What can be reached from a block, or from values that a call of it reads."""

    def places(self, skipped: Iterable[dict[str, Any]] = ()) -> list[ReachedPlace]:
        """Return what was found, without tables that are held otherwise; and let go of the copies that were made."""
        others = {id(table) for table in skipped}
        of_parameters = {id(vars(each)) for _, each in self.tensors.values() if not vars(each)}
        others |= of_parameters | {id(vars(each)["_non_persistent_buffers_set"]) for _, each in self.modules}
        found = [_of_table(table) for table in self.tables.values() if id(table.table) not in others]
        found += [_of_items(each) for each in self.items if id(each.items) not in others and _is_small(each)]
        found += [ReachedPlace(each.read, each.write, is_same) for each in self.cells]
        found += [ReachedPlace(each.read, each.write, _is_equal) for each in self.positions if each.may_be_set]
        found += [ReachedPlace(each.get_state, each.set_state, torch.equal) for each in self.generators]
        found += [_of_generator(each) for each in self._seen.values() if isinstance(each, GENERATORS)]
        for table in self.tables.values():
            if table.names is None or table.is_whole:
                table.before = {}
        for each in (*self.items, *self.cells):
            each.before = None  # pyright: ignore[reportAttributeAccessIssue]
        return found

    def lost(self) -> list[Position]:
        """Return the iterators that cannot be set back."""
        return [each for each in self.positions if not each.may_be_set]

    def _discover_object(self, value: Any, path: str) -> None:
        """Leave objects of libraries alone: hooks of FSDP or DeepSpeed are to see each forward pass as it comes."""
        if is_users(type(value)):
            super()._discover_object(value, path)


class _FoundInBlock(_Found):
    def __init__(self, module: torch.nn.Module, name: str) -> None:
        super().__init__()
        self._discover(module, name)
        for table in global_module_hooks():
            for hook in table.values():
                self._discover(hook, "a hook of all modules")
        self.look_everywhere()

    def reaches(self, generator: Any) -> bool:
        """Return whether code of the user's can draw from a generator of Python's or NumPy's by its name."""
        if generator is random.random.__self__:  # pyright: ignore[reportFunctionMemberAccess]
            return id(random) in self._seen or id(generator) in self._seen
        is_numpys = generator is np.random.mtrand._rand
        return id(generator) in self._seen or (is_numpys and bool({id(np), id(np.random)} & self._seen.keys()))

    def values(self) -> dict[int, Any]:
        """Return what was found by its id; no tensors, which would be held."""
        return {key: value for key, value in self._seen.items() if not isinstance(value, torch.Tensor)}


class FoundInValues(_Found):
    """What can be reached from values: arguments of a call, or attributes that are new.

    Of code, functions of the user's are looked at.

    Args:
        values: (name, value).
    """

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        super().__init__()
        for path, value in values:
            self._discover(value, path)
        self.look_everywhere()

    def _discover_one(self, value: Any, path: str) -> None:
        if not isinstance(value, _CODE) or _is_users_function(value):
            super()._discover_one(value, path)


@dataclass(slots=True, eq=False)
class Reach:
    """What a block, or a module inside of one, can read and change.

    Attributes:
        name: of the module.
        own: tables of its modules: attributes, parameters, buffers, modules, hooks.
        empty: those of them in which nothing was.
        beside: those of them that are no module's in the block: of modules that are not registered, hooks of all.
        places: beyond them.
        lost: iterators that cannot be set back.
        written: (id of a table, key) of tensors that are written to in place.
        generators: of Python and NumPy that code can draw from, whose names it need not read: (read, write).
        known: (id of a table, key) -> the table, and what was found there, and looked into.
        seen: what else was, by its id.
        has_storages: whether the storages of parameters are the model's own: no library exchanges them.
        statistics: of batch normalization, which a forward pass writes and does not read: (id of a table, key).
        is_compiled: whether the block's code is, which may ask whether a tensor is the same.
    """

    name: str
    own: list[dict[str, Any]]
    empty: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    beside: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    places: list[ReachedPlace] = field(default_factory=list[ReachedPlace])
    lost: list[Position] = field(default_factory=list[Position])
    written: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    generators: list[ReachedPlace] = field(default_factory=list[ReachedPlace])
    known: dict[tuple[int, str], tuple[dict[str, Any], Any]] = field(
        default_factory=dict[tuple[int, str], tuple[dict[str, Any], Any]]
    )
    seen: dict[int, Any] = field(default_factory=dict[int, Any])
    has_storages: bool = True
    statistics: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict[tuple[int, str], dict[str, Any]])
    is_compiled: bool = False
    _kinds: dict[type, bool] = field(default_factory=dict[type, bool])

    def __post_init__(self) -> None:
        self.sort_tables()

    def sort_tables(self) -> None:
        """Look at those tables again that were empty."""
        tables = [*self.own, *self.empty]
        self.own = [table for table in tables if table]
        self.empty = [table for table in tables if not table]

    def within(self, module: torch.nn.Module, name: str) -> Reach:
        """Return what a module inside of the block can read: its own tables, and all that code of the block reaches."""
        return Reach(
            name=name,
            own=[*_own_tables(module), *self.beside],
            beside=self.beside,
            places=self.places,
            lost=self.lost,
            written=self.written,
            known=self.known,
            seen=self.seen,
            has_storages=self.has_storages,
            statistics={where: table for where, table in _statistics(module).items() if where in self.statistics},
            is_compiled=self.is_compiled,
        )

    def needs_a_look(self, kind: type) -> bool:
        """Return `needs_a_look`, remembered."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = needs_a_look(kind)
        return found

    def is_new(self, table: int, key: str, value: Any) -> bool:
        """Return whether a container or object is one that was not looked into.

        Args:
            table: the id of the table that it is in.
            key: there.
            value: itself.
        """
        known = self.known.get((table, key))
        return not (known is not None and known[1] is value) and id(value) not in self.seen

    def free_replaced(self) -> None:
        """Hold no containers and objects that are not there any more: there may be tensors in them."""
        for where, (table, value) in tuple(self.known.items()):
            if table.get(where[1]) is not value:
                del self.known[where]
                self.places = [place for place in self.places if place.of is not value]


def reach_of(module: torch.nn.Module, name: str, generators: HostGenerators, models: Collection[int]) -> Reach:
    """Return what a block can read and change; takes about 0.02 s.

    Args:
        module: the block.
        name: of it.
        generators: Python's and NumPy's.
        models: keys of the storages of the model. Modules that the block reaches, and that have others, are its own.
    """
    found = _FoundInBlock(module, name)
    inside = set(map(id, module.modules()))
    hidden = [each for _, each in found.modules if id(each) not in inside and _is_beside(each, models)]
    beside = [*(table for each in hidden for table in tables_of(each)), *global_module_hooks()]
    own = [*_own_tables(module), *beside]
    values = found.values()
    own_ids = {id(table) for table in own}
    known = {
        (id(table), key): (table, value)
        for table in own
        for key, value in table.items()
        if id(value) in values and not isinstance(value, _CODE)
    }
    for _, value in known.values():
        values.pop(id(value), None)
    has_storages = not any(map(is_exchanged, module.parameters()))
    skipped = [*own, *(table for _, each in found.modules for table in _librarys_tables(each))]
    reach = Reach(name, own, beside=beside, lost=found.lost(), known=known, has_storages=has_storages)
    reach.statistics = _statistics(module)
    reach.places = found.places(skipped)
    reach.seen = {key: value for key, value in values.items() if key not in own_ids}
    for owner, (read, write) in zip(generators.owners(), generators.places(), strict=True):
        place = ReachedPlace(read, write, _same_state)
        (reach.places if found.reaches(owner) else reach.generators).append(place)
    return reach


def reach_of_tables(module: torch.nn.Module, name: str) -> Reach:
    """Return the tables of a module alone, which no lean pass has looked at."""
    return Reach(name, _own_tables(module), statistics=_statistics(module))


def needs_a_look(kind: type) -> bool:
    """Return whether values of a class hold others, which a forward pass may change."""
    if issubclass(kind, _CALLED):
        return True
    if kind in ATOMS or issubclass(kind, (torch.Tensor, *_CODE)):
        return False
    return issubclass(kind, (tuple, torch.Generator, *GENERATORS, *_CONTAINERS)) or _is_iterator(kind) or is_users(kind)


def _is_iterator(kind: type) -> bool:
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def _is_users_function(value: Any) -> bool:
    return isinstance(value, FunctionType) and is_own(value.__code__.co_filename)


def may_change(value: Any) -> bool:
    """Return whether a value, of a class that `needs_a_look`, holds others that a forward pass may change."""
    if isinstance(value, tuple):
        return any(needs_a_look(type(each)) and may_change(each) for each in value)
    return not isinstance(value, FunctionType) or _is_users_function(value)


def _of_generator(generator: Any) -> ReachedPlace:
    read, write = place_of(generator)
    return ReachedPlace(read, write, _same_state)


def is_exchanged(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a parameter is exchanged by FSDP (1) or DeepSpeed (ZeRO 3) between its uses."""
    return hasattr(tensor, "_fsdp_flattened") or hasattr(tensor, "ds_id")


def _is_beside(module: torch.nn.Module, models: Collection[int]) -> bool:
    own = [each for table in module_tables(module) for each in table.values() if each is not None]
    return not any(is_plain_dense(each) and storage_key(each) in models for each in own)


def _own_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [table for each in module.modules() for table in tables_of(each)]


def _statistics(module: torch.nn.Module) -> dict[tuple[int, str], dict[str, Any]]:
    tables = [module_tables(each)[1] for each in module.modules() if isinstance(each, BatchNormBase)]
    return {(id(table), key): table for table in tables for key, value in table.items() if value is not None}


def _librarys_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [table for key, table in vars(module).items() if key in MODULE_NAMES and isinstance(table, dict)]


def _of_table(table: Table) -> ReachedPlace:
    names = table.names
    is_all = names is None or table.is_whole

    def held() -> Any:
        if not is_all:
            return {name: entry_of(table.table, name) for name in tuple(table.before)}
        if len(table.table) > _MOST_ENTRIES:
            return {}
        return table.table.copy() if type(table.table) is dict else entries_of(table.table)

    def put(entries: dict[Any, Any]) -> None:
        if is_all and len(table.table) > _MOST_ENTRIES:
            return
        now = entries_of(table.table) if is_all else {name: entry_of(table.table, name) for name in entries}
        is_reordered = is_all and list(now) != list(entries)
        for key in [*entries, *(now.keys() - entries.keys())]:
            value = entries.get(key, MISSING)
            if is_reordered and key in now:
                table.write(key, MISSING)
                table.write(key, value) if value is not MISSING else None
            elif not is_same(value, now.get(key, MISSING)):
                table.write(key, value)

    return ReachedPlace(held, put, _same_entries, table.table)


def _of_items(items: Items) -> ReachedPlace:
    is_list = type(items.items) is list
    return ReachedPlace(items.items.copy if is_list else items.read, items.write, _same_items, items.items)


def _is_small(items: Items) -> bool:
    held = items.items
    if isinstance(held, np.ndarray):
        return held.nbytes <= _MOST_BYTES
    if isinstance(held, BUFFERS):
        return memoryview(held).nbytes <= _MOST_BYTES
    return sum(1 for _ in each_of(held)) <= _MOST_ENTRIES


def _same_entries(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    return list(before) == list(now) and all(map(is_same, before.values(), now.values()))


def _same_items(before: Any, now: Any) -> bool:
    return len(before) == len(now) and all(map(is_same, before, now))


def _is_equal(before: Any, now: Any) -> bool:
    return bool(before == now)


def _same_state(before: Any, now: Any) -> bool:
    return not differ(before, now)
