"""Windows: the most bytes on a device between two moments, but for what compiling a graph takes in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

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


@contextmanager
def apart(device: torch.device) -> Iterator[Window]:
    """Measure the block in a window of its own; those that are open on the device leave it out.

    What torch's allocator holds unused at the end is returned, so that it does not count in theirs.

    Args:
        device: that is measured.
    """
    is_shared, thread = device.type == "cuda", threading.get_ident()  # a CPU's are each of one thread
    others = [each for each in _windows if each.device == device and (is_shared or each.thread == thread)]
    for each in others:
        each.pause()
    own = Window(device)
    try:
        yield own
    finally:
        own.close()
        empty_cache(device)
        for each in others:
            each.resume()
