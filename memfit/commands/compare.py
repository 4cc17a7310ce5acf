"""`memfit compare`: the plans of every planner at the same budgets, beside torch's own ways to save memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, rows_table
from memfit.commands.compare_points import Comparison, Grid, compare_step
from memfit.commands.graph_with_costs import graph_with_costs
from memfit.commands.targets import resolve
from memfit.commands.work import working
from memfit.planning import DEFAULT_TIME_LIMIT_SECONDS
from memfit.report.comparison import ComparedPoint, write_comparison
from memfit.report.formatting import change_text, seconds_text, status_text
from memfit.system.budget import format_bytes
from memfit.system.files import require_writable

EXAMPLES = """
Examples:

memfit compare resnet50 --report resnet50.html

memfit compare gpt2 --planners sublinear,division_tree,search --budgets 5 --measure

memfit compare step.graph.json.gz --json
"""
_POINT_KEYS = ("planner", "budget_bytes", "status", "peak_bytes", "overhead", "plan_seconds")
_MEASURED_KEYS = (
    "peak_bytes", "step_seconds", "overhead", "overhead_spread", "bitwise_equal",
    "baseline_peak_bytes", "baseline_step_seconds",
)  # fmt: skip

_Planners = Annotated[
    str,
    typer.Option(
        "--planners",
        "-p",
        metavar="NAMES",
        help="all, or names with commas: planners, torch:dp, torch:greedy, torch:ilp, checkpoint:block, "
        "checkpoint:stage.",
    ),
]


def compare(
    target: options.Target,
    planners: _Planners = "all",
    budgets: Annotated[
        int,
        typer.Option(
            "--budgets",
            metavar="N",
            min=1,
            help="Points, evenly from the unplanned peak down to the bound (for torch: shares from 1 to 0).",
        ),
    ] = 10,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run every plan too, check its bits, and measure it beside eager.")
    ] = False,
    host_budget: options.HostBudget = None,
    host_dir: options.HostDir = None,
    time_limit: options.TimeLimit = DEFAULT_TIME_LIMIT_SECONDS,
    seed: options.Seed = 0,
    set_: options.WorkloadOptions = None,
    device_profile: options.DeviceProfile = None,
    report: options.Report = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="With --measure: turns of eager and planned steps.")
    ] = 3,
) -> Answer:
    """Plan TARGET with every planner at the same budgets, and show peaks and overheads side by side."""
    require_writable(report)
    search = options.Search(host_budget=host_budget, host_dir=host_dir, time_limit=time_limit, seed=seed)
    asked = search.settings("100%")
    of_workload = options.read_settings(set_, "--set")
    with working() as work:
        grid = Grid(planners=planners, budgets=budgets, repeats=repeats if measure else 0, settings=work.follow(asked))
        resolved = resolve(target, of_workload)
        grid.require_known(resolved)
        costed = graph_with_costs(resolved, device_profile, work, settings=asked)
        comparison = compare_step(resolved, costed, grid, work)
        if report and not work.interrupted:
            work.stage("writing the report")
            write_comparison(comparison.graph, comparison.device, comparison.points, report)
    return _answer(target, comparison, report, work.exit_status)


def _answer(target: str, comparison: Comparison, report: Path | None, exit_status: int) -> Answer:
    unplanned, parts = comparison.unplanned, _parts(comparison, report)
    keys: dict[str, Any] = {
        "unplanned": {"peak_bytes": unplanned.peak_bytes, "seconds": unplanned.seconds},
        "least_budget_bound_bytes": comparison.bound_bytes,
        "points": [_point_keys(point) for point in comparison.points],
    }
    return Answer(target=target, device=comparison.device.name, keys=keys, parts=parts, exit_status=exit_status)


def _point_keys(point: ComparedPoint) -> dict[str, Any]:
    keys = {name: getattr(point, name) for name in _POINT_KEYS}
    if point.setting is not None:
        keys["setting"] = point.setting
    if point.measured is not None:
        keys["measured"] = {name: getattr(point.measured, name) for name in _MEASURED_KEYS}
    return keys


def _parts(comparison: Comparison, report: Path | None) -> tuple[RenderableType, ...]:
    head = {
        "step": comparison.graph.name,
        "unplanned": format_bytes(comparison.unplanned.peak_bytes),
        "no plan below": format_bytes(comparison.bound_bytes),
        **({"report": str(report)} if report else {}),
    }
    is_measured = any(point.measured is not None for point in comparison.points)
    columns = ["planner", "budget", "status", "peak", "overhead", "planned in"]
    columns += ["measured peak", "measured overhead", "same bits"] if is_measured else []
    rows = [tuple(_row(point)[: len(columns)]) for point in comparison.points]
    return rows_table(head), Text(), columns_table(tuple(columns), rows)


def _row(point: ComparedPoint) -> list[str]:
    measured = point.measured
    setting = "" if point.setting is None else str(point.setting)
    return [
        point.planner,
        setting if point.budget_bytes is None else format_bytes(point.budget_bytes),
        status_text(point.status),
        "-" if point.peak_bytes is None else format_bytes(point.peak_bytes),
        "-" if point.overhead is None else change_text(point.overhead),
        "-" if point.plan_seconds is None else seconds_text(point.plan_seconds),
        "-" if measured is None else format_bytes(measured.peak_bytes),
        "-" if measured is None else measured.overhead_text,
        "-" if measured is None else "yes" if measured.bitwise_equal else "no",
    ]
