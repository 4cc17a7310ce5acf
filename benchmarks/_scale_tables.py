"""The table of docs/figures.md on long graphs: what `planning_time.py` stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOMENTS = (5.0, 15.0, 60.0, 180.0)  # seconds at which the best so far is shown

Payload = dict[str, Any]
Table = tuple[list[str], list[list[str]], str]
"""Head, rows, and the note below them."""


def planning_time(payload: Payload) -> Table:
    """A row for each time limit of each network."""
    head = ["network", "ops", "blocks, kinds", "budget", "time limit, s"]
    head += [*(f"after {moment:.0f} s" for moment in MOMENTS), "plan", "proved bound", "plan after, s", "memory, GB"]
    rows = [_row(network, point) for network, points in payload["networks"].items() for point in points]
    note = (
        f"Overheads, best so far; all predicted, with a roofline of device {payload['device']}. Budget: so much of the "
        "way from what backward holds by itself to the unplanned peak."
    )
    return head, rows, note


def _row(network: str, point: dict[str, Any]) -> list[str]:
    if "error" in point:
        return [network, "failed"]
    return [
        network,
        f"{point['ops']:,}",
        f"{point['blocks']}, {point['kinds']}",
        f"{point['share']:.0%}",
        f"{point['time_limit_seconds']:.0f}",
        *(_best_after(point, moment) for moment in MOMENTS),
        "none" if point["overhead"] is None else f"{point['overhead']:.3%}",
        f"{point['bound']:.3%}",
        f"{point['plan_seconds']:.1f}",
        f"{point['peak_rss_bytes'] / 1e9:.2f}",
    ]


def _best_after(point: dict[str, Any], moment: float) -> str:
    """Return the best overhead after so many seconds; nothing before there is one, or beyond the time limit."""
    found = [overhead for seconds, overhead in point["best_so_far"] if seconds <= moment]
    return f"{found[-1]:.3%}" if found and moment <= point["time_limit_seconds"] else ""


SCALE_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {"planning-time": ("planning_time", planning_time)}
"""Each table by name: the script whose only result it shows, and what makes it."""
