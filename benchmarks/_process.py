"""Measurements in processes of their own: no cache, compiled code or leaked tensor of one reaches the next."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CACHE = "MEMFIT_CACHE"
CHILD = "--child"
_COMPLAINT_LINES = 3
_EXIT_SECONDS = 10.0


def in_fresh_process(
    script: str, request: dict[str, Any], *, timeout_seconds: float, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run `script` again as a child that answers `request`; return its answer, or `{"error": why}`.

    What a child that gives several answers gave last is returned with the error that ended it; `timed_out` is there
    where that was the time. What the child prints goes on to this process's standard error. `environment` is added to
    that of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, script, CHILD, json.dumps(request), str(answer)]
        variables = os.environ | (environment or {})
        status, complaint = run_for(command, timeout_seconds, stdout=sys.stderr, stderr=subprocess.PIPE, env=variables)
        last: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        if status is None:
            return last | {"error": f"took more than {timeout_seconds:.0f} s", "timed_out": True}
        if status or not last:
            print(complaint, file=sys.stderr)
            why = " ".join(complaint.strip().splitlines()[-_COMPLAINT_LINES:])
            return last | {"error": f"exit status {status}: {why}"}
        return last


def in_forked_child(
    measure: Callable[[], dict[str, Any] | Iterator[dict[str, Any]]], *, timeout_seconds: float
) -> dict[str, Any]:
    """Call `measure` in a fork of this process; return its last answer, with `error` if it did not come to its end.

    What this process has imported need not be imported again. It must not have touched CUDA: a fork cannot use it then.
    What the child started ends with it. `timed_out` is there where the time was up.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer_through, args=(measure, theirs))
    child.start()
    theirs.close()
    last: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            last = ours.recv()
        return last | {"error": f"took more than {timeout_seconds:.0f} s", "timed_out": True}
    except EOFError:
        child.join(_EXIT_SECONDS)
        return last if child.exitcode == 0 else last | {"error": last.get("error", f"exit status {child.exitcode}")}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.kill()
        child.join()
        ours.close()


def _answer_through(measure: Callable[[], dict[str, Any] | Iterator[dict[str, Any]]], pipe: Connection) -> None:
    """In a fork: send each answer of `measure`, and in the end how it failed, if it did."""
    os.setpgrp()
    last: dict[str, Any] = {}
    try:
        answers = measure()
        for last in [answers] if isinstance(answers, dict) else answers:
            pipe.send(last)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent says it
        traceback.print_exc()
        pipe.send(last | {"error": f"{type(error).__name__}: {error}"})
        pipe.close()
        sys.stderr.flush()
        os._exit(1)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of torch may not end in a fork


def run_for(command: Sequence[str], seconds: float, **how: Any) -> tuple[int | None, str]:
    """Run a command for so long at most; return its exit status, None if it was stopped, and its standard error.

    What it has started ends with it: a device that somebody else still uses measures wrong. `how` goes to Popen.
    """
    process = subprocess.Popen(command, text=True, process_group=0, **how)
    try:
        _, complaint = process.communicate(timeout=max(0.0, seconds))
        return process.returncode, complaint or ""
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Let the children of this block share a cache of their own: op times measured on a busier day are not read.

    Compiled libraries, which are found by a hash of their source, stay.
    """
    before = os.environ.get(CACHE)
    shared = Path(before or Path.home() / ".cache" / "memfit")
    with tempfile.TemporaryDirectory(prefix="memfit-benchmark-", ignore_cleanup_errors=True) as folder:
        for built in shared.glob("torch-*"):
            (Path(folder) / built.name).symlink_to(built.resolve())
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE]
            if before is not None:
                os.environ[CACHE] = before


def answer_if_child(measure: Callable[..., dict[str, Any] | Iterator[dict[str, Any]]]) -> bool:
    """In a child: call `measure(**request)`, hand the answer back, and return True. Else return False.

    Of several answers each replaces the one before, so that a child that is stopped has given what it had.
    """
    if len(sys.argv) < 2 or sys.argv[1] != CHILD:
        return False
    request, path = json.loads(sys.argv[2]), Path(sys.argv[3])
    answers = measure(**request)
    for answer in [answers] if isinstance(answers, dict) else answers:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(answer))
        unfinished.replace(path)
    return True
