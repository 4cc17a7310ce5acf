"""Long calls into C++ that Ctrl-C ends at once: Python hears a signal only between its own instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memfit.system.worker import Worker

R = TypeVar("R")


def run_aside(work: Callable[[], R], stop: Callable[[], None]) -> R:
    """Return the result of `work`, which runs in another thread, while this one waits.

    >>> run_aside(lambda: 2, lambda: None)
    2

    Args:
        work: a call that lets other threads run meanwhile.
        stop: makes `work` end soon; called on Ctrl-C.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once `work` has ended.
    """
    thread = Worker("memfit aside")
    running = thread.submit(work)
    thread.end()
    try:
        return running.result()
    except KeyboardInterrupt:
        stop()
        running.wait()
        raise
