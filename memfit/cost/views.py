"""Tensors as windows on a storage."""

from __future__ import annotations

import torch

_aten = torch.ops.aten


def reinterpret(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return the storage of `base` seen with another dtype; shape, stride and offset in elements of that dtype."""
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, shape, stride)


def lazy_view(tensor: torch.Tensor, *, conjugated: bool, negated: bool) -> torch.Tensor:
    """Return the view of `tensor` whose elements are its conjugates, its negatives, or both: nothing is computed yet.

    torch makes the first for `.conj()`, and the second for the imaginary part of a conjugate.
    """
    tensor = tensor.conj() if conjugated else tensor
    return _aten._neg_view(tensor) if negated else tensor
