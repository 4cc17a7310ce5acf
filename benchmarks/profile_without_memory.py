"""Steps profiled without their memory: estimated seconds beside measured ones, and recordings of arenas.

For steps that do fit, so that both can be told: eager's seconds of a step, the sum of its ops measured one by one, and
the estimate of a run that frees what is big as it comes (dqn2020, section 4.7), interleaved. And the most bytes that
the first step in an arena takes with and without spilling (sekiyama2018, section 3), and whether both record the same.

    python benchmarks/profile_without_memory.py          # the eight workloads, stored: a quarter of an hour
    python benchmarks/profile_without_memory.py lstm     # one, nothing stored
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from _measure import EIGHT, MIB
from _process import answer_if_child, in_fresh_process
from _record import store

import memfit
from memfit.capture import finish, with_real_results
from memfit.capture.whole_step import capture_whole_step
from memfit.cost.calibration import local_device
from memfit.cost.measurement import measure
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.step.freed_run import run_freed
from memfit.system.recorder import record
from memfit.workloads import build

ROUNDS = 5
CHILD_SECONDS = 1800


def profile(workload: str) -> dict[str, Any]:
    """Return the estimated and the measured figures of a workload's step."""
    step = build(workload)
    captured = with_real_results(lambda corrections: finish(capture_whole_step(step, corrections=corrections)))
    graph = measure(captured.graph, captured.binding, captured.observed)
    eager_seconds: list[float] = []
    freed_seconds: list[float] = []
    for number in range(ROUNDS + 1):
        started = time.perf_counter()
        step.run_eager(step.batch)
        eager = time.perf_counter() - started
        step.model.zero_grad(set_to_none=True)
        freed = run_freed(step, captured, graph, runs=1)
        if number:
            eager_seconds.append(eager)
            freed_seconds.append(freed.step_seconds)
    return {
        "workload": workload,
        "eager_seconds": statistics.median(eager_seconds),
        "one_by_one_seconds": sum(op.seconds for op in graph.ops),
        "freed_run_seconds": statistics.median(freed_seconds),
        "unplanned_peak_bytes": unplanned_peak_bytes(graph, local_device(torch.device("cpu"))),
        "freed_run_peak_bytes": freed.peak_bytes,
        "freed_bytes": freed.freed_bytes,
    }


def recorded(workload: str, *, spill: bool) -> tuple[Any, int, float]:
    """Return the recording of the first step in an arena, the most bytes that it took, and its seconds."""
    step = build(workload)
    window = record("cpu")
    with memfit.arena(spill=spill, time_limit_seconds=0.1) as arena:
        usage = window.__enter__()
        started = time.perf_counter()
        with arena.step():
            step.run_eager(step.batch)
            seconds = time.perf_counter() - started
            window.__exit__(None, None, None)  # before the arena takes memory of its own
        plan: Any = arena.plans[None]  # with a recording, as it is of a whole step
        return plan.recording, usage.peak_bytes, seconds


def record_arena(workload: str) -> dict[str, Any]:
    """Return what the first step in an arena takes, with and without spilling."""
    plain, plain_bytes, plain_seconds = recorded(workload, spill=False)
    spilled, spilled_bytes, spilled_seconds = recorded(workload, spill=True)
    return {
        "recorded_peak_bytes": plain_bytes,
        "spilled_peak_bytes": spilled_bytes,
        "recorded_seconds": plain_seconds,
        "spilled_seconds": spilled_seconds,
        "same_recording": spilled.equals(plain),
    }


def child(workload: str) -> dict[str, Any]:
    """Return all figures of one workload."""
    return profile(workload) | record_arena(workload)


def main() -> None:
    """Profile the workloads, print a line for each, and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="some of the eight; nothing is stored")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for workload in options.workloads or EIGHT:
        row = in_fresh_process(__file__, {"workload": workload}, timeout_seconds=CHILD_SECONDS)
        if "error" in row:
            raise SystemExit(f"{workload}: {row['error']}")
        rows.append(row)
        freed, alone, eager = (row[f"{name}_seconds"] for name in ("freed_run", "one_by_one", "eager"))
        print(
            f"{workload}: eager {eager:.3f} s, freed run {freed / eager - 1:+.1%}, op by op {alone / eager - 1:+.1%}; "
            f"{row['freed_run_peak_bytes'] / MIB:.0f} of {row['unplanned_peak_bytes'] / MIB:.0f} MiB; arena "
            f"{row['spilled_peak_bytes'] / MIB:.0f} of {row['recorded_peak_bytes'] / MIB:.0f} MiB, "
            f"{'the same' if row['same_recording'] else 'another'} recording",
            flush=True,
        )
    if not options.workloads:
        print(store("profile_without_memory", {"rounds": ROUNDS, "workloads": rows}))


if __name__ == "__main__" and not answer_if_child(child):
    main()
