"""Tensors as windows on a storage."""

from __future__ import annotations

import torch


def reinterpret(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return the storage of `base` seen with another dtype; shape, stride and offset in elements of that dtype."""
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, shape, stride)
