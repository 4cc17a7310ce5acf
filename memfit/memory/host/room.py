"""Room on the host for storages that are copied one by one: pinned memory on CUDA, a file on a disk on a CPU.

All copies have their places in one slab, which is made at once and is as large as the host budget.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

import torch

from memfit.cost.link import link_rates
from memfit.errors import HostMemoryError
from memfit.memory.host.slab import Slab, alignment_bytes, make_slab
from memfit.memory.host.store import HostCopy
from memfit.torch_private.autograd import no_modes

_MOST_UNUSED = 2  # a storage of more than so many times its tensor's bytes is not copied for it


class OnHost(HostCopy):
    """A copy on the host; its place is free again when nothing refers to it.

    Attributes:
        seconds_back: of a copy back to the device.
        coming: what is being copied back to, if a copy back has begun.
    """

    __slots__ = ("__weakref__", "_places", "_taken", "coming", "seconds_back")

    def __init__(self, places: HostPlaces, size_bytes: int, source: torch.Tensor, seconds_back: float) -> None:
        self.seconds_back = seconds_back
        self.coming: torch.Tensor | None = None
        self._source = None  # there is nothing to wait for, if no copy can begin
        self._places, self._taken = places, places.take(size_bytes)
        with no_modes(), torch.no_grad():
            super().__init__(places.slab, source, self._taken[0])

    def __del__(self) -> None:
        with suppress(HostMemoryError):  # nobody reads it any more
            self.wait()
        self._places.returned.append(self._taken)

    def begin_back(self) -> None:
        """Begin to copy the contents back, to memory that is taken for them now."""
        self.wait()
        if self.coming is None:
            with no_modes(), torch.no_grad():
                self.coming = self.prefetch()

    def back(self) -> torch.Tensor:
        """Return the tensor that was copied, on a new storage.

        Raises:
            HostMemoryError: a copy failed.
        """
        self.begin_back()
        tensor, self.coming = self.coming, None
        assert tensor is not None
        with no_modes(), torch.no_grad():
            self.arrived()
        return tensor


class HostPlaces:
    """The places in a slab.

    Attributes:
        slab: see there.
        returned: places (offset, bytes) that nobody uses any more; garbage collection may append some at any time.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.returned: deque[tuple[int, int]] = deque()
        self._gaps = [(0, slab.size_bytes)] if slab.size_bytes else []  # free places in order; no two of them touch

    def largest_bytes(self) -> int:
        """Return the size of the largest free place."""
        return max((size_bytes for _, size_bytes in self._free()), default=0)

    def take(self, size_bytes: int) -> tuple[int, int]:
        """Take the beginning of the smallest free place that is large enough; there is one."""
        gaps = self._free()
        gap_bytes, offset = min((gap_bytes, offset) for offset, gap_bytes in gaps if gap_bytes >= size_bytes)
        rest = [(offset + size_bytes, gap_bytes - size_bytes)] if gap_bytes > size_bytes else []
        number = gaps.index((offset, gap_bytes))
        gaps[number : number + 1] = rest
        return offset, size_bytes

    def _free(self) -> list[tuple[int, int]]:
        """Return the free places, with those that were returned since."""
        if self.returned:
            while self.returned:
                self._gaps.append(self.returned.popleft())
            merged: list[tuple[int, int]] = []
            for offset, size_bytes in sorted(self._gaps):
                if merged and sum(merged[-1]) == offset:
                    offset, size_bytes = merged[-1][0], merged.pop()[1] + size_bytes
                merged.append((offset, size_bytes))
            self._gaps = merged
        return self._gaps


class Host:
    """Where storages are copied to, within a host budget.

    Attributes:
        device: that they are on: a CPU or CUDA device.
        budget_bytes: of all copies together.
        rates: of the link.

    Args:
        device, budget_bytes: see above.
        directory: for the file of a CPU; by default see `spill_directory`.

    Raises:
        HostMemoryError: the directory cannot be used, or the host or the disk has no room for the host budget.
    """

    def __init__(self, device: torch.device, budget_bytes: int, directory: Path | None) -> None:
        self.device, self.budget_bytes, self._process = device, budget_bytes, os.getpid()
        self.rates = link_rates(device, directory)
        self._alignment_bytes = alignment_bytes(device)
        whole_bytes = budget_bytes // self._alignment_bytes * self._alignment_bytes
        self._places: HostPlaces | None = HostPlaces(make_slab(device, whole_bytes, directory))

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of a copy to the host and back."""
        rates = self.rates
        seconds_out = rates.copy_latency_seconds + size_bytes / rates.to_host_bytes_per_second
        return seconds_out + self._seconds_back(size_bytes)

    def has_room(self, size_bytes: int) -> bool:
        """Return whether there is room for a copy within the host budget."""
        if self._places is None or self._process != os.getpid():  # a forked process: the slab is that of its parent
            return False
        return self.aligned_bytes(size_bytes) <= self._places.largest_bytes()

    def suits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a plain one, most of its storage, and there is room for it."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        size_bytes = tensor.untyped_storage().nbytes()
        return 0 < size_bytes <= _MOST_UNUSED * tensor.numel() * tensor.element_size() and self.has_room(size_bytes)

    def copy(self, source: torch.Tensor) -> OnHost:
        """Begin to copy a tensor's storage to the host, which has room for it."""
        assert self._places is not None
        size_bytes = source.untyped_storage().nbytes()
        return OnHost(self._places, self.aligned_bytes(size_bytes), source, self._seconds_back(size_bytes))

    def close(self) -> None:
        """Make no more copies; the slab goes with the last one."""
        self._places = None

    def _seconds_back(self, size_bytes: int) -> float:
        return self.rates.copy_latency_seconds + size_bytes / self.rates.to_device_bytes_per_second

    def aligned_bytes(self, size_bytes: int) -> int:
        """Return what a copy of so many bytes takes of the host budget."""
        return -(-size_bytes // self._alignment_bytes) * self._alignment_bytes
