"""Windows: the most bytes on a device between two moments, but for what compiling a graph takes in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.system.recorder import Record, empty_cache, record
from memfit.torch_private.tensors import StorageWeakRef, is_plain_dense, storage_key


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
        self._open: Record | None = None
        self.resume()
        _windows.add(self)

    def resume(self) -> None:
        """Measure on after `pause`."""
        self._open = record(self.device).begin()

    def pause(self) -> None:
        """Leave out what is taken until `resume`."""
        if self._open is None:
            return
        usage, self._open = self._open.close(), None
        self.live_bytes = max(self.live_bytes, usage.most_live_bytes)
        self.held_bytes = max(self.held_bytes, usage.most_taken_bytes)

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
        kept: one of the tensors that only the backward half, or who has the outputs, still needs.
        most_bytes: live at once since then.
        is_last: whether the graph was not called again since then.
    """

    after_forward_bytes: int
    kept: StorageWeakRef | None = None
    most_bytes: int = 0
    is_last: bool = True

    def is_awaited(self) -> bool:
        """Whether the backward half may still come: outputs that nobody kept have taken it along."""
        return self.kept is None or not self.kept.expired()


class Marks:
    """The marks of one graph's calls, until their backward halves run or can run no more."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def add(self, mark: Mark) -> None:
        """Keep the mark of a call: those of earlier ones are the last no more."""
        self._marks = [*filter(Mark.is_awaited, self._marks)]
        for each in self._marks:
            each.is_last = False
        self._marks.append(mark)

    def take(self) -> Mark | None:
        """Return the mark whose backward half runs now, of several calls the last one's, and keep it no more."""
        self._marks.sort(key=Mark.is_awaited)
        return self._marks.pop() if self._marks else None


class LossWindows:
    """What runs between the forward and the backward halves of an account's graphs: of all that are awaited, as one.

    Args:
        device: that is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: list[Mark] = []
        self.open: Window | None = None

    @property
    def are_awaited(self) -> bool:
        """Whether a graph was called whose backward half has yet to run, and none has begun since."""
        return self.open is not None and any(map(Mark.is_awaited, self._pending))

    def begin(self, mark: Mark) -> None:
        """Measure from the end of a forward half on; `end` takes the same mark."""
        self._cut()
        self._pending.append(mark)
        self.open = Window(self._device)

    def end(self, mark: Mark) -> None:
        """End the measurement that began with a mark."""
        self._cut()
        if mark in self._pending:
            self._pending.remove(mark)
        if self._pending:
            self.open = Window(self._device)

    def _cut(self) -> None:
        window, self.open = self.open, None
        if window is not None:
            window.close()
            for mark in self._pending:
                mark.most_bytes = max(mark.most_bytes, window.live_bytes)

    def drop(self) -> None:
        """Measure none of them any more."""
        self.open = None
        self._pending.clear()


def storages_of(values: Sequence[Any]) -> set[int]:
    """Return numbers of the storages of those values that are tensors."""
    return {storage_key(each) for each in values if is_plain_dense(each)}


def kept_by(returned: Sequence[Any], given: set[int]) -> StorageWeakRef | None:
    """Return the storage of the last tensor that a call has returned and was not given; None without one.

    A forward half returns what it saves for its backward half after its outputs.

    Args:
        returned: of the call.
        given: storages of its arguments, by `storages_of`.
    """
    made = (each for each in reversed(returned) if is_plain_dense(each) and storage_key(each) not in given)
    last = next(made, None)
    return None if last is None else StorageWeakRef(last.untyped_storage())


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
