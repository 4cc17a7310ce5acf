"""The link of a device to where its storages are offloaded: pinned host memory on CUDA, a disk on a CPU.

Both directions are measured alone and together, the time of the smallest copy, and how much a copy slows compute down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import torch

from memfit.cost.environment import environment, free_bytes
from memfit.device import Device, Rate
from memfit.errors import HostMemoryError
from memfit.system.cache import environment_path, keep, read_kept
from memfit.system.spill_file import BLOCK_BYTES, Span, SpillFile, spill_directory

_COPY_BYTES = 128 << 20  # well beyond every cache
_COPY_SHARE = 8  # a copy takes at most this part of the device's free memory: one eighth
_RUNS = 5
_SMALL_RUNS = 50
_ROWS = 768  # of the matrices that are multiplied while something is copied
_MOST_LOAD = 0.45


class LinkRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of a link; the fields are those of `Device`."""

    to_host_bytes_per_second: Rate
    to_device_bytes_per_second: Rate
    to_host_shared_bytes_per_second: Rate
    to_device_shared_bytes_per_second: Rate
    copy_latency_seconds: Annotated[float, msgspec.Meta(ge=0)]
    copy_load: Annotated[float, msgspec.Meta(ge=0, lt=0.5)]


def with_link(profile: Device, device: torch.device, directory: Path | None = None) -> Device:
    """Return a device's profile with its link's rates, measured now unless they are kept on disk.

    Args:
        profile: of the device; the rates of another link in it are replaced.
        device: a CPU or CUDA device at hand.
        directory: on the disk that a CPU offloads to; by default see `spill_directory`.

    Raises:
        HostMemoryError: the directory cannot be used.
    """
    return msgspec.structs.replace(profile, **msgspec.structs.asdict(link_rates(device, directory)))


def link_rates(device: torch.device, directory: Path | None = None, *, again: bool = False) -> LinkRates:
    """Return the rates of a device's link: those kept on disk, or new ones, which takes about a second.

    Args:
        device: a CPU or CUDA device at hand.
        directory: as for `with_link`.
        again: measure even if rates are kept.

    Raises:
        HostMemoryError: the directory cannot be used.
    """
    setting = environment(device)
    if device.type == "cpu":
        directory = spill_directory() if directory is None else directory
        try:
            setting["disk"] = str(directory.stat().st_dev)
        except OSError as error:
            raise HostMemoryError(f"host_dir {str(directory)!r} cannot be used: {error.strerror}") from error
    path = environment_path("links", setting)
    kept = None if again else read_kept(path, LinkRates, "the kept rates of the link are not used: %s")
    if kept is not None:
        return kept
    with torch.no_grad():
        measured = _disk_rates(directory) if device.type == "cpu" else _pcie_rates(device)
    keep(measured, path, "rates of the link")
    return measured


class _Copies(Protocol):
    """Starts copies of some bytes; each returns a function that waits for the end, and returns when that was."""

    def to_host(self, size_bytes: int) -> Callable[[], float]:
        """Start a copy to the host or disk."""
        ...

    def to_device(self, size_bytes: int) -> Callable[[], float]:
        """Start a copy back."""
        ...


def _rates(copies: _Copies, size_bytes: int) -> LinkRates:
    """Measure a link; the load of the copies on compute is left at 0."""
    starts = copies.to_host, copies.to_device
    alone = [size_bytes / _median_seconds(lambda start=start: start(size_bytes)) for start in starts]
    # As many bytes in each direction as take equally long alone.
    sizes = [int(size_bytes * rate / max(alone)) for rate in alone]
    runs = [_together(starts, sizes) for _ in range(_RUNS)]
    ends = [statistics.median(run[direction] for run in runs) for direction in range(2)]
    overlap = min(ends)  # until then both copied; after it one did, alone
    shared = [
        max(size - rate * (end - overlap), 0.1 * size) / overlap
        for size, rate, end in zip(sizes, alone, ends, strict=True)
    ]
    latencies = [_median_seconds(lambda start=start: start(BLOCK_BYTES), _SMALL_RUNS) for start in starts]
    return LinkRates(
        to_host_bytes_per_second=alone[0],
        to_device_bytes_per_second=alone[1],
        to_host_shared_bytes_per_second=min(shared[0], alone[0]),
        to_device_shared_bytes_per_second=min(shared[1], alone[1]),
        copy_latency_seconds=statistics.mean(latencies),
        copy_load=0.0,
    )


