"""The form of a tensor: what it is beside the bytes of its storage, so that it can be made again around them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memfit.cost.views import lazy_view


class Form(NamedTuple):
    """What a tensor is beside the bytes of its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool
    device: torch.device
    storage_bytes: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """Return the form of a tensor."""
        return Form(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.device,
            tensor.untyped_storage().nbytes(),
        )

    def allocate(self) -> torch.Tensor:
        """Return such a tensor on a storage of its own."""
        return self.on(torch.empty(self.storage_bytes, dtype=torch.uint8, device=self.device).untyped_storage())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return such a tensor on a given storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)
        return lazy_view(tensor, conjugated=self.conjugated, negated=self.negated)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's whole storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
