"""Side effects of a step's Python code during capture: found, and undone, recorded as an op, or refused.

Python code runs once, at capture; later steps run the recorded ops alone. Fakes replace the model's parameters and
buffers meanwhile. If the step replaces a buffer, an op writes the new values into it. What else the step sets in Python
is found and reset by `memfit.capture.reads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import UnsupportedStepError
from memfit.torch_private import BatchNormBase, module_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
def swapped(model: torch.nn.Module, fakes: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[list[Place]]:
    """Replace the model's parameters and buffers by their fakes inside the block, and restore its tables at the end.

    Args:
        model: its modules' tables are written to.
        fakes: of each parameter and buffer of it.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    places: list[Place] = []
    for module_name, module in model.named_modules():
        for table in module_tables(module):
            kept.append((table, dict(table)))
            places += [
                Place(module=module_name, table=table, name=name, tensor=tensor)
                for name, tensor in table.items()
                if tensor is not None
            ]
    for place in places:
        place.table[place.name] = fakes[place.tensor]
    try:
        yield places
    finally:
        for table, before in kept:
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


def replaced(places: list[Place], fakes: Mapping[torch.Tensor, torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
    """Return the places whose tensor the step replaced, each with the new tensor.

    Args:
        places: as `swapped` gives them, inside its block.
        fakes: as `swapped` was given them.

    Raises:
        UnsupportedStepError: the new tensor cannot be written into the old one.
    """
    found: list[tuple[Place, torch.Tensor]] = []
    for place in places:
        before, after = fakes[place.tensor], place.table.get(place.name)
        if after is before:
            continue
        like_before = after is not None and after.shape == before.shape and after.dtype == before.dtype
        if not like_before or isinstance(place.tensor, torch.nn.Parameter):
            now = "nothing" if after is None else f"a tensor of shape {tuple(after.shape)} and {after.dtype}"
            raise UnsupportedStepError(
                f"the step replaces {place.path!r}, of shape {tuple(before.shape)} and {before.dtype}, by {now}; "
                "a planned step keeps parameters, and the sizes of buffers: write into it in place, or replace it "
                "between steps"
            )
        assert after is not None
        found.append((place, after))
    return found
