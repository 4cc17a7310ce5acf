"""Seconds of what a device does, without waiting for it until they are read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """Seconds from when it is made until it is stopped: of the host for a CPU, between two events on CUDA.

    Args:
        device: a CPU or CUDA device, whose current stream is timed.
        clock: gives the seconds of the host.
    """

    __slots__ = ("_begin", "_clock", "_device", "_end")

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock, self._end = device, clock, None
        self._begin = self._now()

    def stop(self) -> None:
        """Note the end; of several the last one counts."""
        self._end = self._now()

    def seconds(self) -> float | None:
        """Return the seconds, once the device is there; None if it was not stopped."""
        if self._end is None or self._device.type != "cuda":
            return None if self._end is None else self._end - self._begin
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e-3

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
