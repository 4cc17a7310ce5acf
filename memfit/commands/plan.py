"""`memfit plan`: find a plan and say what it would cost; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.budget import format_bytes
from memfit.commands import options
from memfit.commands.answer import DONE, INTERRUPTED, Answer, columns_table, deliver, rows_table
from memfit.commands.planning import (
    bounds_of,
    counts_of,
    find_plan,
    graph_with_costs,
    host_of,
    load_target,
    make_search,
    trade_off,
    write_report,
)
from memfit.commands.work import working
from memfit.plan import Plan
from memfit.report import text_summary
from memfit.report.figures import CurvePoint
from memfit.report.words import change_text

EXAMPLES = """
Examples:

memfit plan resnet50 --budget 60%

memfit plan step.graph.json.gz --budget 6GiB --planner search --time-limit 20

memfit plan train.py:make_step --budget 4GiB --save step.plan.json --report step.html

memfit plan gpt2 --set batch=64 --budget 40GiB --device-profile a100-40

memfit plan step.graph.json.gz --budget 6GiB --device-profile h100 --host-budget 64GiB

memfit plan resnet50 --budget 50% --frontier 10
"""


def plan(
    target: options.Target,
    budget: options.Budget,
    host_budget: options.HostBudget = None,
    planner: options.Planner = "auto",
    option: options.PlannerOptions = None,
    time_limit: options.TimeLimit = 5.0,
    seed: options.Seed = 0,
    set_: options.Settings = None,
    device_profile: options.DeviceProfile = None,
    save: options.Save = None,
    report: options.Report = None,
    curve: options.CurvePoints = 10,
    frontier: Annotated[
        int,
        typer.Option("--frontier", metavar="N", help="Plan N more budgets, from the unplanned peak to the bound."),
    ] = 0,
    as_json: options.Json = False,
) -> int:
    """Find a plan for TARGET within a budget, and say what it would cost. Nothing is run."""
    options.require_writable(save, report)
    options.require_count(curve, "--curve")
    options.require_count(frontier, "--frontier")
    options.require_budget(budget)
    settings = options.read_settings(set_, "--set")
    search = make_search(planner, option, time_limit, seed, host_budget)
    with working() as work:
        graph, device = graph_with_costs(load_target(target, settings), device_profile, work)
        found = find_plan(graph, device, budget, search, work)
        work.keep(found, save)
        points = trade_off(found, frontier, time_limit, search, work) if not work.interrupted else []
        if report and not work.interrupted:
            write_report(found, report, curve, search, work)
    status = INTERRUPTED if work.interrupted else DONE
    return deliver(_answer(target, found, points, save, report, status), as_json=as_json)


def _answer(
    target: str, plan: Plan, points: list[CurvePoint], save: Path | None, report: Path | None, exit_status: int
) -> Answer:
    keys: dict[str, Any] = {
        "budget_bytes": plan.budget_bytes,
        "planner": plan.planner,
        "status": plan.status,
        "plan_seconds": plan.plan_seconds,
        "predicted": {"peak_bytes": plan.predicted.peak_bytes, "seconds": plan.predicted.seconds},
        "unplanned": {"peak_bytes": plan.unplanned.peak_bytes, "seconds": plan.unplanned.seconds},
        "overhead": plan.overhead,
        "bounds": bounds_of(plan),
        "counts": counts_of(plan),
        **host_of(plan),
    }
    if points:
        keys["frontier"] = [
            {"budget_bytes": point.budget_bytes, "overhead": point.overhead, "status": point.status} for point in points
        ]
    written = {"plan": str(save)} if save else {}
    if exit_status == INTERRUPTED:
        where = f"it is in {save}" if save else "give --save to keep it"
        written["interrupted"] = f"this is the best plan so far; {where}"
    elif report:
        written["report"] = str(report)
    parts: list[RenderableType] = [text_summary(plan)]
    if points:
        parts += [Text(), columns_table(("budget", "overhead"), [_frontier_row(point) for point in points])]
    if written:
        parts += [Text(), rows_table(written)]
    return Answer(target=target, device=plan.device.name, keys=keys, parts=tuple(parts), exit_status=exit_status)


def _frontier_row(point: CurvePoint) -> tuple[str, str]:
    return format_bytes(point.budget_bytes), point.status if point.overhead is None else change_text(point.overhead)
