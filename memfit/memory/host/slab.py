"""Slabs that hold host copies: pinned memory for a GPU's storages, a file on a disk for a CPU's.

Pinned memory is copied to and from on two streams, one for each direction; the compute stream waits for events, and the
host waits for nothing. A file is copied to and from by two threads, one for each direction.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from memfit.errors import HostMemoryError
from memfit.memory.pinned import pin
from memfit.memory.place import bytes_of
from memfit.system.budget import format_bytes
from memfit.system.spill_file import BLOCK_BYTES, Span, SpillFile
from memfit.system.worker import Call

_PINNED_ALIGNMENT_BYTES = 512


class Transfer(Protocol):
    """A copy that is under way in one direction."""

    def wait(self) -> None:
        """Wait for it."""

    def span(self) -> Span | None:
        """Return when it started and ended; None if that is not known."""
        ...


class Slab(Protocol):
    """The memory, or the file, that holds host copies."""

    size_bytes: int

    def write(self, source: torch.Tensor, offset: int) -> Transfer:
        """Start the copy of a tensor's storage to an offset.

        Args:
            source: on the device, all of its storage.
            offset: in the slab, in bytes.
        """
        ...

    def read(self, target: torch.Tensor, offset: int) -> Transfer:
        """Start the copy from an offset to a tensor's storage.

        Args:
            target: on the device, all of its storage.
            offset: in the slab, in bytes.
        """
        ...

    def settle(self) -> None:
        """Wait until no copy is under way."""

    def close(self) -> None:
        """Give the memory, or the disk's room, back."""


def alignment_bytes(device: torch.device) -> int:
    """Return what offsets and sizes of host copies are multiples of."""
    return BLOCK_BYTES if device.type == "cpu" else _PINNED_ALIGNMENT_BYTES


def make_slab(device: torch.device, size_bytes: int, directory: Path | None) -> Slab:
    """Return a slab for a device's storages.

    Args:
        device: a CPU or CUDA device.
        size_bytes: of the slab.
        directory: for the file of a CPU; by default see `spill_directory`.

    Raises:
        HostMemoryError: the host, or the disk, has no room for it.
    """
    return PinnedSlab(size_bytes, device) if device.type == "cuda" else DiskSlab(size_bytes, directory)


class DiskSlab:
    """A slab in a file."""

    def __init__(self, size_bytes: int, directory: Path | None) -> None:
        self._file = SpillFile(size_bytes, directory)
        self.size_bytes = self._file.size_bytes
        self.settle, self.close = self._file.settle, self._file.close

    def write(self, source: torch.Tensor, offset: int) -> Transfer:
        """See `Slab`."""
        storage = source.untyped_storage()
        size_bytes = storage.nbytes()
        return _DiskTransfer(self._file.write(storage.data_ptr(), size_bytes, offset, source), size_bytes, "to")

    def read(self, target: torch.Tensor, offset: int) -> Transfer:
        """See `Slab`."""
        storage = target.untyped_storage()
        size_bytes = storage.nbytes()
        return _DiskTransfer(self._file.read(storage.data_ptr(), size_bytes, offset, target), size_bytes, "from")


class _DiskTransfer:
    __slots__ = ("_call", "_direction", "_size_bytes")

    def __init__(self, call: Call[Span], size_bytes: int, direction: str) -> None:
        self._call, self._size_bytes, self._direction = call, size_bytes, direction

    def wait(self) -> None:
        try:
            self._call.result()
        except OSError as error:
            raise HostMemoryError(
                f"{format_bytes(self._size_bytes)} could not be copied {self._direction} the file of offloaded "
                f"storages: {error.strerror or error}; name another directory as host_dir"
            ) from error.with_traceback(None)  # its frames hold what autograd holds, and the call holds the error

    def span(self) -> Span | None:
        return self._call.result() if self._call.succeeded else None


class PinnedSlab:
    """A slab of pinned host memory.

    A place in the slab is used again only after compute has waited for the copy back from it, and copies to the host
    start after what compute has done. So the order of the streams guards the places.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self._device = device
        self._memory = torch.empty(size_bytes, dtype=torch.uint8)
        self._unpin = weakref.finalize(self, pin(self._memory, device, "host memory"))

    def write(self, source: torch.Tensor, offset: int) -> Transfer:
        """See `Slab`."""
        whole = bytes_of(source)
        return PinnedTransfer(copy_streams(source.device)[0], self._memory[offset : offset + len(whole)], whole)

    def read(self, target: torch.Tensor, offset: int) -> Transfer:
        """See `Slab`."""
        whole = bytes_of(target)
        return PinnedTransfer(copy_streams(target.device)[1], whole, self._memory[offset : offset + len(whole)])

    def settle(self) -> None:
        """Wait until no copy is under way."""
        for stream in copy_streams(self._device):
            stream.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self.settle()
        self._unpin()


class PinnedTransfer:
    """A copy on a stream, after what the current stream was given before."""

    __slots__ = ("_device", "_done")

    def __init__(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        device = self._device = stream.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with _on(stream):
            target.copy_(source, non_blocking=True)
            self._done = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        device = self._device
        torch.cuda.current_stream(device).wait_event(self._done)

    def span(self) -> None:
        """Return None: nobody notes the times of copies on a GPU."""


@cache
def copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return a device's streams for copies: to the host, and to the device."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream the current one; its end alone would make the current device's context, where that is another."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
