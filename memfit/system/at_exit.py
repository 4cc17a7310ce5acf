"""Calls before the interpreter waits for its threads at exit: `atexit` calls only after that."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import cache
from weakref import WeakSet

_waited_for: WeakSet[threading.Thread] = WeakSet()


def before_threads_end(call: Callable[[], None]) -> None:
    """Have `call` run when the interpreter exits, before it waits for the threads of thread pools.

    Python keeps that registration to itself; where it is not there, `call` runs after these threads have ended.

    Args:
        call: tells threads to end, and waits for them.
    """
    register = getattr(threading, "_register_atexit", atexit.register)  # as concurrent.futures.thread does
    register(call)


def wait_at_exit(thread: threading.Thread) -> None:
    """Have the interpreter wait for a daemon's thread when it exits.

    It would end the thread wherever it asks for Python's lock next. In a destructor of C++ that aborts the process.

    Args:
        thread: has an end.
    """
    _waited_for.add(thread)
    _wait_for_all_at_exit()


@cache
def _wait_for_all_at_exit() -> None:
    before_threads_end(_wait_for_all)


def _wait_for_all() -> None:
    for thread in tuple(_waited_for):
        thread.join()
