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

    The thread ends when nothing is left to do, when `stop` is called, and when the interpreter exits: the listener that
    a piece of work is given then raises KeyboardInterrupt, on which a search returns. Where no plan is found, a warning
    says so.
    """

    def __init__(self) -> None:
        self._state = _State()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._state.stop)
        _all.add(self)
        _stop_all_at_exit()

    def add(self, work: Work) -> None:
        """Append a piece of work; it begins when those before it are done."""
        with self._state.changed:
            if self._state.is_stopped:
                return
            self._state.waiting.append(work)
            if not self._state.is_running:
                self._state.is_running = True
                self._thread = threading.Thread(target=_run, args=(self._state,), name="memfit search", daemon=True)
                self._thread.start()

    def take(self, key: Hashable) -> Plan | None:
        """Return the plan that was found for a key, once; None if there is no new one."""
        return self._state.found.pop(key, None) if self._state.found else None

    @contextmanager
    def paused(self) -> Generator[None]:
        """Let the thread rest inside the block: a capture needs Python's lock, and asks who draws random numbers."""
        self._state.may_run.clear()
        try:
            yield
        finally:
            self._state.may_run.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is left to do; return whether that is so.

        Args:
            seconds: how long to wait at most; None waits as long as it takes.
        """
        with self._state.changed:
            return self._state.changed.wait_for(lambda: not self._state.is_running, seconds)

    def stop(self) -> None:
        """End the thread, and wait for it; nothing can be added any more."""
        self._state.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class _State:
    """What the thread and its owner share; it does not hold the owner, so that the owner's end can end the thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[Work] = []
        self.found: dict[Hashable, Plan] = {}
        self.is_running = False
        self.is_stopped = False
        self.may_run = threading.Event()
        self.may_run.set()

    def stop(self) -> None:
        with self.changed:
            self.is_stopped = True
            self.waiting.clear()
        self.may_run.set()

    def next(self) -> Work | None:
        with self.changed:
            if self.waiting:
                return self.waiting.pop(0)
            self.end()  # under the lock: what is added from here on begins a thread
            return None

    def end(self) -> None:
        with self.changed:
            self.is_running = False
            self.changed.notify_all()

    def listen(self, _progress: Progress) -> None:
        self.may_run.wait()
        if self.is_stopped:
            raise KeyboardInterrupt  # a search returns its best plan


def _run(state: _State) -> None:
    _yield_to_others()
    try:
        while work := state.next():
            with _one_at_a_time:
                _do(work, state)
    except BaseException:
        state.end()
        raise


def _yield_to_others() -> None:
    """Let this thread, and those that it starts, run where the steps leave a processor idle."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _do(work: Work, state: _State) -> None:
    state.may_run.wait()
    if state.is_stopped:
        return
    try:
        state.found.update(work(state.listen))
    except KeyboardInterrupt:  # which `listen` has raised
        return
    except MemfitError as error:
        _log.warning("a plan was not searched further: %s", error)


@cache
def _stop_all_at_exit() -> None:
    before_threads_end(_stop_all)


def _stop_all() -> None:
    every = tuple(_all)
    for behind in every:
        behind._state.stop()
    for behind in every:
        behind.stop()
