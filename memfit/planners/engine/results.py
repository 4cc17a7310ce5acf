"""The Result of a planner: its schedule is checked and simulated, and bounds are proved."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import msgspec

from memfit.checker import check
from memfit.device import Device
from memfit.graph import Graph
from memfit.plan import PROVED_TO, Bounds, Plan, Prediction, Problem, Result, Status
from memfit.planners.engine.bounds.bounds import NOTHING_PROVED, Proofs, prove_bounds
from memfit.planners.engine.order import original_order
from memfit.planners.engine.overlapping import with_overlap
from memfit.planners.engine.retention.decisions import Retention, evaluate, keep_everything, simulated
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import Instance, build_instance
from memfit.schedule import Schedule
from memfit.simulate import simulate

_PACKAGES = ("memfit", "numpy", "numba", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a planner ended.

    Attributes:
        planner: its name.
        started_seconds: the problem's clock when it began.
        schedule: its best schedule, which need not fit; None without one.
        least_found_bytes: the least peak of all schedules that it simulated; None if `schedule` has it.
        tried_all: whether it has tried all schedules that it can make; a longer time limit is then of no use.
        interrupted: whether Ctrl-C ended it.
        proofs: bounds that it has proved.
        unplanned: the prediction of `unplanned_schedule`, if the planner has it.
        stats: counts for those who measure planners.
    """

    planner: str
    started_seconds: float
    schedule: Schedule | None
    least_found_bytes: int | None = None
    tried_all: bool = False
    interrupted: bool = False
    proofs: Proofs = NOTHING_PROVED
    unplanned: Prediction | None = None
    stats: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search's result, and its best retention: the plan's, or that of the least peak if none fits."""

    result: Result
    retention: Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A legal schedule and its prediction."""

    schedule: Schedule
    predicted: Prediction

    @staticmethod
    def of(problem: Problem, schedule: Schedule) -> _Checked:
        return _Checked(schedule=schedule, predicted=predict(problem, schedule))


def unplanned_schedule(problem: Problem | Plan) -> Schedule:
    """Return the schedule that keeps every storage to its last use, in the original order, whatever the pins.

    Compute hides as much of its collectives as it can, whatever memory that takes.
    """
    free = Problem(graph=problem.graph, device=problem.device, budget_bytes=0, bytes_outside=problem.bytes_outside)
    return with_overlap(problem.graph, problem.device, keeping_schedule(free), None)


def keeping_schedule(problem: Problem) -> Schedule:
    """Return the schedule that keeps all storages except those pinned to be rematerialized, in the original order.

    Raises:
        InvalidOptionError: a pin that cannot be honoured.
    """
    instance = build_instance(problem, original_order(problem.graph))
    if all(problem.pinned.values()):
        return kept_schedule(instance)
    return emit(instance, evaluate(instance, simulated(instance, keep_everything(instance))).sequence)


def kept_schedule(instance: Instance) -> Schedule:
    """Return the schedule that computes every op of an instance once, and drops each storage after its last use.

    Args:
        instance: in any order; its pins are not looked at.
    """
    return emit(instance, range(len(instance.op_at)))


