"""Progress of plans in the log: each stage when it begins, and a line every ten seconds of a search.

`logging.basicConfig(level=logging.INFO)` shows it.
"""

from __future__ import annotations

import logging

from memfit.plan import Progress
from memfit.system.budget import format_bytes

PROGRESS = "memfit.progress"
"""The logger's name; records are of level INFO."""
SEARCHING = "searching a plan"
"""The stage that `Settings.on_stage` is called with before a planner runs; a kept plan has no such stage."""
TOLD_SECONDS = 10.0
"""Between two lines of one stage."""

_log = logging.getLogger(PROGRESS)


def tell_stage(title: str) -> None:
    """The default listener of stages: it logs each."""
    _log.info("%s", title)


def search_text(progress: Progress) -> str:
    """Return a planner's report as text.

    >>> search_text(Progress(elapsed_seconds=1, best_overhead=0.1, best_peak_bytes=4096, message="moves"))
    'best +10.0% at 4 KiB, bound +0.00%, gap 10.00%, moves'
    """
    if progress.best_overhead is None or progress.best_peak_bytes is None:
        return progress.message
    best = f"best {progress.best_overhead:+.1%} at {format_bytes(progress.best_peak_bytes)}"
    parts = (best, f"bound {progress.bound_overhead:+.2%}", f"gap {progress.gap:.2%}", progress.message)
    return ", ".join(filter(None, parts))


class TellsSearch:
    """The default listener of searches: it logs one report every ten seconds."""

    def __init__(self) -> None:
        self._told_seconds = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.elapsed_seconds < self._told_seconds:  # another search
            self._told_seconds = 0.0
        if progress.elapsed_seconds - self._told_seconds >= TOLD_SECONDS:
            self._told_seconds = progress.elapsed_seconds
            _log.info("%s: %.0f s; %s", SEARCHING, progress.elapsed_seconds, search_text(progress))


tell_search = TellsSearch()
