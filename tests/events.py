"""An event that a process sets and its parent waits for, in place of a time after which it must have happened."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

import pytest

_SAFETY_SECONDS = 300


class Event:
    """A named pipe; a process sets the event by writing to its `path`."""

    def __init__(self, folder: Path, name: str = "event") -> None:
        self.path = folder / name
        os.mkfifo(self.path)
        self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait(self) -> None:
        """Return as soon as the event is set."""
        self._read()

    def wait_for_the_end(self) -> None:
        """Return as soon as every process that had opened the pipe has ended."""
        while self._read():
            pass
        os.close(self._reader)

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._reader], [], [], _SAFETY_SECONDS)
        assert ready, f"nothing happened at {self.path}"
        return os.read(self._reader, 1024)


def time_out_at(event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time that a process is given be up at `event`, however long that takes."""

    def communicate(process: subprocess.Popen[str], _input: str | None = None, timeout: float = 0.0) -> None:
        event.wait()
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
