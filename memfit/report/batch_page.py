"""The HTML page of `memfit batch`: samples a second and overhead against the batch size."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import msgspec

from memfit.device import Device
from memfit.report.formatting import change_text, printable
from memfit.report.html_template import fill_template
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically


class BatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One batch size: its plan's peak, overhead and speed, all predicted; None where there is no plan.

    `least_bytes` is the proved least budget: no plan of this size fits less.
    """

    batch: int
    least_bytes: int
    unplanned_bytes: int | None = None
    peak_bytes: int | None = None
    overhead: float | None = None
    samples_per_second: float | None = None

    def keys(self) -> dict[str, Any]:
        """The point as JSON."""
        shown = ("batch", "peak_bytes", "overhead", "samples_per_second")
        return {name: getattr(self, name) for name in shown}

    def no_plan_text(self, budget_bytes: int) -> str:
        """Return why there is no plan for this size: it is proved that none fits, or the planner found none."""
        return "no plan fits" if self.least_bytes > budget_bytes else "no plan found"


def write_batch_page(name: str, budget_bytes: int, device: Device, points: list[BatchPoint], path: Path) -> None:
    """Write one self-contained HTML file with the curve of samples a second against batch, and a table.

    Args:
        name: of the step.
        budget_bytes: for which all batch sizes were planned.
        device: whose times were used.
        points: one for each batch size.
        path: where the page is written.

    Raises:
        InvalidFileError: the file cannot be written.

    Guarantees: as `write_html`: no text can become markup or script, and the page loads nothing.
    """
    title = f"{printable(name)} within {format_bytes(budget_bytes)}"
    parts = {
        "title": escape(f"memfit batch: {title}"),
        "name": escape(title),
        "lead": _lead(device, points),
        "rows": "".join(_row(point, budget_bytes) for point in points),
    }
    write_atomically(path, fill_template("batch.html", parts, {"points": [point.keys() for point in points]}).encode())


def _lead(device: Device, points: list[BatchPoint]) -> str:
    """Return the answer in a sentence or two: the largest batch, and the fastest."""
    speeds = {point.batch: point.samples_per_second for point in points if point.samples_per_second is not None}
    where = f"All times are predicted, for {escape(printable(device.name))}."
    if not speeds:
        return f"No plan was found for any batch size that was tried. {where}"
    largest, fastest = max(speeds), max(speeds, key=lambda batch: (speeds[batch], -batch))
    said = f"The largest batch that fits is <b>{largest:,}</b>, at {speeds[largest]:,.1f} samples a second."
    if fastest == largest:
        return f"{said} None that was tried is faster. {where}"
    return f"{said} The fastest is <b>{fastest:,}</b>, at {speeds[fastest]:,.1f}. {where}"


def _row(point: BatchPoint, budget_bytes: int) -> str:
    if point.overhead is None or point.peak_bytes is None or point.unplanned_bytes is None:
        why = point.no_plan_text(budget_bytes)
        return f'<tr><td class="number">{point.batch:,}</td><td colspan="4">{why}</td></tr>'
    cells = (
        f"{point.batch:,}",
        format_bytes(point.peak_bytes),
        format_bytes(point.unplanned_bytes),
        change_text(point.overhead),
        f"{point.samples_per_second:,.1f}",
    )
    return "<tr>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"
