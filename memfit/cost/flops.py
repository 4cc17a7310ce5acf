"""What one call computes and moves, from its Values alone: floating point operations, and bytes of device memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from memfit.binding import Call, Value
from memfit.cost.made_inputs import elements_of, mapped, values_in
from memfit.graph import Op, Storage

_aten = torch.ops.aten


def flops_of(call: Call) -> int:
    """Return the floating point operations of matrix products, convolutions and attention; 0 for all else.

    The formulas are those of torch.utils.flop_counter; a multiplication and an addition count as two.
    """
    packet = getattr(call.target, "overloadpacket", None)
    if packet in _CPU_ATTENTION:
        shapes = [value.shape for value in values_in(call.args)]
        return _CPU_ATTENTION[packet](shapes)
    if packet not in flop_registry:
        return 0
    results = tuple(None if value is None else _meta(value) for value in call.results)
    returned: Any = results[0] if len(results) == 1 else results
    return int(flop_registry[packet](*mapped(call.args, _meta), **mapped(call.kwargs, _meta), out_val=returned))


def dtype_of(call: Call) -> torch.dtype:
    """Return the floating point dtype that a call computes in: that of its first such argument."""
    for value in (*values_in(call.args), *values_in(call.kwargs), *(r for r in call.results if r is not None)):
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return value.dtype
    return torch.float32


def bytes_moved(call: Call, op: Op, storages: tuple[Storage, ...]) -> int:
    """Return the bytes that a call must read and write at least, each element once; what it mutates counts twice."""
    if not getattr(call.target, "measurable", True):
        # such a target reaches storages that are not among its arguments: the optimizer's state
        touched = sum(storages[s].bytes for s in {*op.reads, *op.writes} - {*op.mutates})
        return touched + 2 * sum(storages[s].bytes for s in set(op.mutates))
    arguments = {*values_in(call.args), *values_in(call.kwargs)}
    mutated = [value for value in arguments if value.storage in op.mutates]
    results = [value for value in call.results if value is not None]
    return sum(elements_of(value) * value.dtype.itemsize for value in (*arguments, *mutated, *results))


def is_convolution(call: Call) -> bool:
    """Return whether a call is a convolution or its gradient: cuDNN has a float32 precision of its own."""
    packet = getattr(call.target, "overloadpacket", None)
    return packet in (_aten.convolution, _aten.convolution_backward, _aten.cudnn_convolution, _aten._convolution)


def _meta(value: Value) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


def _attention_flops(shapes: list[tuple[int, ...]]) -> int:
    return int(sdpa_flop_count(*shapes[:3]))


def _attention_backward_flops(shapes: list[tuple[int, ...]]) -> int:
    return int(sdpa_backward_flop_count(*shapes[:4]))


# torch.utils.flop_counter knows the kernels of CUDA only
_CPU_ATTENTION: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
