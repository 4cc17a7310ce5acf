"""Seconds of each op on a device that is not here: the longest of its computation, its traffic and its launch."""

from __future__ import annotations

import msgspec
import torch

from memfit.binding import Binding, Call
from memfit.cost.flops import bytes_moved, dtype_of, flops_of, is_convolution
from memfit.device import Device
from memfit.errors import InvalidDeviceError
from memfit.graph import Graph, Op, Storage


def roofline(graph: Graph, binding: Binding, device: Device) -> Graph:
    """Return `graph` with the seconds that each op takes at least on `device`.

        graph = roofline(captured.graph, captured.binding, load_device("h100"))

    seconds = max(flops / rate of the dtype, bytes / memory rate, launch): no kernel reaches its roofline, but what an
    op costs beside another, which is what a plan weighs, is near. float32 runs as TF32 where torch's settings allow it
    and the device has it. Workspace stays as it is: unknown, in a graph that was captured.

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
    """Return the seconds that one op takes at least on `device`.

    Raises:
        InvalidDeviceError: the profile lacks a rate that it needs.
    """
    if device.memory_bytes_per_second is None:
        raise InvalidDeviceError(
            f"device profile {device.name!r} has no memory_bytes_per_second; add it, or run `memfit calibrate`"
        )
    memory_seconds = bytes_moved(call, op, storages) / device.memory_bytes_per_second
    flops = flops_of(call)
    compute_seconds = flops / _flops_per_second(call, op, device) if flops else 0.0
    return max(memory_seconds, compute_seconds, device.launch_seconds)


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
    backend = torch.backends.cudnn.conv if is_convolution(call) else torch.backends.cuda.matmul
    return backend.fp32_precision == "tf32"
