"""Tensors made as views of a given storage: of a Value, of another dtype, or lazily conjugated and negated."""

from __future__ import annotations

import torch

from memfit.binding import Value

_aten = torch.ops.aten


def view_of(storage: torch.Tensor, value: Value) -> torch.Tensor:
    """Return the tensor that `value` describes, on the storage of the tensor `storage`.

    Args:
        storage: any tensor on the storage; it is not read.
        value: dtype, shape, strides and offset, in elements of its dtype.
    """
    tensor = reinterpret(storage, value.dtype, value.shape, value.stride, value.offset)
    return lazy_view(tensor, conjugated=value.conjugated, negated=value.negated)


def value_of(tensor: torch.Tensor, storage: int) -> Value:
    """Return the Value that describes a tensor, as a view of the storage with this id."""
    return Value(
        storage=storage,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=tensor.storage_offset(),
        conjugated=tensor.is_conj(),
        negated=tensor.is_neg(),
    )


def reach_bytes(value: Value) -> int:
    """Return the bytes from the start of the storage to the end of the last element of the view."""
    if 0 in value.shape:
        return 0
    last = value.offset + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride, strict=True))
    return (last + 1) * value.dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def reinterpret(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a view of the whole storage of `base`.

    Args:
        base: any tensor on the storage.
        dtype: of the view.
        shape, stride, offset: of the view, in elements of `dtype`.
    """
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, shape, stride)


def lazy_view(tensor: torch.Tensor, *, conjugated: bool, negated: bool) -> torch.Tensor:
    """Return the view of `tensor` whose elements are its conjugates, its negatives, or both; nothing is computed yet.

    torch makes the first for `.conj()`, and the second for the imaginary part of a conjugate.

    Args:
        tensor: complex where `conjugated` is set.
        conjugated, negated: which of torch's lazy views to make.
    """
    tensor = tensor.conj() if conjugated else tensor
    return _aten._neg_view(tensor) if negated else tensor


def at_offset_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a tensor over the same memory that starts at the beginning of its storage.

    A batch is captured as if it had a storage of its own. A slice of a larger tensor starts within the storage.
    """
    if tensor.storage_offset() == 0:
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start:]
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())
    return lazy_view(own, conjugated=tensor.is_conj(), negated=tensor.is_neg())


def on_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a tensor over the same memory whose storage holds nothing else, for capture to look at.

    A slice of a larger tensor has a storage of the larger one's bytes, and starts within it.
    """
    start, end = span_bytes(tensor)
    storage = tensor.untyped_storage()
    if (start, end) == (0, storage.nbytes()):
        return tensor
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    own.set_(storage[start:end], 0, tensor.shape, tensor.stride())
    own = lazy_view(own, conjugated=tensor.is_conj(), negated=tensor.is_neg())
    return own.requires_grad_(tensor.requires_grad)


def fills_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill one piece of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def span_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor uses, and the one after the last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + ((1 + last) * tensor.element_size() if tensor.numel() else 0)
