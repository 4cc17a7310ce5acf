"""The HTML page of `memfit frontier`: for each combination of sizes, batches against their speed and their price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from memfit.device import Device
from memfit.report.batch_page import BatchPoint
from memfit.report.formatting import change_text, printable
from memfit.report.html_template import fill_template
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically


class FrontierRow(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of sizes.

    Attributes:
        options: option or argument -> value.
        largest_batch: that was found to fit; 0 if none does.
        points: the batches that were planned, from the smallest on.
    """

    options: Mapping[str, Any]
    largest_batch: int
    points: Sequence[BatchPoint]

    @property
    def largest(self) -> BatchPoint | None:
        """The plan of the largest batch."""
        return next((point for point in self.points if point.batch == self.largest_batch), None)

    @property
    def fastest(self) -> BatchPoint | None:
        """The plan with the most samples a second; the smaller batch of two that are equal."""
        planned = [point for point in self.points if point.samples_per_second is not None]
        return max(planned, key=lambda point: (point.samples_per_second or 0.0, -point.batch), default=None)

    def cells(self) -> tuple[str, ...]:
        """The row as texts: largest batch, peak, unplanned peak, overhead, speed, and the fastest batch with its speed.

        Two texts where no batch fits.
        """
        best, fastest = self.largest, self.fastest
        if best is None or fastest is None:
            least_bytes = min((point.least_bytes for point in self.points), default=0)
            return "0", f"a batch of 1 takes {format_bytes(least_bytes)} or more"
        return (
            f"{best.batch:,}",
            format_bytes(best.peak_bytes or 0),
            format_bytes(best.unplanned_bytes or 0),
            change_text(best.overhead or 0.0),
            f"{best.samples_per_second:,.1f}",
            f"{fastest.batch:,}: {fastest.samples_per_second:,.1f}",
        )

    def keys(self) -> dict[str, Any]:
        """The row as JSON."""
        planned = [point.keys() for point in self.points if point.overhead is not None]
        return {"options": dict(self.options), "largest_batch": self.largest_batch, "points": planned}


def write_frontier_page(name: str, budget_bytes: int, device: Device, rows: Sequence[FrontierRow], path: Path) -> None:
    """Write one self-contained HTML file with a curve for each combination, and a table.

    Args:
        name: of the step.
        budget_bytes: for all plans.
        device: whose times were used.
        rows: one for each combination.
        path: where the page is written.

    Raises:
        InvalidFileError: the file cannot be written.

    Guarantees: as `write_html`.
    """
    title = f"{printable(name)} within {format_bytes(budget_bytes)}"
    parts = {
        "title": escape(f"memfit frontier: {title}"),
        "name": escape(title),
        "lead": f"All times are predicted, for {escape(printable(device.name))}.",
        "rows": "".join(_html_row(row) for row in rows),
    }
    curves = [{"name": _label(row), "points": row.keys()["points"]} for row in rows]
    write_atomically(path, fill_template("frontier.html", parts, {"curves": curves}).encode())


def _label(row: FrontierRow) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.options.items()) or "as it is"


def _html_row(row: FrontierRow) -> str:
    head, cells = f"<tr><td>{escape(_label(row))}</td>", row.cells()
    if row.largest is None:
        return f'{head}<td class="number">{cells[0]}</td><td colspan="5">{cells[1]}</td></tr>'
    return head + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"
