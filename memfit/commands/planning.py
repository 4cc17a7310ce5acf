"""From a target to a graph with times, and from a budget to a plan: what `plan`, `fit` and `report` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memfit.budget import parse_budget
from memfit.commands import options
from memfit.commands.work import Work
from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.plan import Plan, Problem
from memfit.planners import PLANNERS, make_planner
from memfit.planners.ask import require_link, require_plan, unplanned_peak_bytes
from memfit.planners.frontier import plan_frontier
from memfit.report import write_html
from memfit.report.figures import CurvePoint, Measured
from memfit.report.more_memory import next_step_bytes
from memfit.schedule import Code

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep


class Limits(Protocol):
    """What holds for each search of a command: how long it may take, its seed, and the bytes it may use on the host."""

    @property
    def time_limit_seconds(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def host_budget_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How a plan is to be looked for; `options` are the planner's own."""

    planner: str
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    time_limit_seconds: float
    seed: int
    host_budget_bytes: int = 0


def load_target(target: str, settings: Mapping[str, str]) -> TrainingStep | Graph:
    """Return the training step or the graph that `target` names; only a training step brings torch."""
    from memfit.workloads.target import resolve  # torch's room: a graph file must not pay for it

    return resolve(target, settings)


def graph_with_costs(resolved: TrainingStep | Graph, device_profile: str | None, work: Work) -> tuple[Graph, Device]:
    """Return the step's graph with seconds and workspace of each op, and the device that they are for.

    A graph file brings its own seconds; `device_profile` then only gives link rates and alignment.
    """
    from memfit.device_profiles import load_device

    profile = load_device(device_profile) if device_profile else None
    if isinstance(resolved, Graph):
        return resolved, profile or GENERIC
    from memfit.capture import capture
    from memfit.cost import local_device, measure, roofline

    work.stage("capturing the step")
    captured = capture(resolved)
    if profile is not None:
        return roofline(captured.graph, captured.binding, profile), profile
    work.stage("measuring each op")
    graph = measure(captured.graph, captured.binding, progress=work.done)
    return graph, local_device(captured.binding.device)


def make_search(
    planner: str, option: list[str] | None, time_limit: float, seed: int, host_budget: str | None = None
) -> Search:
    """Return the search that the command line asks for.

    Raises:
        InvalidOptionError: no such planner, no such option, or a value that it cannot take.
    """
    search = Search(
        planner=planner,
        options=options.typed_options("planner", planner, PLANNERS, options.read_settings(option, "--option")),
        time_limit_seconds=options.require_time_limit(time_limit),
        seed=seed,
        host_budget_bytes=options.read_host_budget(host_budget),
    )
    make_planner(planner, **search.options)
    return search


def problem_of(graph: Graph, device: Device, budget_bytes: int, limits: Limits, work: Work) -> Problem:
    """Return what a planner is asked, within the limits that the command line sets; its progress is shown."""
    return Problem(
        graph=graph,
        device=device,
        budget_bytes=budget_bytes,
        host_budget_bytes=limits.host_budget_bytes,
        time_limit_seconds=limits.time_limit_seconds,
        seed=limits.seed,
        progress=work.on_search,
    )


def find_plan(graph: Graph, device: Device, budget: str, search: Search, work: Work) -> Plan:
    """Return a plan of `graph` within `budget`.

    Raises:
        InvalidBudgetError: a budget that cannot be read.
        InvalidOptionError: a host budget on a device without a link.
        InfeasibleBudgetError: no plan fits.
        TimeLimitError: time was up with no plan.
    """
    require_link(device, search.host_budget_bytes)
    planner = make_planner(search.planner, **search.options)
    budget_bytes = parse_budget(budget, unplanned_peak_bytes(graph, device))
    work.stage("searching a plan", expected_seconds=search.time_limit_seconds)
    problem = problem_of(graph, device, budget_bytes, search, work)
    return require_plan(planner.plan(problem), problem, search.planner)


def counts_of(plan: Plan) -> dict[str, int]:
    """Return how many instructions of each kind the plan has; `rematerialized` are computations beyond the first."""
    per_code = {code: int((plan.schedule.codes == code).sum()) for code in Code}
    return {
        "computed": per_code[Code.COMPUTE],
        "rematerialized": per_code[Code.COMPUTE] - len(plan.graph.ops),
        "offloaded": per_code[Code.OFFLOAD],
        "dropped": per_code[Code.DROP],
    }


def host_of(plan: Plan) -> dict[str, dict[str, int]]:
    """Return what the plan copies to the host, for its JSON form; nothing where no host budget was given."""
    if plan.host_budget_bytes == 0:
        return {}
    return {
        "host": {
            "budget_bytes": plan.host_budget_bytes,
            "peak_bytes": plan.predicted.host_peak_bytes,
            "offloaded_bytes": plan.offloaded_bytes,
        }
    }


def bounds_of(plan: Plan) -> dict[str, Any]:
    """Return the JSON form of the plan's bounds."""
    return {
        "least_budget_found_bytes": plan.bounds.least_budget_found_bytes,
        "least_budget_bound_bytes": plan.bounds.least_budget_bound_bytes,
        "overhead": plan.bounds.overhead,
        "overhead_in_order": plan.bounds.overhead_in_order,
    }


def write_report(
    plan: Plan, path: Path, curve_points: int, search: Search, work: Work, measured: Measured | None = None
) -> None:
    """Write the HTML report of `plan`, with a trade-off curve of so many points around it."""
    each_seconds = search.time_limit_seconds / max(curve_points, 1)
    curve = trade_off(plan, curve_points, each_seconds, search, work, also=larger_budgets(plan))
    work.stage("writing the report")
    write_html(plan, path, curve=curve, measured=measured)


def larger_budgets(plan: Plan) -> list[int]:
    """Return the budgets that a report tells the price of, beside those of its curve: what the next GiB would buy."""
    larger = plan.budget_bytes + next_step_bytes(plan)
    return [larger] if plan.overhead > 0 and larger < plan.unplanned.peak_bytes else []


def trade_off(
    plan: Plan, points: int, each_seconds: float, search: Search, work: Work, also: Sequence[int] = ()
) -> list[CurvePoint]:
    """Return what is reached at `points` budgets, evenly from the unplanned peak down to the proved bound.

    A larger budget never gives a slower plan. `each_seconds` is the time limit of each point's search; `also` are more
    budgets, in bytes, where there is a curve at all.
    """
    highest, lowest = plan.unplanned.peak_bytes, plan.bounds.least_budget_bound_bytes
    if points == 0 or highest <= lowest:
        return []
    budgets = [highest - (highest - lowest) * step // max(points - 1, 1) for step in range(points)]
    budgets += [budget for budget in also if budget not in budgets]
    work.stage("drawing the trade-off curve", expected_seconds=each_seconds)
    problem = replace(
        problem_of(plan.graph, plan.device, plan.budget_bytes, search, work),
        host_budget_bytes=plan.host_budget_bytes,
        bytes_outside=plan.bytes_outside,
        time_limit_seconds=each_seconds,
    )
    results = plan_frontier(problem, budgets)
    return [CurvePoint.of(budget, result) for budget, result in zip(budgets, results, strict=True)]
