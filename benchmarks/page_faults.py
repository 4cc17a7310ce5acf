"""Why planned steps can be faster than eager on a CPU: page faults of fresh memory, counted by the kernel.

Each way to run a step has a process of its own, because malloc adapts to what it has seen:

    eager        plain PyTorch
    eager_kept   plain PyTorch with a malloc that returns nothing to the operating system (glibc's own settings)
    planned      planner `none`: no op is recomputed, storages are dropped after their last use
    planned_kept the same plan with that malloc
    arena        the same plan, its storages at fixed addresses in one block of memory

Counted for each step are the minor page faults and the processor seconds of the process, in user code and in the
kernel (`getrusage`). Steps run on one thread: the processor seconds of waiting threads would count as well. Medians
are stored; the first steps, which make the optimizer's state, are not counted.

    python benchmarks/page_faults.py
    python benchmarks/page_faults.py gpt2
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _planned import NO_BUDGET_BYTES, build_for_measurement, eager_run, planned_run
from _process import answer_if_child, in_fresh_process
from _record import store

from memfit import TrainingStep
from memfit.doors.step import fit_step
from memfit.planning import Settings
from memfit.step.planned_step import PlannedStep

WAYS = ("eager", "eager_kept", "planned", "planned_kept", "arena")
WORKLOADS: dict[str, dict[str, Any]] = {"gpt2": {"width": 768, "batch": 1}, "resnet50": {"batch": 4}}  # GPT-2 small
# glibc, mallopt(3): no block has a mapping of its own, and the top of the heap is not returned.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
UNCOUNTED_STEPS, COUNTED_STEPS = 3, 3
CHILD_SECONDS = 1800


def measure(workload: str, way: str) -> dict[str, Any]:
    """Count the faults and seconds of a workload's steps, run in one way; called in a process of its own."""
    torch.set_num_threads(1)
    step = build_for_measurement(workload, WORKLOADS[workload])
    run = _run_of(step, way)
    for _ in range(UNCOUNTED_STEPS):
        run()
    steps = [_counted(run) for _ in range(COUNTED_STEPS)]
    return {key: statistics.median(counted[key] for counted in steps) for key in steps[0]}


def _run_of(step: TrainingStep, way: str) -> Callable[[], torch.Tensor]:
    if way.startswith("eager"):
        return eager_run(step)
    planned = fit_step(step, Settings(budget=NO_BUDGET_BYTES, planner="none", arena=way == "arena"))
    assert isinstance(planned, PlannedStep)
    return planned_run(planned)


def _counted(run: Callable[[], object]) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    run()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "minor_faults": after.ru_minflt - before.ru_minflt,
        "user_seconds": after.ru_utime - before.ru_utime,
        "kernel_seconds": after.ru_stime - before.ru_stime,
    }


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def measure_workload(workload: str) -> dict[str, Any]:
    """Measure a workload in every way, print and return what was counted."""
    found: dict[str, Any] = {"options": WORKLOADS[workload]}
    for way in WAYS:
        with _environment(KEEPING if way.endswith("_kept") else {}):
            answer = in_fresh_process(__file__, {"workload": workload, "way": way}, timeout_seconds=CHILD_SECONDS)
        if "error" in answer:
            raise SystemExit(f"{workload}, {way}: {answer['error']}")
        found[way] = answer
        print(
            f"{workload:9} {way:11} {answer['minor_faults']:9.0f} faults a step, "
            f"{answer['user_seconds']:.2f} s in user code, {answer['kernel_seconds']:.2f} s in the kernel",
            flush=True,
        )
    return found


def main() -> None:
    """Measure the workloads named on the command line, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    for workload in parser.parse_args().workloads:
        store(f"page_faults/{workload}", measure_workload(workload) | {"page_bytes": resource.getpagesize()})


if __name__ == "__main__" and not answer_if_child(measure):
    main()
