"""A thread that carries out calls one after the other, for callers that Ctrl-C may end at any moment.

The executors, futures and events of the standard library keep locks that Python code takes. An interrupt right after
one was taken leaves it taken, and the next that asks for it, perhaps the thread itself, waits for ever. Here calls are
passed by a queue that is written in C, and whoever waits for a call holds nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar, cast

from memfit.system.at_exit import before_threads_end

R = TypeVar("R")

_LOOK_AGAIN_SECONDS = 1.0  # where several threads wait for one call, only one is woken


class Call(Generic[R]):
    """A call that a thread carries out."""

    __slots__ = ("_ended", "_error", "_function", "_result", "has_ended")

    def __init__(self, function: Callable[[], R]) -> None:
        self._function: Callable[[], R] | None = function
        self._result: R | None = None
        self._error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()
        self.has_ended = False

    def wait(self) -> None:
        """Wait until the call has ended."""
        while not self.has_ended:  # an interrupt may follow on the wake-up: then this says that nothing is left to do
            self._ended.acquire(timeout=_LOOK_AGAIN_SECONDS)

    def result(self) -> R:
        """Wait until the call has ended, and return what it returned.

        Raises:
            BaseException: what it raised.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return cast("R", self._result)

    @property
    def succeeded(self) -> bool:
        """Whether the call has ended, and raised nothing."""
        return self.has_ended and self._error is None

    def run(self) -> None:
        """Carry out the call, on the thread."""
        function, self._function = self._function, None
        assert function is not None, "a call is carried out once"
        try:
            self._result = function()
        except BaseException as error:  # noqa: BLE001 (raised again by `result`)
            self._error = error
        self.has_ended = True
        self._ended.release()
        del self, function  # the error's traceback refers to this frame


class Worker:
    """A thread that carries out calls in turn, until `end` is called."""

    def __init__(self, name: str) -> None:
        """Start the thread.

        Args:
            name: of the thread.
        """
        self._calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        self._process = os.getpid()
        # At exit Python would stop a daemon's thread wherever it is; it is waited for before. Others could hang there:
        # an interrupt while one is started may leave it as it was before its first call.
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, function: Callable[[], R]) -> Call[R]:
        """Return a call that is carried out after those before it.

        Args:
            function: is called on the thread.
        """
        call = Call(function)
        self._calls.put(cast("Call[object]", call))
        return call

    def end(self) -> None:
        """Let the thread end after the calls submitted so far."""
        self._calls.put(None)

    def end_at_exit(self) -> None:
        """Wait for the calls when the interpreter exits."""
        before_threads_end(self._finish)

    def _finish(self) -> None:
        if self._process == os.getpid():  # the thread of a forked process's parent is not in that process
            self.submit(_nothing).wait()


def _work(calls: SimpleQueue[Call[object] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # nothing of it is kept while the next one is waited for


def _nothing() -> None:
    """Do nothing, after all calls before."""


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
