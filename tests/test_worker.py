"""Threads that carry out calls, for callers that are interrupted at any moment."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

from memfit.system.worker import Worker


def test_calls_are_carried_out_in_turn_and_errors_are_raised_where_they_are_waited_for() -> None:
    worker, done = Worker("in turn"), list[int]()
    calls = [worker.submit(lambda number=number: done.append(number) or number) for number in range(50)]
    failing = worker.submit(lambda: 1 // 0)
    assert [call.result() for call in calls] == done == list(range(50))
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert failing.has_ended and not failing.succeeded and calls[0].succeeded
    worker.end()


def test_nothing_of_a_call_is_kept() -> None:
    class Kept:
        pass

    worker, kept = Worker("keeps nothing"), Kept()
    gone = weakref.ref(kept)

    def fail(_: Kept = kept) -> None:
        raise ValueError

    call = worker.submit(fail)
    call.wait()
    gc.disable()
    try:
        del kept, fail, call
        time.sleep(0.05)
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_a_caller_that_is_interrupted_anywhere_leaves_the_thread_working() -> None:
    """With futures of the standard library, this waits for ever after a few thousand interrupts at most."""
    worker, interrupted = Worker("interrupted"), 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(2_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-6 * (1 + number % 40))
                for _ in range(20):
                    worker.submit(int).result()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            while True:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    break
                except KeyboardInterrupt:
                    continue
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
    ended = threading.Event()
    worker.submit(ended.set)
    assert ended.wait(10)
    worker.end()


def test_calls_end_before_the_interpreter_does() -> None:
    code = (
        "import time; from memfit.system.worker import Worker\n"
        "worker = Worker('at exit'); worker.end_at_exit()\n"
        "worker.submit(lambda: (time.sleep(0.3), print('ended', flush=True)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr, found.returncode) == ("ended\n", "", 0)
