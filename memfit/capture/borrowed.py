"""A model while its step is captured: fakes stand in its tables, and what its Python leaves behind is undone.

Python runs once, at capture; later steps are the recorded ops alone. What a step does to its model beside them is
found here: a buffer that is replaced is written back as an op, and an attribute that the step sets is put back, and
refused where the next step would have read it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memfit.capture.torch_private import module_tables
from memfit.errors import UnsupportedStepError

_PLAIN_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a module keeps a parameter or a buffer, and what is there."""

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
    """Put the fakes where the model keeps its parameters and buffers, and its own tables back at the end."""
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


def replaced(places: list[Place], fakes: Mapping[torch.Tensor, torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
    """Return the places whose tensor the step replaced by another one, with that one.

    Raises:
        UnsupportedStepError: what stands there now cannot be written into the tensor before.
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


class Attributes:
    """The plain attributes of a model's modules, as they were when this was made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = [(name, module, dict(module.__dict__)) for name, module in model.named_modules()]

    def changes(self) -> dict[str, tuple[torch.nn.Module, str, Any]]:
        """Return what was set since, by its dotted name: the module, the attribute, and its value now."""
        changes: dict[str, tuple[torch.nn.Module, str, Any]] = {}
        for module_name, module, before in self._before:
            for key, value in module.__dict__.items():
                if key in before and _is_same(before[key], value):
                    continue
                changes[f"{module_name}.{key}" if module_name else key] = (module, key, value)
        return changes

    def put_back(self) -> None:
        """Give every module the attributes it had."""
        for module, key, _ in self.changes().values():
            del module.__dict__[key]
        for _, module, before in self._before:
            for key in before.keys() - module.__dict__.keys():
                module.__dict__[key] = before[key]


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    return type(before) is type(after) and isinstance(before, _PLAIN_NUMBERS) and before == after


@contextmanager
def host_randomness_refused() -> Iterator[None]:
    """Refuse a step that draws from Python's or NumPy's generators: what it drew would stay for all later steps.

    Raises:
        UnsupportedStepError: names the generator, whose state is put back.
    """
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    drawn: list[str] = []
    try:
        yield
    finally:
        if random.getstate() != python:
            drawn.append("Python's `random`")
            random.setstate(python)
        if _differ(np.random.get_state(legacy=False), numpy):
            drawn.append("`numpy.random`")
            np.random.set_state(numpy)
    if drawn:
        raise UnsupportedStepError(
            f"the step draws from {' and '.join(drawn)}, whose numbers a planned step would never draw again; draw "
            "from torch's generators (torch.rand), or draw outside of the step and hand it in with the batch"
        )


def _differ(left: Any, right: Any) -> bool:
    """Whether two states of NumPy's generator differ: dictionaries of numbers, arrays, and more dictionaries."""
    if isinstance(left, dict):
        return any(_differ(left[key], right[key]) for key in left)  # pyright: ignore[reportUnknownVariableType]
    return bool(np.any(left != right))
