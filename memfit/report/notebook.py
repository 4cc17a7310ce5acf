"""A plan as a fragment of HTML for notebooks: its figures, and a chart of its live bytes. It needs no script."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.plan import Plan
from memfit.planners.engine.results import unplanned_schedule
from memfit.report.formatting import change_text, seconds_text, status_text
from memfit.report.html_template import as_html
from memfit.report.live import play
from memfit.system.budget import format_bytes

_WIDTH, _HEIGHT, _POINTS = 640, 160, 320
_UNPLANNED, _PLANNED, _BUDGET = "#9aa0a6", "#1a73e8", "#d93025"


def plan_html(plan: Plan, rows: dict[str, str] | None = None) -> str:
    """Return a plan's figures and its live bytes beside the unplanned ones, as HTML without a page around it.

    Args:
        plan: checked.
        rows: more figures, as text.
    """
    timed = plan.unplanned.seconds > 0
    figures = {
        "budget": format_bytes(plan.budget_bytes),
        "predicted peak": f"{format_bytes(plan.predicted.peak_bytes)} "
        f"(unplanned {format_bytes(plan.unplanned.peak_bytes)})",
        "predicted time": f"{seconds_text(plan.predicted.seconds)} ({change_text(plan.overhead)})"
        if timed
        else "unknown",
        "no plan below": format_bytes(plan.bounds.least_budget_bound_bytes),
        "planner": f"{plan.planner}: {status_text(plan.status)}",
        **(rows or {}),
    }
    cells = "".join(
        f'<tr><th style="text-align:left">{as_html(name)}</th><td style="text-align:left">{as_html(text)}</td></tr>'
        for name, text in figures.items()
    )
    return f"<div><b>{as_html(plan.graph.name)}</b>{_chart(plan)}<table>{cells}</table></div>"


def _chart(plan: Plan) -> str:
    curves = [
        (colour, play(plan.graph, schedule, plan.device).timeline.device_bytes + plan.always_outside_bytes)
        for colour, schedule in ((_UNPLANNED, unplanned_schedule(plan)), (_PLANNED, plan.schedule))
    ]
    top = 1.05 * max(plan.budget_bytes, *(int(held.max(initial=1)) for _, held in curves))
    lines = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{_points(held, top)}"/>'
        for colour, held in curves
    )
    at = _HEIGHT * (1 - plan.budget_bytes / top)
    budget = f'<line x1="0" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="{_BUDGET}" stroke-dasharray="4 3"/>'
    label = "Live bytes over the step: unplanned (grey), planned (blue), and the budget (red)"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="display:block;width:100%;max-width:{_WIDTH}px" role="img" '
        f'aria-label="{label}"><title>{label}</title>{lines}{budget}</svg>'
    )


def _points(held: NDArray[np.int64], top: float) -> str:
    """Return the corners of a curve; of each bin the largest value, so that no peak is lost."""
    bins = [int(each.max()) for each in np.array_split(held, min(_POINTS, len(held))) if len(each)]
    across = _WIDTH / max(1, len(bins) - 1)
    return " ".join(f"{number * across:.1f},{_HEIGHT * (1 - size / top):.1f}" for number, size in enumerate(bins))
