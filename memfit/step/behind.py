"""Work behind running steps: on a thread, one piece at a time in the whole process."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, suppress
from functools import cache

from memfit.errors import MemfitError
from memfit.plan import Plan, Progress
from memfit.system.at_exit import before_threads_end

Work = Callable[[Callable[[Progress], None]], dict[Hashable, Plan]]
"""Given a listener for a search's progress, which may end the search, returns plans by the key of their variant."""

_NICE = 10  # setpriority(2): on Linux a thread has its own, and those that it starts inherit it

_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
_all: weakref.WeakSet[Behind] = weakref.WeakSet()


class Behind:
    """Runs pieces of work on a thread, and keeps the plans that they return until they are asked for.

    The thread ends when nothing is left to do, when `stop` or `end` is called, and when the interpreter exits: the
    listener that a piece of work is given then raises KeyboardInterrupt, on which a search returns. Where no plan is
    found, a warning says so. The thread holds this object, and so can end with another one that calls `end`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Work] = []
        self._found: dict[Hashable, Plan] = {}
        self._is_running = self._is_ended = False
        self._may_run = threading.Event()
        self._may_run.set()
        self._thread: threading.Thread | None = None
        _all.add(self)
        _stop_all_at_exit()

    def add(self, work: Work) -> None:
        """Append a piece of work; it begins when those before it are done."""
        with self._changed:
            if self._is_ended:
                return
            self._waiting.append(work)
            if not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(target=self._run, name="memfit search", daemon=True)
                self._thread.start()

    def take(self, key: Hashable) -> Plan | None:
        """Return the plan that was found for a key, once; None if there is no new one."""
        return self._found.pop(key, None) if self._found else None

    @contextmanager
    def paused(self) -> Generator[None]:
        """Let the thread rest inside the block: a capture needs Python's lock, and asks who draws random numbers."""
        self._may_run.clear()
        try:
            yield
        finally:
            self._may_run.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is left to do; return whether that is so.

        Args:
            seconds: how long to wait at most; None waits as long as it takes.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, seconds)

    def end(self) -> None:
        """Have the thread end; nothing can be added any more."""
        with self._changed:
            self._is_ended = True
            self._waiting.clear()
        self._may_run.set()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        _yield_to_others()
        try:
            while work := self._next():
                with _one_at_a_time:
                    self._do(work)
        except BaseException:
            self._finish()
            raise

    def _next(self) -> Work | None:
        with self._changed:
            if self._waiting:
                return self._waiting.pop(0)
            self._finish()  # under the lock: what is added from here on begins a thread
            return None

    def _finish(self) -> None:
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def _do(self, work: Work) -> None:
        self._may_run.wait()
        if self._is_ended:
            return
        try:
            self._found.update(work(self._listen))
        except KeyboardInterrupt:  # which `_listen` has raised
            return
        except MemfitError as error:
            _log.warning("a plan was not searched further: %s", error)

    def _listen(self, _progress: Progress) -> None:
        self._may_run.wait()
        if self._is_ended:
            raise KeyboardInterrupt  # a search returns its best plan


def _yield_to_others() -> None:
    """Let this thread, and those that it starts, run where the steps leave a processor idle."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@cache
def _stop_all_at_exit() -> None:
    before_threads_end(_stop_all)


def _stop_all() -> None:
    every = tuple(_all)
    for behind in every:
        behind.end()
    for behind in every:
        behind.stop()
