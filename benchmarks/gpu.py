"""On a GPU: the tests marked `gpu`, then the sweep at real sizes. Ten minutes at most; one JSON; `make gpu` runs it.

Writes `gpu.json` under $OUT, or under `benchmarks/results/<gpu>/` where OUT is not set. Without a GPU it says so and
exits 0. Exits 1 if a test failed, a measured peak was over its budget, bits differed, or a workload could not be
measured. What time did not allow is listed as not measured.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --minutes 5 --budgets 5
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from _process import fresh_cache
from _record import FOLDER, store
from sweep import BUDGETS, described, sweep, verdict

SIZES: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 128},
    "gpt2": {"batch": 16, "layers": 12, "width": 768, "tokens": 1024},
    "unet": {"batch": 8, "size": 512, "width": 64},
}
MINUTES = 9.5  # of the ten that `make gpu` may take: the rest is for starting and storing
TESTS_SHARE = 0.25
SWEEP_SHARE = 0.8  # a sweep stops by itself before it is stopped
REPEATS = 5
NO_PYTEST = "not run: pytest is not installed here"


def run_tests(seconds: float) -> dict[str, Any]:
    """Run `pytest -m gpu` and count what passed, failed and was skipped."""
    if find_spec("pytest") is None:
        return {"status": NO_PYTEST}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}"]
        start = time.monotonic()
        try:
            done = subprocess.run(command, cwd=FOLDER.parent, timeout=seconds, check=False, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            return {"status": f"stopped after {seconds:.0f} s"}
        taken = time.monotonic() - start
        if not report.exists():
            return {"status": f"pytest gave up with exit status {done.returncode}"}
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest's report has no suite"
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {"status": "failed" if done.returncode else "passed", **counts, "seconds": taken}


def sweeps(count: int, stop: float, time_limit_seconds: float) -> dict[str, Any]:
    """Sweep each workload with an even share of the time that is left."""
    found: dict[str, Any] = {}
    for number, (workload, options) in enumerate(SIZES.items()):
        seconds = (stop - time.monotonic()) / (len(SIZES) - number)
        points = sweep(
            workload,
            {**options, "device": "cuda"},
            timeout_seconds=seconds,
            count=count,
            repeats=REPEATS,
            time_limit_seconds=time_limit_seconds,
            seconds=seconds * SWEEP_SHARE,
        )
        found[workload] = {"options": options, "points": points, "verdict": verdict(points)}
        for point in points:
            print(f"{workload:10} {described(point)}", flush=True)
    return found


def keeps_promises(tests: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether no test failed, every workload was measured, and every feasible point kept its budget and its bits."""
    verdicts = [result["verdict"] for result in found.values()]
    kept = all(not each["failed"] and each["within_budget"] and each["same_bits"] for each in verdicts)
    return kept and tests["status"] in ("passed", NO_PYTEST)


def main() -> int:
    """Run tests and sweeps, store one JSON, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long all of it may take")
    parser.add_argument("--budgets", type=int, default=BUDGETS, help="budgets in each sweep")
    parser.add_argument("--time-limit", type=float, default=3.0, help="seconds that the planner may search")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure (torch.cuda.is_available() is False)")
        return 0
    stop = time.monotonic() + options.minutes * 60
    tests = run_tests(options.minutes * 60 * TESTS_SHARE)
    print(f"tests      {tests}", flush=True)
    with fresh_cache():
        found = sweeps(options.budgets, stop, options.time_limit)
    payload = {"tests": tests, "sweeps": found, "keeps_promises": keeps_promises(tests, found)}
    folder = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    print(f"stored in {store('gpu', payload, device='cuda', folder=folder)}")
    return 0 if payload["keeps_promises"] else 1


if __name__ == "__main__":
    sys.exit(main())
