"""Eager steps for which the device has no room: what autograd saves for backward waits in host memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.cost.environment import free_bytes
from memfit.memory.place import Place, bytes_of
from memfit.torch_private.autograd import saved_with


@contextmanager
def saved_on_host() -> Generator[None]:
    """Keep the tensors that autograd saves in this block on the host, but for parameters.

    A whole storage is copied, so that a tensor comes back with its strides: kernels are chosen by these, and with them
    the bits (torch.autograd.graph.save_on_cpu makes some tensors contiguous).
    """

    def pack(tensor: torch.Tensor) -> Any:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if is_parameter or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        return Place.of(tensor), tensor.device, bytes_of(tensor.detach()).to("cpu", copy=True)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        place, device, content = packed
        return place.on(content.to(device, copy=True))

    with saved_with(pack, unpack):
        yield


def has_room(device: torch.device, more_bytes: int) -> bool:
    """Return whether a device has so many bytes left; yes, if it does not say.

    Args:
        device: a CPU, whose saved tensors would be no smaller on the host, always has; or a CUDA device.
        more_bytes: beside what is there.
    """
    free = free_bytes(device) if device.type == "cuda" else None
    return free is None or more_bytes <= free


class EagerRun:
    """Runs a step as eager does, with what is saved for backward on the host once the device has no room for it.

    Args:
        run: runs the step on a batch.
        device: where it runs.
        more_bytes: the bytes that the step takes beside those on the device before, as far as they are known.
        put_back: resets what a run that broke off has changed.

    Attributes:
        is_saved_on_host: whether a run kept what is saved there, so that its time and peak are not eager's.
    """

    def __init__(
        self, run: Callable[[Any], Any], device: torch.device, more_bytes: int, put_back: Callable[[], None]
    ) -> None:
        self._run = run
        self._put_back = put_back
        self.is_saved_on_host = not has_room(device, more_bytes)

    def __call__(self, batch: Any) -> Any:
        """Return what the step returns."""
        if not self.is_saved_on_host:
            try:
                return self._run(batch)
            except torch.OutOfMemoryError:
                self._put_back()
                self.is_saved_on_host = True
        with saved_on_host():
            return self._run(batch)
