"""The page of `memfit batch`: samples a second and the price of fitting, against the batch size."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import msgspec

from memfit.budget import format_bytes
from memfit.device import Device
from memfit.files import write_atomically
from memfit.report.frame import fill
from memfit.report.words import change_text, printable


class BatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One batch size: its plan's peak, overhead and speed, all predicted; None where no plan fits."""

    batch: int
    least_bytes: int
    unplanned_bytes: int | None = None
    peak_bytes: int | None = None
    overhead: float | None = None
    samples_per_second: float | None = None

    def keys(self) -> dict[str, Any]:
        """The point as JSON."""
        return {
            "batch": self.batch,
            "peak_bytes": self.peak_bytes,
            "overhead": self.overhead,
            "samples_per_second": self.samples_per_second,
        }


def write_batch_page(name: str, budget_bytes: int, device: Device, points: list[BatchPoint], path: Path) -> None:
    """Write one self-contained HTML file with the curve of samples a second against batch, and a table.

    Guarantees: as `write_html`: no text can become markup or script, and the page loads nothing.
    """
    title = f"{printable(name)} within {format_bytes(budget_bytes)}"
    parts = {
        "title": escape(f"memfit batch: {title}"),
        "name": escape(title),
        "lead": _lead(device, points),
        "rows": "".join(_row(point) for point in points),
    }
    write_atomically(path, fill("batch.html", parts, {"points": [point.keys() for point in points]}).encode())


def _lead(device: Device, points: list[BatchPoint]) -> str:
    """Return the answer in a sentence or two: the largest batch, and the fastest."""
    speeds = {point.batch: point.samples_per_second for point in points if point.samples_per_second is not None}
    where = f"All times are predicted, for {escape(printable(device.name))}."
    if not speeds:
        return f"No batch that was tried fits. {where}"
    largest, fastest = max(speeds), max(speeds, key=lambda batch: (speeds[batch], -batch))
    said = f"The largest batch that fits is <b>{largest:,}</b>, at {speeds[largest]:,.1f} samples a second."
    if fastest == largest:
        return f"{said} None that was tried is faster. {where}"
    return f"{said} The fastest is <b>{fastest:,}</b>, at {speeds[fastest]:,.1f}. {where}"


def _row(point: BatchPoint) -> str:
    if point.overhead is None or point.peak_bytes is None or point.unplanned_bytes is None:
        return f'<tr><td class="number">{point.batch:,}</td><td colspan="4">no plan fits</td></tr>'
    cells = (
        f"{point.batch:,}",
        format_bytes(point.peak_bytes),
        format_bytes(point.unplanned_bytes),
        change_text(point.overhead),
        f"{point.samples_per_second:,.1f}",
    )
    return "<tr>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"
