"""A tensor as a place in a storage, and tensors made on a given storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_aten = torch.ops.aten
_NOWHERE, _MOST_WORK = 1 << 40, 1_000_000


@dataclass(slots=True, kw_only=True, unsafe_hash=True)  # not frozen: eager mode makes many, in half of the time
class Place:
    """A tensor as a view of a storage.

    Attributes:
        storage: identifies the storage: its id in a graph, say; None where the caller has that elsewhere.
        dtype: of its elements.
        shape, stride, offset: in elements of `dtype`.
        conjugated, negated: whether it is one of torch's lazy views, whose elements are the conjugates or the negatives
            of those in the storage.
    """

    storage: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    conjugated: bool = False
    negated: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: Any = None) -> Place:
        """Return the place of a tensor.

        Args:
            tensor: dense.
            storage: stands for its storage.
        """
        return cls(
            storage=storage,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
        )

    def on(self, base: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor at this place.

        Args:
            base: the storage, or any tensor on it; it is not read.
        """
        tensor = reinterpret(base, self.dtype, self.shape, self.stride, self.offset)
        return lazy_view(tensor, conjugated=self.conjugated, negated=self.negated)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return a new tensor of the place's dtype, shape and strides on a device, with memory of its own."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def meets(self, other: Place) -> bool:
        """Return whether a byte is part of both places, on one storage; False if that takes too long to find out.

        Args:
            other: on the same storage.
        """
        try:
            return np.shares_memory(self._as_array(), other._as_array(), max_work=_MOST_WORK)
        except np.exceptions.TooHardError:
            return False

    def _as_array(self) -> np.ndarray:
        """Return an array at the place in memory that is not there, and is not looked at."""
        size = self.dtype.itemsize
        there = {
            "version": 3,
            "shape": self.shape,
            "typestr": f"|V{size}",
            "data": (_NOWHERE + self.offset * size, True),
            "strides": tuple(each * size for each in self.stride),
        }
        return np.asarray(SimpleNamespace(__array_interface__=there))

    @property
    def reach_bytes(self) -> int:
        """Bytes from the start of the storage to the end of the last element."""
        return reach(self.offset, self.shape, self.stride) * self.dtype.itemsize

    def is_strided_as(self, stride: Sequence[int]) -> bool:
        """Return whether elements lie where others of this shape do; the stride of a single one tells nothing.

        Args:
            stride: of the others.
        """
        return all(size <= 1 or own == other for size, own, other in zip(self.shape, self.stride, stride, strict=True))


def bytes_of(base: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a whole storage as a tensor over it.

    Args:
        base: the storage, or any tensor on it.
    """
    storage = base.untyped_storage() if isinstance(base, torch.Tensor) else base
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def reinterpret(
    base: torch.Tensor | torch.UntypedStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    """Return a view of a whole storage.

    Args:
        base: the storage, or any tensor on it.
        dtype: of the view.
        shape, stride, offset: of the view, in elements of `dtype`.
    """
    storage = base.untyped_storage() if isinstance(base, torch.Tensor) else base
    return torch.empty(0, dtype=dtype, device=base.device).set_(storage, offset, shape, stride)


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
    return replace(Place.of(tensor), offset=0).on(tensor.untyped_storage()[start:])


def reach(offset: int, shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the start of a storage to the end of a tensor's last; 0 if it has none.

    Args:
        offset: of the tensor's first element, in elements.
        shape, stride: of its dimensions, equally many; strides are in elements.
    """
    return 0 if 0 in shape else offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1


def span_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor uses, and the one after the last."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, max(start, reach(start, tensor.shape, tensor.stride())) * size


def fills_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill one piece of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
