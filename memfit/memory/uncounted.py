"""What the recorder of a device does not count: tensors of a CPU that are older than it, and buckets of DDP's.

A DistributedDataParallel holds its buckets where Python sees no tensor.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from typing import Any

import torch

from memfit.capture.training_step import states_of
from memfit.memory.footprint import footprint
from memfit.memory.kept_on_host import is_kept_on_host
from memfit.memory.snapshot import is_undone
from memfit.system.alive import alive_objects
from memfit.system.budget import format_bytes
from memfit.system.instruments import older_reducers
from memfit.system.recorder import allocated_bytes, is_counted, records_at_once, taken_bytes
from memfit.torch_private.modules import own_tensors
from memfit.torch_private.ranks import first_bucket_sizes

_log = logging.getLogger("memfit")
_MOST_NAMED = 3
_GROWN = 1.02  # what was looked at is looked at again if it has grown by so much


class Uncounted:
    """The tensors and buckets on a device that are not counted when it is made.

    Args:
        device: a CPU or CUDA device; on CUDA all is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._found: list[tuple[weakref.ref[torch.Tensor], int, int]] = []
        self._device = device
        if device.type in ("cpu", "cuda"):
            allocated_bytes(device)  # the recorder is there from now on
        if device.type != "cpu":
            return
        for thing in alive_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter):
                self._look_at(thing, device)

    def _look_at(self, tensor: torch.Tensor, device: torch.device) -> None:
        if tensor.device != device or tensor.layout is not torch.strided or is_kept_on_host(tensor):
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


class Beside:
    """What is on a device beside a planned step: it is said once where both together are more than the budget.

    Args:
        device: of the step.
        model, optimizer: the step's own.

    Attributes:
        bytes: before the last step.
    """

    def __init__(self, device: torch.device, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.bytes = 0
        self._device, self._model, self._optimizer = device, model, optimizer
        self._uncounted: Uncounted | None = None
        self._uncounted_bytes = self._looked_at_bytes = 0

    def look(self, own_bytes: int, peak_bytes: int, budget_bytes: int) -> None:
        """Look at the device before a step.

        Args:
            own_bytes: of the step, on the device already.
            peak_bytes: that the step will take, with these.
            budget_bytes: for the step.
        """
        if not records_at_once(self._device):  # what is live is not known
            return
        if self._uncounted is None:
            self._uncounted = Uncounted(self._device)
            self._uncounted_bytes = self._uncounted.live_bytes()
        self.bytes = max(0, allocated_bytes(self._device) + self._uncounted_bytes - own_bytes)
        is_known = self.bytes <= self._looked_at_bytes * _GROWN
        if peak_bytes + self.bytes <= budget_bytes or is_known or is_undone(self._model):
            return
        self._looked_at_bytes = self.bytes
        gc.collect()
        self._uncounted_bytes = self._uncounted.live_bytes()
        self.bytes = max(0, allocated_bytes(self._device) + self._uncounted_bytes - own_bytes)
        if peak_bytes + self.bytes > budget_bytes:
            _log.warning(
                "memfit: %s on %s are not the planned step's (%s), and its budget of %s does not count them. The step "
                "takes %s, which makes %s together. Give memfit.fit a budget that is smaller by %s, or train under "
                "memfit.checkpoint, which counts all",
                format_bytes(self.bytes),
                self._device,
                self._names(),
                format_bytes(budget_bytes),
                format_bytes(peak_bytes),
                format_bytes(peak_bytes + self.bytes),
                format_bytes(self.bytes),
            )

    def _names(self) -> str:
        """Return what holds most of it, in words."""
        alive = alive_objects()
        modules = [each for each in alive if issubclass(type(each), torch.nn.Module)]
        inner = {id(child) for each in modules for child in each.children()} | set(map(id, self._model.modules()))
        own = footprint([*_tensors_of(self._model), *states_of(self._optimizer)], self._device)
        sizes: Counter[str] = Counter()
        for each in modules:
            if id(each) not in inner:
                sizes[type(each).__name__] += self._size(_tensors_of(each), own)
        for each in alive:
            if issubclass(type(each), torch.optim.Optimizer) and each is not self._optimizer:
                sizes[f"state of {type(each).__name__}"] += self._size(states_of(each), own)
        named = [f"{name}: {format_bytes(size)}" for name, size in sizes.most_common(_MOST_NAMED) if size]
        return "; ".join([*named, "other tensors"] if sum(sizes.values()) < self.bytes else named)

    def _size(self, tensors: list[Any], own: dict[int, int]) -> int:
        with_data = [each for each in tensors if type(each) in (torch.Tensor, torch.nn.Parameter)]
        return sum(size for pointer, size in footprint(with_data, self._device).items() if pointer not in own)


def _tensors_of(module: torch.nn.Module) -> list[Any]:
    return [tensor for kind in own_tensors(module) for tensor in kind]
