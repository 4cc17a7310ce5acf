"""Guards: all that a captured step took from Python and from its tensors' metadata, held against each later step.

What is compared is what `Reads` found at capture: attributes of modules and objects, globals, closure variables,
containers; the tables of all modules, and their hooks; metadata, memory and gradients of parameters, buffers and
tensors beside the model; the optimizer's groups; torch's own settings. Dictionaries are compared by their versions and
tensors by Dynamo's guards, so that a step in which nothing changed pays 0.2 us for each module and tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, cast

import torch

from memfit.capture.copies import Variable, entries_of, function_parts, is_fixed, is_same
from memfit.capture.discovery import MODULE_NAMES
from memfit.capture.guarded_table import Difference, GuardedTable, name_of
from memfit.capture.reads import Reads
from memfit.capture.training_step import TrainingStep
from memfit.capture.unrecorded import Left
from memfit.memory.bits import same_bits
from memfit.torch_private.guarding import (
    ATTRIBUTES_HAVE_VERSIONS,
    DictVersions,
    GlobalState,
    TensorAddresses,
    TensorMetadata,
    dict_version,
    leaf_hooks,
)
from memfit.torch_private.modules import global_module_hooks, module_hooks, module_tables, optimizer_hooks
from memfit.torch_private.sharding import is_sharded, local, local_gradient
from memfit.torch_private.tensors import is_plain_dense, storage_key

_ALWAYS = MODULE_NAMES | {"momentum"}  # capture itself sets the momentum of batch normalization


class Guards:
    """All that a captured step depends on beside its batch.

    Args:
        step: the step, as it is between two of its runs.
        reads: what the capture of it read.
        left: where the step has left tensors.
        values: tensors whose values the step's code has read.

    Attributes:
        tensors: the tensors that were guarded, each as it is now.
        parameters: the model's, by name.
    """

    def __init__(
        self, step: TrainingStep, reads: Reads, left: Sequence[Left] = (), values: Sequence[torch.Tensor] = ()
    ) -> None:
        self._left = left
        self.tensors: list[torch.Tensor] = []
        self._paths: list[str] = []
        self._tables: list[GuardedTable] = []
        self._empty: list[tuple[str, dict[Any, Any]]] = []
        self._cells: list[tuple[Variable, Any]] = [
            (c, c.before) for c in reads.cells if not (c.is_log or c.only_counts())
        ]
        self._items = [items for items in reads.items if not items.is_log]
        self._functions = reads.functions
        self._optimizer = step.optimizer
        self._state = GlobalState()
        self.parameters = dict(step.model.named_parameters())
        self._parameters = tuple(p for p in self.parameters.values() if is_plain_dense(p))
        self._sharded = tuple((name, p) for name, p in self.parameters.items() if is_sharded(p))
        for name, parameter in self.parameters.items():
            if is_plain_dense(parameter):
                self._add_tensor(parameter, f"model.{name}")
        self._add_modules(step, reads)
        self._modules = tuple(module for _, module in reads.modules)
        self._kinds = tuple(map(type, self._modules))
        first_read = len(self._tables)
        self._add_reads(reads)
        # Where attributes have no versions, their tables are looked into at each step; and where the order may change.
        self._unversioned = [
            number
            for number, guarded in enumerate(self._tables)
            if isinstance(guarded.table, OrderedDict) or (number >= first_read and not ATTRIBUTES_HAVE_VERSIONS)
        ]
        self._cell_numbers: dict[int, int] = {}
        for number, (cell, before) in enumerate(self._cells):
            if is_plain_dense(before):
                self._cell_numbers[number] = self._add_tensor(before, cell.path)
        for items in self._items:
            for number, value in enumerate(items.before if isinstance(items.before, list) else ()):
                if is_plain_dense(value):
                    self._add_tensor(value, f"{items.path}[{number}]")
        self._number_of = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._values = [self._value_read(tensor) for tensor in values]
        self._groups = _groups(step.optimizer)
        self._volatile_numbers: set[int] = set()
        self._addresses: TensorAddresses | None = None
        self._is_armed = False

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the position in `tensors` of a tensor that the step was captured with, or None."""
        number = self._number_of.get(id(tensor))
        return number if number is not None and self.tensors[number] is tensor else None

    def at_hand(self, constant: torch.Tensor) -> torch.Tensor:
        """Return the tensor that has taken the place of one that the step was captured with; or that itself."""
        number = self._number_of.get(id(constant))
        return constant if number is None else self.tensors[number]

    def take_left(self) -> None:
        """Let the reading of what an eager step would have set be refused, after a planned step."""
        for place in self._left:
            place.take()

    def arm(self) -> None:
        """Take the present metadata of all tensors for those that later steps must have."""
        self._versions = [dict_version(guarded.table) for guarded in self._tables]
        self._follow_versions(())
        self._tuple = tuple(self.tensors)
        self._metadata = TensorMetadata(self._tuple, len(self._parameters))
        self._signatures = [_signature(tensor) for tensor in self._tuple]
        self._hooks_before = self._hooks()
        self._gradients = [p.grad is None for p in self._parameters]
        self._sharded_before = self._present_sharded()
        self._ties = self._present_ties()
        self._addresses = TensorAddresses(self._tuple)
        self._is_armed = True

    def difference(self) -> Difference | None:
        """Return the first thing that is not as it was at capture, or None.

        A tensor that takes the place of another with the same metadata, and shares memory with the same others, is no
        difference: the step reads the new one.
        """
        if not self._is_armed:
            self.arm()
        return (
            self._state_difference()
            or self._table_difference()
            or self._value_difference()
            or self._group_difference()
            or self._tensor_difference()
            or self._sharded_difference()
            or self._memory_difference()
            or self._read_difference()
        )

    def _state_difference(self) -> Difference | None:
        if not all(map(is_, map(type, self._modules), self._kinds)):
            return Difference(what="the class of a module")
        what = self._state.difference()
        return what and Difference(what=f"torch's setting {what}")

    def _table_difference(self) -> Difference | None:
        volatile = list(map(dict_version, self._volatile))
        is_touched = any(not self._tables[number].is_untouched() for number in self._unversioned)
        if is_touched or volatile != self._volatile_versions or not self._stable.match():
            difference = self._changed_table()
            if difference is not None:
                return difference
        if any(self._empty_dicts):
            return next(Difference(what=path) for path, table in self._empty if table)
        return None

    def _changed_table(self) -> Difference | None:
        """Look at the entries of the tables whose versions changed; if none differs, take the new versions."""
        versions = [dict_version(guarded.table) for guarded in self._tables]
        tensors = list(self._tuple)
        changed = [i for i, pair in enumerate(zip(versions, self._versions, strict=True)) if pair[0] != pair[1]]
        for number in dict.fromkeys([*changed, *self._unversioned]):
            difference = self._tables[number].difference(tensors)
            if difference is not None:
                return difference
        self._take_tensors(tensors)
        self._versions = versions
        self._follow_versions(changed)
        return None

    def _take_tensors(self, tensors: list[torch.Tensor]) -> None:
        self.tensors[:] = tensors
        if not all(map(is_, self._tuple, tensors)):
            self._tuple = tuple(tensors)
            self._addresses = None

    def _follow_versions(self, changed: Sequence[int]) -> None:
        """Watch tables that changed once by themselves: making all of Dynamo's guards anew takes milliseconds."""
        known = len(self._volatile_numbers)
        self._volatile_numbers.update(changed)
        self._volatile = [self._tables[number].table for number in self._volatile_numbers]
        self._volatile_versions = list(map(dict_version, self._volatile))
        if known == 0 or len(self._volatile_numbers) > known:
            others = (t.table for number, t in enumerate(self._tables) if number not in self._volatile_numbers)
            self._stable = DictVersions(tuple(others))

    def _value_difference(self) -> Difference | None:
        for number, (cell, before) in enumerate(self._cells):
            now = cell.read()
            if now is before:
                continue
            if number in self._cell_numbers and is_plain_dense(now):
                self.tensors[self._cell_numbers[number]] = now
                self._take_tensors(self.tensors)
            elif is_fixed(cell.left) and is_same(cell.left, now):
                continue
            elif not is_same(before, now):
                return Difference(what=cell.path, is_replaced=isinstance(before, torch.nn.Module))
            self._cells[number] = cell, now
        for path, function, parts in self._functions:
            if not all(map(is_same, parts, function_parts(function))):
                return Difference(what=f"the function {path}")
        changed = next((i.path for i in self._items if i.is_changed and not i.has_left), None)
        return None if changed is None else Difference(what=changed)

    def _group_difference(self) -> Difference | None:
        sizes, members = self._groups
        now_sizes, now = _groups(self._optimizer)
        if now_sizes == sizes and all(map(is_, members, now)):
            return None
        return Difference(what="the parameters in the optimizer's groups")

    def _tensor_difference(self) -> Difference | None:
        if self._metadata.matches(self._tuple):
            return None
        for path, tensor, signature in zip(self._paths, self._tuple, self._signatures, strict=True):
            now = _signature(tensor)
            if now != signature:
                is_frozen = now[:4] == signature[:4] and now[5] is signature[5]
                return Difference(what=f"{path} ({_words(signature, now)})", is_routine=is_frozen)
        if self._hooks() != self._hooks_before:
            return Difference(what="the hooks of a parameter")
        return Difference(what="the gradients that are there", is_routine=True)

    def _sharded_difference(self) -> Difference | None:
        present = self._present_sharded() if self._sharded else self._sharded_before
        if present == self._sharded_before:
            return None
        pairs = zip(self._sharded, present, self._sharded_before, strict=True)
        name, now, before = next((name, now, before) for (name, _), now, before in pairs if now != before)
        return Difference(what=f"model.{name}, or its gradient", is_routine=now[:-2] == before[:-2])

    def _present_sharded(self) -> list[tuple[Any, ...]]:
        """Return what the step takes from each sharded parameter beside its values; what changes in training last.

        Of a gradient this is its offset, and the number of the first one on its storage.
        """
        first: dict[int, int] = {}
        found: list[tuple[Any, ...]] = []
        for number, (_, parameter) in enumerate(self._sharded):
            part, gradient = local(parameter), local_gradient(parameter)
            offset = None if gradient is None else int(gradient.storage_offset())
            place = offset, None if gradient is None else first.setdefault(storage_key(gradient), number)
            found.append((tuple(part.shape), part.dtype, part.device, parameter.requires_grad, place))
        return found

    def _memory_difference(self) -> Difference | None:
        """Compare offsets, and which tensors share memory, where a tensor has another address than in the last step."""
        if self._addresses is not None and self._addresses.match() and all(self._gradients):
            return None
        ties = self._present_ties()
        if ties != self._ties:
            what = next(i for i, (a, b) in enumerate(zip(ties, self._ties, strict=True)) if a != b)
            path = self._paths[what] if what < len(self._paths) else "the gradients"
            return Difference(what=f"the memory of {path}")
        self._addresses = TensorAddresses(self._tuple)
        return None

    def _value_read(self, tensor: torch.Tensor) -> tuple[int | torch.Tensor, torch.Tensor]:
        """Return a tensor whose values were read, or the position of the guarded one on its memory; and the values."""
        numbers = (n for n, guarded in enumerate(self.tensors) if storage_key(guarded) == storage_key(tensor))
        number = next(numbers, None)
        held = tensor if number is None else self.tensors[number]
        return held if number is None else number, held.detach().clone()

    def _read_difference(self) -> Difference | None:
        for place, before in self._values:
            if not same_bits(before, self.tensors[place] if isinstance(place, int) else place):
                path = self._paths[place] if isinstance(place, int) else f"a tensor of shape {tuple(before.shape)}"
                return Difference(what=f"the values that the step reads from {path}")
        return None

    def _hooks(self) -> list[int]:
        return [id(hooks) for parameter in self._parameters for hooks in leaf_hooks(parameter)]

    def _present_ties(self) -> list[tuple[int, int]]:
        """Return for each tensor its offset, and the position of the first tensor on the same storage."""
        first: dict[int, int] = {}
        gradients = (p.grad for p, absent in zip(self._parameters, self._gradients, strict=True) if not absent)
        return [
            (int(tensor.storage_offset()), first.setdefault(storage_key(tensor), number))
            for number, tensor in enumerate((*self._tuple, *cast("Iterator[torch.Tensor]", gradients)))
        ]

    def _add_tensor(self, tensor: torch.Tensor, path: str) -> int:
        self.tensors.append(tensor)
        self._paths.append(path)
        return len(self.tensors) - 1

    def _add_modules(self, step: TrainingStep, reads: Reads) -> None:
        own = {id(module) for module in step.model.modules()}
        for path, module in reads.modules:
            parameters, buffers = module_tables(module)
            self._add_whole(path, parameters, is_fixed=id(module) in own)
            self._add_whole(path, buffers)
            self._add_whole(path, cast("dict[Any, Any]", module._modules))
            for hooks in module_hooks(module):
                self._add_whole(f"the hooks of {path}", hooks)
        for hooks in global_module_hooks():
            self._add_whole("the hooks of all modules", hooks)
        for name, parameter in self.parameters.items():
            for hooks in leaf_hooks(parameter):
                if hooks is not None:
                    self._add_whole(f"the hooks of model.{name}", hooks)
        if step.optimizer is not None:
            for hooks in optimizer_hooks(step.optimizer):
                self._add_whole("the hooks of the optimizer", hooks)

    def _add_whole(self, path: str, table: dict[Any, Any], *, is_fixed: bool = False) -> None:
        if not table:
            self._empty.append((path, table))
            return
        whole = GuardedTable(path=path, table=table, values=entries_of(table), is_whole=True)
        self._number_tensors(whole, is_fixed=is_fixed)

    def _number_tensors(self, guarded: GuardedTable, *, is_fixed: bool = False) -> None:
        self._tables.append(guarded)
        for key, value in guarded.values.items():
            if is_plain_dense(value) and not is_fixed:  # the model's parameters are numbered already
                guarded.numbers[key] = self._add_tensor(value, name_of(guarded.path, key))

    def _add_reads(self, reads: Reads) -> None:
        modules = {id(module.__dict__): module for _, module in reads.modules}
        for key, table in reads.tables.items():
            values = table.read_entries()
            if key in modules:
                values |= {name: table.before[name] for name in _ALWAYS & table.before.keys()}
            if not values and table.names is not None:
                continue
            is_whole = table.names is None and key not in modules and not table.is_log
            if is_whole and not values and type(table.table) is dict:
                self._empty.append((table.path, table.table))
                continue
            left = {name: value for name, value in table.left.items() if is_fixed(value)}
            guarded = GuardedTable(path=table.path, table=table.table, values=values, accepted=left, is_whole=is_whole)
            self._number_tensors(guarded)
        self._empty_dicts = [table for _, table in self._empty]


def _groups(optimizer: torch.optim.Optimizer | None) -> tuple[list[int], list[torch.Tensor]]:
    """Return how many parameters each group of an optimizer has, and all of them in order."""
    sizes: list[int] = []
    members: list[torch.Tensor] = []
    for group in optimizer.param_groups if optimizer is not None else ():
        sizes.append(len(group["params"]))
        members += group["params"]
    return sizes, members


def _signature(tensor: torch.Tensor) -> Sequence[Any]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _words(before: Sequence[Any], now: Sequence[Any]) -> str:
    names = ("shape", "strides", "dtype", "device", "requires_grad", "type")
    return ", ".join(
        f"{name} {new}, was {old}" for name, old, new in zip(names, before, now, strict=True) if old != new
    )
