"""Ctrl-C during long calls into C++, in processes of their own, because the signal is for the whole process."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from memfit.commands.work import CommandInterrupted, working

CALLS = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background

def interrupt_soon():
    threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()

"""
ASIDE = """
from memfit.system.worker import run_aside
stop = threading.Event()
interrupt_soon()
try:
    run_aside(lambda: stop.wait(100), stop.set)
except KeyboardInterrupt:
    print("stopped", stop.is_set())
"""
SOLVER = """
import random
from ortools.sat.python import cp_model
from memfit.planners.engine.solver import make_solver
from memfit.system.worker import run_aside

chance = random.Random(0)
model = cp_model.CpModel()  # a market split, for which no solver has a proof in minutes (Cornuejols and Dawande 1998)
chosen = [model.new_bool_var("") for _ in range(50)]
for _ in range(6):
    shares = [chance.randrange(100) for _ in chosen]
    model.add(sum(share * each for share, each in zip(shares, chosen)) == sum(shares) // 2)
solver = make_solver(limit_seconds=10_000)
interrupt_soon()
try:
    print(solver.status_name(run_aside(lambda: solver.solve(model), solver.stop_search)))
except KeyboardInterrupt:
    print("stopped")
"""


def run(code: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CALLS + code], capture_output=True, text=True, timeout=200, check=False
    )
    return done.stdout, done.stderr


def test_the_thread_that_waits_hears_ctrl_c() -> None:
    assert run(ASIDE) == ("stopped True\n", "")


def test_an_integer_program_ends_at_ctrl_c() -> None:
    assert run(SOLVER) == ("stopped\n", "")


def test_ctrl_c_that_python_drops_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destructor or a callback that runs when the signal comes swallows the KeyboardInterrupt."""
    seconds = [10.0]
    monkeypatch.setattr("memfit.commands.work.time.monotonic", lambda: seconds[0])
    with pytest.raises(CommandInterrupted), working() as work:
        with suppress(KeyboardInterrupt):
            work.interrupt()
        work.done(0.0, 1.0)  # a planner that heard it may still report
        seconds[0] += 0.5
        work.done(0.5, 1.0)
        raise AssertionError("the interrupt was lost")


def test_an_error_that_ctrl_c_leads_to_is_reported_as_ctrl_c() -> None:
    """Numba raises RuntimeError where its compilation was interrupted."""
    with pytest.raises(CommandInterrupted), working() as work:
        with suppress(KeyboardInterrupt):
            work.interrupt()
        raise RuntimeError("no compiled object yet")
