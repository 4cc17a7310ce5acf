"""Optimizer's state on the host between steps: the least bytes of a step of AdamW, and its time there.

`device`: all state on the device, recomputation alone. `activations`: storages of the step may be copied to the host,
the optimizer's state may not. `whole`: the state as well, and what comes after clipping is one update of all
parameters. `parts`: as memfit does it; without clipping this is `whole`. Peaks are measured, seconds are shares of
eager's, in turns. On a CPU "the host" is a file.

    python benchmarks/host_states.py     # about ten minutes, stored
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from _measure import MIB
from _record import store

from memfit.doors.step import fit_step
from memfit.errors import NoPlanError
from memfit.planning import Settings
from memfit.step import state_forms
from memfit.step.planned_step import PlannedStep
from memfit.workloads import build

HOST_BYTES = 4 << 30
SEARCH: dict[str, Any] = {"time_limit_seconds": 2.0}
TURNS = 7
SLACK = 1.01  # over the least that a search has reached, which a later one may miss
WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "activations": {"planner": "offload", "host_budget_bytes": HOST_BYTES},
    "whole": {"host_budget_bytes": HOST_BYTES},
    "parts": {"host_budget_bytes": HOST_BYTES},
}
STEPS: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "width": 384, "tokens": 128, "batch": 2, "vocabulary": 4096, "dropout": 0.0},
}


def made(name: str, *, clipped: bool) -> Any:
    """Return a step of AdamW."""
    return replace(build(name, optimizer="adamw", **STEPS[name]), clip_norm=1.0 if clipped else None)


@contextmanager
def as_way(way: str) -> Iterator[None]:
    """Leave out the part that a way does without."""
    if way == "whole":
        with mock.patch.object(state_forms, "with_update_in_parts", lambda _step, captured: captured):
            yield
    else:
        yield


def measure(name: str, way: str, *, clipped: bool) -> dict[str, Any]:
    """Return the least budget that a plan was found for, and what a step takes there."""
    with as_way(way):
        try:
            fit_step(made(name, clipped=clipped), Settings(budget=1, **SEARCH, **WAYS[way]))
        except NoPlanError as error:
            least_bytes = error.least_budget_found_bytes or error.least_budget_bound_bytes
        else:
            raise AssertionError("no step fits a byte")
        step = fit_step(made(name, clipped=clipped), Settings(budget=int(SLACK * least_bytes), **SEARCH, **WAYS[way]))
    assert isinstance(step, PlannedStep)
    step.verify()
    measured = step.measure(repeats=TURNS)
    assert measured.baseline_step_seconds is not None
    return {
        "step": name,
        "clipped": clipped,
        "way": way,
        "peak_bytes": measured.peak_bytes,
        "predicted_bytes": step.plan.predicted.peak_bytes,
        "eager_bytes": measured.baseline_peak_bytes,
        "ratio": measured.step_seconds / measured.baseline_step_seconds,
        "parameter_bytes": sum(parameter.nbytes for parameter in step.step.model.parameters()),
        "turns": measured.turns,
    }


def main() -> None:
    """Measure, print, and store."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: list[dict[str, Any]] = []
    for name in STEPS:
        for clipped in (False, True):
            for way in WAYS:
                if way == "whole" and not clipped:
                    continue
                row = measure(name, way, clipped=clipped)
                rows.append(row)
                sizes = f"{row['peak_bytes'] / MIB:.1f} of {row['eager_bytes'] / MIB:.1f} MiB"
                print(f"{name}{', clipped' if clipped else ''}, {way}: {sizes}, {row['ratio']:.2f}", flush=True)
    print(store("host_states", {"rows": rows}))


if __name__ == "__main__":
    main()
