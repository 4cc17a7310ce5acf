"""The page of `memfit batch`: samples a second and the price of fitting, against the batch size."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import msgspec

from memfit.budget import format_bytes
from memfit.device import Device
from memfit.files import write_atomically
from memfit.report.words import printable


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
    """Write one self-contained HTML file with the curve of samples a second against batch, and a table."""
    from plotly import graph_objects  # pyright: ignore  # it takes as long to import as all else together
    from plotly.subplots import make_subplots  # pyright: ignore

    fitting = [point for point in points if point.overhead is not None]
    batches = [point.batch for point in fitting]
    figure: Any = make_subplots(specs=[[{"secondary_y": True}]])
    figure.add_trace(
        graph_objects.Scatter(
            x=batches, y=[p.samples_per_second for p in fitting], name="samples a second", mode="lines+markers"
        )
    )
    figure.add_trace(
        graph_objects.Scatter(
            x=batches, y=[100 * (p.overhead or 0) for p in fitting], name="overhead, %", mode="lines+markers"
        ),
        secondary_y=True,
    )
    figure.update_xaxes(title_text="batch size")
    figure.update_yaxes(title_text="samples a second (predicted)", rangemode="tozero")
    figure.update_yaxes(title_text="overhead of the plan, %", rangemode="tozero", secondary_y=True)
    figure.update_layout(template="plotly_white", height=480, margin={"t": 20})
    rows = "".join(_row(point) for point in points)
    title = f"memfit batch: {escape(printable(name))} within {format_bytes(budget_bytes)}"
    chart: str = figure.to_html(full_html=False, include_plotlyjs=True)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{padding:.2rem 1rem;text-align:right}</style></head><body>"
        f"<h1>{title}</h1><p>Times are predicted for {escape(printable(device.name))}. Each point is a plan of its own "
        "within the same budget; a larger batch computes more of its activations a second time.</p>"
        f"{chart}<table><tr><th>batch</th><th>peak</th><th>unplanned</th><th>overhead</th>"
        "<th>samples a second</th></tr>"
        f"{rows}</table></body></html>"
    )
    write_atomically(path, page.encode())


def _row(point: BatchPoint) -> str:
    if point.overhead is None or point.peak_bytes is None or point.unplanned_bytes is None:
        return f"<tr><td>{point.batch}</td><td colspan=4>no plan fits</td></tr>"
    return (
        f"<tr><td>{point.batch}</td><td>{format_bytes(point.peak_bytes)}</td><td>{format_bytes(point.unplanned_bytes)}"
        f"</td><td>{point.overhead:.1%}</td><td>{point.samples_per_second:,.1f}</td></tr>"
    )
