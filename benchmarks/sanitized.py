"""Planned steps on a CUDA device that is not here, under the address sanitizer: arena, copies to the host, corrections.

memfit's native libraries and the fake runtime are built with `-fsanitize=address`. What a step has freed, in an arena
as elsewhere, is overwritten, and poisoned until it is given out again: memfit's own C++, and every copy, may not touch
it.
torch's kernels are not instrumented; what they read there would change the bits, which are compared with eager's.

    python benchmarks/sanitized.py                 # all workloads, each in a process of its own: a quarter of an hour
    python benchmarks/sanitized.py lstm gpt2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import FOLDER, load, result_path, store

TESTS = FOLDER.parent / "tests"
sys.path.insert(0, str(TESTS))

from fake_device import build_fakes  # noqa: E402
from test_fake_cuda_workloads import GROUPS  # noqa: E402

NAME = "sanitized"
FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g")
OPTIONS = (
    "detect_leaks=0:allocator_may_return_null=1:abort_on_error=0:exitcode=99"  # Python leaves what it has to the system
)
REPORT = "AddressSanitizer"
SECONDS = 1200
WORKLOADS = {name: options for group in GROUPS for name, options in group.items()}

PLANTED = """
import ctypes, sys, torch
from fake_device import start_with_tensors
start_with_tensors(sys.argv[1])
kept, freed = torch.ones(4096), torch.ones(4096)
address = freed.data_ptr()
del freed
ctypes.memmove(kept.data_ptr(), address, 64)
"""


def preloaded() -> list[str]:
    """Return the sanitizer's library, and the C++ library whose exceptions it has to find; none without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return []
    paths: list[str] = []
    for name in ("libasan.so", "libstdc++.so.6"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        path = Path(found.stdout.strip())
        if not path.is_absolute():
            return []
        paths.append(str(path.resolve()))
    return paths


def environment(folder: Path, libraries: list[str]) -> dict[str, str]:
    """Return the variables of a process whose native code is instrumented, with caches of its own."""
    compiler = folder / "instrumented-c++"
    compiler.write_text(f'#!/bin/sh\nexec g++ {" ".join(FLAGS)} "$@"\n')
    compiler.chmod(0o700)
    return os.environ | {
        "CXX": str(compiler),
        "MEMFIT_CACHE": str(folder / "cache"),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": OPTIONS,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(TESTS)]),
    }


def run(arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Run a process; return its status, the sanitizer's first report, and what it printed, if that was JSON."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=variables, timeout=SECONDS
    )
    report = done.stderr[done.stderr.find(REPORT) :].splitlines() if REPORT in done.stderr else []
    if done.returncode and not report:
        print(done.stderr, file=sys.stderr)
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return {
        "exit_status": done.returncode,
        "report": " ".join(report[:8]),
        "seconds": time.monotonic() - start,
        **found,
    }


def main() -> int:
    """Run the workloads, store what each did, and return 1 if there was a report or a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=list(WORKLOADS))
    options = parser.parse_args()
    libraries = preloaded()
    if not libraries:
        print("g++ has no address sanitizer here")
        return 2
    stored = load(result_path(NAME))["payload"] if result_path(NAME).exists() else {"workloads": {}}
    with tempfile.TemporaryDirectory(prefix="memfit-sanitized-") as scratch:
        folder = Path(scratch)
        (folder / "cache").mkdir(mode=0o700)
        build_fakes(folder, *FLAGS)
        variables = environment(folder, libraries)
        stored["planted_error"] = run(["-c", PLANTED, str(folder)], variables)
        assert stored["planted_error"]["report"], "the sanitizer does not see a read of freed memory"
        for name in options.workloads:
            asked = json.dumps({name: WORKLOADS[name]})
            found = stored["workloads"][name] = run([str(TESTS / "fake_workloads.py"), str(folder), asked], variables)
            print(name, found, flush=True)
            store(NAME, stored)
    return int(any(found["exit_status"] or found["report"] for found in stored["workloads"].values()))


if __name__ == "__main__":
    sys.exit(main())
