"""Steps that offload to a disk, on a CPU: predicted against measured, and a long run.

Ten plans on each of three workloads, six on a fourth: budgets, offloading only and with recomputation. Of each, the
seconds of a step, the time that compute waited for copies, and the time that both worked at once, predicted by the
simulator and measured. The simulator is given the seconds of ops in their places in a step of the same budget that
offloads nothing, and the link's rates as `memfit calibrate` measures them, both in turns with the steps; and for
comparison those of ops measured one by one. Of seven runs of each, the fastest and the slowest are left out of the
means. The C library is set to keep memory that is freed. Otherwise a step would spend time on new pages from the
system, and how much depends on what ran before (`benchmarks/page_faults.py`).

    python benchmarks/disk_tier.py                      # the plans, stored
    python benchmarks/disk_tier.py unet                 # those of one workload again, the others as they are stored
    python benchmarks/disk_tier.py gpt2 --soak 1000     # one workload at half of its peak for 1,000 steps, stored
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import torch
from _process import answer_if_child, in_fresh_process
from _record import load, result_path, store

from memfit.capture import Captured, TrainingStep
from memfit.capture.generators import SaveGeneratorState
from memfit.cost.link import link_rates
from memfit.doors.step import fit_step
from memfit.kernels.program import make_program
from memfit.memory.snapshot import left_as_it_was
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.simulate import simulate
from memfit.simulate.overlap import simulated_transfers
from memfit.step.planned_step import PlannedStep
from memfit.step.step_program import fetchers
from memfit.torch_private.tensors import tree_flatten
from memfit.workloads import build

CPU = torch.device("cpu")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)  # of the unplanned peak
WORKLOADS = {"resnet50": SHARES, "gpt2": SHARES, "unet": SHARES, "char_lstm": (0.9, 0.8, 0.7)}
WAYS: dict[str, dict[str, Any]] = {
    "offloading": {"planner": "offload", "options": {"rematerialize": False}},
    "both": {"planner": "auto"},
}
REFERENCE: dict[str, Any] = {"planner": "search"}
HOST_BUDGET_BYTES = 8 << 30
REPEATS = 7
SEARCH_SECONDS = 5.0
SOAK_OPTIONS: dict[str, dict[str, Any]] = {"resnet50": {"batch": 4}, "gpt2": {"batch": 3}}
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # man 3 mallopt
LOOK_EVERY = 100  # steps of a long run
CHILD_SECONDS = 7200


def fitted(workload: str, share: float, way: str, **options: Any) -> PlannedStep:
    """Return a workload's step within a share of its unplanned peak, with a disk to offload to."""
    step, chosen = build(workload, **options), WAYS.get(way, REFERENCE)
    host_bytes = HOST_BUDGET_BYTES if way in WAYS else 0
    settings = Settings(
        budget=f"{share:.0%}", host_budget_bytes=host_bytes, time_limit_seconds=SEARCH_SECONDS, **chosen
    )
    planned = fit_step(step, settings)
    assert isinstance(planned, PlannedStep)
    return planned


def measure_plans(workload: str, share: float) -> dict[str, Any]:
    """Return the predictions and the measurements of the plans at one budget."""
    planned = {way: fitted(workload, share, way) for way in WAYS}
    for each in planned.values():
        each.verify()
    seconds, link, runs = in_turns(planned, fitted(workload, share, "neither"))
    return {"rows": [compared(workload, share, way, planned[way], seconds, link, runs[way]) for way in WAYS]}


def compared(
    workload: str,
    share: float,
    way: str,
    planned: PlannedStep,
    op_seconds: Mapping[str, float],
    link: Mapping[str, float],
    runs: Sequence[tuple[float, float, float]],
) -> dict[str, Any]:
    """Return what was predicted of a plan, with these seconds of ops and rates of the link, and what was measured."""
    plan, measured = planned.plan, planned.measure(repeats=2)
    ops = (msgspec.structs.replace(op, seconds=op_seconds.get(op.name, op.seconds)) for op in plan.graph.ops)
    device = msgspec.structs.replace(plan.device, **link)
    in_place = simulate(msgspec.structs.replace(plan.graph, ops=tuple(ops)), plan.schedule, device)
    transfers = simulated_transfers(in_place, plan.graph, plan.schedule)
    step_seconds, stall_seconds, overlap_seconds = (trimmed_mean(column) for column in zip(*runs, strict=True))
    seconds = {
        "step": (in_place.makespan_seconds, step_seconds),
        "step_one_by_one": (plan.predicted.seconds, step_seconds),
        "stall": (transfers.stall_seconds, stall_seconds),
        "overlap": (transfers.overlap_seconds, overlap_seconds),
    }
    return {
        "workload": workload,
        "share": share,
        "way": way,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "link": dict(link),
        "overhead": {"predicted": plan.overhead, "measured": measured.overhead},
        "unplanned_seconds": {"predicted": plan.unplanned.seconds, "measured": measured.baseline_step_seconds},
        **{name: {"predicted": guess, "measured": real} for name, (guess, real) in seconds.items()},
        "errors": {  # of the step's seconds as a share, of the others in points of the step
            name: (guess - real) / step_seconds for name, (guess, real) in seconds.items()
        },
    }


