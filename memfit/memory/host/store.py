"""Copies of storages that leave the device, in slabs on the host (see `memfit.memory.host.slab`).

A program's host copies have fixed places in one *slab* (see `memfit.memory.host.layout`). Nothing is allocated there
while a step runs, so the host budget holds, and a host or disk that is full is an error before the first step.

A copy holds the bytes of a whole storage, so that all views of it come back as they were, whatever their strides.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from pathlib import Path
from typing import Any

import torch

from memfit.errors import UnsupportedStepError
from memfit.memory.host.slab import Slab, Transfer, make_slab
from memfit.memory.place import Place
from memfit.planning import Settings
from memfit.simulate.overlap import Span, Transfers
from memfit.system.budget import format_bytes


class HostCopy:
    """A storage's copy on the host, and the transfers to and from it that are under way.

    Args:
        slab: that holds it.
        source: a tensor of the storage.
        offset: in the slab.
        lease: of the run that copies, which is noted there, and keeps the slab as long as this copy is referred to.
    """

    __slots__ = ("_device", "_fetched", "_lease", "_offset", "_place", "_sent", "_size_bytes", "_slab", "_source")

    def __init__(self, slab: Slab, source: torch.Tensor, offset: int, lease: Lease | None = None) -> None:
        self._slab, self._offset, self._lease = slab, offset, lease
        self._place, self._device = Place.of(source), source.device
        self._size_bytes = source.untyped_storage().nbytes()
        self._fetched: Transfer | None = None
        self._sent = slab.write(source, offset)
        self._source: torch.Tensor | None = source  # kept until `wait`: its memory must not be reused under the copy
        if lease is not None:
            lease.sent.append(self._sent)

    def wait(self) -> None:
        """Wait for the copy to the host, and release the device's tensor.

        Raises:
            HostMemoryError: it failed.
        """
        if self._source is not None:
            self._wait_for(self._sent)
            self._source = None

    def prefetch(self) -> torch.Tensor:
        """Allocate on the device, start the copy back, and return the tensor, to be read after `arrived` only."""
        whole = torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device)
        self._fetched = self._slab.read(whole, self._offset)
        if self._lease is not None:
            self._lease.fetched.append(self._fetched)
        return self._place.on(whole)

    def arrived(self) -> None:
        """Wait for the copy back.

        Raises:
            HostMemoryError: it failed.
        """
        if self._fetched is not None:
            self._wait_for(self._fetched)

    def back(self) -> torch.Tensor:
        """Return the tensor on a new storage, copied back."""
        tensor = self.prefetch()
        self.arrived()
        return tensor

    def _wait_for(self, transfer: Transfer) -> None:
        began = time.perf_counter()
        transfer.wait()
        if self._lease is not None:
            self._lease.stalls.append((began, time.perf_counter()))


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

    @property
    def lent_bytes(self) -> int:
        """The bytes of the slabs that runs have borrowed."""
        return sum(lease.slab.size_bytes for lease in self._lent)

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
        self._last = Transfers(
            to_host=tuple(span for copy in lease.sent if (span := copy.span())),
            to_device=tuple(span for copy in lease.fetched if (span := copy.span())),
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
        lent_bytes = self.lent_bytes
        if lent_bytes and lent_bytes + self._needed_bytes > self.budget_bytes:
            raise UnsupportedStepError(
                f"a planned forward pass runs again before the backward pass of the one before, and the host budget of "
                f"{format_bytes(self.budget_bytes)} has no room for the host copies of both; raise it to "
                f"{format_bytes(lent_bytes + self._needed_bytes)}, or call backward first"
            )
        return make_slab(self.device, self._needed_bytes, self._directory)


class SharedHost:
    """A host budget for several programs, each with a store of its own: what runs have borrowed counts for all."""

    def __init__(self) -> None:
        self._stores: weakref.WeakSet[HostStore] = weakref.WeakSet()

    def left_bytes(self, budget_bytes: int) -> int:
        """Return what is left of the host budget beside the slabs that are borrowed now."""
        return max(0, budget_bytes - sum(store.lent_bytes for store in self._stores))

    def store(self, device: torch.device, settings: Settings) -> HostStore:
        """Return a store for another program, which was planned for what is left."""
        store = HostStore(device, settings.host_budget_bytes, settings.host_dir)
        self._stores.add(store)
        return store


class Lease:
    """A slab for one run of a program; it goes back when nothing of the run is left.

    Attributes:
        slab, process: that is lent, and to which process.
        sent, fetched: the run's transfers to and from the host.
        stalls: when compute waited for one.
    """

    def __init__(self, store: HostStore, slab: Slab) -> None:
        self.slab = slab
        self.process = os.getpid()
        self.sent: list[Transfer] = []
        self.fetched: list[Transfer] = []
        self.stalls: list[Span] = []
        self._store = store

    def __del__(self) -> None:
        self._store.take_back(self)

    def offload(self, source: torch.Tensor, offset: int) -> HostCopy:
        """Start the copy of a storage to the slab.

        Args:
            source: a tensor of the storage.
            offset: in the slab.
        """
        return HostCopy(self.slab, source, offset, self)


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