def overlapped(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule with collectives beside compute, as the budget allows.

    Args:
        problem: of the schedule.
        schedule: legal on its graph.
    """
    return with_overlap(problem.graph, problem.device, schedule, problem.budget_bytes - problem.always_outside_bytes)


def predict(problem: Problem, schedule: Schedule) -> Prediction:
    """Check `schedule` and return the simulator's prediction.

    If the graph has no boundary, the bytes outside count from start to end.

    Args:
        problem: gives the graph, the device and the bytes outside.
        schedule: of the whole step.

    Raises:
        InvalidScheduleError: the schedule is not legal on the problem's graph.
    """
    check(problem.graph, schedule)
    timeline = simulate(problem.graph, schedule, problem.device)
    return Prediction(
        peak_bytes=timeline.peak_bytes + problem.always_outside_bytes,
        seconds=timeline.makespan_seconds,
        host_peak_bytes=timeline.host_peak_bytes,
    )


def unplanned_peak_bytes(graph: Graph, device: Device, bytes_outside: int = 0) -> int:
    """Return the predicted peak of the unplanned step, which keeps each storage to its last use.

    Args:
        graph: a step.
        device: gives the alignment of allocations.
        bytes_outside: bytes on the device that are not the graph's.
    """
    problem = Problem(graph=graph, device=device, budget_bytes=0, bytes_outside=bytes_outside)
    return predict(problem, unplanned_schedule(problem)).peak_bytes


def make_result(problem: Problem, ending: Ending) -> Result:
    """Return the Result of a planner that ended in this way.

    A budget at or above the peak of the unplanned step is always met, unless pins prevent it: if the planner's own
    schedule does not fit, the schedule that keeps everything replaces it.

    Args:
        problem: the problem that was planned.
        ending: the schedule found, and what was proved.

    Raises:
        InvalidScheduleError: the planner's schedule is not legal, which is a fault of the planner.
    """
    unplanned = ending.unplanned or predict(problem, unplanned_schedule(problem))
    candidates = _candidates(problem, ending, unplanned)
    peaks = [each.predicted.peak_bytes for each in candidates]
    peaks += [] if ending.least_found_bytes is None else [ending.least_found_bytes]
    least_found_bytes = min(peaks, default=None)
    bounds = prove_bounds(
        problem, ending.proofs, least_found_bytes=least_found_bytes, unplanned_seconds=unplanned.seconds
    )
    fitting = [each for each in candidates if problem.fits(each.predicted)]
    plan = _plan(problem, ending, fitting[0], unplanned, bounds) if fitting else None
    proved = Status.INFEASIBLE if problem.budget_bytes < bounds.least_budget_bound_bytes else Status.TIMED_OUT
    return Result(
        status=proved if plan is None else plan.status,
        plan=plan,
        bounds=bounds,
        stats=ending.stats,
        interrupted=ending.interrupted,
        tried_all=plan is None and ending.tried_all,
        leanest=_leanest(problem, ending, candidates, unplanned, bounds) if plan is None else None,
    )


def _candidates(problem: Problem, ending: Ending, unplanned: Prediction) -> list[_Checked]:
    """Return the planner's schedule; if it does not fit, also the one that keeps everything, if that may fit."""
    candidates = [] if ending.schedule is None else [_Checked.of(problem, overlapped(problem, ending.schedule))]
    if unplanned.peak_bytes <= problem.budget_bytes and not any(problem.fits(each.predicted) for each in candidates):
        candidates.append(_Checked.of(problem, overlapped(problem, keeping_schedule(problem))))
        if not problem.fits(candidates[-1].predicted) and all(problem.pinned.values()):
            candidates.append(_Checked.of(problem, unplanned_schedule(problem)))  # whose overlap takes less
    return candidates


def _plan(problem: Problem, ending: Ending, checked: _Checked, unplanned: Prediction, bounds: Bounds) -> Plan:
    """Return the plan of a schedule that fits the problem's budgets."""
    return Plan(
        graph=problem.graph,
        device=problem.device,
        budget_bytes=problem.budget_bytes,
        host_budget_bytes=problem.host_budget_bytes,
        bytes_outside=problem.bytes_outside,
        schedule=checked.schedule,
        predicted=checked.predicted,
        unplanned=unplanned,
        bounds=bounds,
        status=_status(checked.predicted, unplanned, bounds),
        planner=ending.planner,
        seed=problem.seed,
        plan_seconds=max(0.0, problem.clock() - ending.started_seconds),
        versions=_versions(),
    )


def _leanest(
    problem: Problem, ending: Ending, candidates: list[_Checked], unplanned: Prediction, bounds: Bounds
) -> Plan | None:
    """Return the plan of the least peak that fits the host's budget, with that peak for its budget.

    Bounds on the overhead hold for smaller budgets only, and are left out.
    """
    legal = [each for each in candidates if problem.fits_host(each.predicted)]
    if not legal:
        return None
    least = min(legal, key=lambda each: each.predicted.peak_bytes)
    plan = _plan(problem, ending, least, unplanned, bounds.of_any_budget(problem.graph))
    return msgspec.structs.replace(plan, budget_bytes=least.predicted.peak_bytes, status=Status.FEASIBLE)


def _status(predicted: Prediction, unplanned: Prediction, bounds: Bounds) -> Status:
    """Return optimal if the overhead is the proved least, for every order of ops or for one; else feasible."""
    in_order = bounds.overhead if bounds.overhead_in_order is None else bounds.overhead_in_order
    least = max(bounds.overhead, in_order) + PROVED_TO
    return Status.OPTIMAL if predicted.seconds <= unplanned.seconds * (1.0 + least) else Status.FEASIBLE


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # a planner needs no torch, and a checkout on the path is not installed
            continue
    return versions
