"""Iterative functions within budgets: k-means on a million points, and a kernel of all pairs of points.

Each is planned at shares of its own unplanned peak, run for five calls beside eager from the same state, and measured
in turns with it.

    python benchmarks/functions.py     # a few minutes, stored
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _measure import MIB
from _process import answer_if_child, in_fresh_process
from _record import store

from memfit.capture.row_chunks import RowChunks
from memfit.doors.step import fit_step
from memfit.errors import NoPlanError
from memfit.planning import Settings
from memfit.step.planned_step import PlannedStep
from memfit.workloads import build

WORKLOADS: dict[str, dict[str, Any]] = {"kmeans": {"points": 1_000_000}, "power_iteration": {}}
SHARES = ("100%", "75%", "50%", "25%")
CALLS = 5
CHILD_SECONDS = 1800


def measure(workload: str, share: str) -> dict[str, Any]:
    """Return bits, peaks and seconds of a planned function."""
    step = build(workload, **WORKLOADS[workload])
    row: dict[str, Any] = {"workload": workload, "options": WORKLOADS[workload], "share": share}
    try:
        planned = fit_step(step, Settings(budget=share), verify=True)
    except NoPlanError as error:
        return row | {"least_bytes": error.least_budget_found_bytes}
    assert isinstance(planned, PlannedStep)
    state, batch = step.batch
    mine = theirs = state
    for _ in range(CALLS):
        mine, theirs = planned((mine, batch)), step.run_eager((theirs, batch))
    measured = planned.measure(repeats=5)
    targets = (call.target for call in planned.captured.binding.calls)
    return row | {
        "budget_bytes": planned.plan.budget_bytes,
        "same_bits": torch.equal(mine, theirs),
        "chunks": [target.count for target in targets if isinstance(target, RowChunks)],
        "predicted_peak_bytes": planned.plan.predicted.peak_bytes,
        "peak_bytes": measured.peak_bytes,
        "eager_peak_bytes": measured.baseline_peak_bytes,
        "overhead": measured.overhead,
    }


def main() -> None:
    """Measure, print, and store."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        for share in SHARES:
            row = in_fresh_process(__file__, {"workload": workload, "share": share}, timeout_seconds=CHILD_SECONDS)
            if "error" in row:
                raise SystemExit(f"{workload}: {row['error']}")
            rows.append(row)
            if "peak_bytes" in row:
                peak = f"{row['peak_bytes'] / MIB:.0f} of {row['eager_peak_bytes'] / MIB:.0f} MiB"
                print(workload, share, peak, f"{row['overhead']:+.1%}", row["same_bits"], flush=True)
            else:
                print(workload, share, "no plan", flush=True)
    print(store("functions", {"calls": CALLS, "rows": rows}))


if __name__ == "__main__" and not answer_if_child(measure):
    main()
