"""What a block's forward pass can read and change in Python: found in a lean pass, by the discovery that captures use.

Attributes and tables of its modules; containers, globals, closures, attributes of other objects, arrays; and the
generators of random numbers that a checkpoint does not set back by itself.
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from memfit.capture.code_reads import is_own, is_users
from memfit.capture.copies import ATOMS, BUFFERS
from memfit.capture.discovery import MODULE_NAMES, Discovery
from memfit.capture.draws import GENERATORS, HostGenerators
from memfit.capture.iterators import Position
from memfit.errors import EAGER_MODE
from memfit.memory.python_places import PythonPlace, of_generator, places_of
from memfit.torch_private.modules import global_module_hooks, module_tables, tables_of
from memfit.torch_private.sharding import is_of_first_fsdp
from memfit.torch_private.tensors import BatchNormBase, is_plain_dense, storage_key

OR_EAGER_MODE = f", or train in {EAGER_MODE}"
"""Ends a refusal of what a block reaches."""
_CODE = (FunctionType, type, ModuleType, torch.nn.Module)
_CALLED = (FunctionType, MethodType, partial)
_CONTAINERS = (dict, list, deque, set, frozenset, *BUFFERS)


class _Found(Discovery):
    """What can be reached from a block, or from values that a call of it reads."""

    def places(self, skipped: Iterable[dict[str, Any]] = ()) -> list[PythonPlace]:
        """Return what was found, without tables that are held otherwise; and let go of the copies that were made."""
        others = {id(table) for table in skipped}
        of_parameters = {id(vars(each)) for _, each in self.tensors.values() if not vars(each)}
        others |= of_parameters | {id(vars(each)["_non_persistent_buffers_set"]) for _, each in self.modules}
        found = [place for place in places_of(self, others) if place.is_small]
        found += [PythonPlace(each.read, each.write, operator.eq) for each in self.positions if each.may_be_set]
        found += map(of_generator, self.generators)
        found += [of_generator(each) for each in self._seen.values() if isinstance(each, GENERATORS)]
        for table in self.tables.values():
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
        tables: of its modules: attributes, parameters, buffers, modules, hooks.
        beside: those of them that are no module's in the block: of modules that are not registered, hooks of all.
        places: beyond them.
        lost: iterators that cannot be set back.
        written: (id of a table, key) of tensors that are written to in place.
        generators: of Python and NumPy that code can draw from, whose names it need not read: (read, write).
        known: id of a table -> the table, and what was found there by its keys, and looked into.
        seen: what else was, by its id.
        has_storages: whether the storages of parameters are the model's own: no library exchanges them.
        statistics: of batch normalization, which a forward pass writes and does not read: (id of a table, key).
        norms: batch normalizations whose code is PyTorch's: (the table of the statistics, that of the attributes).
        is_compiled: whether the block's code is, which may ask whether a tensor is the same.
    """

    name: str
    tables: list[dict[str, Any]]
    beside: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    places: list[PythonPlace] = field(default_factory=list[PythonPlace])
    lost: list[Position] = field(default_factory=list[Position])
    written: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    generators: list[PythonPlace] = field(default_factory=list[PythonPlace])
    known: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(
        default_factory=dict[int, tuple[dict[str, Any], dict[str, Any]]]
    )
    seen: dict[int, Any] = field(default_factory=dict[int, Any])
    has_storages: bool = True
    statistics: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict[tuple[int, str], dict[str, Any]])
    norms: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list[Any])
    is_compiled: bool = False

    def within(self, module: torch.nn.Module, name: str) -> Reach:
        """Return what a module inside of the block can read: its own tables, and all that code of the block reaches.

        Args:
            module: inside of the block; the result shares all but its name, tables and statistics with the block's.
            name: of the module.
        """
        norms = _norms(module)
        own = {where: table for where, table in _statistics(norms).items() if where in self.statistics}
        return replace(self, name=name, tables=[*_own_tables(module), *self.beside], statistics=own, norms=norms)

    def frozen_counts(self) -> Iterator[torch.Tensor]:
        """Yield the counts of batches of all batch normalizations that are in evaluation, and so read statistics."""
        for table, attributes in self.norms:
            if not attributes["training"]:
                for key in table:
                    self.is_read((id(table), key))
                count = table.get("num_batches_tracked")
                if count is not None and not count.is_inference():
                    yield count

    def is_read(self, where: tuple[int, str]) -> None:
        """Take a statistic for any other buffer from now on: some passes read it, and others write to it.

        PyTorch's kernels do not count these writes.
        """
        if self.statistics.pop(where, None) is not None:
            self.written.add(where)

    def is_new(self, table: int, key: str, value: Any) -> bool:
        """Return whether a container or object is one that was not looked into.

        Args:
            table: the id of the table that it is in.
            key: there.
            value: itself.
        """
        known = self.known.get(table)
        return not (known is not None and known[1].get(key) is value) and id(value) not in self.seen

    def free_replaced(self) -> None:
        """Hold no containers and objects that are not there any more: there may be tensors in them."""
        for table, values in self.known.values():
            if not all(map(operator.is_, map(table.get, values), values.values())):
                for key in [key for key, value in values.items() if table.get(key) is not value]:
                    value = values.pop(key)
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
    known: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for table in own:
        looked_into = {k: v for k, v in table.items() if id(v) in values and not isinstance(v, _CODE)}
        if looked_into:
            known[id(table)] = table, looked_into
    for _, looked_into in known.values():
        for value in looked_into.values():
            values.pop(id(value), None)
    has_storages = not any(map(is_exchanged, module.parameters()))
    skipped = [*own, *(table for _, each in found.modules for table in _librarys_tables(each))]
    norms = _norms(module)
    reach = Reach(name, own, beside=beside, lost=found.lost(), known=known, has_storages=has_storages, norms=norms)
    reach.statistics = _statistics(norms)
    reach.places = found.places(skipped)
    reach.seen = {key: value for key, value in values.items() if key not in own_ids}
    for owner in generators.owners():
        (reach.places if found.reaches(owner) else reach.generators).append(of_generator(owner))
    return reach


def reach_of_tables(module: torch.nn.Module, name: str) -> Reach:
    """Return the tables of a module alone, which no lean pass has looked at."""
    norms = _norms(module)
    return Reach(name, _own_tables(module), statistics=_statistics(norms), norms=norms)


@lru_cache(maxsize=4096)
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


def is_exchanged(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a parameter is exchanged by FSDP (1) or DeepSpeed (ZeRO 3) between its uses."""
    return is_of_first_fsdp(tensor) or hasattr(tensor, "ds_id")


def _is_beside(module: torch.nn.Module, models: Collection[int]) -> bool:
    own = [each for table in module_tables(module) for each in table.values() if each is not None]
    return not any(is_plain_dense(each) and storage_key(each) in models for each in own)


def _own_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [table for each in module.modules() for table in tables_of(each)]


def _norms(module: torch.nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the batch normalizations with PyTorch's code: the user's own may read statistics in some passes."""
    own = [each for each in module.modules() if isinstance(each, BatchNormBase) and not is_users(type(each))]
    return [(module_tables(each)[1], vars(each)) for each in own]


def _statistics(norms: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(id(table), key): table for table, _ in norms for key, value in table.items() if value is not None}


def _librarys_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [table for key, table in vars(module).items() if key in MODULE_NAMES and isinstance(table, dict)]
