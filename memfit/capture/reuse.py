"""In-place reuse: the inputs that a kernel may write its result over, and the form of the call that does so.

Torch's schemas tag pointwise operators. Each element of their result depends only on the elements at the same place, so
the result may be written over an input of the same layout. Their in-place overload (`relu_`) writes over the first
argument. An overload with an `out` argument (`threshold_backward.grad_input`) writes over any argument, if it has a
kernel of its own for the device; one generated from the functional form would copy.

A few more operators have an `out` overload that may write over an input, though no tag says so (`UNPROMISED`). Their
form is not promised: `memfit.capture.finish` tries it on the device and compares the bits. No other operator has a
form: a kernel whose threads read what others write may give the right bits by chance.

Source: Chen 2016, section 3 (in-place operation); MXNet's memory note; ATen's native/cpu/SoftMaxKernel.cpp,
native/cuda/SoftMax.cu and BinaryOps kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.binding import InPlaceForm, Value
from memfit.capture.functionalize import arguments_of, with_arguments_of
from memfit.torch_private.tensors import has_kernel, tree_flatten

ROW_BY_ROW = frozenset(
    f"aten::{name}" for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
)
"""One thread or block computes a row, and reads each element for the last time before it writes there."""

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
"""Pointwise kernels without torch's tag."""

UNPROMISED = ROW_BY_ROW | UNTAGGED_POINTWISE


def in_place_form(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Value | None],
    storage: int,
    device_type: str,
) -> InPlaceForm | None:
    """Return the form of `target(*args, **kwargs)` that writes its only result over `storage`, or None.

        >>> tensor = Value(storage=0, dtype=torch.float32, shape=(4,), stride=(1,))
        >>> result = Value(storage=1, dtype=torch.float32, shape=(4,), stride=(1,))
        >>> in_place_form(torch.ops.aten.relu.default, [tensor], {}, [result], 0, "cpu").target
        <OpOverload(op='aten.relu_', overload='default')>

    Args:
        target, args, kwargs: the call, with Values.
        results: what it returns; only a call with a single result has such a form.
        storage: id of the input's storage. It must be used by one argument alone, which has the layout of the result
            and covers its storage (the caller compares bytes).
        device_type: of the step's device.
    """
    promised = torch.Tag.pointwise in getattr(target, "tags", ())
    if not (promised or _name(target) in UNPROMISED) or len(results) != 1:
        return None
    result = results[0]
    showing = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Value) and leaf.storage == storage]
    if result is None or len(showing) != 1 or replace(showing[0], storage=result.storage) != result:
        return None
    if result.dtype.is_complex and not all_laid_out_as(result, (args, kwargs)):
        return None
    if args and args[0] == showing[0]:
        in_place = with_arguments_of(target, f"{_name(target).split('::')[-1]}_")
        if in_place is not None:
            return InPlaceForm(target=in_place, promised=promised)
    for overload in _out_overloads(target):
        if has_kernel(overload, device_type):
            over = replace(result, storage=storage)
            name = next(argument.name for argument in overload._schema.arguments if argument.is_out)
            return InPlaceForm(target=overload, extra={name: over}, promised=promised)
    return None


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return "" if schema is None else schema.name


def all_laid_out_as(result: Value, given: Any) -> bool:
    """Return whether all tensors that a call is given have the shape and strides of another one.

    Kernels of complex numbers are vectorized by hand for these alone. For others the compiler makes a loop with fused
    multiplications, and another one, which rounds otherwise, where the result overlaps an input.
    """
    values = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Value)]
    return all((value.shape, value.stride) == (result.shape, result.stride) for value in values)


def _out_overloads(target: Any) -> Iterator[Any]:
    """Yield the overloads that take the arguments of `target`, and one tensor to write to."""
    for name in target._overloadpacket.overloads():
        overload = getattr(target._overloadpacket, name)
        outs = [argument for argument in overload._schema.arguments if argument.is_out]
        if len(outs) == 1 and arguments_of(overload) == arguments_of(target):
            yield overload
