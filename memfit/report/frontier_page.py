"""The HTML page of `memfit batch` and `memfit frontier`: batches against their speed and their price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memfit.device import Device
from memfit.report.formatting import change_text
from memfit.report.html_template import make_page, table_row
from memfit.report.ranks import RankFigures
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically


class BatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One batch size: its plan's peak, overhead and speed, all predicted; None where there is no plan.

    `least_bytes` is the proved least budget: no plan of this size fits less. `rank` has the figures of one of many
    ranks; the speed is then that of all ranks together.
    """

    batch: int
    least_bytes: int
    unplanned_bytes: int | None = None
    peak_bytes: int | None = None
    overhead: float | None = None
    samples_per_second: float | None = None
    rank: RankFigures | None = None

    def keys(self) -> dict[str, Any]:
        """The point as JSON."""
        shown = ("batch", "peak_bytes", "overhead", "samples_per_second")
        of_rank = {} if self.rank is None else {"rank": self.rank.keys()}
        return {name: getattr(self, name) for name in shown} | of_rank

    def no_plan_text(self, budget_bytes: int) -> str:
        """Return why there is no plan for this size: it is proved that none fits, or the planner found none."""
        return "no plan fits" if self.least_bytes > budget_bytes else "no plan found"

    def cells(self, budget_bytes: int) -> tuple[str, ...]:
        """Return the point as texts: batch, peak, unplanned peak, overhead and speed; two texts without a plan."""
        if self.overhead is None:
            return f"{self.batch:,}", self.no_plan_text(budget_bytes)
        return (
            f"{self.batch:,}",
            format_bytes(self.peak_bytes or 0),
            format_bytes(self.unplanned_bytes or 0),
            change_text(self.overhead),
            f"{self.samples_per_second:,.1f}",
        )


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
    def label(self) -> str:
        """The combination in words."""
        return ", ".join(f"{name} {value}" for name, value in self.options.items()) or "as it is"

    @property
    def planned(self) -> list[BatchPoint]:
        """The points that have a plan."""
        return [point for point in self.points if point.overhead is not None]

    @property
    def largest(self) -> BatchPoint | None:
        """The plan of the largest batch."""
        return next((point for point in self.points if point.batch == self.largest_batch), None)

    @property
    def fastest(self) -> BatchPoint | None:
        """The plan with the most samples a second; the smaller batch of two that are equal."""
        return max(self.planned, key=lambda point: (point.samples_per_second or 0.0, -point.batch), default=None)

    def cells(self) -> tuple[str, ...]:
        """The row as texts: those of the largest batch, and the fastest batch with its speed.

        Two texts where no batch fits.
        """
        best, fastest = self.largest, self.fastest
        if best is None or fastest is None:
            least_bytes = min((point.least_bytes for point in self.points), default=0)
            return "0", f"a batch of 1 takes {format_bytes(least_bytes)} or more"
        return *best.cells(0), f"{fastest.batch:,}: {fastest.samples_per_second:,.1f}"

    def keys(self) -> dict[str, Any]:
        """The row as JSON."""
        points = [point.keys() for point in self.planned]
        return {"options": dict(self.options), "largest_batch": self.largest_batch, "points": points}


def write_frontier_page(
    command: str, name: str, budget_bytes: int, device: Device, rows: Sequence[FrontierRow], path: Path
) -> None:
    """Write one self-contained HTML file with a curve for each combination, and tables.

    Args:
        command: that the page is of.
        name: of the step.
        budget_bytes: for all plans.
        device: whose times were used.
        rows: one for each combination.
        path: where the page is written.

    Raises:
        InvalidFileError: the file cannot be written.

    Guarantees: as `write_html`.
    """
    title = f"{name} within {format_bytes(budget_bytes)}"
    texts = {
        "title": f"{command}: {title}",
        "command": command,
        "name": title,
        "lead": f"{_lead(rows[0]) if len(rows) == 1 else winners(rows)} All times are predicted, for {device.name}.",
    }
    tables = {
        "rows": "".join(table_row([row.label], row.cells(), columns=6) for row in rows),
        "points": "".join(
            table_row([row.label], point.cells(budget_bytes), columns=5) for row in rows for point in row.points
        ),
    }
    page = make_page("frontier.html", texts, {"curves": [_curve(row, budget_bytes) for row in rows]}, tables)
    write_atomically(path, page.encode())


def _curve(row: FrontierRow, budget_bytes: int) -> dict[str, Any]:
    missed = min((point for point in row.points if point.overhead is None), key=lambda point: point.batch, default=None)
    return {
        "name": row.label,
        "points": [point.keys() for point in row.planned],
        "missed": None if missed is None else missed.batch,
        "missed_text": "" if missed is None else missed.no_plan_text(budget_bytes),
    }


def winners(rows: Sequence[FrontierRow]) -> str:
    """Return which combination is the fastest, and which has the largest batch, in a sentence."""
    fitting = [(row, row.fastest) for row in rows if row.fastest is not None]
    if not fitting:
        return "No plan was found for any combination."
    best, point = max(fitting, key=lambda each: (each[1].samples_per_second or 0.0) if each[1] else 0.0)
    widest = max(rows, key=lambda row: row.largest_batch)
    assert point is not None
    where = f"{best.label} at a batch of {point.batch:,}"
    said = f"The most samples a second, {point.samples_per_second:,.1f}, are those of {where}"
    also = f"; the largest batch, {widest.largest_batch:,}, fits with {widest.label}"
    return (
        f"{said}{also if (widest.label, widest.largest_batch) != (best.label, point.batch) else ', the largest batch'}."
    )


def _lead(row: FrontierRow) -> str:
    """Return the answer in a sentence or two: the largest batch, and the fastest."""
    largest, fastest = row.largest, row.fastest
    if largest is None or fastest is None:
        return "No plan was found for any batch size that was tried."
    said = f"The largest batch that fits is {largest.batch:,}, at {largest.samples_per_second:,.1f} samples a second."
    if fastest.batch == largest.batch:
        return f"{said} None that was tried is faster."
    return f"{said} The fastest is {fastest.batch:,}, at {fastest.samples_per_second:,.1f}."
