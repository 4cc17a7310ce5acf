"""From a planner's schedule to a Result: checked, simulated, bounded. No planner is trusted."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import msgspec

from memfit.checker import check
from memfit.plan import PROVED_TO, Bounds, Plan, Prediction, Problem, Result, Status
from memfit.planners.bounds import LeastBudget, prove_bounds
from memfit.planners.cuts import Bound
from memfit.planners.emit import emit
from memfit.planners.order import original_order
from memfit.planners.program import build_program
from memfit.planners.windows import evaluate, keep_everything, simulated
from memfit.schedule import Schedule
from memfit.simulate import simulate

_PACKAGES = ("memfit", "numpy", "numba", "torch")


def unplanned_schedule(problem: Problem) -> Schedule:
    """Return the schedule that keeps everything to its last use, in the original order; pins do not count."""
    free = Problem(graph=problem.graph, device=problem.device, budget_bytes=0, bytes_outside=problem.bytes_outside)
    program = build_program(free, original_order(problem.graph))
    evaluation = evaluate(program, simulated(program, keep_everything(program)))
    return emit(program, evaluation.sequence)


def predict(problem: Problem, schedule: Schedule) -> Prediction:
    """Check `schedule` and return what the simulator says of it.

    Where the graph has no boundary, what user code holds outside counts from start to end.

    Raises:
        InvalidScheduleError: the schedule is not legal on the problem's graph.
    """
    check(problem.graph, schedule)
    timeline = simulate(problem.graph, schedule, problem.device)
    outside = 0 if problem.graph.boundaries else problem.bytes_outside
    return Prediction(
        peak_bytes=timeline.peak_bytes + outside,
        seconds=timeline.makespan_seconds,
        host_peak_bytes=timeline.host_peak_bytes,
    )


def make_result(
    problem: Problem,
    schedule: Schedule | None,
    *,
    planner: str,
    started_seconds: float,
    least_found_bytes: int | None = None,
    timed_out: bool = False,
    again: Bound | None = None,
    again_in_order_seconds: float | None = None,
    unplanned: Prediction | None = None,
    least_budget: LeastBudget | None = None,
    stats: Mapping[str, float] | None = None,
) -> Result:
    """Return the Result of a planner that ended with `schedule`, or with nothing that fits.

    Args:
        schedule: the best one found, whether or not it fits; its peak counts as a budget that was reached.
        started_seconds: `problem.clock()` when the planner began.
        least_found_bytes: the least peak of any schedule that the planner saw, where that is less.
        again: the bound on the seconds of computing again, where the planner has asked for it.
        again_in_order_seconds: the same for one order of ops, where the planner has proved one.
        unplanned: of planner `none`, where the planner has it already.
        least_budget: what `least_budget_bound` says of this problem, likewise.
        timed_out: time was up before the planner could tell whether the budget can be met.

    Raises:
        InvalidScheduleError: the planner has a fault.
    """
    unplanned = unplanned or predict(problem, unplanned_schedule(problem))
    predicted = predict(problem, schedule) if schedule is not None else None
    found = [b for b in (least_found_bytes, predicted.peak_bytes if predicted else None) if b is not None]
    bounds = prove_bounds(
        problem,
        least_found_bytes=min(found, default=None),
        unplanned_seconds=unplanned.seconds,
        least_budget=least_budget,
        again=again,
        again_in_order_seconds=again_in_order_seconds,
    )
    counts = dict(stats or {})
    proved = problem.budget_bytes < bounds.least_budget_bound_bytes
    without = Status.TIMED_OUT if timed_out and not proved else Status.INFEASIBLE
    if schedule is None or predicted is None or predicted.host_peak_bytes > problem.host_budget_bytes:
        return Result(status=without, plan=None, bounds=bounds, stats=counts)
    fits = predicted.peak_bytes <= problem.budget_bytes
    plan = Plan(
        graph=problem.graph,
        device=problem.device,
        budget_bytes=problem.budget_bytes if fits else predicted.peak_bytes,
        host_budget_bytes=problem.host_budget_bytes,
        bytes_outside=problem.bytes_outside,
        schedule=schedule,
        predicted=predicted,
        unplanned=unplanned,
        bounds=bounds if fits else _at_more_bytes(bounds),
        status=_status(predicted, unplanned, bounds) if fits else Status.FEASIBLE,
        planner=planner,
        seed=problem.seed,
        plan_seconds=max(0.0, problem.clock() - started_seconds),
        versions=_versions(),
    )
    if fits:
        return Result(status=plan.status, plan=plan, bounds=bounds, stats=counts)
    return Result(status=without, plan=None, bounds=bounds, stats=counts, leanest=plan)


def _at_more_bytes(bounds: Bounds) -> Bounds:
    """Return what the bounds say of a greater budget: what is proved of the overhead does not hold there."""
    return msgspec.structs.replace(bounds, overhead=0.0, overhead_in_order=None)


def _status(predicted: Prediction, unplanned: Prediction, bounds: Bounds) -> Status:
    """Optimal where the overhead is the proved least: for every order of ops, or for one."""
    least = max(bounds.overhead, bounds.overhead_in_order or 0.0) + PROVED_TO
    return Status.OPTIMAL if predicted.seconds <= unplanned.seconds * (1.0 + least) else Status.FEASIBLE


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # a planner needs no torch, and a checkout on the path is not installed
            continue
    return versions
