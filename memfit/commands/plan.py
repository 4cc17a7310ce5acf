"""`memfit plan`: find a plan and show its cost; the step does not run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import INTERRUPTED, Answer, columns_table, rows_table
from memfit.commands.curves import trade_off, write_report
from memfit.commands.graph_with_costs import graph_with_costs
from memfit.commands.plan_keys import bounds_of, counts_of, host_of
from memfit.commands.ranks import RankRow, Ranks, on_ranks, one_of, ranks_answer, require_alone
from memfit.commands.targets import resolve
from memfit.commands.work import Work, working
from memfit.errors import NoPlanError
from memfit.options import Cluster
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.report import text_summary
from memfit.report.curve import CurvePoint
from memfit.report.formatting import change_text, seconds_text, status_text
from memfit.report.ranks import COLUMNS, RankFigures
from memfit.report.taken import is_for_gpu, taken_of
from memfit.system.budget import format_bytes
from memfit.system.files import require_writable
from memfit.workloads.registry import OptionValue

EXAMPLES = """
Examples:

memfit plan resnet50 --budget 60%

memfit plan step.graph.json.gz --budget 6GiB --planner search --time-limit 20

memfit plan train.py:make_step --budget 4GiB --save step.plan.json --report step.html

memfit plan gpt2 --set batch=64 --budget 40GiB --device-profile a100-40

memfit plan step.graph.json.gz --budget 6GiB --device-profile h100 --host-budget 64GiB

memfit plan resnet50 --budget 50% --frontier 10

memfit plan train.py:make_step --budget 72GiB --ranks 64 --shard --device-profile h100

memfit plan train.py:make_step --budget 72GiB --ranks 8,16,64 --shard --replicas 2 --link 25GB/s --device-profile h100
"""


def plan(
    target: options.Target,
    budget: options.Budget,
    search: options.Search,
    ranks: Ranks,
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
) -> Answer:
    """Find a plan for TARGET within a budget, and show its cost.

    The step does not run; its ops are measured one by one here, unless --device-profile is given.
    """
    require_writable(save, report)
    asked, clusters = search.settings(budget), ranks.clusters()
    of_workload = options.read_settings(set_, "--set")
    if len(clusters) > 1:
        require_alone({"--save": save, "--report": report, "--frontier": frontier})
        with working() as work:
            rows = [_planned(target, of_workload, device_profile, asked, each, work) for each in clusters]
        head = f"{target} within {budget} on each rank; all predicted"
        return ranks_answer(target, rows, head, work.exit_status)
    with working() as work:
        settings = work.follow(asked)
        with on_ranks(one_of(clusters)) as there:
            resolved = resolve(target, of_workload, there.ranks)
            costed = graph_with_costs(resolved, device_profile, work, settings=settings)
            settings_of_step = costed.with_shares(settings)
        found = costed.plan(settings_of_step)
        work.keep(found, save)
        points = trade_off(found, frontier, settings.time_limit_seconds, settings, work) if not work.interrupted else []
        if report and not work.interrupted:
            write_report(found, report, curve, settings, work)
        figures = there.figures(costed, found.schedule) if clusters else None
    return _answer(target, found, points, figures, save, report, work.exit_status)


def _planned(
    target: str,
    of_workload: Mapping[str, OptionValue],
    device_profile: str | None,
    asked: Settings,
    cluster: Cluster,
    work: Work,
) -> RankRow:
    """Return the row of one number of ranks in the table."""
    settings = work.follow(asked)
    with on_ranks(cluster) as there:
        costed = graph_with_costs(resolve(target, of_workload, there.ranks), device_profile, work, settings=settings)
        settings = costed.with_shares(settings)
    device = costed.device.name
    try:
        found = costed.plan(settings)
    except NoPlanError as error:
        return RankRow(cluster=cluster, device=device, figures=None, error=error)
    more = {
        "overhead": (change_text(found.overhead), found.overhead),
        "unplanned_peak_bytes": (format_bytes(found.unplanned.peak_bytes), found.unplanned.peak_bytes),
        "plan_seconds": (seconds_text(found.plan_seconds), found.plan_seconds),
    }
    return RankRow(cluster=cluster, device=device, figures=there.figures(costed, found.schedule), more=more)


def _answer(
    target: str,
    plan: Plan,
    points: list[CurvePoint],
    figures: RankFigures | None,
    save: Path | None,
    report: Path | None,
    exit_status: int,
) -> Answer:
    taken = taken_of(plan) if is_for_gpu(plan) else None
    keys: dict[str, Any] = {
        "budget_bytes": plan.budget_bytes,
        "planner": plan.planner,
        "status": plan.status,
        "plan_seconds": plan.plan_seconds,
        "age_seconds": plan.age_seconds,
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
    if figures:
        keys["rank"] = figures.keys()
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
    if figures:
        parts += [Text(), columns_table(COLUMNS, [figures.cells()])]
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
