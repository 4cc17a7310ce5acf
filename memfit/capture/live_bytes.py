"""The bytes of tensors that calls make, as they come and go: on fakes as on real tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.torch_private.autograd import TorchDispatchMode
from memfit.torch_private.tensors import storage_key, tensors_in


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors among those made under it; `peak_bytes` is their maximum.

    Args:
        size_of: gives the bytes that count of a tensor's storage.
    """

    def __init__(self, size_of: Callable[[torch.Tensor], int] = _storage_bytes) -> None:
        super().__init__()
        self._size_of = size_of
        self.live_bytes = 0
        self.peak_bytes = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {storage_key(leaf) for leaf in tensors_in((args, kwargs))}
        returned = func(*args, **(kwargs or {}))
        for tensor in tensors_in(returned):
            key = storage_key(tensor)
            if key in inputs and key not in self._holders:
                continue
            size = self._size_of(tensor)
            if key not in self._holders:
                self._holders[key] = 0
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._holders[key] += 1
            weakref.finalize(tensor, self._release, key, size)
        return returned

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.live_bytes -= size
