"""The HTML page of `memfit compare`: curves, a table, and the storages that only one of two chosen plans keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.device import Device
from memfit.graph import Graph
from memfit.plan import Plan
from memfit.report.formatting import change_text, count_text, module_text, status_text
from memfit.report.html_template import make_page
from memfit.report.live import play
from memfit.report.storage_fates import Kind, fates
from memfit.step.measured import Measured
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically
from memfit.system.lines import printable

_EQUAL = 0.0005  # overheads that are shown as one number
_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPoint:
    """The result of one planner or baseline at one budget.

    >>> ComparedPoint(planner="torch:dp", setting=0.5, status="feasible", peak_bytes=1 << 20, overhead=0.1).setting
    0.5

    Attributes:
        planner: the name of a planner or of a baseline.
        budget_bytes: None for a baseline that takes no bytes.
        setting: what a baseline takes in place of a budget.
        status: of the result, or why there is none.
        peak_bytes: predicted.
        overhead: predicted, against the unplanned step.
        plan_seconds: how long planning took.
        measured: None where nothing was run.
        plan: None where none was found.
    """

    planner: str
    budget_bytes: int | None = None
    setting: float | str | None = None
    status: str = "not measured"
    peak_bytes: int | None = None
    overhead: float | None = None
    plan_seconds: float | None = None
    measured: Measured | None = None
    plan: Plan | None = None


def write_comparison(graph: Graph, device: Device, points: Sequence[ComparedPoint], path: Path | str) -> None:
    """Write the page to `path`: one HTML file that needs no network, atomically.

    Args:
        graph: of the step.
        device: whose times were used.
        points: of all planners and baselines.
        path: where the page is written.

    Raises:
        InvalidFileError: the file cannot be written.

    Guarantees: as `write_html`: no text of the graph can become markup or script, and the page loads nothing.
    """
    planners = list(dict.fromkeys(point.planner for point in points))
    texts = {
        "title": f"memfit compare: {graph.name}",
        "name": graph.name,
        "lead": f"{count_text(len(planners), 'planner')} on {count_text(len(graph.ops), 'op')}, "
        f"{format_bytes(graph.resident_bytes)} resident, times of {device.name}. {winner(points)}",
    }
    page = make_page("comparison.html", texts, _data(graph, device, points, planners))
    write_atomically(Path(path), page.encode())


def winner(points: Sequence[ComparedPoint]) -> str:
    """Return which planner is the fastest most often, and which reaches the least memory, in a sentence or two."""
    fits = [(point, point.overhead, point.peak_bytes) for point in points]
    planned = [(point, overhead, peak) for point, overhead, peak in fits if overhead is not None and peak is not None]
    if not planned:
        return "No plan was found."
    by_budget: dict[int, list[tuple[ComparedPoint, float]]] = {}
    for point, overhead, _ in planned:
        if point.budget_bytes is not None:
            by_budget.setdefault(point.budget_bytes, []).append((point, overhead))
    contested = [each for each in by_budget.values() if len({point.planner for point, _ in each}) > 1]
    wins = Counter(
        name
        for each in contested
        for name in {p.planner for p, overhead in each if overhead <= min(o for _, o in each) + _EQUAL}
    )
    said = ""
    if wins:
        name, count = wins.most_common(1)[0]
        said = (
            f"{name} adds the least time at {count} of the {count_text(len(contested), 'budget')} that several reach. "
        )
    least, overhead, peak = min(planned, key=lambda each: (each[2], each[1]))
    return f"{said}The least memory is that of {least.planner}: {format_bytes(peak)}, {change_text(overhead)} time."


def _data(graph: Graph, device: Device, points: Sequence[ComparedPoint], planners: list[str]) -> dict[str, Any]:
    managed = [storage.id for storage in graph.storages if not storage.resident]
    managed.sort(key=lambda storage: (-graph.storages[storage].bytes, storage))
    return {
        "planners": planners,
        "kinds": list(_KINDS),
        "points": [_point(point, device, managed) for point in points],
        "storages": {
            "name": [printable(graph.storages[s].name) for s in managed],
            "module": [module_text(graph, s) for s in managed],
            "bytes": [graph.storages[s].bytes for s in managed],
        },
    }


def _point(point: ComparedPoint, device: Device, managed: list[int]) -> dict[str, Any]:
    kinds = ""
    if point.plan is not None:
        of_storage = fates(play(point.plan.graph, point.plan.schedule, device))
        kinds = "".join(str(_KINDS.index(of_storage[storage].kind)) for storage in managed)
    measured = point.measured
    shown = ("planner", "budget_bytes", "setting", "peak_bytes", "overhead", "plan_seconds")
    return {
        **{name: getattr(point, name) for name in shown},
        "status": status_text(point.status),
        "measured_peak_bytes": measured.peak_bytes if measured else None,
        "measured_overhead": measured.overhead if measured else None,
        "measured_text": measured.overhead_text if measured else None,
        "same_bits": measured.bitwise_equal if measured else None,
        "kinds": kinds,
    }
