"""The promise, over its whole range: ten budgets from the unplanned peak down to the least that any plan could reach.

For each of the workloads, and each budget: predicted and measured peak (everything on the device counts: parameters,
buffers, inputs too), time against eager run in turns, and whether loss, gradients and buffers are eager's bits. Budgets
that no plan fits are shown as such. The ten are planned together, in one process for each workload, whose result is
kept unless `--again` is given.

    python benchmarks/sweep.py                    # all eight workloads
    python benchmarks/sweep.py --quick            # one workload, four budgets
    python benchmarks/sweep.py gpt2 --time-limit 20
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from _measure import EIGHT, MIB
from _planned import NO_BUDGET_BYTES, both, build_for_measurement, let_go
from _process import answer_if_child, fresh_cache, in_fresh_process
from _record import load, result_path, store

from memfit import Plan, Problem, TrainingStep
from memfit.doors.step import fit_step
from memfit.planning import Settings, plan_frontier

BUDGETS = 10
QUICK_WORKLOAD, QUICK_BUDGETS, QUICK_REPEATS = "unet", 4, 1
CHILD_SECONDS = 1800
TIME_WAS_UP = "not measured: time was up"
MOST_LEFT_OUT = 0.01  # of the gradients


def sweep(
    workload: str, options: dict[str, Any], *, timeout_seconds: float = CHILD_SECONDS, **how: Any
) -> list[dict[str, Any]]:
    """Return the points of `measure_sweep`, made in a process of its own; if it failed, the last one says why.

    Args:
        timeout_seconds: when the process is stopped.
        how: the rest of `measure_sweep`.
    """
    request = {"workload": workload, "options": options, **how}
    answer = in_fresh_process(__file__, request, timeout_seconds=timeout_seconds)
    points: list[dict[str, Any]] = answer.pop("points", [])
    if "error" in answer:
        points.append({"planner": "none", "budget_bytes": NO_BUDGET_BYTES} | answer)
    return points


def measure_sweep(
    workload: str,
    options: dict[str, Any],
    count: int = BUDGETS,
    repeats: int = 5,
    time_limit_seconds: float = 5.0,
    seconds: float = CHILD_SECONDS,
) -> Iterator[dict[str, Any]]:
    """Measure planner `none`, plan all budgets together, so that they are monotone, and measure each plan.

    Yields the points so far, after each.

    Args:
        count: how many budgets.
        repeats: timed pairs of steps at each budget.
        time_limit_seconds: for the planner, at each budget.
        seconds: how long all of it may take; what is left then is answered as not measured.
    """
    stop = time.monotonic() + seconds
    step = build_for_measurement(workload, options)
    unplanned = fit_step(step, Settings(budget=NO_BUDGET_BYTES, planner="none"))
    points = [{"budget_bytes": NO_BUDGET_BYTES, "planner": "none"} | both(unplanned, repeats)]
    yield {"points": points}
    plan = unplanned.plan
    del unplanned
    budgets = budgets_between(plan.unplanned.peak_bytes, plan.bounds.least_budget_bound_bytes, count)
    problem = Problem(
        graph=plan.graph, device=plan.device, budget_bytes=budgets[0], time_limit_seconds=time_limit_seconds
    )
    longest = 0.0
    for budget_bytes, result in zip(budgets, plan_frontier(problem, budgets), strict=True):
        start = time.monotonic()
        point: dict[str, Any] = {"budget_bytes": budget_bytes, "planner": "auto", "status": str(result.status)}
        if result.plan is None:
            point |= {"least_budget_found_bytes": result.bounds.least_budget_found_bytes}
        elif start + longest > stop:
            point |= {"status": TIME_WAS_UP}
        else:
            point |= measured_within(step, budget_bytes, result.plan, repeats, time_limit_seconds)
            longest = max(longest, time.monotonic() - start)
        points.append(point)
        print(f"{workload:12} {described(point)}", flush=True)
        yield {"points": points}


def measured_within(
    step: TrainingStep, budget_bytes: int, plan: Plan, repeats: int, time_limit_seconds: float
) -> dict[str, Any]:
    """Measure a plan of a step; a device that runs out of memory is an answer too."""
    step.model.zero_grad(set_to_none=True)  # gradients that are there would make another graph
    let_go(next(step.model.parameters()).device)
    try:
        settings = Settings(budget=budget_bytes, time_limit_seconds=time_limit_seconds)  # of corrections
        return both(fit_step(step, settings, plan=plan), repeats)
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error).splitlines()[0]}"}


def budgets_between(most_bytes: int, least_bytes: int, count: int) -> list[int]:
    """Return `count` budgets from most to least, evenly, both ends included."""
    return [most_bytes - (most_bytes - least_bytes) * step // (count - 1) for step in range(count)]


def verdict(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many points were feasible, and whether these keep the promises (None where there is none)."""
    feasible = [point for point in points if "measured_peak_bytes" in point and point["planner"] != "none"]
    counts = {
        "feasible": len(feasible),
        "infeasible": sum(point.get("status") == "infeasible" for point in points),
        "not_found": sum(point.get("status") == "timed_out" for point in points),
        "failed": sum("error" in point for point in points),
        "unplanned_time_ratio": points[0].get("time_ratio"),
    }
    promises: dict[str, Any] = dict.fromkeys(("within_budget", "prediction_error", "monotone", "same_bits"))
    if feasible:
        overheads = [point["predicted_overhead"] for point in feasible]  # from the largest budget to the least
        promises = {
            "within_budget": all(point["within_budget"] for point in feasible),
            "prediction_error": max(abs(point["prediction_error"]) for point in feasible),
            "monotone": overheads == sorted(overheads),
            "same_bits": all(point["first_difference"] is None and not _is_vacuous(point) for point in feasible),
        }
    return counts | promises


