"""What was found of a step's Python: copies of attributes, globals, closures and containers."""

from __future__ import annotations

import gc
from types import FunctionType
from typing import Any, cast

import torch

from memfit.capture.copies import Globals, Items, Table, Variable
from memfit.capture.iterators import Position


class Found:
    """Copies of what a step can reach.

    Attributes:
        tables, cells, items, positions: copies of all that the step can reach, made before it does.
        functions: (path, function, its parts) of the user's functions.
        modules: (path, module) of the model's modules, and of those that the loss reaches beside it.
        tensors: (path, tensor) of what these hold, by the tensor's id.
    """

    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        self.cells: list[Variable] = []
        self.items: list[Items] = []
        self.positions: list[Position] = []
        self.functions: list[tuple[str, FunctionType, tuple[Any, ...]]] = []
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._seen: dict[int, Any] = {}
        self._classes: dict[type, Table] = {}

    @property
    def generators(self) -> list[torch.Generator]:
        """Torch's generators that were found."""
        return [value for value in self._seen.values() if isinstance(value, torch.Generator)]

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

    def _globals(self, names: dict[str, Any]) -> Globals:
        found = self.tables.get(id(names))
        if not isinstance(found, Globals):
            found = self.tables[id(names)] = Globals(str(names.get("__name__", "the globals")), names)
        return found
