"""The link of a device to where its storages are offloaded: pinned host memory on CUDA, a disk on a CPU.

Each direction is measured by itself and both together, and the time of the smallest copy. A CPU's copies are measured
while it computes, with what they take of compute's rate.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated

import msgspec
import torch

from memfit.cost.environment import environment, free_bytes
from memfit.device import Device, Rate
from memfit.errors import HostMemoryError, InvalidOptionError
from memfit.system.cache import environment_path, keep, read_kept
from memfit.system.spill_file import BLOCK_BYTES, SpillFile, spill_directory

_COPY_SHARE = 8  # a copy takes at most this part of the device's free memory: one eighth
_RUNS = 5
_SMALL_RUNS = 50
_ROWS = 768  # of the matrices that are multiplied while something is copied
_SIZE = 4  # bytes of a float32
_LEAST_CALLS = 3  # of work, while something is copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much is run to measure a device and its link; less takes less time, and is less exact.

    Attributes:
        smallest_product, largest_product: rows of the square matrices that are multiplied.
        copy_bytes: of a copy on the device, well beyond every cache; a copy to pinned memory takes an eighth.
        launches: of the smallest op, timed together.
        disk_copy_bytes: of a copy to the disk, about those of a step's copies.
        sum_bytes: of the tensors that are added while something is copied.
        turn_seconds: of work, while something is copied.
    """

    smallest_product: int = 256
    largest_product: int = 8192
    copy_bytes: int = 256 << 20
    launches: int = 200
    disk_copy_bytes: int = 8 << 20
    sum_bytes: int = 32 << 20
    turn_seconds: float = 0.25


EXACT = Amounts()


class LinkRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of a link; the fields are those of `Device`."""

    to_host_bytes_per_second: Rate
    to_device_bytes_per_second: Rate
    to_host_shared_bytes_per_second: Rate
    to_device_shared_bytes_per_second: Rate
    copy_latency_seconds: Annotated[float, msgspec.Meta(ge=0)]
    copy_compute_seconds_per_byte: Annotated[float, msgspec.Meta(ge=0)] = 0.0


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


def link_rates(
    device: torch.device, directory: Path | None = None, *, again: bool = False, amounts: Amounts = EXACT
) -> LinkRates:
    """Return the rates of a device's link: those kept on disk, or new ones, which takes about a second.

    Args:
        device: a CPU or CUDA device at hand.
        directory: as for `with_link`.
        again: measure even if rates are kept.
        amounts: how much is copied and computed to measure.

    Raises:
        HostMemoryError: the directory cannot be used.
        InvalidOptionError: a directory is given, and the device is no CPU.
    """
    if device.type != "cpu" and directory is not None:
        raise InvalidOptionError(
            f"host_dir is {str(directory)!r}, but host copies of {str(device)!r} are in pinned memory; only those of a "
            "CPU are on a disk: leave host_dir out"
        )
    setting = environment(device)
    if device.type == "cpu":
        directory = spill_directory(directory)
        try:
            setting["disk"] = str(directory.stat().st_dev)
        except OSError as error:
            raise HostMemoryError(f"host_dir {str(directory)!r} cannot be used: {error.strerror}") from error
    path = environment_path("links", setting)
    kept = None if again else read_kept(path, LinkRates, "the kept rates of the link are not used: %s")
    if kept is not None:
        return kept
    with torch.no_grad():
        measured = _disk_rates(directory, amounts) if device.type == "cpu" else _pcie_rates(device, amounts)
    keep(measured, path, "rates of the link")
    return measured


def _disk_rates(directory: Path | None, amounts: Amounts) -> LinkRates:
    """Return the rates of copies to a disk and back while a CPU works, and what the copies take of its rate.

    Copies of a step run while it computes, on the same cores and over the same memory; so what counts is not how fast
    they are alone. Copies back go to new memory, as they do in a step.
    """
    work, size_bytes = _everyday_work(amounts), _copy_bytes(torch.device("cpu"), amounts.disk_copy_bytes)
    file = SpillFile(2 * size_bytes, directory)
    try:
        copies = _DiskCopies(file, size_bytes)
        to_host, to_device = partial(copies.to_host, size_bytes), partial(copies.to_device, size_bytes)
        work()
        together = (), (to_host,), (to_device,), (to_host, to_device)
        alone, *turns = (_Turn.of(work, threads, amounts.turn_seconds) for threads in together)
        lost_seconds = sum(turn.seconds - turn.calls * alone.seconds / alone.calls for turn in turns)
        rates = [turn.copied_bytes[0] / turn.seconds for turn in turns[:2]]
        shared = [min(rate, size / turns[2].seconds) for rate, size in zip(rates, turns[2].copied_bytes, strict=True)]
        starts = (copies.to_host, copies.to_device)
        latencies = (_median_seconds(partial(start, BLOCK_BYTES), _SMALL_RUNS) for start in starts)
        return LinkRates(
            to_host_bytes_per_second=rates[0],
            to_device_bytes_per_second=rates[1],
            to_host_shared_bytes_per_second=shared[0],
            to_device_shared_bytes_per_second=shared[1],
            copy_latency_seconds=statistics.mean(latencies),
            copy_compute_seconds_per_byte=max(0.0, lost_seconds) / sum(sum(turn.copied_bytes) for turn in turns),
        )
    except OSError as error:
        raise HostMemoryError(f"copies to {str(directory)!r} fail: {error.strerror or error}") from error
    finally:
        file.close()


def _everyday_work(amounts: Amounts) -> Callable[[], object]:
    """Return a function whose time is about half a matrix product's, and half that of a sum in new memory."""
    size_bytes = _copy_bytes(torch.device("cpu"), amounts.sum_bytes)
    rows = min(_ROWS, math.isqrt(size_bytes // _SIZE))
    square, long = torch.ones(rows, rows), torch.ones(size_bytes // _SIZE)

    def work() -> None:
        torch.mm(square, square)
        torch.add(long, long)

    return work


@dataclass(frozen=True, slots=True)
class _Turn:
    """Some calls of a function, the seconds that they took, and the bytes that were copied meanwhile by each thread."""

    calls: int
    seconds: float
    copied_bytes: tuple[int, ...]

    @staticmethod
    def of(work: Callable[[], object], copies: Sequence[Callable[[], int]], least_seconds: float) -> _Turn:
        """Call `work` again and again, while each of `copies` is called again and again by a thread of its own.

        Args:
            work: called in this thread, at least `_LEAST_CALLS` times unless a copy fails.
            copies: each returns the bytes that one call has copied.
            least_seconds: the turn lasts at least so long, and until each thread has copied once.
        """
        is_over, copied = Event(), [0] * len(copies)

        def go(number: int) -> None:
            while not is_over.is_set():
                copied[number] += copies[number]()

        with ThreadPoolExecutor(max(1, len(copies))) as threads:
            ends = [threads.submit(go, number) for number in range(len(copies))]
            try:
                before, began, calls = tuple(copied), time.perf_counter(), 0
                while not any(end.done() for end in ends):  # a copy that fails ends its thread
                    work()
                    calls += 1
                    is_long = calls >= _LEAST_CALLS and time.perf_counter() - began >= least_seconds
                    if is_long and all(late > early for late, early in zip(copied, before, strict=True)):
                        break
                seconds, after = time.perf_counter() - began, tuple(copied)
            finally:
                is_over.set()
            for end in ends:
                end.result()
        return _Turn(calls, seconds, tuple(late - early for late, early in zip(after, before, strict=True)))


class _DiskCopies:
    """Copies to a disk and back, each of which returns its bytes."""

    def __init__(self, file: SpillFile, size_bytes: int) -> None:
        self._file, self._size_bytes = file, size_bytes
        self._memory = torch.ones(size_bytes, dtype=torch.uint8)
        for place in range(2):  # what was never written is not read from the disk
            file.write(self._memory.data_ptr(), size_bytes, place * size_bytes).result()

    def to_host(self, size_bytes: int) -> int:
        self._file.write(self._memory.data_ptr(), size_bytes, 0).result()
        return size_bytes

    def to_device(self, size_bytes: int) -> int:
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        self._file.read(memory.data_ptr(), size_bytes, self._size_bytes, memory).result()
        return size_bytes


def _copy_bytes(device: torch.device, most_bytes: int) -> int:
    """Return the size of the copies that are timed: whole blocks that the device has room for."""
    free = free_bytes(device)
    size_bytes = most_bytes if free is None else min(most_bytes, free // _COPY_SHARE)
    return max(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _median_seconds(copy: Callable[[], object], runs: int = _RUNS) -> float:
    seconds: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class _PinnedCopies:
    """Copies to pinned memory and back, which have engines of their own; each is started and waited for."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = [torch.ones(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._host = [torch.ones(size_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]

    def start(self, direction: int, size_bytes: int) -> None:
        """Start a copy on the stream of its direction.

        Args:
            direction: 0 to the host, 1 to the device.
            size_bytes: at most the size that the object was made for.
        """
        target, source = (self._host, self._device) if direction == 0 else (self._device, self._host)
        with torch.cuda.stream(self._streams[direction]):
            target[direction][:size_bytes].copy_(source[direction][:size_bytes], non_blocking=True)

    def wait(self, direction: int) -> float:
        """Return when the copies of a direction have ended."""
        self._streams[direction].synchronize()
        return time.perf_counter()

    def run(self, direction: int, size_bytes: int) -> None:
        """Copy, and wait until it is done.

        Args:
            direction, size_bytes: as for `start`.
        """
        self.start(direction, size_bytes)
        self.wait(direction)

    def together(self, sizes: Sequence[int]) -> list[float]:
        """Copy in both directions at once; return the seconds that each took."""
        began = time.perf_counter()
        for direction, size in enumerate(sizes):
            self.start(direction, size)
        return [self.wait(direction) - began for direction in range(2)]


def _pcie_rates(device: torch.device, amounts: Amounts) -> LinkRates:
    with torch.cuda.device(device):  # else memory is pinned for the current device, which then gets a context
        return _rates_of_copies(device, amounts.copy_bytes // 8)


def _rates_of_copies(device: torch.device, most_bytes: int) -> LinkRates:
    size_bytes = _copy_bytes(device, most_bytes)
    copies = _PinnedCopies(device, size_bytes)
    alone = [size_bytes / _median_seconds(partial(copies.run, direction, size_bytes)) for direction in range(2)]
    # As many bytes in each direction as take equally long alone.
    sizes = [int(size_bytes * rate / max(alone)) for rate in alone]
    runs = [copies.together(sizes) for _ in range(_RUNS)]
    ends = [statistics.median(run[direction] for run in runs) for direction in range(2)]
    overlap = min(ends)  # until then both copied; after it one did, alone
    shared = [
        max(size - rate * (end - overlap), 0.1 * size) / overlap
        for size, rate, end in zip(sizes, alone, ends, strict=True)
    ]
    latencies = (_median_seconds(partial(copies.run, direction, BLOCK_BYTES), _SMALL_RUNS) for direction in range(2))
    return LinkRates(
        to_host_bytes_per_second=alone[0],
        to_device_bytes_per_second=alone[1],
        to_host_shared_bytes_per_second=min(shared[0], alone[0]),
        to_device_shared_bytes_per_second=min(shared[1], alone[1]),
        copy_latency_seconds=statistics.mean(latencies),
    )
