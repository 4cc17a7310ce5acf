"""The queue of `make gpu`: children one after the other, each in a fork, what they found stored after each."""

from __future__ import annotations

import datetime
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from _gpu_rows import Child
from _process import in_forked_child, run_for
from _record import FOLDER, commit

LEAST_SECONDS = 5.0  # in less no child gets through its first stage
MOST_TIMES = 2.0  # a child is ended after its expected seconds, times this
TESTS_SECONDS = 60.0
NO_PYTEST = "not run: pytest is not installed here"
NOT_BEGUN = "not begun: time was up"
_OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)

Payload = dict[str, Any]


def run_queue(
    children: Iterable[Child],
    stop: float,
    *,
    rehearsal: bool = False,
    patience: float = MOST_TIMES,
    least_seconds: float = 20.0,
) -> Iterator[tuple[Child, dict[str, Any]]]:
    """Run each child in a fork of this process; yield it with its record: what it answered, and how long it took.

    Args:
        children: in their order.
        stop: no child may run after this time (of `time.monotonic`).
        rehearsal: whether nothing is computed, so that sizes may be others.
        patience: how many times the seconds that a child should take it may take.
        least_seconds: that a child may take at all: a start of CUDA is among them.
    """
    for child in children:
        left = stop - time.monotonic()
        arguments = child.arguments | (child.rehearsal if rehearsal else {})
        began, host_before = time.monotonic(), _host_seconds()
        if left < LEAST_SECONDS:
            answer: dict[str, Any] = {"error": NOT_BEGUN}
        else:
            seconds = min(left, max(least_seconds, child.seconds * patience))
            answer = in_forked_child(partial(child.measure, **arguments), timeout_seconds=seconds)
        yield (
            child,
            {
                "rows": child.rows,
                "answer": answer,
                "failures": failures_of(child, answer, rehearsal=rehearsal),
                "seconds": time.monotonic() - began,
                "host_seconds": _host_seconds() - host_before,
                "commit": commit(),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            },
        )


def failures_of(child: Child, answer: dict[str, Any], *, rehearsal: bool = False) -> list[str]:
    """Return what a child failed in, one line each; in a rehearsal also that a known fault of memfit is gone."""
    failed = [*answer.get("failures", ()), *answer.get("hard", {}).get("failures", ())]
    failed += [f"{child.name}: {answer['error']}"] if "error" in answer else []
    if not rehearsal or not child.fails or answer.get("timed_out"):
        return failed
    return [] if failed else [f"{child.name}: did not fail, so that the reason for it goes: {child.fails}"]


def line_of(child: Child, record: dict[str, Any]) -> str:
    """One line for the terminal: the rows, the child, what matters of its answer, and how long it took."""
    answer = record["answer"]
    rows = "+".join(map(str, child.rows))
    said = "; ".join(filter(None, [answer.get("line", ""), answer.get("hard", {}).get("line", "")]))
    wrong = f" -- {answer['error'][:120]}" if "error" in answer else ""
    return f"{rows:>5} {child.name:44} {said}{wrong} ({record['seconds']:.0f} s)"


def merged(stored: Payload, records: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what is known of each child after this run: a child that broke off now replaces none that came through."""
    known = dict(stored.get("children", {}))
    for name, record in records.items():
        if "error" not in record["answer"] or "error" in known.get(name, {"answer": {"error": ""}})["answer"]:
            known[name] = record
    return known


def failures_in(payload: Payload, records: dict[str, dict[str, Any]]) -> list[str]:
    """Return what failed in this run, one line each."""
    tests = failures_of_tests(payload["tests"]) if payload.get("tests") else []
    return tests + [line for record in records.values() for line in record["failures"]]


def seconds_by_row(children: Sequence[Child], records: dict[str, dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Return the wall and host seconds of each row; a child of several rows counts with the first."""
    found: dict[int, tuple[float, float]] = {}
    for child in children:
        if child.name in records:
            row, record = min(child.rows), records[child.name]
            wall, host = found.get(row, (0.0, 0.0))
            found[row] = wall + record["seconds"], host + record["host_seconds"]
    return found


def gpu_test_files() -> list[str]:
    """Return the test files that have tests marked `gpu`: the others may need packages that are not here."""
    tests = FOLDER.parent / "tests"
    return [f"tests/{path.name}" for path in sorted(tests.glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]


def run_tests(seconds: float) -> dict[str, Any]:
    """Run `pytest -m gpu`, and say of each test whether it passed, as far as `seconds` allowed."""
    if find_spec("pytest") is None:
        return {"status": NO_PYTEST, "outcomes": {}}
    command = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-v", "--continue-on-collection-errors"]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        how: dict[str, Any] = {"cwd": FOLDER.parent, "stdout": log, "stderr": log}
        status, _ = run_for([*command, *gpu_test_files()], seconds, **how)
        log.seek(0)
        printed = log.read()
    print(printed, file=sys.stderr, flush=True)
    outcomes = {test: outcome.lower() for test, outcome in _OUTCOME.findall(printed)}
    taken = {"seconds": time.monotonic() - start, "outcomes": outcomes}
    if status == 0:
        return {"status": "passed", **taken}
    return {"status": f"cut off after {seconds:.0f} s" if status is None else "failed", **taken} | (
        {"end_of_output": printed[-4000:]} if status else {}
    )


def failures_of_tests(tests: dict[str, Any]) -> list[str]:
    """Return why the tests are not all passed, one line each."""
    if tests["status"] != "passed":
        return [f"tests: {tests['status']}"]
    skipped = [test for test, outcome in tests["outcomes"].items() if outcome != "passed"]
    return [f"tests: {test} was not passed" for test in skipped] + (
        [] if tests["outcomes"] else ["tests: there are none"]
    )


def _host_seconds() -> float:
    """Seconds of the CPU that children took which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
