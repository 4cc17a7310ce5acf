"""The points of `memfit compare`: every planner at every budget, and torch's own ways at every share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from memfit.commands.graph_with_costs import Costed
from memfit.commands.work import Work
from memfit.device import Device
from memfit.errors import InvalidOptionError, InvalidTargetError, VerificationError
from memfit.graph import Graph
from memfit.papers.dqn.planner import DqnPlanner
from memfit.plan import Plan, Prediction, Problem, Result
from memfit.planners import PLANNERS, make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.results import predict, unplanned_schedule
from memfit.planning import DEFAULT_PLANNER, Settings, TradeOff, budgets_between, make_problem
from memfit.report.comparison import ComparedPoint
from memfit.schedule import Schedule
from memfit.step.measured import Measured

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

_BY_NAME = (DqnPlanner.name,)  # not of `all`: it trains for minutes, and imports torch
_WITHOUT_MARKS = ("mirror",)  # planners that do nothing unless the user marks something
# Without a host budget, the plans of the first are those of `search`, and the others keep everything.
_WITHOUT_HOST = ("offload", "vdnn", "tflms", "autoswap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The planners and budgets to compare.

        >>> Grid(planners="none, search", budgets=3, repeats=0, settings=Settings(budget="100%")).budgets
        3

    Args:
        planners: names with commas, or `all`.
        budgets: how many, evenly from the unplanned peak down to the proved least budget.
        repeats: how often each plan is measured; 0 measures nothing.
        settings: time limit, seed and host budget of each plan; its own budget does not count.
    """

    planners: str
    budgets: int
    repeats: int
    settings: Settings

    def require_known(self, resolved: TrainingStep | Graph) -> None:
        """Refuse, before any work is done, a comparison that is not possible.

        Raises:
            InvalidOptionError: a name that is neither a planner nor a baseline of this step.
            InvalidTargetError: a graph file is to be measured.
        """
        self.names(resolved)
        if self.repeats and isinstance(resolved, Graph):
            raise InvalidTargetError("a graph file can be planned but not run; leave out --measure")

    def names(self, resolved: TrainingStep | Graph) -> list[str]:
        """Return the planners and baselines, in the order of the answer."""
        there = [name for name in PLANNERS if name not in _WITHOUT_MARKS]
        if self.settings.host_budget_bytes == 0:
            there = [name for name in there if name not in _WITHOUT_HOST]
        if not isinstance(resolved, Graph) and resolved.has_backward:
            from memfit.baselines import baseline_names

            there += baseline_names(resolved)
        if self.planners.strip() == "all":
            return [name for name in there if name not in _BY_NAME]
        asked = [name.strip() for name in self.planners.split(",") if name.strip()]
        for name in asked:
            if name not in there:
                raise InvalidOptionError(
                    f"--planners names {name!r}, expected all or some of {', '.join(there)} for this target"
                )
        return list(dict.fromkeys(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison; its points are in order of planner, then from the largest budget down."""

    graph: Graph
    device: Device
    unplanned: Prediction
    bound_bytes: int
    points: tuple[ComparedPoint, ...]


def compare_step(resolved: TrainingStep | Graph, costed: Costed, grid: Grid, work: Work) -> Comparison:
    """Return what all planners of the grid reach; after Ctrl-C, the points so far.

    Every planner is planned at the same budgets, and at the least peak that it reached itself. Planner `auto` is
    planned last, and at the peak of every other point too, so that each can be compared at equal memory.

    Args:
        resolved: the target; a training step has torch's baselines beside the planners, and can be measured.
        costed: its graph, with the seconds of each op. An iterative function is planned in all of its forms.
        grid: planners and budgets.
        work: shows the stages.

    Raises:
        InvalidOptionError: a host budget for a device without a link.
    """
    graphs = [costed.graph, *(costed.forms() if costed.forms else ())]
    problems = [make_problem(each, costed.device, grid.settings) for each in graphs]
    unplanned = predict(problems[0], unplanned_schedule(problems[0]))
    bound_bytes = min(least_budget_bound(each)[0] for each in problems)
    budgets = budgets_between(unplanned.peak_bytes, min(bound_bytes, unplanned.peak_bytes), grid.budgets)
    names = grid.names(resolved)
    points: dict[str, list[ComparedPoint]] = {name: [] for name in names}
    measured: dict[Schedule, Measured] = {}
    for name in sorted(names, key=lambda name: name == DEFAULT_PLANNER):
        if work.interrupted:
            break
        work.stage(f"planning with {name}")
        others = [each for some in points.values() for each in some]
        for point in _points(name, problems, unplanned, budgets, resolved, others):
            if grid.repeats and not work.interrupted and not isinstance(resolved, Graph):
                work.stage(f"measuring {name}")
                point = _measured(point, resolved, grid.repeats, measured)
            if point.peak_bytes is not None or point.measured is not None or point.budget_bytes is not None:
                points[name].append(point)
    return Comparison(
        graph=costed.graph,
        device=costed.device,
        unplanned=unplanned,
        bound_bytes=bound_bytes,
        points=tuple(point for name in names for point in points[name]),
    )


def _points(
    name: str,
    problems: list[Problem],
    unplanned: Prediction,
    budgets: list[int],
    resolved: TrainingStep | Graph,
    others: list[ComparedPoint],
) -> Iterator[ComparedPoint]:
    if name in PLANNERS:
        for budget, result in sorted(_reached(name, problems, budgets, others).items(), reverse=True):
            yield _point(name, budget, None, result, unplanned)
        return
    assert not isinstance(resolved, Graph), "a graph file has no baselines"
    from memfit.baselines import CHECKPOINT, SOLVERS, plan_knapsack

    kind, _, setting = name.partition(":")
    if kind == CHECKPOINT:
        yield ComparedPoint(planner=name, setting=setting)
        return
    for step in range(len(budgets)):
        share = round(1.0 - step / max(len(budgets) - 1, 1), 4)
        yield _point(name, None, share, plan_knapsack(problems[0], share, SOLVERS[setting], name), unplanned)


def _reached(name: str, problems: list[Problem], budgets: list[int], others: list[ComparedPoint]) -> dict[int, Result]:
    """Return by budget what a planner reaches at best in any form of the step, and at the least peak of all forms."""
    found: dict[int, Result] = {}
    least: list[int] = []
    for problem in problems:
        trade_off = TradeOff(problem, make_planner(name)).reach(budgets).reach_least()
        least += [budget for budget in trade_off.results if budget not in budgets]
        if name == DEFAULT_PLANNER:
            _reach_others(trade_off, others)
        for budget, result in trade_off.results.items():
            known = found.get(budget)
            if known is None or _seconds(result) < _seconds(known):
                found[budget] = result
    needless = {*least} - {min(least, default=0), *(point.peak_bytes for point in others)}
    return {budget: result for budget, result in found.items() if budget not in needless}


def _seconds(result: Result) -> float:
    return math.inf if result.plan is None else result.plan.predicted.seconds


def _reach_others(trade_off: TradeOff, others: list[ComparedPoint]) -> None:
    """Add the peak of every other point as a budget; it is searched only where the other point is faster so far."""
    least_overhead: dict[int, float] = {}
    for point in others:
        if point.peak_bytes is not None and point.overhead is not None:
            known = least_overhead.get(point.peak_bytes, point.overhead)
            least_overhead[point.peak_bytes] = min(known, point.overhead)
    for peak_bytes, overhead in sorted(least_overhead.items()):
        trade_off.add(peak_bytes, overhead)


def _point(
    name: str, budget_bytes: int | None, setting: float | None, result: Result, unplanned: Prediction
) -> ComparedPoint:
    plan = None if result.plan is None else msgspec.structs.replace(result.plan, unplanned=unplanned)
    return ComparedPoint(
        planner=name,
        budget_bytes=budget_bytes,
        setting=setting,
        status=str(result.status),
        peak_bytes=plan.predicted.peak_bytes if plan else None,
        overhead=plan.overhead if plan else None,
        plan_seconds=plan.plan_seconds if plan else None,
        plan=plan,
    )


def _measured(point: ComparedPoint, step: TrainingStep, repeats: int, known: dict[Schedule, Measured]) -> ComparedPoint:
    """Return the point with the measurement of its run; equal schedules are run once."""
    from memfit import baselines

    kind, _, setting = point.planner.partition(":")
    if kind == baselines.TORCH:
        assert isinstance(point.setting, float)
        try:
            return replace(point, measured=baselines.with_torch_budget(step, setting, point.setting).measure(repeats))
        except RuntimeError as error:  # of which all errors of torch's compiler are a kind
            return replace(point, status=f"torch: {type(error).__name__}")
    if kind == baselines.CHECKPOINT:
        measured = baselines.with_checkpoints_placed(step, setting).measure(repeats)
        return replace(point, status="measured", measured=measured)
    if point.plan is None:
        return point
    if point.plan.schedule not in known:
        known[point.plan.schedule] = _run(point.plan, step, repeats)
    return replace(point, measured=known[point.plan.schedule])


def _run(plan: Plan, step: TrainingStep, repeats: int) -> Measured:
    from memfit.doors.step import fit_step

    planned = fit_step(step, Settings(budget=plan.budget_bytes, device=plan.device), plan=plan)
    try:
        planned.verify()
        same = True
    except VerificationError:
        same = False
    return replace(planned.measure(repeats=repeats), bitwise_equal=same)
