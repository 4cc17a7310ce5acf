"""Steps that offload to a disk, on a CPU: predicted against measured, and a long run.

Ten plans on each of three workloads, six on a fourth: budgets, offloading only and with recomputation. Of each, the
seconds of a step, the time that compute waited for copies, and the time that both worked at once, predicted by the
simulator and measured. The simulator is given the seconds that ops take one after the other, and for comparison those
of ops measured one by one.

    python benchmarks/disk_tier.py                      # the plans, stored
    python benchmarks/disk_tier.py gpt2 --soak 1000     # one workload at half of its peak for 1,000 steps, stored
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from pathlib import Path
from typing import Any

import msgspec
from _process import answer_if_child, in_fresh_process
from _record import store

from memfit.graph import Graph
from memfit.planning import Settings
from memfit.runtime.freed_run import run_freed
from memfit.runtime.step import PlannedStep, fit_step
from memfit.simulate import simulate
from memfit.simulate.overlap import Transfers, simulated_transfers
from memfit.workloads import build

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)  # of the unplanned peak
WORKLOADS = {"resnet50": SHARES, "gpt2": SHARES, "unet": SHARES, "char_lstm": (0.9, 0.7, 0.5)}
WAYS: dict[str, dict[str, Any]] = {
    "offloading": {"planner": "offload", "options": {"rematerialize": False}},
    "both": {"planner": "auto"},
}
HOST_BUDGET_BYTES = 8 << 30
REPEATS = 7
LOOK_EVERY = 100  # steps of a long run
CHILD_SECONDS = 7200


def fitted(workload: str, share: float, way: str) -> PlannedStep:
    """Return a workload's step within a share of its unplanned peak, with a disk to offload to."""
    step = build(workload)
    settings = Settings(budget=f"{share:.0%}", host_budget_bytes=HOST_BUDGET_BYTES, time_limit_seconds=10, **WAYS[way])
    planned = fit_step(step, settings)
    assert isinstance(planned, PlannedStep)
    return planned


def measure_plan(workload: str, share: float, way: str) -> dict[str, Any]:
    """Return what was predicted of a plan and what was measured."""
    planned = fitted(workload, share, way)
    planned.verify()
    plan = planned.plan
    in_sequence = simulate(in_sequence_graph(planned), plan.schedule, plan.device)
    transfers = simulated_transfers(in_sequence, plan.schedule)
    measured = planned.measure(repeats=REPEATS)
    seen = measured.transfers or Transfers()
    seconds = {
        "step": (in_sequence.makespan_seconds, measured.step_seconds),
        "step_one_by_one": (plan.predicted.seconds, measured.step_seconds),
        "stall": (transfers.stall_seconds, seen.stall_seconds),
        "overlap": (transfers.overlap_seconds, seen.overlap_seconds),
    }
    return {
        "workload": workload,
        "share": share,
        "way": way,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "overhead": {"predicted": plan.overhead, "measured": measured.overhead},
        "unplanned_seconds": {"predicted": plan.unplanned.seconds, "measured": measured.baseline_step_seconds},
        **{name: {"predicted": guess, "measured": real} for name, (guess, real) in seconds.items()},
        "errors": {  # of the step's seconds as a share, of the others in points of the step
            name: (guess - real) / measured.step_seconds for name, (guess, real) in seconds.items()
        },
    }


def in_sequence_graph(planned: PlannedStep) -> Graph:
    """Return a step's graph with the seconds that its ops take one after the other (`memfit.runtime.freed_run`)."""
    graph = planned.plan.graph
    run = run_freed(planned.step, planned.captured, graph)
    ops = (msgspec.structs.replace(op, seconds=took) for op, took in zip(graph.ops, run.op_seconds, strict=True))
    return msgspec.structs.replace(graph, ops=tuple(ops))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and 90th percentiles of the absolute errors."""
    found: dict[str, Any] = {}
    for name in ("step", "step_one_by_one", "stall", "overlap"):
        errors = sorted(abs(row["errors"][name]) for row in rows)
        found[name] = {"median": statistics.median(errors), "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))]}
    return found


def soak(workload: str, steps: int) -> dict[str, Any]:
    """Train at half of the unplanned peak; return resident memory, open files and threads as they went."""
    planned = fitted(workload, 0.5, "offloading")
    planned.verify()
    looks: list[dict[str, int]] = []
    for number in range(steps + 1):
        planned(planned.step.batch)
        if number % LOOK_EVERY == 0:
            looks.append({"step": number, **_held()})
            print(workload, looks[-1], flush=True)
    planned.verify()
    return {"workload": workload, "steps": steps, "budget_bytes": planned.plan.budget_bytes, "looks": looks}


def answer(what: str, **request: Any) -> dict[str, Any]:
    """Return what a process of its own is asked for: a plan's measurement, or a long run."""
    return soak(**request) if what == "soak" else measure_plan(**request)


def _held() -> dict[str, int]:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


def _apart(**request: Any) -> dict[str, Any]:
    found = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
    if "error" in found:
        raise SystemExit(f"{request}: {found['error']}")
    return found


def main() -> None:
    """Measure what the command line names, and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="default: " + " ".join(WORKLOADS))
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS", help="train for so many steps instead")
    options = parser.parse_args()
    names = options.workloads or list(WORKLOADS)
    if options.soak:
        for name in names:
            store(f"disk_tier/soak_{name}", _apart(what="soak", workload=name, steps=options.soak))
        return
    rows: list[dict[str, Any]] = []
    for name in names:
        for way in WAYS:
            for share in WORKLOADS[name]:
                rows.append(_apart(what="plan", workload=name, share=share, way=way))
                errors = {key: f"{error:+.1%}" for key, error in rows[-1]["errors"].items()}
                print(name, way, f"{share:.0%}", errors, flush=True)
    print(store("disk_tier/plans", {"plans": rows, "errors": summary(rows)}), summary(rows))


if __name__ == "__main__" and not answer_if_child(answer):
    main()
