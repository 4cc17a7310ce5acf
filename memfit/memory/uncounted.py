"""What the recorder of a device does not count: tensors of a CPU that are older than it, and buckets of DDP's.

A DistributedDataParallel holds its buckets where Python sees no tensor.
"""

from __future__ import annotations

import weakref

import torch

from memfit.system.alive import alive_objects
from memfit.system.instruments import older_reducers
from memfit.system.recorder import allocated_bytes, is_counted, taken_bytes
from memfit.torch_private.ranks import first_bucket_sizes


class Uncounted:
    """The tensors and buckets on a device that are not counted when it is made.

    Args:
        device: a CPU or CUDA device; on CUDA all is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._found: list[tuple[weakref.ref[torch.Tensor], int, int]] = []
        self._device = device
        if device.type != "cpu":
            return
        allocated_bytes(device)  # the recorder is there from now on
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
        if self._device.type != "cpu":
            return 0
        buckets = [each for module in tuple(older_reducers) for each in first_bucket_sizes(module)]
        return sum(sizes.values()) + sum(taken_bytes(each, self._device) for each in buckets)
