"""Windows of a training loop: the bytes that each takes, and the seconds of its forward and backward pass."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.checkpointing.reporting import WindowSeen
from memfit.memory.contract import Usage, WindowKind
from memfit.system.recorder import Usage as Recorded
from memfit.system.recorder import record

_MOST_REMEMBERED = 1000


class Meter:
    """Measures one window at a time.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: tuple[AbstractContextManager[Recorded], Recorded] | None = None
        self._begin = self._end = None

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    def open(self) -> None:
        """Begin a window."""
        context = record(self._device)
        self._open = context, context.__enter__()
        self._begin, self._end = self._now(), None

    def end_of_backward(self) -> None:
        """Note that a backward pass is over; of several the last one counts."""
        self._end = self._now()

    def close(self, kind: WindowKind, uncounted_bytes: int) -> Usage:
        """End the window, and return what it took.

        Args:
            kind: of the window.
            uncounted_bytes: that are live, too, and that the recorder does not count.
        """
        assert self._open is not None
        context, recorded = self._open
        self._open = None
        context.__exit__(None, None, None)
        live_bytes = uncounted_bytes + recorded.start_bytes + recorded.peak_bytes
        taken_bytes = live_bytes if recorded.reserved_bytes is None else max(recorded.reserved_bytes, live_bytes)
        return Usage(taken_bytes=taken_bytes, live_bytes=live_bytes, kind=kind)

    def seconds(self) -> float | None:
        """Return the seconds from the beginning of the last window to the end of backward; waits for the device."""
        if self._begin is None or self._end is None:
            return None
        if self._device.type == "cuda":
            self._end.synchronize()
            return self._begin.elapsed_time(self._end) * 1e-3
        return self._end - self._begin

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(slots=True)
class History:
    """What windows took, the latest ones, and totals of all.

    Attributes:
        latest: windows.
        count, lean, over: of all windows, of lean passes, and of those that took more than the budget.
        most_bytes: that one took.
    """

    latest: deque[WindowSeen] = field(default_factory=lambda: deque(maxlen=_MOST_REMEMBERED))
    count: int = 0
    lean: int = 0
    over: int = 0
    most_bytes: int = 0

    def add(self, window: WindowSeen, *, is_over: bool) -> None:
        """Count a window."""
        self.latest.append(window)
        self.count += 1
        self.lean += window.plan == 0 and window.kind is not WindowKind.EVALUATION
        self.over += is_over
        self.most_bytes = max(self.most_bytes, window.taken_bytes)
