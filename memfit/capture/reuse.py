"""Which inputs a kernel can write its result over, and the form of the call that does so.

Torch's schemas tag pointwise operators, whose every element depends on the elements in its own place only, so that the
result may take the place of an input of the same layout. Their in-place overload (`relu_`) writes over the first
argument; an overload with an `out` argument (`threshold_backward.grad_input`) over any, where it has a kernel for the
device: one that is generated from the functional form would copy.

Of a few more operators the `out` overload can do the same, and no tag says it: those of `UNPROMISED`. Their form is
offered as not promised, and `memfit.cost` compares its bits on the device before anything is written over. No other
operator is offered, whatever its bits: a kernel whose threads read what others write may give the right bits by luck.

Source: Chen 2016, section 3 (in-place operation); MXNet's memory note; ATen's native/cpu/SoftMaxKernel.cpp,
native/cuda/SoftMax.cu and BinaryOps kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.binding import Overwrite, Value
from memfit.capture.torch_private import has_kernel, tree_flatten

ROW_BY_ROW = frozenset(
    f"aten::{name}" for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
)
"""One thread or block makes a row, and reads all of it, or each element of the last pass, before it writes there."""

UNTAGGED_POINTWISE = frozenset(
    f"aten::{name}_backward"
    for name in (
        "elu",
        "leaky_relu",
        "hardtanh",
        "hardsigmoid",
        "softplus",
        "log_sigmoid",
        "mse_loss",
        "smooth_l1_loss",
    )
)
"""Pointwise kernels that torch has not tagged as such."""

UNPROMISED = ROW_BY_ROW | UNTAGGED_POINTWISE


def in_place_form(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Value | None],
    storage: int,
    device_type: str,
) -> Overwrite | None:
    """Return the form of `target(*args, **kwargs)` that writes its only result over `storage`, or None.

        >>> tensor = Value(storage=0, dtype=torch.float32, shape=(4,), stride=(1,))
        >>> result = Value(storage=1, dtype=torch.float32, shape=(4,), stride=(1,))
        >>> in_place_form(torch.ops.aten.relu.default, [tensor], {}, [result], 0, "cpu").target
        <OpOverload(op='aten.relu_', overload='default')>

    The input has to be one argument alone, laid out as the result is, and all of its storage (the caller compares
    bytes). Where the form is not `promised`, it may be used only on a device that was seen to give the same bits.
    """
    promised = torch.Tag.pointwise in getattr(target, "tags", ())
    if not (promised or _name(target) in UNPROMISED) or len(results) != 1:
        return None
    result = results[0]
    showing = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Value) and leaf.storage == storage]
    if result is None or len(showing) != 1 or _layout(showing[0]) != _layout(result):
        return None
    if args and args[0] == showing[0]:
        in_place = _in_place_overload(target)
        if in_place is not None:
            return Overwrite(target=in_place, promised=promised)
    for overload in _out_overloads(target):
        if has_kernel(overload, device_type):
            over = replace(result, storage=storage)
            name = next(argument.name for argument in overload._schema.arguments if argument.is_out)
            return Overwrite(target=overload, extra={name: over}, promised=promised)
    return None


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return "" if schema is None else schema.name


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
