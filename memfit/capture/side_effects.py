"""Side effects of a step's Python code on its model during capture: found, and undone.

Python code runs once, at capture; later steps run the recorded ops alone. Fakes replace the model's parameters and
buffers meanwhile. Those that the step replaces are written by `memfit.capture.replaced`. What else the step sets in
Python is found and reset by `memfit.capture.reads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_private.modules import module_tables, submodules_table
from memfit.torch_private.tensors import BatchNormBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The entry of a parameter or a buffer in its module's table.

    Attributes:
        module: dotted name of the module.
        table: the dictionary in which the module keeps it.
        name: its key there.
        tensor: the parameter or buffer itself.
    """

    module: str
    table: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor

    @property
    def path(self) -> str:
        """The dotted name from the model down."""
        return f"{self.module}.{self.name}" if self.module else self.name


@contextmanager
def swapped(model: torch.nn.Module, fakes: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[list[Entry]]:
    """Replace the model's parameters and buffers by their fakes inside the block, and restore its tables at the end.

    Args:
        model: its modules' tables are written to.
        fakes: of each parameter and buffer of it; what has none stays in its place.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    entries: list[Entry] = []
    for module_name, module in model.named_modules():
        kept.append((submodules_table(module), dict(submodules_table(module))))
        for table in module_tables(module):
            kept.append((table, dict(table)))
            entries += [
                Entry(module=module_name, table=table, name=name, tensor=tensor)
                for name, tensor in table.items()
                if tensor is not None and tensor in fakes
            ]
    for entry in entries:
        entry.table[entry.name] = fakes[entry.tensor]
    try:
        yield entries
    finally:
        for table, before in kept:
            if len(table) != len(before) or any(table.get(name) is not value for name, value in before.items()):
                table.clear()
                table.update(before)


@contextmanager
def with_a_momentum(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give each batch normalization with momentum=None a momentum inside the block, so that it reads no number.

    It would compute the momentum from its count of steps, which is a fake there; the recorded op does so in each step.

    Returns:
        name of the module -> its count of steps, a fake.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and module.momentum is None and module.num_batches_tracked is not None
    }
    for module in modules.values():
        module.momentum = 0.0
    try:
        yield {name: module.num_batches_tracked for name, module in modules.items()}
    finally:
        for module in modules.values():
            module.momentum = None
