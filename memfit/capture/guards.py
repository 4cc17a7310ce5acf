"""Guards: all that a captured step took from Python and from its tensors' metadata, held against each later step.

What is compared is what `Reads` found at capture: attributes of modules and objects, globals, closure variables,
containers; the tables of all modules, and their hooks; metadata, memory and gradients of parameters, buffers and
tensors beside the model; the optimizer's groups; torch's own settings. Dictionaries are compared by their versions and
tensors by Dynamo's guards, so that a step in which nothing changed pays 0.2 us for each module and tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, cast

import torch

from memfit.capture.copies import Variable, entries_of, function_parts, is_fixed, is_same
from memfit.capture.discovery import MODULE_NAMES
from memfit.capture.guarded_table import Difference, GuardedTable, GuardedTables, name_of
from memfit.capture.guarded_tensors import GuardedShards, GuardedTensors
from memfit.capture.reads import Reads
from memfit.capture.training_step import TrainingStep
from memfit.capture.unrecorded import Left
from memfit.memory.bits import same_bits
from memfit.torch_private.guarding import GlobalState
from memfit.torch_private.modules import global_module_hooks, leaf_hooks, module_hooks, module_tables, optimizer_hooks
from memfit.torch_private.sharding import is_sharded
from memfit.torch_private.tensors import is_plain_dense, storage_key

_RATES = ("lr", "initial_lr")
_ALWAYS = MODULE_NAMES | {"momentum"}  # capture itself sets the momentum of batch normalization


class Guards:
    """All that a captured step depends on beside its batch.

    Args:
        step: the step, as it is between two of its runs.
        reads: what the capture of it read.
        left: where the step has left tensors.
        values: tensors whose values the step's code has read.

    Attributes:
        tensors: the tensors that are guarded.
        parameters: the model's, by name.
    """

    def __init__(
        self, step: TrainingStep, reads: Reads, left: Sequence[Left] = (), values: Sequence[torch.Tensor] = ()
    ) -> None:
        self._left = left
        self.tensors = GuardedTensors()
        self._tables = GuardedTables()
        self._cells: list[tuple[Variable, Any]] = [
            (c, c.before) for c in reads.cells if not (c.is_log or c.only_counts())
        ]
        self._items = [items for items in reads.items if not items.is_log]
        self._functions = reads.functions
        self._optimizer = step.optimizer
        self._state = GlobalState()
        self.parameters = dict(step.model.named_parameters())
        for name, parameter in self.parameters.items():
            if is_plain_dense(parameter):
                self.tensors.add(parameter, f"model.{name}", is_watched=True)
        self._shards = GuardedShards([(name, p) for name, p in self.parameters.items() if is_sharded(p)])
        self._add_modules(step, reads)
        self._modules = tuple(module for _, module in reads.modules)
        self._kinds = tuple(map(type, self._modules))
        self._add_reads(reads)
        self._cell_numbers: dict[int, int] = {}
        for number, (cell, before) in enumerate(self._cells):
            if is_plain_dense(before):
                self._cell_numbers[number] = self.tensors.add(before, cell.path)
        for items in self._items:
            for number, value in enumerate(items.before if isinstance(items.before, list) else ()):
                if is_plain_dense(value):
                    self.tensors.add(value, f"{items.path}[{number}]")
        self._values = [self._value_read(tensor) for tensor in values]
        self._groups, self._zeros = _groups(step.optimizer), _zeros(step.optimizer)
        self._is_armed = False

    def take_left(self) -> None:
        """Let the reading of what an eager step would have set be refused, after a planned step."""
        for place in self._left:
            place.take()

    def arm(self) -> None:
        """Take the present metadata of all tensors for those that later steps must have."""
        self._tables.arm()
        self.tensors.arm()
        self._shards.arm()
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
            or self._tables.difference(self.tensors.now, self.tensors.take)
            or self._value_difference()
            or self._group_difference()
            or self.tensors.metadata_difference()
            or self._shards.difference()
            or self.tensors.memory_difference()
            or self._read_difference()
        )

    def _state_difference(self) -> Difference | None:
        if not all(map(is_, map(type, self._modules), self._kinds)):
            return Difference(what="the class of a module")
        what = self._state.difference()
        return what and Difference(what=f"torch's setting {what}")

    def _value_difference(self) -> Difference | None:
        for number, (cell, before) in enumerate(self._cells):
            now = cell.read()
            if now is before:
                continue
            if number in self._cell_numbers and is_plain_dense(now):
                self.tensors.now[self._cell_numbers[number]] = now
                self.tensors.take(self.tensors.now)
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
        if now_sizes != sizes or not all(map(is_, members, now)):
            return Difference(what="the parameters in the optimizer's groups")
        for number, names in enumerate(self._zeros):
            values = self._optimizer.param_groups[number].get  # pyright: ignore[reportOptionalMemberAccess]
            if any(map(values, names)):
                name = next(filter(values, names))
                return Difference(what=f"{name} of the optimizer's group {number}, from {self._zeros[number][name]!r}")
        return None

    def _value_read(self, tensor: torch.Tensor) -> tuple[int | torch.Tensor, torch.Tensor]:
        """Return a tensor whose values were read, or the position of the guarded one on its memory; and the values."""
        numbers = (n for n, guarded in enumerate(self.tensors.now) if storage_key(guarded) == storage_key(tensor))
        number = next(numbers, None)
        held = tensor if number is None else self.tensors.now[number]
        return held if number is None else number, held.detach().clone()

    def _read_difference(self) -> Difference | None:
        for place, before in self._values:
            if not same_bits(before, self.tensors.now[place] if isinstance(place, int) else place):
                path = (
                    self.tensors.paths[place] if isinstance(place, int) else f"a tensor of shape {tuple(before.shape)}"
                )
                return Difference(what=f"the values that the step reads from {path}")
        return None

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
            self._tables.add_empty(path, table)
            return
        whole = GuardedTable(path=path, table=table, values=entries_of(table), is_whole=True)
        self._number_tensors(whole, is_fixed=is_fixed, is_modules=True)

    def _number_tensors(self, guarded: GuardedTable, *, is_fixed: bool = False, is_modules: bool = False) -> None:
        self._tables.add(guarded, is_modules=is_modules)
        for key, value in guarded.values.items():
            if is_plain_dense(value) and not is_fixed:  # the model's parameters are numbered already
                guarded.numbers[key] = self.tensors.add(value, name_of(guarded.path, key))

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
                self._tables.add_empty(table.path, table.table)
                continue
            left = {name: value for name, value in table.left.items() if is_fixed(value)}
            guarded = GuardedTable(path=table.path, table=table.table, values=values, accepted=left, is_whole=is_whole)
            self._number_tensors(guarded)


def _zeros(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return by group which of its numbers are 0, or off: an update leaves out what they stand for, and its memory.

    A learning rate takes none, and schedules begin with 0.
    """
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups if optimizer is not None else ():
        numbers = {name: value for name, value in group.items() if isinstance(value, int | float)}
        found.append({name: value for name, value in numbers.items() if not value and name not in _RATES})
    return found


def _groups(optimizer: torch.optim.Optimizer | None) -> tuple[list[int], list[torch.Tensor]]:
    """Return how many parameters each group of an optimizer has, and all of them in order."""
    sizes: list[int] = []
    members: list[torch.Tensor] = []
    for group in optimizer.param_groups if optimizer is not None else ():
        sizes.append(len(group["params"]))
        members += group["params"]
    return sizes, members
