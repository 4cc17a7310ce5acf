"""Host copies of a GPU's storages, in pinned memory, made on two streams, one for each direction."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from memfit.errors import HostMemoryError
from memfit.memory.host.form import Form, bytes_of
from memfit.system.budget import format_bytes


class PinnedSlab:
    """A slab of pinned host memory, of exactly its size: torch's own allocator would round it up to a power of two."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self._device = device
        self._memory = torch.empty(size_bytes, dtype=torch.uint8)
        address = self._memory.data_ptr()
        with torch.cuda.device(device):  # CUDA pins for the current device, and makes a context there if there is none
            status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)) if size_bytes else 0
        if status:
            raise HostMemoryError(
                f"{format_bytes(size_bytes)} of host memory cannot be pinned (CUDA error {status}); lower the host "
                "budget, or raise the limit on locked memory (ulimit -l)"
            )
        self._unpin = weakref.finalize(self, _unpin, address if size_bytes else 0, device)

    def copy(self, source: torch.Tensor, offset: int) -> PinnedCopy:
        """Start the copy of a tensor's storage to an offset, and return that copy."""
        return PinnedCopy(self._memory, source, offset)

    def settle(self) -> None:
        """Wait until no copy is under way."""
        for stream in _streams(self._device):
            stream.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self.settle()
        self._unpin()


def _unpin(address: int, device: torch.device) -> None:
    if address:
        with suppress(RuntimeError), torch.cuda.device(device):  # at the interpreter's exit the driver may be gone
            torch.cuda.cudart().cudaHostUnregister(address)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return a device's streams for copies: to the host, and to the device."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream the current one; its end alone would make the current device's context, where that is another."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class PinnedCopy:
    """A host copy in pinned memory. The compute stream waits for events; the host waits for nothing.

    A place in the slab is used again only after compute has waited for the copy back from it, and copies to the host
    start after what compute has done. So the order of the streams guards the places.
    """

    __slots__ = ("_done", "_form", "_host", "_returned", "_source")

    def __init__(self, memory: torch.Tensor, source: torch.Tensor, offset: int) -> None:
        self._form = Form.of(source)
        self._source: torch.Tensor | None = source  # kept until `wait`: its memory must not be reused under the copy
        self._host = memory[offset : offset + self._form.storage_bytes]
        self._returned: torch.cuda.Event | None = None
        to_host, _ = _streams(source.device)
        to_host.wait_stream(torch.cuda.current_stream(source.device))
        with _on(to_host):
            self._host.copy_(bytes_of(source), non_blocking=True)
            self._done = to_host.record_event()

    def wait(self) -> None:
        """Make the compute stream wait for the copy to the host, and release the device's tensor."""
        device = self._form.device
        torch.cuda.current_stream(device).wait_event(self._done)
        self._source = None

    def prefetch(self) -> torch.Tensor:
        """Allocate on the device, start the copy back, and return the tensor, to be read after `arrived` only."""
        tensor = self._form.allocate()
        _, to_device = _streams(tensor.device)
        to_device.wait_stream(torch.cuda.current_stream(tensor.device))
        with _on(to_device):
            bytes_of(tensor).copy_(self._host, non_blocking=True)
            self._returned = to_device.record_event()
        return tensor

    def arrived(self) -> None:
        """Make the compute stream wait for the copy back."""
        device = self._form.device
        if self._returned is not None:
            torch.cuda.current_stream(device).wait_event(self._returned)
