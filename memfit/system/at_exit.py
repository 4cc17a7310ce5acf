"""Calls before the interpreter waits for its threads at exit, and threads that it waits for."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import cache
from weakref import WeakSet

_waited_for: WeakSet[threading.Thread] = WeakSet()


def before_threads_end(call: Callable[[], None]) -> None:
    """Have `call` run when the interpreter exits, before it waits for the threads of thread pools.

    Python keeps that registration to itself. Where it is not there, and where the main thread has ended already, `call`
    runs as those of `atexit` do: after all threads have ended but the daemons'.

    Args:
        call: tells threads to end, and waits for them.
    """
    register = getattr(threading, "_register_atexit", atexit.register)  # as concurrent.futures.thread does
    try:
        register(call)
    except RuntimeError:  # another thread goes on after the main one
        atexit.register(call)


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
    atexit.register(_wait_for_all)


def _wait_for_all() -> None:
    for thread in tuple(_waited_for):
        thread.join()
