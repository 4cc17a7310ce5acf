"""The seconds of calls on a GPU, by events around them; nobody waits for these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOST_TIMED = 1 << 16  # kinds of calls of which the seconds are remembered
MOST_OPEN = 256  # kinds of calls whose events were not read


class CallTimes:
    """The seconds of one call of each kind on a CUDA device.

    Args:
        device: of the calls.

    Attributes:
        seconds: by the number of the kind.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[int, float] = {}
        self._device = device
        self._open: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._read: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # to be recorded again

    def has_to_time(self, number: int) -> bool:
        """Return whether no call of a kind lies between events; of one that does, the GPU may have reached them by now.

        Args:
            number: of the kind.
        """
        if number in self.seconds:
            return False
        events = self._open.get(number)
        if events is not None and events[1].query():
            self._note(number)
        return events is None

    @contextmanager
    def between_events(self, number: int) -> Iterator[None]:
        """Return a block whose kernels on the current stream are timed.

        Args:
            number: of the kind.
        """
        if len(self._open) == MOST_OPEN:
            self._note(next(iter(self._open)))
        if not self._read:
            self._read.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        begin, end = self._read.pop()
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        self._open[number] = begin, end

    def _note(self, number: int) -> None:
        """Read the events of a kind, if the GPU has reached them, and have them ready for another."""
        begin, end = self._open.pop(number)
        self._read.append((begin, end))
        if end.query():
            self.seconds[number] = begin.elapsed_time(end) / 1000
            if len(self.seconds) > _MOST_TIMED:
                del self.seconds[next(iter(self.seconds))]
