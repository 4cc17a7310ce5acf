"""Measurements in processes of their own: no cache, compiled code or leaked tensor of one reaches the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CACHE = "MEMFIT_CACHE"
CHILD = "--child"
_COMPLAINT_LINES = 3


def in_fresh_process(script: str, request: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
    """Run `script` again as a child that answers `request`; return its answer, or `{"error": why}`.

    What the child prints goes on to this process's standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, script, CHILD, json.dumps(request), str(answer)]
        try:
            done = subprocess.run(
                command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {timeout_seconds:.0f} s"}
        if done.returncode or not answer.exists():
            complaint = " ".join(done.stderr.strip().splitlines()[-_COMPLAINT_LINES:])
            print(done.stderr, file=sys.stderr)
            return {"error": f"exit status {done.returncode}: {complaint}"}
        return json.loads(answer.read_text())


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Let the children of this block share a cache of their own: op times measured on a busier day are not read."""
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory(prefix="memfit-benchmark-") as folder:
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE]
            if before is not None:
                os.environ[CACHE] = before


def answer_if_child(measure: Callable[..., dict[str, Any]]) -> bool:
    """In a child: call `measure(**request)`, hand the answer back, and return True. Else return False."""
    if len(sys.argv) < 2 or sys.argv[1] != CHILD:
        return False
    request, answer = sys.argv[2:4]
    Path(answer).write_text(json.dumps(measure(**json.loads(request))))
    return True
