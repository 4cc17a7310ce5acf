"""Windows: the most bytes on a device between two moments, but for what compiling a graph takes in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from memfit.system.recorder import Usage, empty_cache, record


class Window:
    """Begins a window; it ends with `close`, or with the object.

    Args:
        device: that is measured.

    Attributes:
        live_bytes: the most that were live at once, as `allocated_bytes` counts.
        held_bytes: the most that the allocator held; on a CPU the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.thread = device, threading.get_ident()
        self.live_bytes = self.held_bytes = 0
        self._open: tuple[AbstractContextManager[Usage], Usage] | None = None
        self.resume()
        _windows.add(self)

    def resume(self) -> None:
        """Measure on after `pause`."""
        context = record(self.device)
        self._open = context, context.__enter__()

    def pause(self) -> None:
        """Leave out what is taken until `resume`."""
        if self._open is None:
            return
        (context, usage), self._open = self._open, None
        context.__exit__(None, None, None)
        self.live_bytes = max(self.live_bytes, usage.start_bytes + usage.peak_bytes)
        self.held_bytes = max(self.held_bytes, usage.start_bytes + usage.taken_bytes)

    def close(self) -> None:
        """End the window."""
        self.pause()
        _windows.discard(self)


_windows: weakref.WeakSet[Window] = weakref.WeakSet()


@dataclass(slots=True, kw_only=True, eq=False)
class Mark:
    """The end of a graph's forward half, whose backward half has yet to run.

    Attributes:
        after_forward_bytes: live at that time.
        most_bytes: live at once since then.
        is_last: whether the graph was not called again since then.
    """

    after_forward_bytes: int
    most_bytes: int = 0
    is_last: bool = True


@contextmanager
def paused(windows: Sequence[Window]) -> Iterator[None]:
    """Leave out of some windows what is taken in the block."""
    for each in windows:
        each.pause()
    try:
        yield
    finally:
        for each in windows:
            each.resume()


@contextmanager
def apart(device: torch.device) -> Iterator[Window]:
    """Measure the block in a window of its own; those that are open on the device leave it out.

    What torch's allocator holds unused at the end is returned, so that it does not count in theirs.

    Args:
        device: that is measured.
    """
    is_shared, thread = device.type == "cuda", threading.get_ident()  # a CPU's are each of one thread
    others = [each for each in _windows if each.device == device and (is_shared or each.thread == thread)]
    with paused(others):
        own = Window(device)
        try:
            yield own
        finally:
            own.close()
            empty_cache(device)
