"""Where storages go that leave the device, and the copies to there and back: pinned memory on CUDA, a file on a CPU.

A program's host copies have fixed places in one *slab* (see `memfit.memory.host.layout`). Nothing is allocated there
while a step runs, so the host budget holds, and a host or disk that is full is an error before the first step.

A copy holds the bytes of a whole storage, so that all views of it come back as they were, whatever their strides.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from memfit.errors import UnsupportedStepError
from memfit.memory.host.disk import DiskCopy, DiskSlab
from memfit.memory.host.pinned import PinnedSlab
from memfit.simulate.overlap import Span, Transfers
from memfit.system.budget import format_bytes
from memfit.system.spill_file import BLOCK_BYTES

_PINNED_ALIGNMENT_BYTES = 512


def alignment_bytes(device: torch.device) -> int:
    """Return what offsets and sizes of host copies are multiples of."""
    return BLOCK_BYTES if device.type == "cpu" else _PINNED_ALIGNMENT_BYTES


class HostCopy(Protocol):
    """A storage's copy on the host, and the transfers to and from it that are under way."""

    def wait(self) -> None:
        """Wait for the copy to the host, and release the device's tensor."""

    def prefetch(self) -> torch.Tensor:
        """Allocate on the device, start the copy back, and return the tensor, to be read after `arrived` only."""
        ...

    def arrived(self) -> None:
        """Wait for the copy back."""


class Slab(Protocol):
    """The memory, or the file, that holds the host copies of one run of a program."""

    size_bytes: int

    def copy(self, source: torch.Tensor, offset: int) -> HostCopy:
        """Start the copy of a tensor's storage to an offset, and return that copy."""
        ...

    def settle(self) -> None:
        """Wait until no copy is under way."""

    def close(self) -> None:
        """Give the memory, or the disk's room, back."""


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


class HostStore:
    """The slabs of the programs of one device that never run at the same time, within a host budget.

    A run of a program borrows a slab, and returns it when its last host copy is gone. A compiled model may run forward
    again before the backward of its last forward: the second run then borrows another slab.

    Args:
        device: that storages leave: a CPU or CUDA device.
        budget_bytes: most bytes of all slabs.
        directory: for the files of a CPU; by default see `spill_directory`.
    """

    def __init__(self, device: torch.device, budget_bytes: int, directory: Path | None = None) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self._directory = directory
        self._process = os.getpid()
        self._needed_bytes = 0
        self._free: list[Slab] = []
        self._lent: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._last = Transfers(to_host=(), to_device=(), stalls=())

    @property
    def transfers(self) -> Transfers:
        """The copies and stalls of the last run; on a GPU nobody notes the times of copies."""
        return self._last

    def reserve(self, size_bytes: int) -> None:
        """Get a slab of at least this size before the first run.

        Raises:
            HostMemoryError: the host, or the disk, has no room for it.
        """
        self._needed_bytes = max(self._needed_bytes, size_bytes)
        self._free.append(self._take())

    def begin(self) -> Lease:
        """Borrow a slab for a run.

        Raises:
            UnsupportedStepError: the host budget has no room for another one beside those that are borrowed.
            HostMemoryError: the host, or the disk, has none.
        """
        lease = Lease(self, self._take())
        self._lent.add(lease)
        return lease

    def take_back(self, lease: Lease) -> None:
        """Take a slab back from a run of which nothing is left.

        Args:
            lease: of the run.
        """
        if lease.process == os.getpid():
            self._free.append(lease.slab)
        spans = [copy.spans() for copy in lease.copies if isinstance(copy, DiskCopy)]
        self._last = Transfers(  # not the copies: those of a step that failed may still have the device's tensors
            to_host=tuple(span for span, _ in spans if span),
            to_device=tuple(span for _, span in spans if span),
            stalls=tuple(lease.stalls),
        )

    def settle(self) -> None:
        """Wait until no copy is under way, as after an error."""
        for slab in [*self._free, *(lease.slab for lease in self._lent)]:
            slab.settle()

    def _take(self) -> Slab:
        if self._process != os.getpid():  # a forked process: the files are those of its parent, which copies to them
            self._process = os.getpid()
            self._free.clear()
            self._lent.clear()
        while self._free:
            slab = self._free.pop()
            if slab.size_bytes >= self._needed_bytes:
                slab.settle()
                return slab
            slab.close()
        lent_bytes = sum(lease.slab.size_bytes for lease in self._lent)
        if lent_bytes and lent_bytes + self._needed_bytes > self.budget_bytes:
            raise UnsupportedStepError(
                f"a planned forward pass runs again before the backward pass of the one before, and the host budget of "
                f"{format_bytes(self.budget_bytes)} has no room for the host copies of both; raise it to "
                f"{format_bytes(lent_bytes + self._needed_bytes)}, or call backward first"
            )
        return make_slab(self.device, self._needed_bytes, self._directory)


class Lease:
    """A slab for one run of a program; it goes back when nothing of the run is left."""

    def __init__(self, store: HostStore, slab: Slab) -> None:
        self.slab = slab
        self.process = os.getpid()
        self.copies: list[HostCopy] = []
        self.stalls: list[Span] = []
        self._store = store

    def __del__(self) -> None:
        self._store.take_back(self)

    def stall(self, wait: Callable[[], None]) -> None:
        """Wait for a copy, and note when.

        Args:
            wait: does it.
        """
        began = time.perf_counter()
        wait()
        self.stalls.append((began, time.perf_counter()))

    def offload(self, source: torch.Tensor, offset: int) -> LentCopy:
        """Start the copy of a storage to the slab.

        Args:
            source: a tensor of the storage.
            offset: in the slab.
        """
        return LentCopy(self, self.slab.copy(source, offset))


class LentCopy:
    """A host copy that keeps its run's slab borrowed, and notes when compute waits for it."""

    __slots__ = ("_copy", "_lease", "prefetch")

    def __init__(self, lease: Lease, copy: HostCopy) -> None:
        self._lease, self._copy = lease, copy
        self.prefetch = copy.prefetch
        lease.copies.append(copy)

    def wait(self) -> None:
        """As `HostCopy.wait`."""
        self._lease.stall(self._copy.wait)

    def arrived(self) -> None:
        """As `HostCopy.arrived`."""
        self._lease.stall(self._copy.arrived)


_numbers = itertools.count()
_left: dict[int, tuple[Any, ...]] = {}


def leave(*things: Any) -> torch.Tensor:
    """Leave what a forward half holds on the host for the backward half; return a tensor that stands for it.

    Autograd saves tensors only. If it drops this one, because backward never runs, what was left is dropped with it.
    """
    number = next(_numbers)
    ticket = torch.tensor(number)
    _left[number] = things
    weakref.finalize(ticket, _left.pop, number, None).atexit = False
    return ticket


def take_up(ticket: torch.Tensor) -> tuple[Any, ...]:
    """Return what a forward half left: its lease first.

    Raises:
        UnsupportedStepError: the forward half ran in another process.
    """
    things = _left.pop(int(ticket))
    if things[0].process != os.getpid():
        raise UnsupportedStepError(
            "backward runs in a process that was forked after the planned forward pass, whose host copies are the "
            "other process's; run forward again in this one"
        )
    return things
