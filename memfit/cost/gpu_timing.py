"""Timing one op on a GPU: the seconds of its kernels, and the seconds that the host takes to launch them.

Kernels start with inputs in memory, as in a step, and not in the L2 cache that the last run has filled: it is
overwritten before. While that runs, the host launches the op, so that no launch is in the time between the two events.
Before the first op the clocks are brought up, which an idle GPU lowers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from memfit.cost.environment import free_bytes

_CACHES = 2  # of the size of the L2 cache are overwritten
_MOST_FLUSH_BYTES = 256 << 20
_FLUSHES = 3  # which take longer than the launches of an op
_WARM_SECONDS = 0.1
_WARM_ROWS = 4096
_LAUNCHES = 20  # in a row, without waiting


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done all that was launched; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    """Return the seconds of the host's clock, once a device has done all that was launched."""
    synchronize(device)
    return time.perf_counter()


def kernel_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the kernels that `run` launches, from a cold cache.

    Args:
        run: launches them on the current stream.
        device: a CUDA device.
    """
    bring_clocks_up(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        overwrite_cache(device)
        begin.record()
        run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def dispatch_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the host takes to launch what `run` launches; of an op that waits, with its kernels.

    Args:
        run: launches kernels on the current stream.
        device: a CUDA device.
    """
    synchronize(device)
    started = time.perf_counter()
    for _ in range(_LAUNCHES):
        run()
    seconds = (time.perf_counter() - started) / _LAUNCHES
    synchronize(device)
    return seconds


def on_two_timelines(kernels: Sequence[float], dispatches: Sequence[float]) -> list[float]:
    """Return how much later the device is done with each op than with the one before.

    The host launches the ops one after the other; the device starts each when it is launched and the last is done.
    Where kernels are long this is their time, and where they are short that of their launches: the sum is the step's.

    >>> on_two_timelines([5.0, 5.0, 1.0], [2.0, 2.0, 2.0])
    [7.0, 5.0, 1.0]
    >>> on_two_timelines([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    [3.0, 2.0, 2.0]

    Args:
        kernels: seconds of the ops on the device, in order.
        dispatches: seconds of the same ops on the host.
    """
    launched = done = 0.0
    seconds: list[float] = []
    for kernel, dispatch in zip(kernels, dispatches, strict=True):
        launched += dispatch
        end = max(done, launched) + kernel
        seconds.append(end - done)
        done = end
    return seconds


@functools.cache
def bring_clocks_up(device: torch.device) -> None:
    """Keep the device busy for a while, once a process."""
    rows = torch.ones(_WARM_ROWS, _WARM_ROWS, device=device)
    stop = time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < stop:
        torch.mm(rows, rows)
        synchronize(device)


def overwrite_cache(device: torch.device) -> None:
    """Overwrite a GPU's L2 cache, with at most half of the memory that is free."""
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    size_bytes = _CACHES * cache_bytes or _MOST_FLUSH_BYTES
    size_bytes = min(size_bytes, _MOST_FLUSH_BYTES, (free_bytes(device) or _MOST_FLUSH_BYTES) // 2)
    flushed = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    for _ in range(_FLUSHES):
        flushed.zero_()
