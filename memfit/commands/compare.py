"""`memfit compare`: what every planner reaches at the same budgets, and what torch offers beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.budget import format_bytes
from memfit.commands import options
from memfit.commands.answer import DONE, INTERRUPTED, Answer, columns_table, deliver, rows_table
from memfit.commands.comparing import Comparison, Grid, compare_step
from memfit.commands.planning import graph_with_costs, load_target
from memfit.commands.work import working
from memfit.report.comparison import ComparedPoint, write_comparison
from memfit.report.words import change_text, seconds_text

EXAMPLES = """
Examples:

memfit compare resnet50 --report resnet50.html

memfit compare gpt2 --planners sublinear,division_tree,search --budgets 5 --measure

memfit compare step.graph.json.gz --json
"""


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
            help="Points, evenly from the unplanned peak down to the bound (for torch: shares from 1 to 0).",
        ),
    ] = 10,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run every plan too, check its bits, and measure it beside eager.")
    ] = False,
    host_budget: options.HostBudget = None,
    time_limit: options.TimeLimit = 5.0,
    seed: options.Seed = 0,
    set_: options.Settings = None,
    device_profile: options.DeviceProfile = None,
    report: options.Report = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Steps to measure; medians are shown.")] = 3,
    as_json: options.Json = False,
) -> int:
    """Plan TARGET with every planner at a grid of budgets, and lay what they reach side by side."""
    options.require_writable(report)
    options.require_count(budgets, "--budgets", least=1)
    options.require_count(repeats, "--repeats", least=1)
    settings = options.read_settings(set_, "--set")
    grid = Grid(
        planners=planners,
        budgets=budgets,
        time_limit_seconds=options.require_time_limit(time_limit),
        seed=seed,
        repeats=repeats if measure else 0,
        host_budget_bytes=options.read_host_budget(host_budget),
    )
    with working() as work:
        resolved = load_target(target, settings)
        grid.require_known(resolved)
        graph, device = graph_with_costs(resolved, device_profile, work)
        comparison = compare_step(resolved, graph, device, grid, work)
        if report and not work.interrupted:
            work.stage("writing the report")
            write_comparison(comparison.graph, comparison.device, comparison.points, report)
        status = INTERRUPTED if work.interrupted else DONE
    return deliver(_answer(target, comparison, report, status), as_json=as_json)


def _answer(target: str, comparison: Comparison, report: Path | None, exit_status: int) -> Answer:
    keys: dict[str, Any] = {
        "unplanned": {
            "peak_bytes": comparison.unplanned.peak_bytes,
            "seconds": comparison.unplanned.seconds,
        },
        "least_budget_bound_bytes": comparison.bound_bytes,
        "points": [_point_keys(point) for point in comparison.points],
    }
    return Answer(
        target=target,
        device=comparison.device.name,
        keys=keys,
        parts=_parts(comparison, report),
        exit_status=exit_status,
    )


def _point_keys(point: ComparedPoint) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "planner": point.planner,
        "budget_bytes": point.budget_bytes,
        "status": point.status,
        "peak_bytes": point.peak_bytes,
        "overhead": point.overhead,
        "plan_seconds": point.plan_seconds,
    }
    if point.setting is not None:
        keys["setting"] = point.setting
    if point.measured is not None:
        measured = point.measured
        keys["measured"] = {
            "peak_bytes": measured.peak_bytes,
            "step_seconds": measured.step_seconds,
            "overhead": measured.overhead,
            "bitwise_equal": measured.bitwise_equal,
            "baseline_peak_bytes": measured.baseline_peak_bytes,
            "baseline_step_seconds": measured.baseline_step_seconds,
        }
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
        point.status,
        "-" if point.peak_bytes is None else format_bytes(point.peak_bytes),
        "-" if point.overhead is None else change_text(point.overhead),
        "-" if point.plan_seconds is None else seconds_text(point.plan_seconds),
        "-" if measured is None else format_bytes(measured.peak_bytes),
        "-" if measured is None or measured.overhead is None else change_text(measured.overhead),
        "-" if measured is None else "yes" if measured.bitwise_equal else "no",
    ]
