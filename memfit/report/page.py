"""The HTML report: one file, nothing loaded from anywhere, every name in it inert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.budget import format_bytes
from memfit.files import write_atomically
from memfit.graph import Role
from memfit.plan import Plan, Problem
from memfit.planners.result import unplanned_schedule
from memfit.report import story
from memfit.report.explanation import Explanation, explained
from memfit.report.fates import Kind
from memfit.report.figures import Curve, CurvePoint, Measured
from memfit.report.frame import fill
from memfit.report.live import Layer, Run, play
from memfit.report.series import series
from memfit.report.storage_table import storage_columns
from memfit.report.words import change_text, printable


def write_html(plan: Plan, path: Path | str, *, curve: Curve = (), measured: Measured | None = None) -> None:
    """Write the report of `plan` to `path`: one HTML file that needs no network, atomically.

    `write_html(plan, "report.html", curve=[(6 << 30, 0.115, "feasible")])`; the package's docstring has all around it.

    Args:
        curve: points (budget in bytes, predicted overhead or None, status) of the trade-off curve; this plan is drawn
            among them.
        measured: figures that a machine measured; they stand in columns of their own.

    Raises:
        InvalidOptionError: a malformed point of the curve.
        InvalidFileError: the file cannot be written.

    Guarantees: no text of the graph or the plan can become markup or script; a content security policy allows the two
    scripts of the page by their hashes, and no loads at all. Charts of more than 1,500 moments keep the largest of each
    bin exactly.
    """
    write_atomically(Path(path), render(plan, curve=curve, measured=measured).encode())


def render(
    plan: Plan, *, curve: Curve = (), measured: Measured | None = None, picture_height_pixels: int | None = None
) -> str:
    """Return the page's text; with a height, a page of that height that holds only the picture of `write_png`."""
    explanation = explained(plan, curve)
    of_storage = explanation.fates
    unplanned = play(plan.graph, unplanned_schedule(_problem(plan)), plan.device)
    return fill(
        "page.html",
        {
            "title": f"memfit: {story.text(plan.graph.name)} in {format_bytes(plan.budget_bytes)}",
            "name": story.text(plan.graph.name),
            "mode": "report" if picture_height_pixels is None else "picture",
            "verdict": "fits the budget" if story.fits(plan) else "over the budget",
            "verdict_class": "good" if story.fits(plan) else "bad",
            "lead": story.lead(plan, of_storage),
            "key_figures": story.key_figures(plan) + story.figures_table(plan, measured),
            "picture_caption": _picture_caption(plan),
            "live_label": (
                f"Live bytes over the step: up to {format_bytes(plan.unplanned.peak_bytes)} unplanned, "
                f"up to {format_bytes(plan.predicted.peak_bytes)} with the plan"
            ),
            "more": story.more_section(explanation),
            "least": story.least_section(explanation),
            "curve": story.curve_section(bool(explanation.points)),
            "fates": story.fates_table(plan, of_storage),
            "made": story.made(plan),
        },
        _data(explanation, unplanned, picture_height_pixels),
    )


def _problem(plan: Plan) -> Problem:
    return Problem(
        graph=plan.graph, device=plan.device, budget_bytes=plan.budget_bytes, bytes_outside=plan.bytes_outside
    )


def _picture_caption(plan: Plan) -> str:
    price = f", {change_text(plan.overhead)} time" if plan.unplanned.seconds else ""
    return (
        f"one training step, predicted: {format_bytes(plan.unplanned.peak_bytes)} unplanned, "
        f"{format_bytes(plan.predicted.peak_bytes)} with a plan for {format_bytes(plan.budget_bytes)}{price}"
    )


def _data(explanation: Explanation, unplanned: Run, picture_height_pixels: int | None) -> dict[str, Any]:
    plan, planned = explanation.plan, explanation.run
    # With boundaries, the schedule says when it comes.
    outside_bytes = 0 if plan.graph.boundaries else plan.bytes_outside
    runs = {"unplanned": series(unplanned, outside_bytes), "planned": series(planned, outside_bytes)}
    shown_ops = {op for run in runs.values() for op in run["ops"] if op is not None}
    strings: dict[str, int] = {}
    return {
        "picture_height_pixels": picture_height_pixels,
        "axis": "seconds" if plan.unplanned.seconds else "step",
        "budget_bytes": plan.budget_bytes,
        "bound_bytes": plan.bounds.least_budget_bound_bytes,
        "unplanned_bytes": plan.unplanned.peak_bytes,
        "runs": runs,
        "ops": {op: _op(plan, op) for op in sorted(shown_ops)},
        "peaks": {"unplanned": _peak(unplanned, outside_bytes), "planned": _peak(planned, outside_bytes)},
        "roles": list(Role),
        "kinds": list(Kind),
        "storages": storage_columns(explanation, strings),
        "strings": list(strings),
        "curve": [_curve_point(point) for point in explanation.points],
        "this_point": _curve_point(CurvePoint(plan.budget_bytes, plan.overhead, plan.status)),
    }


def _op(plan: Plan, op_id: int) -> dict[str, str | float]:
    op = plan.graph.ops[op_id]
    return {"name": printable(op.name), "module": printable(op.module), "phase": op.phase, "seconds": op.seconds}


def _peak(run: Run, outside_bytes: int) -> dict[str, Any]:
    timeline, sizes = run.timeline, run.graph.storages
    position = timeline.peak_position
    rows = [(storage, run.device.aligned(sizes[storage].bytes)) for storage in run.live_at(position)]
    others = {layer: int(run.layers[layer][position]) for layer in (Layer.WORKSPACE, Layer.OUTSIDE)} if rows else {}
    others[Layer.OUTSIDE] = others.get(Layer.OUTSIDE, 0) + outside_bytes
    moment = f"{format_bytes(timeline.peak_bytes + outside_bytes)} {run.doing_at(position)}".rstrip()
    return {
        "note": f"All that is on the device at the fullest moment: {moment}.",
        "rows": rows,
        "others": [(layer, size) for layer, size in others.items() if size],
    }


def _curve_point(point: CurvePoint) -> dict[str, Any]:
    reached = point.status.replace("_", " ")
    text = f"no plan ({reached})" if point.overhead is None else f"{change_text(point.overhead)} time ({reached})"
    return {"budget_bytes": point.budget_bytes, "overhead": point.overhead, "text": text}
