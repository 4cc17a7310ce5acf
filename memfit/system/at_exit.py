"""Calls before the interpreter waits for its threads at exit."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


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
