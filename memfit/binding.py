"""Binding: how a graph's ops are called and where its residents are found. Capture makes it, cost and runtime read it.

Views exist only here: a `Value` is a tensor as (storage, offset, strides), and each view of a storage is another Value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from memfit.memory.place import Place

if TYPE_CHECKING:
    import torch


Value = Place
"""A tensor of a graph: its storage is the id of one of the graph's storages."""


def values_in(tree: Any) -> Iterator[Value]:
    """Yield the Values in nested tuples, lists and dicts, in order."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, Mapping):
        yield from values_in(tuple(cast("Mapping[Any, Any]", tree).values()))
    elif isinstance(tree, tuple | list):
        for branch in cast("tuple[Any, ...]", tree):
            yield from values_in(branch)


def map_values(tree: Any, function: Callable[[Value], Any]) -> Any:
    """Return nested tuples, lists and dicts with `function(value)` in the place of each Value.

    Args:
        tree: nested tuples, lists and dicts.
        function: called with each Value; its result takes the Value's place.
    """
    if isinstance(tree, Value):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_values(branch, function) for key, branch in cast("Mapping[Any, Any]", tree).items()}
    if isinstance(tree, tuple):
        return tuple(map_values(branch, function) for branch in cast("tuple[Any, ...]", tree))
    if isinstance(tree, list):
        return [map_values(branch, function) for branch in cast("list[Any]", tree)]
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlaceForm:
    """The form of a call that writes its only result over an input (in-place reuse).

    Attributes:
        target: the operator of this form.
        extra: keyword arguments to add to the call's own: the tensor to write to.
        promised: whether torch's schema promises the same result. If not, the form is used only on a device that was
            seen to give the same bits.
    """

    target: Callable[..., Any]
    extra: Mapping[str, Value] = field(default_factory=dict[str, Value])
    promised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The call that computes op `op`: `target(*args, **kwargs)`, with Values in the places of tensors, at any depth.

    Attributes:
        op: id of the op.
        target: an operator of torch, or a callable made by capture.
        args, kwargs: the arguments.
        results: the tensors of the returned value in order, flattened. None stands for a returned object that is not a
            tensor, and for a tensor that aliases an argument. Two results may share a storage.
        generator_state: the storage that holds the state of the generator which the call draws from; it is replayed
            when the op is rematerialized.
        in_place_forms: storage id of an input -> the form of the call that writes over it. `Op.reuses` says which of
            them a schedule may use.
    """

    op: int
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    results: tuple[Value | None, ...] = ()
    generator_state: int | None = None
    in_place_forms: Mapping[int, InPlaceForm] = field(default_factory=dict[int, InPlaceForm])


class Origin(enum.StrEnum):
    """Where a storage that no op writes is found when a step runs; a tangent arrives at the boundary."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    INPUT = "input"
    STATE = "state"
    CONSTANT = "constant"
    TANGENT = "tangent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A tensor from outside of the step.

    Attributes:
        value: its view of a storage of the graph.
        origin: where it is found when a step runs.
        key: its qualified name, or its position among the step's inputs.
        constant: the tensor itself if the step closes over it.
    """

    value: Value
    origin: Origin
    key: str | int
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """All that is needed, beside a schedule, to run a graph.

    Attributes:
        device: of the step.
        calls: `calls[i]` computes op i.
        residents: the tensors from outside of the step.
        outputs: the values returned to the user, by name (`loss`, `grad:fc.weight`, or a position).
    """

    device: torch.device
    calls: tuple[Call, ...]
    residents: tuple[Resident, ...]
    outputs: Mapping[str, Value]

    def __repr__(self) -> str:
        return f"Binding({self.device}, {len(self.calls):,} calls, {len(self.residents):,} residents)"

    def bases(self) -> dict[int, Value]:
        """Return for each storage the Value that its tensor is passed on as: the resident, or the first result."""
        bases = {resident.value.storage: resident.value for resident in reversed(self.residents)}
        for call in self.calls:
            for value in call.results:
                if value is not None:
                    bases.setdefault(value.storage, value)
        return bases
