"""Checks of a call's real results against the captured ones, which are those of a fake kernel and may be wrong.

A fake that is wrong about a dtype, strides, or whether there is a tensor at all, is corrected: the step is captured
again with the real result. Another shape may depend on values, and is an error.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.binding import Call, Value
from memfit.cost.observations import RealResult
from memfit.errors import CaptureError
from memfit.graph import Op, Storage
from memfit.system.recorder import taken_bytes
from memfit.torch_private.tensors import tensors_in, tree_flatten


def check_results(
    op: Op, call: Call, returned: Any, storages: tuple[Storage, ...], device: torch.device
) -> tuple[dict[int, int], dict[int, RealResult | None]]:
    """Compare the tensors in `returned` with `call.results`, one by one.

    Args:
        op: names the op in errors.
        call: its captured call.
        returned: what the real kernel returned.
        storages: those of the graph.
        device: of the step.

    Returns:
        - position of a result -> real bytes of its storage, where they differ from the captured ones. A kernel that
          reduces in place (mse_loss) returns a number on a storage of its input's size; its fake does not. The bytes
          that a kernel saves for its gradient may depend on the real kernel alone.
        - position of a result -> what the kernel returned, where its dtype or strides differ from the captured ones, or
          None where the kernel returned no tensor.

    Raises:
        CaptureError: another number of results, or one of another shape or offset.
    """
    leaves = tree_flatten(returned)[0]
    if len(leaves) != len(call.results):
        raise CaptureError(
            f"op {op.name!r} ({op.target}) returned {len(leaves)} values, expected {len(call.results)} by its capture"
        )
    other_bytes: dict[int, int] = {}
    other_results: dict[int, RealResult | None] = {}
    for place, (leaf, value) in enumerate(zip(leaves, call.results, strict=True)):
        if value is None:
            continue
        real = _real_result(f"result {place} of op {op.name!r} ({op.target})", leaf, value)
        if differs(value, real):
            other_results[place] = real
        if real is None:
            continue
        real_bytes = leaf.untyped_storage().nbytes()
        if leaf.device.type == device.type and real_bytes != storages[value.storage].bytes:
            other_bytes[place] = real_bytes
    return other_bytes, other_results


def check_memory(op: Op, call: Call, returned: Any, args: Any, kwargs: Any) -> None:
    """Check that the results have memory of their own: a plan lets that of arguments be written to again.

    Args:
        op: names the op in errors.
        call: its captured call, of as many results.
        returned: what the real kernel returned.
        args, kwargs: what it was given.

    Raises:
        CaptureError: a result lies on the memory of an argument.
    """
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.layout is torch.strided]
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for place, (leaf, value) in enumerate(zip(tree_flatten(returned)[0], call.results, strict=True)):
        if value is None or not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            continue
        if leaf.untyped_storage().nbytes() and leaf.untyped_storage().data_ptr() in given:
            raise CaptureError(
                f"result {place} of op {op.name!r} ({op.target}) lies on the memory of an argument, expected memory of "
                "its own by its capture; the operator's fake kernel is wrong, report it to its author"
            )


def differs(value: Value | None, real: RealResult | None) -> bool:
    """Return whether a captured result is another one than the kernel returned.

    The strides of an empty tensor, and of a dimension of one element, are arbitrary.

    Args:
        value: the captured result; None stands for no tensor of its own, which needs no correction.
        real: of the same shape; None stands for no tensor.
    """
    if value is None or real is None:
        return value is not real
    if str(value.dtype) != f"torch.{real.dtype}":
        return True
    return 0 not in value.shape and not value.is_strided_as(real.stride)


def result_bytes(returned: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    """Return the bytes of the storages that a call allocated for its results.

    Args:
        returned: its results; those on another device, and on the storage of an argument, do not count.
        args, kwargs: its arguments.
        device: of the step.
    """
    taken = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
    storages = [t.untyped_storage() for t in tensors_in(returned) if t.device.type == device.type]
    sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in taken}
    return sum(taken_bytes(size, device) for size in sizes.values())


def _real_result(what: str, result: Any, value: Value) -> RealResult | None:
    """Return what a kernel returned in the place of `value`; a reserve counts as captured.

    Raises:
        CaptureError: it is neither None nor a tensor of the captured shape and offset.
    """
    if result is None:
        return None
    if not isinstance(result, torch.Tensor):
        raise CaptureError(f"{what} is a {type(result).__name__}, expected a tensor by its capture")
    if _is_reserve(result, value):
        return RealResult(dtype=_dtype_name(value.dtype), stride=value.stride)
    got = (tuple(result.shape), int(result.storage_offset()))
    if got != (value.shape, value.offset):
        raise CaptureError(
            f"{what} is {_described(result.dtype, *got)}, expected {_described(value.dtype, value.shape, value.offset)}"
            " by its capture; the operator's fake kernel is wrong, report it to its author"
        )
    return RealResult(dtype=_dtype_name(result.dtype), stride=tuple(result.stride()))


def _is_reserve(result: torch.Tensor, value: Value) -> bool:
    """Return whether the result is bytes that a kernel saves for its gradient: their number depends on the real kernel,
    as for cudnn_batch_norm's fourth result, which its fake kernel makes empty.
    """
    return result.dtype == value.dtype == torch.uint8 and value.shape == (0,) and result.dim() == 1


def _described(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> str:
    return f"{_dtype_name(dtype)}{list(shape)} at offset {offset}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
