"""The HTML report: one file, nothing loaded from anywhere, every name in it inert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memfit.graph import Role
from memfit.plan import Plan
from memfit.planners.engine.results import unplanned_schedule
from memfit.report import page_sections
from memfit.report.chart_points import chart_points
from memfit.report.copies import copies_spans
from memfit.report.curve import Curve, CurvePoint
from memfit.report.explanation import Explanation, explained
from memfit.report.formatting import change_text, module_text, seconds_text, status_text
from memfit.report.html_template import make_page
from memfit.report.live import Layer, LiveRange, Run, play
from memfit.report.storage_fates import Kind
from memfit.step.measured import Measured
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically
from memfit.system.lines import printable

_STAYS_SHOWN = 2  # of a storage in the table


def write_html(plan: Plan, path: Path | str, *, curve: Curve = (), measured: Measured | None = None) -> None:
    """Write the report of `plan` to `path`: one HTML file that needs no network, atomically.

    `write_html(plan, "report.html", curve=[(6 << 30, 0.115, "feasible")])`; `memfit.report` has a whole example.

    Args:
        plan: checked.
        path: where the page is written.
        curve: points (budget in bytes, predicted overhead or None, status) of the trade-off curve, planned by the
            caller; this plan is drawn among them.
        measured: figures of a run; they have columns of their own.

    Raises:
        InvalidOptionError: a malformed point of the curve.
        InvalidFileError: the file cannot be written.

    Guarantees: no text of the graph or the plan can become markup or script; a content security policy allows the two
    scripts of the page by their hashes, and no loads. Charts of more than 1,500 instructions show the largest of each
    bin exactly.
    """
    write_atomically(Path(path), render(plan, curve=curve, measured=measured).encode())


def render(
    plan: Plan, *, curve: Curve = (), measured: Measured | None = None, picture_height_pixels: int | None = None
) -> str:
    """Return the HTML of the page.

    Args:
        plan, curve, measured: as in `write_html`.
        picture_height_pixels: where given, the page has this height and holds only the picture of `write_png`.

    Raises:
        InvalidOptionError: a malformed point of the curve.
    """
    explanation = explained(plan, curve)
    fits = plan.predicted.peak_bytes <= plan.budget_bytes
    verdict, verdict_class = ("fits the budget", "good") if fits else ("over the budget", "bad")
    unplanned = play(plan.graph, unplanned_schedule(plan), plan.device)
    texts = {
        "title": f"memfit: {plan.graph.name} in {format_bytes(plan.budget_bytes)}",
        "name": plan.graph.name,
        "mode": "report" if picture_height_pixels is None else "picture",
        "verdict": verdict,
        "verdict_class": verdict_class,
        "picture_caption": _picture_caption(plan),
        "live_label": (
            f"Live bytes over the step: up to {format_bytes(plan.unplanned.peak_bytes)} unplanned, "
            f"up to {format_bytes(plan.predicted.peak_bytes)} with the plan"
        ),
    }
    return make_page(
        "page.html",
        texts,
        _data(explanation, unplanned, picture_height_pixels) | {"copies": copies_spans(plan, measured)},
        page_sections.sections(explanation, measured),
    )


def _picture_caption(plan: Plan) -> str:
    price = f", {change_text(plan.overhead)} time" if plan.unplanned.seconds else ""
    return (
        f"one training step, predicted: {format_bytes(plan.unplanned.peak_bytes)} unplanned, "
        f"{format_bytes(plan.predicted.peak_bytes)} with a plan for {format_bytes(plan.budget_bytes)}{price}"
    )


def _data(explanation: Explanation, unplanned: Run, picture_height_pixels: int | None) -> dict[str, Any]:
    plan, planned = explanation.plan, explanation.run
    outside_bytes = plan.always_outside_bytes
    runs = {"unplanned": chart_points(unplanned, outside_bytes), "planned": chart_points(planned, outside_bytes)}
    shown_ops = {op for run in runs.values() for op in run["ops"] if op is not None}
    strings: dict[str, int] = {}
    return {
        "picture_height_pixels": picture_height_pixels,
        "axis": "seconds" if plan.unplanned.seconds else "step",
        "budget_bytes": plan.budget_bytes,
        "bound_bytes": plan.bounds.least_budget_bound_bytes,
        "unplanned_bytes": plan.unplanned.peak_bytes,
        "runs": {name: {**run, "layers": _shortened(run["layers"])} for name, run in runs.items()},
        "ops": {op: _op(plan, op, strings) for op in sorted(shown_ops)},
        "peaks": {"unplanned": _peak(unplanned, outside_bytes), "planned": _peak(planned, outside_bytes)},
        "roles": list(Role),
        "kinds": list(Kind),
        "storages": _storage_columns(explanation, strings),
        "strings": list(strings),
        "curve": [_curve_point(point) for point in explanation.points],
        "this_point": _curve_point(CurvePoint(plan.budget_bytes, plan.overhead, plan.status, plan.bounds.overhead)),
    }


def _shortened(layers: dict[str, list[int]]) -> dict[str, list[int] | int]:
    """Return the layers with one number for each that does not change, as parameters do."""
    return {layer: column[0] if len(set(column)) == 1 else column for layer, column in layers.items()}


def _op(plan: Plan, op_id: int, strings: dict[str, int]) -> tuple[str, int, int, float]:
    """Return name, module, phase and seconds of an op; module and phase as numbers of `strings`."""
    op = plan.graph.ops[op_id]
    module, phase = _numbers([printable(op.module), op.phase.value], strings)
    return printable(op.name), module, phase, round(op.seconds, 9)


def _numbers(texts: Iterable[str], strings: dict[str, int]) -> list[int]:
    """Return the texts as numbers of `strings`, text -> its number, to which new ones are added."""
    return [strings.setdefault(text, len(strings)) for text in texts]


def _peak(run: Run, outside_bytes: int) -> dict[str, Any]:
    timeline, sizes = run.timeline, run.graph.storages
    position = timeline.peak_position
    rows = [(storage, run.device.aligned(sizes[storage].bytes)) for storage in run.live_at(position)]
    others = {layer: int(run.layers[layer][position]) for layer in (Layer.WORKSPACE, Layer.OUTSIDE)} if rows else {}
    others[Layer.OUTSIDE] = others.get(Layer.OUTSIDE, 0) + outside_bytes
    moment = f"{format_bytes(timeline.peak_bytes + outside_bytes)} {run.doing_at(position)}".rstrip()
    return {
        "note": f"All storages on the device at the peak: {moment}.",
        "rows": rows,
        "others": [(layer, size) for layer, size in others.items() if size],
    }


def _curve_point(point: CurvePoint) -> dict[str, Any]:
    reached = status_text(point.status)
    text = f"no plan ({reached})" if point.overhead is None else f"{change_text(point.overhead)} time ({reached})"
    bound = point.bound_overhead if point.bound_overhead > 0 else None
    return {"budget_bytes": point.budget_bytes, "overhead": point.overhead, "text": text, "bound": bound}


def _storage_columns(explanation: Explanation, strings: dict[str, int]) -> dict[str, list[Any]]:
    """Return the storages as columns; `strings` gathers the texts that many storages share: text -> its number."""
    plan, of_storage = explanation.plan, explanation.fates
    graph, seconds = plan.graph, plan.predicted.seconds
    roles, kinds = list(Role), list(Kind)
    return {
        "name": [printable(storage.name) for storage in graph.storages],
        "module": _numbers((module_text(graph, storage.id) for storage in graph.storages), strings),
        "role": [roles.index(storage.role) for storage in graph.storages],
        "bytes": [storage.bytes for storage in graph.storages],
        "fate": _numbers((fate.text for fate in of_storage), strings),
        "kind": [kinds.index(fate.kind) for fate in of_storage],
        "held": [round(fate.held_seconds / seconds, 4) if seconds else None for fate in of_storage],
        "live": _numbers((_live_text(explanation, stays) for stays in explanation.run.stays), strings),
        "extra_seconds": [round(fate.extra_seconds, 9) or None for fate in of_storage],
        "why": _numbers((printable(fate.why) for fate in of_storage), strings),
    }


def _live_text(explanation: Explanation, stays: Sequence[LiveRange]) -> str:
    """Return the stays of a storage on the device: in time, or in instructions where ops have no times."""
    run = explanation.run
    clock, timed = run.clock_seconds, run.timeline.makespan_seconds > 0
    spans = [
        f"{seconds_text(float(clock[stay.first]))} – {seconds_text(float(clock[stay.last]))}"
        if timed
        else f"{stay.first} – {stay.last}"
        for stay in stays
    ]
    shown = spans if len(spans) <= _STAYS_SHOWN + 1 else [*spans[:_STAYS_SHOWN], f"{len(spans) - _STAYS_SHOWN} more"]
    return ", ".join(shown)