def _is_vacuous(point: dict[str, Any]) -> bool:
    """Whether more than 1% of the gradients were left out of the comparison, because eager does not repeat them."""
    left_out = [name for name in point.get("not_repeated", []) if name.split()[0] in ("gradient", "parameter")]
    return len(left_out) > MOST_LEFT_OUT * point.get("compared", 0)


def described(point: dict[str, Any]) -> str:
    """One line of a point for the terminal."""
    budget = "unlimited" if point["planner"] == "none" else f"{point['budget_bytes'] / MIB:8.1f} MiB"
    if "error" in point:
        return f"{budget:>13} {point['error']}"
    if "measured_peak_bytes" not in point:
        return f"{budget:>13} {point['status']}"
    bits = "same bits" if point["first_difference"] is None else f"differs first in {point['first_difference']}"
    over = "" if point["within_budget"] else " OVER BUDGET"
    return (
        f"{budget:>13} predicted {point['predicted_peak_bytes'] / MIB:8.1f}, "
        f"measured {point['measured_peak_bytes'] / MIB:8.1f} MiB{over}, overhead predicted "
        f"{point['predicted_overhead']:6.1%}, time {point['time_ratio']:.3f} of eager's, {bits}"
    )


def sweep_and_store(workload: str, options: argparse.Namespace) -> None:
    """Sweep one workload, store its points and print them; points that are stored without an error are kept."""
    count, repeats = (QUICK_BUDGETS, QUICK_REPEATS) if options.quick else (BUDGETS, options.repeats)
    name = f"sweep_quick/{workload}" if options.quick else f"sweep/{workload}"
    points = load(result_path(name))["payload"]["points"] if result_path(name).exists() and not options.again else []
    if not points or any("error" in point for point in points):
        points = sweep(workload, {}, count=count, repeats=repeats, time_limit_seconds=options.time_limit)
        store(name, {"workload": workload, "points": points, "verdict": verdict(points)})
    for point in points:
        print(f"{workload:12} {described(point)}", flush=True)
    print(f"{workload:12} {verdict(points)}", flush=True)


def main() -> None:
    """Sweep the workloads named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_WORKLOAD} alone, {QUICK_BUDGETS} budgets")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of steps at each budget")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds that the planner may search")
    parser.add_argument("--again", action="store_true", help="measure again what is stored already")
    options = parser.parse_args()
    for workload in options.workloads or ([QUICK_WORKLOAD] if options.quick else list(EIGHT)):
        with fresh_cache():
            sweep_and_store(workload, options)


if __name__ == "__main__" and not answer_if_child(measure_sweep):
    main()
