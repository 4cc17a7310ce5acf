"""Rooflines: least seconds of each op on a device, from its floating point operations, its traffic, or its launch."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from memfit.binding import Binding, Call, Value, map_values, values_in
from memfit.device import Device
from memfit.errors import InvalidDeviceError
from memfit.graph import Graph, Op, Storage

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.convolution, _aten.convolution_backward, _aten.cudnn_convolution, _aten._convolution)

# torch.utils.flop_counter has no formula for the CPU's attention, and refuses fewer heads of keys than of queries:
# its formula for equal heads, and how many shapes that takes
_ATTENTION: dict[Any, tuple[Any, int]] = dict.fromkeys(
    (
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    ),
    (sdpa_flop_count, 3),
) | dict.fromkeys(
    (
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
        _aten._scaled_dot_product_flash_attention_backward,
        _aten._scaled_dot_product_efficient_attention_backward,
        _aten._scaled_dot_product_cudnn_attention_backward,
    ),
    (sdpa_backward_flop_count, 4),
)


def roofline(graph: Graph, binding: Binding, device: Device) -> Graph:
    """Return `graph` with the least seconds of each op on `device`.

        graph = roofline(captured.graph, captured.binding, load_device("h100"))

    seconds = max(flops / rate of the dtype, bytes / memory rate, launch). No kernel reaches its roofline, but a plan
    depends on the ratios between ops, and these are near the real ones. float32 counts as TF32 if torch's settings
    allow it and the device has it. Workspace bytes do not change: in a captured graph they are unknown.

    Args:
        graph: a captured graph.
        binding: its calls.
        device: a profile with rates: built in, calibrated, or from a file.

    Raises:
        InvalidDeviceError: the profile lacks a rate that an op needs.

    Source: S. Williams et al., "Roofline: an insightful visual performance model", CACM 52(4), 2009.
    """
    ops = tuple(
        msgspec.structs.replace(op, seconds=roofline_seconds(call, op, graph.storages, device))
        for op, call in zip(graph.ops, binding.calls, strict=True)
    )
    return msgspec.structs.replace(graph, ops=ops)


def roofline_seconds(call: Call, op: Op, storages: tuple[Storage, ...], device: Device) -> float:
    """Return the least seconds of one op on `device`.

    Args:
        call, op: the op, as called and as in the graph.
        storages: those of the graph.
        device: a profile with rates.

    Raises:
        InvalidDeviceError: the profile lacks a rate that the op needs.
    """
    if device.memory_bytes_per_second is None:
        raise InvalidDeviceError(
            f"device profile {device.name!r} has no memory_bytes_per_second; add it, or run `memfit calibrate`"
        )
    memory_seconds = bytes_moved(call, op, storages) / device.memory_bytes_per_second
    parts: tuple[Call, ...] = getattr(call.target, "parts", (call,))  # of a chain that is run on some rows at a time
    launches = len(parts) * getattr(call.target, "count", 1) if len(parts) > 1 else 1
    compute_seconds = sum(_compute_seconds(part, op, device) for part in parts)
    return max(memory_seconds, compute_seconds, launches * device.launch_seconds)


def _compute_seconds(call: Call, op: Op, device: Device) -> float:
    flops = flops_of(call)
    return flops / _flops_per_second(call, op, device) if flops else 0.0


def _flops_per_second(call: Call, op: Op, device: Device) -> float:
    dtype = str(dtype_of(call)).removeprefix("torch.")
    if dtype == "float32" and "tfloat32" in device.flops_per_second and _allows_tf32(call):
        dtype = "tfloat32"
    if dtype not in device.flops_per_second:
        raise InvalidDeviceError(
            f"device profile {device.name!r} has no rate for {dtype}, which op {op.name!r} computes in; "
            f"it has {', '.join(device.flops_per_second) or 'none'}"
        )
    return device.flops_per_second[dtype]


def _allows_tf32(call: Call) -> bool:
    is_convolution = getattr(call.target, "overloadpacket", None) in _CONVOLUTIONS
    backend = torch.backends.cudnn.conv if is_convolution else torch.backends.cuda.matmul  # each has its own setting
    return backend.fp32_precision == "tf32"


def flops_of(call: Call) -> int:
    """Return the floating point operations of matrix products, convolutions and attention; 0 for all else.

    The formulas are those of torch.utils.flop_counter; a multiplication and an addition count as two.
    """
    packet = getattr(call.target, "overloadpacket", None)
    if packet in _ATTENTION:
        count, tensors = _ATTENTION[packet]
        shapes = [value.shape for value in values_in(call.args)][:tensors]
        heads = max(shape[1] for shape in shapes)  # those of the queries; several share a head of keys and values
        return int(count(*[(shape[0], heads, *shape[2:]) for shape in shapes]))
    if packet not in flop_registry:
        return 0
    results = tuple(None if value is None else _meta(value) for value in call.results)
    returned: Any = results[0] if len(results) == 1 else results
    return int(flop_registry[packet](*map_values(call.args, _meta), **map_values(call.kwargs, _meta), out_val=returned))


def dtype_of(call: Call) -> torch.dtype:
    """Return the dtype that a call computes in: that of its first argument, or else result, of floating point."""
    for value in (*values_in(call.args), *values_in(call.kwargs), *(r for r in call.results if r is not None)):
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return value.dtype
    return torch.float32


def bytes_moved(call: Call, op: Op, storages: tuple[Storage, ...]) -> int:
    """Return the least bytes that a call reads and writes: each element once, mutated ones twice.

    Args:
        call, op: the op, as called and as in the graph.
        storages: those of the graph.
    """
    if not getattr(call.target, "measurable", True):
        # an optimizer's update uses storages that are not among its arguments: its state
        touched = sum(storages[s].bytes for s in {*op.reads, *op.writes} - {*op.mutates})
        return touched + 2 * sum(storages[s].bytes for s in set(op.mutates))
    arguments = {*values_in(call.args), *values_in(call.kwargs)}
    mutated = [value for value in arguments if value.storage in op.mutates]
    results = [value for value in call.results if value is not None]
    return sum(_elements(value) * value.dtype.itemsize for value in (*arguments, *mutated, *results))


def _elements(value: Value) -> int:
    """Return the number of different elements of a view: an expanded dimension (stride 0) counts once."""
    count = 1
    for size, stride in zip(value.shape, value.stride, strict=True):
        count *= min(size, 1) if stride == 0 else size
    return count


def _meta(value: Value) -> torch.Tensor:
    return value.empty("meta")
