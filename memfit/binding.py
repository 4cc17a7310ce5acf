"""Binding: how a graph's ops are called and where its residents come from. Capture makes it, cost and runtime read it.

Torch's objects (dtypes, operators) are carried, never looked into, so that this module imports no torch. Views exist
only here: a `Value` is a tensor seen as (storage, offset, strides), and every view of a storage is just another Value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor as a window on a storage: shape and stride in elements, offset in elements of `dtype`.

    `conjugated` and `negated` say that the elements are the conjugates, or the negatives, of what the storage holds:
    torch's lazy views.
    """

    storage: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    conjugated: bool = False
    negated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overwrite:
    """The form of a call that writes its only result over an input: the operator, and the keyword arguments to add.

    `promised` says that torch's schema promises the same result; otherwise it has to be seen on the device at hand.
    """

    target: Callable[..., Any]
    extra: Mapping[str, Value] = field(default_factory=dict[str, Value])
    promised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The call that computes op `op`: `target(*args, **kwargs)`, Values standing where tensors go, at any depth.

    `results` lists the tensors of the returned value in order, flattened; None where the target returns something that
    is not a tensor, or a tensor that aliases an argument. A result may share its storage with another result.
    `generator_state` is the storage that holds the state of the generator which the call draws from, to be replayed
    when the op is rematerialized. `overwrites` are the forms that write over an input, by its storage; `Op.reuses` says
    which of them a schedule may use.
    """

    op: int
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    results: tuple[Value | None, ...] = ()
    generator_state: int | None = None
    overwrites: Mapping[int, Overwrite] = field(default_factory=dict[int, Overwrite])


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
    """A tensor that comes from outside of the step: `key` is its qualified name, or its position among the step's
    inputs.

    `constant` holds the tensor itself where the step closes over it.
    """

    value: Value
    origin: Origin
    key: str | int
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """All that is needed, beside a schedule, to run a graph on `device`.

    `calls[i]` computes op i. `outputs` are the values handed to the user, by name (`loss`, `grad:fc.weight`, or a
    position); `device` is a torch.device.
    """

    device: Any
    calls: tuple[Call, ...]
    residents: tuple[Resident, ...]
    outputs: Mapping[str, Value]
