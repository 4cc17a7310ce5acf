"""Inputs of blocks on the host: copied there as the block runs, and back ahead of its backward pass."""

from __future__ import annotations

import torch

from memfit.eager_mode.host import Host
from memfit.memory.host.form import Form

_MOST_UNUSED = 2  # a storage of more than so many times its tensor's bytes is not copied


class HostInput:
    """The input of a call of a block, on the host.

    Args:
        host: where it goes.
        tensor: the input; its storage is there until `leave`.
    """

    def __init__(self, host: Host, tensor: torch.Tensor) -> None:
        self._form = Form.of(tensor)
        self._copy = host.copy(tensor.untyped_storage())

    def leave(self) -> None:
        """Wait for the copy, and free the tensor."""
        self._copy.wait()

    def fetch(self) -> None:
        """Begin to copy it back."""
        self._copy.begin_back()

    def tensor(self) -> torch.Tensor:
        """Return it, in memory of its own."""
        with torch.no_grad():
            found = self._form.on(self._copy.back().untyped_storage())
        return found.requires_grad_()


def may_go(host: Host | None, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain one, most of its storage, and the host has room for it."""
    if host is None or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    size_bytes = tensor.untyped_storage().nbytes()
    return 0 < size_bytes <= _MOST_UNUSED * tensor.numel() * tensor.element_size() and host.has_room(size_bytes)
