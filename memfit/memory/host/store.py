"""Copies of storages that leave the device, in slabs on the host (see `memfit.memory.host.slab`).

A program's host copies have fixed places in one *slab* (see `memfit.memory.host.layout`). Nothing is allocated there
while a step runs, so the host budget holds, and a host or disk that is full is an error before the first step.

A copy holds the bytes of a whole storage, so that all views of it come back as they were, whatever their strides.
"""

from __future__ import annotations

import itertools
import math
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.errors import UnsupportedStepError
from memfit.memory.host.slab import Slab, Transfer, alignment_bytes, make_slab
from memfit.memory.place import Place
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
    """The slabs of all programs of one device, within a host budget.

    A run of a program borrows a slab, and returns it when its last host copy is gone. A step may consist of several
    programs, and a compiled model may run forward again before the backward of its last forward: each of these runs
    borrows a slab of its own. What is not borrowed is given back to the host where the budget has no room for another.

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
        self._free: list[Slab] = []
        self._are_beside = False  # whether two runs had slabs at a time: none then takes more than it needs
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

    @property
    def held_bytes(self) -> int:
        """The bytes of all slabs, borrowed or not."""
        return self.lent_bytes + sum(slab.size_bytes for slab in self._free)

    @property
    def left_bytes(self) -> int:
        """What is left of the host budget beside the slabs that are borrowed now."""
        return max(0, self.budget_bytes - self.lent_bytes)

    def reserve(self, size_bytes: int) -> Reserved:
        """Get a slab of at least this size before the first run of a program, and return what its runs begin with.

        Raises:
            UnsupportedStepError, HostMemoryError: as `begin`.
        """
        self._free.append(self._take(size_bytes))
        return Reserved(self, size_bytes)

    def begin(self, size_bytes: int) -> Lease:
        """Borrow a slab of at least this size for a run.

        Raises:
            UnsupportedStepError: the host budget has no room for another one beside those that are borrowed.
            HostMemoryError: the host, or the disk, has none.
        """
        self._are_beside = self._are_beside or bool(self._lent)
        lease = Lease(self, self._take(size_bytes))
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

    def _take(self, size_bytes: int) -> Slab:
        if self._process != os.getpid():  # a forked process: the files are those of its parent, which copies to them
            self._process = os.getpid()
            self._free.clear()
            self._lent.clear()
        self._free.sort(key=lambda slab: slab.size_bytes)
        most_bytes = size_bytes + alignment_bytes(self.device) if self._are_beside else math.inf
        for number, slab in enumerate(self._free):
            if size_bytes <= slab.size_bytes < most_bytes:
                slab.settle()
                return self._free.pop(number)
        lent_bytes = self.lent_bytes
        if lent_bytes and lent_bytes + size_bytes > self.budget_bytes:
            raise UnsupportedStepError(
                f"a planned forward pass runs before the backward pass of the one before, and the host budget of "
                f"{format_bytes(self.budget_bytes)} has no room for the host copies of both; raise it to "
                f"{format_bytes(lent_bytes + size_bytes)}, or call backward first"
            )
        while self._free and self.held_bytes + size_bytes > self.budget_bytes:
            self._free.pop(0).close()
        return make_slab(self.device, size_bytes, self._directory)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Reserved:
    """What a program needs of a store: a slab of so many bytes for each of its runs."""

    store: HostStore
    size_bytes: int

    def begin(self) -> Lease:
        """Borrow a slab for a run; see `HostStore.begin`."""
        return self.store.begin(self.size_bytes)


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
    """Leave what a run holds on the host for its later part, its lease first; return a tensor that stands for it.

    Autograd saves tensors only. If it drops this one, because backward never runs, what was left is dropped with it.
    """
    number = next(_numbers)
    ticket = torch.tensor(number)
    _left[number] = things
    weakref.finalize(ticket, _left.pop, number, None).atexit = False
    return ticket


def left(ticket: torch.Tensor) -> tuple[Any, ...]:
    """Return what was left: the lease of its run first.

    Raises:
        UnsupportedStepError: the forward half ran in another process.
    """
    things = _left[int(ticket)]
    if things[0].process != os.getpid():
        raise UnsupportedStepError(
            "backward runs in a process that was forked after the planned forward pass, whose host copies are the "
            "other process's; run forward again in this one"
        )
    return things


def take_up(ticket: torch.Tensor) -> tuple[Any, ...]:
    """Return what was left, as `left` does, and keep it no longer."""
    things = left(ticket)
    del _left[int(ticket)]
    return things
