"""`memfit plan`: find a plan and show its cost; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import INTERRUPTED, Answer, columns_table, deliver, rows_table
from memfit.commands.curves import trade_off, write_report
from memfit.commands.graph_with_costs import graph_with_costs
from memfit.commands.plan_keys import bounds_of, counts_of, host_of
from memfit.commands.targets import resolve
from memfit.commands.work import working
from memfit.plan import Plan
from memfit.planning import make_plan
from memfit.report import text_summary
from memfit.report.curve import CurvePoint
from memfit.report.formatting import change_text, status_text
from memfit.report.taken import is_for_gpu, taken_of
from memfit.system.budget import format_bytes

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
    search: options.Search,
    set_: options.WorkloadOptions = None,
    device_profile: options.DeviceProfile = None,
    save: options.Save = None,
    report: options.Report = None,
    curve: options.CurvePoints = 10,
    frontier: Annotated[
        int,
        typer.Option(
            "--frontier",
            metavar="N",
            min=0,
            help="Plan N more budgets with planner auto, from the unplanned peak down to the bound.",
        ),
    ] = 0,
    as_json: options.Json = False,
) -> int:
    """Find a plan for TARGET within a budget, and show its cost. Nothing is run."""
    options.require_writable(save, report)
    asked = search.settings(budget)
    of_workload = options.read_settings(set_, "--set")
    with working() as work:
        settings = work.follow(asked)
        resolved = resolve(target, of_workload)
        costed = graph_with_costs(resolved, device_profile, work, settings=settings)
        found = make_plan(costed.graph, costed.device, costed.with_shares(settings))
        work.keep(found, save)
        points = trade_off(found, frontier, settings.time_limit_seconds, settings, work) if not work.interrupted else []
        if report and not work.interrupted:
            write_report(found, report, curve, settings, work)
    return deliver(_answer(target, found, points, save, report, work.exit_status), as_json=as_json)


def _answer(
    target: str, plan: Plan, points: list[CurvePoint], save: Path | None, report: Path | None, exit_status: int
) -> Answer:
    taken = taken_of(plan) if is_for_gpu(plan) else None
    keys: dict[str, Any] = {
        "budget_bytes": plan.budget_bytes,
        "planner": plan.planner,
        "status": plan.status,
        "plan_seconds": plan.plan_seconds,
        "predicted": {
            "peak_bytes": plan.predicted.peak_bytes,
            **({"reserved_bytes": taken.reserved_bytes} if taken else {}),
            "seconds": plan.predicted.seconds,
        },
        "unplanned": {"peak_bytes": plan.unplanned.peak_bytes, "seconds": plan.unplanned.seconds},
        "overhead": plan.overhead,
        "bounds": bounds_of(plan.bounds),
        "counts": counts_of(plan),
        **host_of(plan),
        **({"reserved": taken.keys()} if taken else {}),
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
    if taken:
        parts += [Text(), rows_table(taken.rows())]
    if points:
        parts += [Text(), columns_table(("budget", "overhead"), [_frontier_row(point) for point in points])]
    if written:
        parts += [Text(), rows_table(written)]
    return Answer(target=target, device=plan.device.name, keys=keys, parts=tuple(parts), exit_status=exit_status)


def _frontier_row(point: CurvePoint) -> tuple[str, str]:
    reached = status_text(point.status) if point.overhead is None else change_text(point.overhead)
    return format_bytes(point.budget_bytes), reached
