"""Stored seconds of tests and of their shared fixtures: those that take long are `slow` (see `pyproject.toml`).

`make durations` runs all tests and stores them anew in `durations.json`, in seconds on two cores, from one second on.
A test is as slow as the slowest of what it needs: its own call, or a fixture that its file shares, which the first test
that is run would wait for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

PATH = Path(__file__).parent / "durations.json"
SLOW_SECONDS = 1.0
_FIFTHS = 5


class Durations:
    """What tests and shared fixtures took.

    Args:
        path: of the file; without one nothing is known.

    Attributes:
        seconds: by the test's name, and by file and name of a fixture, joined by `::fixture `.
    """

    def __init__(self, path: Path = PATH) -> None:
        self._path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def slowest(self, item: pytest.Item) -> tuple[str, float]:
        """Return what a test needs that takes the longest, and its seconds."""
        file = item.nodeid.partition("::")[0]
        names = [item.nodeid, *(fixture_key(file, name) for name in getattr(item, "fixturenames", ()))]
        return max(((name, self.seconds.get(name, 0.0)) for name in names), key=lambda each: each[1])

    def mark(self, items: Iterable[pytest.Item]) -> None:
        """Mark tests as slow that take long."""
        for item in items:
            if self.slowest(item)[1] >= SLOW_SECONDS:
                item.add_marker(pytest.mark.slow)

    def is_of_fifth(self, item: pytest.Item, fifth: int) -> bool:
        """Return whether a slow test belongs to a fifth of them; those that share a slow fixture belong together."""
        name, seconds = self.slowest(item)
        key = name if seconds >= SLOW_SECONDS else item.nodeid
        return zlib.crc32(key.encode()) % _FIFTHS == fifth % _FIFTHS

    def store(self, measured: dict[str, float]) -> None:
        """Write what was measured in the place of what was known of it; what was not run stays."""
        known = {**self.seconds, **measured}
        kept = {name: round(seconds, 1) for name, seconds in sorted(known.items()) if seconds >= SLOW_SECONDS}
        written = self._path.with_suffix(".tmp")
        written.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
        written.rename(self._path)


def fixture_key(file: str, name: str) -> str:
    """Return the key of a fixture that the tests of a file share."""
    return f"{file}::fixture {name}"