def _together(starts: Sequence[Callable[[int], Callable[[], float]]], sizes: Sequence[int]) -> list[float]:
    """Copy in both directions at once; return the seconds that each took."""
    began = time.perf_counter()
    waits = [start(size) for start, size in zip(starts, sizes, strict=True)]
    return [wait() - began for wait in waits]


def _median_seconds(start: Callable[[], Callable[[], float]], runs: int = _RUNS) -> float:
    seconds: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        seconds.append(start()() - began)
    return statistics.median(seconds)


def _copy_bytes(device: torch.device) -> int:
    """Return the size of the copies that are timed: whole blocks that the device has room for."""
    free = free_bytes(device)
    size_bytes = _COPY_BYTES if free is None else min(_COPY_BYTES, free // _COPY_SHARE)
    return max(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class _DiskCopies:
    def __init__(self, directory: Path | None) -> None:
        self.size_bytes = _copy_bytes(torch.device("cpu"))
        self.file = SpillFile(2 * self.size_bytes, directory)
        self._memory = [torch.ones(self.size_bytes, dtype=torch.uint8) for _ in range(2)]
        for place in range(2):  # what was never written is not read from the disk
            self.file.write(self._memory[0].data_ptr(), self.size_bytes, place * self.size_bytes).result()

    def to_host(self, size_bytes: int) -> Callable[[], float]:
        return _end_of(self.file.write(self._memory[0].data_ptr(), size_bytes, 0))

    def to_device(self, size_bytes: int) -> Callable[[], float]:
        return _end_of(self.file.read(self._memory[1].data_ptr(), size_bytes, self.size_bytes))


def _end_of(copy: Future[Span]) -> Callable[[], float]:
    return lambda: copy.result()[1]


def _disk_rates(directory: Path | None) -> LinkRates:
    copies = _DiskCopies(directory)
    try:
        rates = _rates(copies, copies.size_bytes)
        load = statistics.mean(_load(start, copies.size_bytes) for start in (copies.to_host, copies.to_device))
        return msgspec.structs.replace(rates, copy_load=min(_MOST_LOAD, load))
    except OSError as error:
        raise HostMemoryError(f"copies to {str(directory)!r} fail: {error.strerror or error}") from error
    finally:
        copies.file.close()


def _load(start: Callable[[int], Callable[[], float]], size_bytes: int) -> float:
    """Return the share of the rate of a matrix product and a sum that copies take away."""
    square = torch.ones(_ROWS, _ROWS)
    long = torch.ones(size_bytes // 16)

    def work() -> float:
        began = time.perf_counter()
        torch.mm(square, square)
        torch.add(long, long)
        return time.perf_counter() - began

    work()
    alone = statistics.median(work() for _ in range(_RUNS))
    beside: list[float] = []
    for _ in range(_RUNS):
        wait = start(size_bytes)
        began, seconds = time.perf_counter(), [work()]
        ended = wait()
        while began + sum(seconds) < ended:
            seconds.append(work())
        beside += seconds
    return max(0.0, 1.0 - alone / statistics.median(beside))


class _PinnedCopies:
    def __init__(self, device: torch.device) -> None:
        self.size_bytes = _copy_bytes(device)
        self._device = [torch.ones(self.size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._host = [torch.ones(self.size_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]

    def to_host(self, size_bytes: int) -> Callable[[], float]:
        return self._start(0, self._host[0][:size_bytes], self._device[0][:size_bytes])

    def to_device(self, size_bytes: int) -> Callable[[], float]:
        return self._start(1, self._device[1][:size_bytes], self._host[1][:size_bytes])

    def _start(self, direction: int, target: torch.Tensor, source: torch.Tensor) -> Callable[[], float]:
        with torch.cuda.stream(self._streams[direction]):
            target.copy_(source, non_blocking=True)

        def wait() -> float:
            self._streams[direction].synchronize()
            return time.perf_counter()

        return wait


def _pcie_rates(device: torch.device) -> LinkRates:
    copies = _PinnedCopies(device)
    return _rates(copies, copies.size_bytes)
