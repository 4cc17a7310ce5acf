"""Which inputs a kernel can write its result over, and the form of the call that does so.

Nothing here is a list of names: torch's schemas tag pointwise operators, whose every element depends on the elements
in its own place only, so that the result may take the place of an input of the same layout. Their in-place overload
(`relu_`) writes over the first argument; an overload with an `out` argument (`threshold_backward.grad_input`) over
any, where it has a kernel for the device: one that is generated from the functional form would copy.

Source: Chen 2016, section 3 (in-place operation); MXNet's memory note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from memfit.binding import Value
from memfit.capture.torch_private import has_kernel, tree_flatten


class Form(NamedTuple):
    """A call that writes its result over an input: the operator, and the arguments to add."""

    target: Callable[..., Any]
    extra: dict[str, Value]


def in_place_form(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Value | None],
    storage: int,
    device_type: str,
) -> Form | None:
    """Return the form of `target(*args, **kwargs)` that writes its only result over `storage`, or None.

        >>> tensor = Value(storage=0, dtype=torch.float32, shape=(4,), stride=(1,))
        >>> result = Value(storage=1, dtype=torch.float32, shape=(4,), stride=(1,))
        >>> in_place_form(torch.ops.aten.relu.default, [tensor], {}, [result], 0, "cpu").target
        <OpOverload(op='aten.relu_', overload='default')>

    The input has to be one argument alone, laid out as the result is, and all of its storage (the caller compares
    bytes).
    """
    if torch.Tag.pointwise not in getattr(target, "tags", ()) or len(results) != 1:
        return None
    result = results[0]
    showing = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Value) and leaf.storage == storage]
    if result is None or len(showing) != 1 or _layout(showing[0]) != _layout(result):
        return None
    if args and args[0] == showing[0]:
        in_place = _in_place_overload(target)
        if in_place is not None:
            return Form(in_place, {})
    for overload in _out_overloads(target):
        if has_kernel(overload, device_type):
            over = replace(result, storage=storage)
            return Form(overload, {next(arg.name for arg in overload._schema.arguments if arg.is_out): over})
    return None


def _layout(value: Value) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride, value.offset, value.conjugated, value.negated


def _in_place_overload(target: Any) -> Any:
    name = target._schema.name.split("::")[-1]
    in_place = getattr(getattr(torch.ops.aten, f"{name}_", None), target._overloadname, None)
    return in_place if in_place is not None and _inputs(in_place) == _inputs(target) else None


def _out_overloads(target: Any) -> Iterator[Any]:
    """The overloads that take what `target` takes, and one tensor to write to."""
    for name in target._overloadpacket.overloads():
        overload = getattr(target._overloadpacket, name)
        outs = [argument for argument in overload._schema.arguments if argument.is_out]
        if len(outs) == 1 and _inputs(overload) == _inputs(target):
            yield overload


def _inputs(overload: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]
