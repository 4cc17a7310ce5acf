"""Calls before the interpreter waits for its threads at exit: `atexit` calls only after that."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


def before_threads_end(call: Callable[[], None]) -> None:
    """Have `call` run when the interpreter exits, before it waits for the threads of thread pools.

    Python keeps that registration to itself; where it is not there, `call` runs after these threads have ended.

    Args:
        call: tells threads to end, and waits for them.
    """
    register = getattr(threading, "_register_atexit", atexit.register)  # as concurrent.futures.thread does
    register(call)
