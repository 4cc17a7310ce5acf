"""On a GPU: the tests marked `gpu`, then the cases of `_gpu_cases.py`, each in a process of its own; for `make gpu`.

Ten minutes at most. Writes `gpu.json` under $OUT, or under `benchmarks/results/<gpu>/` where OUT is not set, after the
tests and after each case, so that whoever stops it has what there was. Exits 1, at the end, if anything failed: a test,
a step over its budget, bits that differ or that more than 1% of the gradients do not show, a retry of the allocator, a
process that broke off; and if anything was cut off, skipped or not begun. Without a GPU it says so and exits 0.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --minutes 5 --only arena backend
    python benchmarks/gpu.py --dry         # the same on a CPU, at small sizes: nothing is stored, nothing is proved
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _gpu_cases import CASES, RIVALS, Case
from _measure import MIB
from _process import fresh_cache, in_fresh_process, run_for
from _record import FOLDER, store

from memfit.errors import MemfitError
from memfit.runtime.arena.library import load_arena_library
from memfit.system.recorder import allocated_bytes

MINUTES = 9.25  # of the ten that `make gpu` may take: the rest is for importing torch, which may take half a minute
TESTS_SECONDS = 100.0
LEAST_SECONDS = 10.0  # in less no case gets through its capture
MOST_LEFT_OUT = 0.01  # of the gradients: what eager itself does not give twice
NO_PYTEST = "not run: pytest is not installed here"
NOT_BEGUN = "not begun: time was up"
SMI = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu,persistence_mode"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING")
_OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)


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


def machine_now() -> dict[str, Any]:
    """Return the driver's version, the clocks and the allocator's settings, as far as the system says."""
    found: dict[str, Any] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    try:
        command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        found |= dict(zip(SMI.split(","), (word.strip() for word in printed.splitlines()[0].split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        found["nvidia-smi"] = f"not there: {type(error).__name__}"
    return found


def measure(case: Case, seconds: float, *, dry: bool) -> dict[str, Any]:
    """Return what a process of its own found of a case, and how long it took."""
    if seconds < LEAST_SECONDS:
        return {"error": NOT_BEGUN}
    start = time.monotonic()
    before = {name: os.environ.get(name) for name in case.environment}
    os.environ.update(case.environment)
    try:
        request = {"case": asdict(case), "dry": dry}
        answer = in_fresh_process(str(FOLDER / "gpu_case.py"), request, timeout_seconds=seconds)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return answer | {"case_seconds": time.monotonic() - start}


def failures_of(case: Case, found: dict[str, Any], *, dry: bool) -> list[str]:
    """Return what a case failed in, one line each; a rival has only to get through."""
    if "error" in found or not found.get("done"):
        return [f"{case.name}: {found.get('error', 'broke off')}"]
    if case.how in RIVALS:
        return []
    failed: list[str] = []
    budget_bytes = found["budget_bytes"]
    over = {
        number: step["taken_bytes"] for number, step in enumerate(found["steps"]) if step["taken_bytes"] > budget_bytes
    }
    if over and not dry:  # small steps on a CPU are other steps, whose budget is soft
        worst = max(over.values())
        failed.append(
            f"{case.name}: steps {list(over)} took up to {worst / MIB:.1f} MiB of a budget of {budget_bytes / MIB:.1f}"
        )
    if found.get("first_difference") is not None:
        failed.append(f"{case.name}: bits differ first in {found['first_difference']}")
    if case.how == "inductor":
        if not found["worst_error"] <= case.tolerance:  # nor NaN
            failed.append(f"{case.name}: {found['worst_name']} is off by {found['worst_error']:.1e} of its norm")
        return failed
    left_out = [name for name in found["not_repeated"] if name.split()[0] in ("gradient", "parameter")]
    if len(left_out) > MOST_LEFT_OUT * found["compared"]:
        failed.append(f"{case.name}: eager does not repeat {len(left_out)} of {found['compared']} gradients")
    if found.get("not_served"):
        failed.append(f"{case.name}: {found['not_served']} requests of the last step had no place in the arena")
    retries = {name: count for name, count in found["statistics"].items() if name != "num_device_alloc" and count}
    if retries and case.hard:
        failed.append(f"{case.name}: {retries}")
    return failed


def failures_of_tests(tests: dict[str, Any]) -> list[str]:
    """Return why the tests are not all passed, one line each."""
    if tests["status"] != "passed":
        return [f"tests: {tests['status']}"]
    skipped = [test for test, outcome in tests["outcomes"].items() if outcome != "passed"]
    return [f"tests: {test} was not passed" for test in skipped] + (
        [] if tests["outcomes"] else ["tests: there are none"]
    )


def described(case: Case, found: dict[str, Any]) -> str:
    """One line of a case for the terminal."""
    if "error" in found or "steps" not in found:
        return f"{case.name:40} {found.get('error', 'broke off')}"
    taken = max(step["taken_bytes"] for step in found["steps"])
    budget = f" of {found['budget_bytes'] / MIB:9.1f}" if "budget_bytes" in found else ""
    beside = "Inductor's" if case.how == "inductor" else "eager's"
    ratio = f", {found['time_ratio']:.3f} of {beside} time" if "time_ratio" in found else ""
    return f"{case.name:40} {taken / MIB:9.1f}{budget} MiB{ratio}, {found['case_seconds']:.0f} s"


def stages(options: argparse.Namespace, cases: Sequence[Case], stop: float) -> Iterator[dict[str, Any]]:
    """Run the tests, and one case after the other; yield what there is to store after each."""
    if not options.dry:
        with suppress(MemfitError):  # compiled once, for the tests and all cases
            allocated_bytes("cpu")
            load_arena_library("cuda")
    tests = run_tests(TESTS_SECONDS)
    print(f"tests {tests['status']}", flush=True)
    failed = [] if options.dry else failures_of_tests(tests)
    found: dict[str, Any] = {}
    left = list(cases)
    while True:
        not_begun = [f"{case.name}: {NOT_BEGUN}" for case in left]
        yield {
            "minutes": options.minutes,
            "dry": options.dry,
            "machine_now": machine_now(),
            "tests": tests,
            "cases": found,
            "failures": [*failed, *not_begun],
        }
        if not left:
            return
        case = left.pop(0)
        # a case may take what those after it leave of their own
        seconds = stop - time.monotonic() - sum(min(LEAST_SECONDS, each.seconds) for each in left)
        answer = measure(case, min(case.seconds * (4 if options.dry else 1), seconds), dry=options.dry)
        found[case.name] = {"asked": asdict(case), **answer}
        failed += failures_of(case, answer, dry=options.dry)
        print(described(case, answer), flush=True)


def main() -> int:
    """Run tests and cases, store one JSON after each, and return the exit status."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long all of it may take")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at small sizes")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or any(word in case.name for word in options.only)]
    if not options.dry and not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure (torch.cuda.is_available() is False)")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children end with this process
    payload: dict[str, Any] = {}
    with fresh_cache(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.dry else Path(os.environ["OUT"]) if "OUT" in os.environ else None
        for payload in stages(options, cases, start + options.minutes * 60):
            path = store("gpu", payload, device="cpu" if options.dry else "cuda", folder=folder)
    print("a dry run: nothing was run on a GPU, nothing is stored" if options.dry else f"stored in {path}")
    for line in payload["failures"]:
        print(f"FAILED {line}")
    return 1 if payload["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
