"""The points of `memfit compare`: every planner at every budget, and torch's own ways at every share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit.commands.planning import problem_of
from memfit.commands.work import Work
from memfit.device import Device
from memfit.errors import InvalidOptionError, InvalidTargetError, VerificationError
from memfit.graph import Graph
from memfit.plan import Plan, Prediction, Problem, Result
from memfit.planners import PLANNERS, make_planner
from memfit.planners.ask import require_link
from memfit.planners.auto import Auto
from memfit.planners.bounds import least_budget_bound
from memfit.planners.frontier import plan_frontier
from memfit.planners.knapsack import plan_knapsack
from memfit.planners.offload import Offload
from memfit.planners.result import predict, unplanned_schedule
from memfit.planners.search import Search
from memfit.report.comparison import ComparedPoint
from memfit.report.figures import Measured
from memfit.schedule import Schedule

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.runtime.measure import Measurement

_NO_BUDGET_BYTES = 1 << 62
_WITHOUT_MARKS = ("mirror",)  # the planners that do nothing unless the user marks something


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is to be compared: names with commas or `all`, how many budgets, how long, and measured how often (0: not).

    >>> Grid(planners="none, search", budgets=3, time_limit_seconds=1.0, seed=0, repeats=0).budgets
    3
    """

    planners: str
    budgets: int
    time_limit_seconds: float
    seed: int
    repeats: int
    host_budget_bytes: int = 0

    def require_known(self, resolved: TrainingStep | Graph) -> None:
        """Refuse, before any work is done, what cannot be compared.

        Raises:
            InvalidOptionError: a name that is no planner, and no rival of this step.
            InvalidTargetError: a graph file is to be measured.
        """
        self.names(resolved)
        if self.repeats and isinstance(resolved, Graph):
            raise InvalidTargetError("a graph file can be planned but not run; leave out --measure")

    def names(self, resolved: TrainingStep | Graph) -> list[str]:
        """Return the planners and rivals, in the order in which they are listed."""
        there = [name for name in PLANNERS if name not in _WITHOUT_MARKS]
        if self.host_budget_bytes == 0:
            there.remove(Offload.name)  # it would be `search` once more
        if not isinstance(resolved, Graph):
            from memfit.workloads.rivals import rivals_of

            there += rivals_of(resolved)
        if self.planners.strip() == "all":
            return there
        asked = [name.strip() for name in self.planners.split(",") if name.strip()]
        for name in asked:
            if name not in there:
                raise InvalidOptionError(
                    f"--planners names {name!r}, expected all or some of {', '.join(there)} for this target"
                )
        return list(dict.fromkeys(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came out; the points in order of planner, then from the largest budget down."""

    graph: Graph
    device: Device
    unplanned: Prediction
    bound_bytes: int
    points: tuple[ComparedPoint, ...]


def compare_step(resolved: TrainingStep | Graph, graph: Graph, device: Device, grid: Grid, work: Work) -> Comparison:
    """Return what all of the grid's planners reach; those done so far where Ctrl-C comes."""
    require_link(device, grid.host_budget_bytes)
    problem = problem_of(graph, device, _NO_BUDGET_BYTES, grid, work)
    unplanned = predict(problem, unplanned_schedule(problem))
    bound_bytes, _ = least_budget_bound(problem)
    highest, lowest = unplanned.peak_bytes, min(bound_bytes, unplanned.peak_bytes)
    budgets = [highest - (highest - lowest) * step // max(grid.budgets - 1, 1) for step in range(grid.budgets)]
    points: list[ComparedPoint] = []
    measured: dict[Schedule, Measured] = {}
    for name in grid.names(resolved):
        if work.interrupted:
            break
        work.stage(f"planning with {name}")
        for point in _points(name, problem, budgets, resolved):
            if grid.repeats and not work.interrupted and not isinstance(resolved, Graph):
                work.stage(f"measuring {name}")
                point = _measured(point, resolved, grid.repeats, measured)
            if point.peak_bytes is not None or point.measured is not None or point.budget_bytes is not None:
                points.append(point)
    return Comparison(graph=graph, device=device, unplanned=unplanned, bound_bytes=bound_bytes, points=tuple(points))


def _points(name: str, problem: Problem, budgets: list[int], resolved: TrainingStep | Graph) -> Iterator[ComparedPoint]:
    if name in PLANNERS:
        for budget, result in zip(budgets, _results(name, problem, budgets), strict=True):
            yield _point(name, budget, None, result)
        return
    assert not isinstance(resolved, Graph), "a graph file has no rivals"
    from memfit.workloads.rivals import CHECKPOINT, SOLVERS

    kind, _, setting = name.partition(":")
    if kind == CHECKPOINT:
        yield ComparedPoint(planner=name, setting=setting)
        return
    for step in range(len(budgets)):
        share = round(1.0 - step / max(len(budgets) - 1, 1), 4)
        yield _point(name, None, share, plan_knapsack(problem, share, SOLVERS[setting], name))


def _results(name: str, problem: Problem, budgets: list[int]) -> list[Result]:
    planner = make_planner(name)
    if isinstance(planner, Auto | Search | Offload):
        return plan_frontier(problem, budgets, planner=planner)
    return [planner.plan(replace(problem, budget_bytes=budget)) for budget in budgets]


def _point(name: str, budget_bytes: int | None, setting: float | None, result: Result) -> ComparedPoint:
    plan = result.plan
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
    """Return the point with what a run gave; equal schedules are run once."""
    from memfit.workloads import rivals

    kind, _, setting = point.planner.partition(":")
    if kind == rivals.TORCH:
        assert isinstance(point.setting, float)
        try:
            rival = rivals.with_torch_budget(step, setting, point.setting)
            return replace(point, measured=_of(rival.measure(repeats), rival.gives_the_same_bits()))
        except RuntimeError as error:  # of which all errors of torch's compiler are a kind
            return replace(point, status=f"torch: {type(error).__name__}")
    if kind == rivals.CHECKPOINT:
        rival = rivals.with_checkpoints_placed(step, setting)
        return replace(point, status="measured", measured=_of(rival.measure(repeats), rival.gives_the_same_bits()))
    if point.plan is None:
        return point
    if point.plan.schedule not in known:
        known[point.plan.schedule] = _run(point.plan, step, repeats)
    return replace(point, measured=known[point.plan.schedule])


def _run(plan: Plan, step: TrainingStep, repeats: int) -> Measured:
    from memfit.runtime.fit import fit_step
    from memfit.runtime.planning import Settings

    planned = fit_step(step, Settings(budget=plan.budget_bytes, device=plan.device), plan=plan)
    try:
        planned.verify()
        same = True
    except VerificationError:
        same = False
    return _of(planned.measure(repeats=repeats), same)


def _of(measurement: Measurement, bitwise_equal: bool) -> Measured:
    return Measured(
        peak_bytes=measurement.peak_bytes,
        step_seconds=measurement.step_seconds,
        baseline_peak_bytes=measurement.baseline_peak_bytes,
        baseline_step_seconds=measurement.baseline_step_seconds,
        overhead=measurement.overhead,
        bitwise_equal=bitwise_equal,
        machine=measurement.source,
    )
