"""The trade-off curve of a plan, as points for reports and answers, and the report that is drawn with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memfit.commands.work import Work
from memfit.plan import Plan, Progress
from memfit.planning import Settings, budgets_between, plan_again_at
from memfit.report import write_html
from memfit.report.curve import CurvePoint
from memfit.report.more_memory import next_step_bytes
from memfit.step.measured import Measured


def write_report(
    plan: Plan, path: Path, points: int, settings: Settings, work: Work, measured: Measured | None = None
) -> None:
    """Write the HTML report of a plan with its trade-off curve.

    Args:
        plan: the plan.
        path: the file.
        points: of the curve; 0 leaves it out.
        settings: give the time for the whole curve, and the seed.
        work: shows the stages.
        measured: what was measured on a machine.
    """
    curve = report_curve(plan, points, settings, work)
    work.stage("writing the report")
    write_html(plan, path, curve=curve, measured=measured)


def report_curve(plan: Plan, points: int, settings: Settings, work: Work) -> list[CurvePoint]:
    """Return the curve that a report shows, with the next larger budget, within one time limit for all of it.

    Args:
        plan: the plan.
        points: evenly from the unplanned peak down to the proved least budget; 0 gives none.
        settings: give the time for the whole curve, and the seed.
        work: shows the stage.
    """
    larger_bytes = plan.budget_bytes + next_step_bytes(plan)
    also = [larger_bytes] if plan.overhead > 0 and larger_bytes < plan.unplanned.peak_bytes else []
    return trade_off(plan, points, settings.time_limit_seconds / max(points, 1), settings, work, also=also)


def trade_off(
    plan: Plan, points: int, each_seconds: float, settings: Settings, work: Work, also: Sequence[int] = ()
) -> list[CurvePoint]:
    """Return what is reached at `points` budgets, evenly from the unplanned peak down to the proved least budget.

    Args:
        plan: gives the graph and the device.
        points: 0 gives no curve.
        each_seconds: the time limit of each point's search.
        settings: give the seed and the progress listener.
        work: shows the stage.
        also: more budgets in bytes, for a curve that has points.
    """
    highest, lowest = plan.unplanned.peak_bytes, plan.bounds.least_budget_bound_bytes
    if points == 0 or highest <= lowest:
        return []
    budgets = budgets_between(highest, lowest, points)
    budgets += [budget for budget in also if budget not in budgets]
    work.stage("drawing the trade-off curve")
    settings = replace(settings, progress=_Points(work, len(budgets), each_seconds).show)
    results = plan_again_at(plan, budgets, settings, each_seconds)
    return [CurvePoint.of(budget, result) for budget, result in zip(budgets, results, strict=True)]


class _Points:
    """The progress of searches that follow one another, as a share of them all: a search that begins has taken less.

    Args:
        work: shows it.
        points: how many searches.
        each_seconds: the time limit of each.
    """

    def __init__(self, work: Work, points: int, each_seconds: float) -> None:
        self._work, self._points, self._each_seconds = work, points, each_seconds
        self._done, self._elapsed_seconds = 0, 0.0

    def show(self, progress: Progress) -> None:
        """Show what is done with this report of the search that runs."""
        self._done += progress.elapsed_seconds < self._elapsed_seconds
        self._elapsed_seconds = progress.elapsed_seconds
        self._work.on_search(progress)
        self._work.done(self._done + min(progress.elapsed_seconds / self._each_seconds, 1.0), self._points)