def op_seconds(step: TrainingStep, captured: Captured, plan: Plan) -> tuple[float, ...]:
    """Run all ops of a plan on the step's batch, and return the seconds of each in its place in the step.

    An op that is computed several times gets the mean. Ops that are measured one by one find other caches and other
    free memory. Outputs are dropped. Only for a CPU, as a GPU's ops run later, and for a plan that offloads nothing.
    """
    seconds: list[list[float]] = [[] for _ in plan.graph.ops]

    def timed(op: int, target: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            returned = target(*args, **kwargs)
            seconds[op].append(time.perf_counter() - began)
            return returned

        return target if isinstance(target, SaveGeneratorState) else call

    calls = tuple(
        replace(
            call,
            target=timed(call.op, call.target),
            in_place_forms={
                read: replace(form, target=timed(call.op, form.target)) for read, form in call.in_place_forms.items()
            },
        )
        for call in captured.binding.calls
    )
    timing = replace(captured, binding=replace(captured.binding, calls=calls))
    (half,) = make_program(timing, plan.schedule, [list(captured.binding.outputs.values())]).halves
    leaves = tree_flatten(step.batch)[0]
    half.function([fetch(leaves) for fetch in fetchers(step.model, captured, half.takes)])
    return tuple(statistics.mean(each) if each else 0.0 for each in seconds)


def in_turns(
    planned: Mapping[str, PlannedStep], reference: PlannedStep
) -> tuple[dict[str, float], dict[str, float], dict[str, list[tuple[float, float, float]]]]:
    """Return the seconds of ops in their places, by name; the link's rates; each step's seconds, stalls, overlap.

    They take turns, because the speed of a machine moves.
    """
    of_ops: list[tuple[float, ...]] = []
    of_link: list[dict[str, float]] = []
    of_steps: dict[str, list[tuple[float, float, float]]] = {way: [] for way in planned}
    for number in range(REPEATS + 1):
        with left_as_it_was(reference.step, reference.generators):
            in_their_places = op_seconds(reference.step, reference.captured, reference.plan)
        of_ops += [in_their_places] if number else []
        of_link += [msgspec.structs.asdict(link_rates(CPU, again=True))]
        for way, each in planned.items():
            with left_as_it_was(each.step, each.generators):
                each.step.model.zero_grad(set_to_none=True)
                began = time.perf_counter()
                each(each.step.batch)
                took = time.perf_counter() - began
            copies = each.transfers.since(began)
            of_steps[way] += [(took, copies.stall_seconds, copies.overlap_seconds)] if number else []
    names = [op.name for op in reference.plan.graph.ops]
    link = {name: trimmed_mean([rates[name] for rates in of_link]) for name in of_link[0]}
    return dict(zip(names, map(trimmed_mean, zip(*of_ops, strict=True)), strict=True)), link, of_steps


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest value."""
    return statistics.mean(sorted(values)[1:-1])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and 90th percentiles of the absolute errors."""
    found: dict[str, Any] = {}
    for name in ("step", "step_one_by_one", "stall", "overlap"):
        errors = sorted(abs(row["errors"][name]) for row in rows)
        found[name] = {"median": statistics.median(errors), "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))]}
    return found


def soak(workload: str, steps: int) -> dict[str, Any]:
    """Train at half of the unplanned peak; return resident memory, open files and threads as they went."""
    planned = fitted(workload, 0.5, "offloading", **SOAK_OPTIONS.get(workload, {}))
    planned.verify()
    looks: list[dict[str, int]] = []
    for number in range(steps + 1):
        planned(planned.step.batch)
        planned.step.model.zero_grad(set_to_none=True)
        if number % LOOK_EVERY == 0:
            looks.append({"step": number, **_held()})
            print(workload, looks[-1], flush=True)
    planned.verify()
    return {
        "workload": workload,
        "steps": steps,
        "options": SOAK_OPTIONS.get(workload, {}),
        "budget_bytes": planned.plan.budget_bytes,
        "looks": looks,
    }


def answer(what: str, **request: Any) -> dict[str, Any]:
    """Return what a process of its own is asked for: a plan's measurement, or a long run."""
    return soak(**request) if what == "soak" else measure_plans(**request)


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
    os.environ.update(KEEPS_MEMORY)
    path = result_path("disk_tier/plans")
    known: list[dict[str, Any]] = load(path)["payload"]["plans"] if path.exists() else []
    for name in names:
        for share in WORKLOADS[name]:
            known = [row for row in known if (row["workload"], row["share"]) != (name, share)]
            rows = _apart(what="plan", workload=name, share=share)["rows"]
            for row in rows:
                errors = {key: f"{error:+.1%}" for key, error in row["errors"].items()}
                print(name, row["way"], f"{share:.0%}", errors, flush=True)
            known += rows
            store("disk_tier/plans", {"plans": known, "errors": summary(known)})
    print(summary(known))


if __name__ == "__main__" and not answer_if_child(answer):
    main()
