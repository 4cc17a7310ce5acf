"""On a GPU: the tests marked `gpu`, then the sweep at real sizes. Ten minutes at most; one JSON; `make gpu` runs it.

Writes `gpu.json` under $OUT, or under `benchmarks/results/<gpu>/` where OUT is not set: first after the tests and then
after each workload, so that whoever stops it has what there was. Without a GPU it says so and exits 0. Exits 1, at the
end, if a test failed, a measured peak was over its budget, bits differed, or a workload could not be measured. What
time did not allow is listed under `not_measured`; it is no failure, unless nothing at all was measured.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --minutes 5 --budgets 5 --only resnet50
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _process import fresh_cache, run_for
from _record import FOLDER, store
from sweep import BUDGETS, TIME_WAS_UP, described, sweep, verdict

SIZES: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 128},
    "gpt2": {"batch": 16, "layers": 12, "width": 768, "tokens": 1024},
    "unet": {"batch": 8, "size": 512, "width": 64},
}
MINUTES = 9.25  # of the ten that `make gpu` may take: the rest is for importing torch, which may take half a minute
TESTS_SHARE = 0.25
SWEEP_SHARE = 0.8  # a sweep stops by itself before it is stopped
LEAST_SECONDS = 30.0  # in less no sweep gets through its capture
REPEATS = 5
NO_PYTEST = "not run: pytest is not installed here"
_OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)


def gpu_test_files() -> list[str]:
    """Return the test files that have tests marked `gpu`: the others may need packages that are not here."""
    tests = FOLDER.parent / "tests"
    return [f"tests/{path.name}" for path in sorted(tests.glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]


def run_tests(seconds: float) -> dict[str, Any]:
    """Run `pytest -m gpu`, and say of each test whether it passed, as far as `seconds` allowed."""
    if find_spec("pytest") is None:
        return {"status": NO_PYTEST}
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
    if status == 0 or (status is None and not {"failed", "error"} & set(outcomes.values())):
        return {"status": "passed" if status == 0 else f"stopped after {seconds:.0f} s", **taken}
    return {"status": "failed", **taken, "end_of_output": printed[-4000:]}


def sweep_of(workload: str, seconds: float, count: int, time_limit_seconds: float) -> dict[str, Any]:
    """Sweep one workload in so many seconds; being stopped is no failure of what had been measured by then."""
    options = SIZES[workload]
    if seconds < LEAST_SECONDS:
        return {"options": options, "points": [], "status": TIME_WAS_UP}
    points = sweep(
        workload,
        {**options, "device": "cuda"},
        timeout_seconds=seconds,
        count=count,
        repeats=REPEATS,
        time_limit_seconds=time_limit_seconds,
        seconds=seconds * SWEEP_SHARE,
    )
    for point in points:
        print(f"{workload:10} {described(point)}", flush=True)
    stopped = bool(points[-1].get("timed_out"))
    points = points[:-1] if stopped else points
    found = {"options": options, "points": points, "status": f"stopped after {seconds:.0f} s" if stopped else "done"}
    return found | ({"verdict": verdict(points)} if points else {})


def not_measured(tests: dict[str, Any], sweeps: dict[str, Any]) -> list[str]:
    """Return what time did not allow, one line each."""
    late = [f"tests: {tests['status']}"] if tests["status"] not in ("passed", "failed") else []
    for workload, found in sweeps.items():
        if found["status"] != "done":
            late.append(f"{workload}: {found['status']}, {len(found['points'])} points")
        skipped = [point["budget_bytes"] for point in found["points"] if point.get("status") == TIME_WAS_UP]
        late += [f"{workload} at {budget_bytes} bytes: {TIME_WAS_UP}" for budget_bytes in skipped]
    return late


def keeps_promises(tests: dict[str, Any], sweeps: dict[str, Any]) -> bool:
    """Whether no test failed, and each feasible point that was measured, at least one, kept its budget and its bits."""
    verdicts = [found["verdict"] for found in sweeps.values() if "verdict" in found]
    measured = [each for each in verdicts if each["feasible"]]
    kept = all(each["within_budget"] and each["same_bits"] for each in measured)
    return bool(measured) and kept and not any(each["failed"] for each in verdicts) and tests["status"] != "failed"


def stages(options: argparse.Namespace, stop: float) -> Iterator[dict[str, Any]]:
    """Run the tests, and sweep one workload after the other; yield what there is to store after each."""
    tests = run_tests(options.minutes * 60 * TESTS_SHARE)
    print(f"tests      {tests['status']}", flush=True)
    sweeps: dict[str, Any] = {}
    left: list[str] = list(options.only)
    while True:
        yield {
            "minutes": options.minutes,
            "tests": tests,
            "sweeps": sweeps,
            "not_measured": not_measured(tests, sweeps) + [f"{workload}: not begun" for workload in left],
            "keeps_promises": keeps_promises(tests, sweeps),
        }
        if not left:
            return
        seconds = (stop - time.monotonic()) / len(left)
        workload = left.pop(0)
        sweeps[workload] = sweep_of(workload, seconds, options.budgets, options.time_limit)


def main() -> int:
    """Run tests and sweeps, store one JSON after each, and return the exit status."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long all of it may take")
    parser.add_argument("--budgets", type=int, default=BUDGETS, help="budgets in each sweep")
    parser.add_argument("--time-limit", type=float, default=3.0, help="seconds that the planner may search")
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES), help="workloads to sweep")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure (torch.cuda.is_available() is False)")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children end with this process
    folder = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    payload: dict[str, Any] = {}
    with fresh_cache():
        for payload in stages(options, start + options.minutes * 60):
            path = store("gpu", payload, device="cuda", folder=folder)
            print(f"stored in {path}", flush=True)
    for line in payload["not_measured"]:
        print(line)
    return 0 if payload["keeps_promises"] else 1


if __name__ == "__main__":
    sys.exit(main())
