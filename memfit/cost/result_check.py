"""Whether a call really returns what the capture said: fake tensors are told their metadata, and may be told wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memfit.binding import Call, Value
from memfit.errors import CaptureError
from memfit.graph import Op, Storage

_CUDA_BLOCK_BYTES = 512  # what the caching allocator rounds up to (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


def check_results(
    op: Op, call: Call, returned: Any, storages: tuple[Storage, ...], device: torch.device
) -> dict[int, int]:
    """Compare the tensors in `returned` with `call.results`, one by one.

    Returns:
        the real bytes of the results, by position, whose storages have other bytes than captured: a kernel that reduces
        in place (mse_loss, say) returns a number on a storage of its input's size, of which its fake knows nothing, and
        one that keeps bytes for its gradient may be the only one to know how many.

    Raises:
        CaptureError: another number of them, or one of another dtype, shape, strides or offset.
    """
    leaves = list(_leaves(returned))
    if len(leaves) != len(call.results):
        raise CaptureError(
            f"op {op.name!r} ({op.target}) returned {len(leaves)} values, expected {len(call.results)} by its capture"
        )
    other_bytes: dict[int, int] = {}
    for place, (leaf, value) in enumerate(zip(leaves, call.results, strict=True)):
        if value is None:
            continue
        _check_result(f"result {place} of op {op.name!r} ({op.target})", leaf, value)
        real_bytes = leaf.untyped_storage().nbytes()
        if leaf.device.type == device.type and real_bytes != storages[value.storage].bytes:
            other_bytes[place] = real_bytes
    return other_bytes


def result_bytes(returned: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    """Return the device bytes of the storages in `returned` that are not those of an argument, each once."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
    storages = [t.untyped_storage() for t in _tensors(returned) if t.device.type == device.type]
    sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in taken}
    if device.type == "cuda":
        return sum(-(-size // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES for size in sizes.values())
    return sum(sizes.values())


def _check_result(what: str, result: Any, value: Value) -> None:
    if not isinstance(result, torch.Tensor):
        raise CaptureError(f"{what} is a {type(result).__name__}, expected a tensor by its capture")
    if _is_reserve(result, value):
        return
    got = (result.dtype, tuple(result.shape), int(result.storage_offset()))
    expected = (value.dtype, value.shape, value.offset)
    # the stride of a dimension of one element, or of an empty tensor, is arbitrary
    counts = 0 not in value.shape
    strides = [(g, e) for g, e, size in zip(result.stride(), value.stride, value.shape, strict=False) if size > 1]
    if got != expected or (counts and any(g != e for g, e in strides)):
        raise CaptureError(
            f"{what} is {_described(*got, result.stride())}, expected {_described(*expected, value.stride)} by its "
            "capture; the operator's fake kernel is wrong, report it to its author"
        )


def _is_reserve(result: torch.Tensor, value: Value) -> bool:
    """Whether it is bytes that a kernel keeps for its gradient, whose number only it knows: cudnn_batch_norm's fourth
    result, of which its fake kernel says none.
    """
    return result.dtype == value.dtype == torch.uint8 and value.shape == (0,) and result.dim() == 1


def _described(dtype: torch.dtype, shape: tuple[int, ...], offset: int, stride: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} at offset {offset}"


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        for branch in tree:
            yield from _leaves(branch)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from _leaves(branch)
    else:
        yield tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor))
