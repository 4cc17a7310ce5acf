"""Tensors that the recorder of a device does not count: those of a CPU that are older than it."""

from __future__ import annotations

import weakref

import torch

from memfit.system.alive import alive_objects
from memfit.system.recorder import is_counted, taken_bytes


class Uncounted:
    """The tensors on a device that are not counted when it is made.

    Args:
        device: a CPU or CUDA device; on CUDA all is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._found: list[tuple[weakref.ref[torch.Tensor], int, int]] = []
        if device.type != "cpu":
            return
        for thing in alive_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter):
                self._look_at(thing, device)

    def _look_at(self, tensor: torch.Tensor, device: torch.device) -> None:
        if tensor.device != device or tensor.layout is not torch.strided:
            return
        try:
            pointer, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        except RuntimeError:  # wrappers of torch.func, and fakes, have no data
            return
        if pointer and not is_counted(pointer, device):
            self._found.append((weakref.ref(tensor), pointer, taken_bytes(size, device)))

    def live_bytes(self) -> int:
        """Return the bytes of those that are still there, each storage once."""
        sizes: dict[int, int] = {}
        for reference, pointer, size in self._found:
            tensor = reference()
            if tensor is not None and tensor.untyped_storage().data_ptr() == pointer:
                sizes[pointer] = size
        return sum(sizes.values())
