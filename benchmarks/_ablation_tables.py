"""The tables of docs/ablation.md: what `ablation.py` stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Payload = dict[str, Any]
Table = tuple[list[str], list[list[str]], str]
"""Head, rows, and the note below them."""

_HEAD = [
    "part",
    "mean gain",
    "largest gain",
    "spread there",
    "largest gain at",
    "better at",
    "worse at",
    "counts at",
    "lost without it",
    "found only without it",
]


def search(payload: Payload) -> Table:
    """A row for each part of the searches."""
    rows = [
        [*_row(part, row), f"{row['closed']:.0%}" if row["closed"] else "", row["verdict"]]
        for part, row in _by_gain(payload["search"])
    ]
    moves = payload["moves"]
    note = (
        f"Gains in percentage points of overhead; {len(payload['seeds'])} seeds, {moves['most']:,} moves a search, "
        "fewer on long graphs. Closed: the largest share of the gap between the best plan and the proved bound."
    )
    return [*_HEAD, "closed", "verdict"], rows, note


def packing(payload: Payload) -> Table:
    """A row for each part of the packers."""
    rows = [
        [*_row(part, row), f"{row['slower']:.1f}" if row["slower"] > 1 else "", row["verdict"]]
        for part, row in _by_gain(payload["packing"])
    ]
    seconds = payload["pack_seconds"]
    seeds = [row["seeds"] for row in payload["packing"].values()]
    note = (
        f"Gains in percent of the lower bound of the height; {min(seeds)} to {max(seeds)} seeds, {seconds['others']:g} "
        f"processor seconds a packing, {seconds['few']:g} of up to 600 blocks; early: after {seconds['early']:g} s. "
        "Slower: how many times longer a proof takes without the part."
    )
    return [*_HEAD, "slower", "verdict"], rows, note


def elimination(payload: Payload) -> Table:
    """What happened when the parts that look needless were switched off one after the other."""
    rows = [
        [
            room,
            f"`{step['part']}`",
            str(step["alone"]["points"]),
            *_gain(step["alone"]),
            *_gain(step["together"]),
            _likely(step),
            "goes" if step["goes"] else "stays",
        ]
        for room, steps in payload["eliminated"].items()
        for step in steps
    ]
    head = [
        "room",
        "part",
        "points",
        "mean gain",
        "largest gain",
        "mean, with all before it",
        "largest, with all before it",
        "beyond chance",
        "",
    ]
    note = (
        "Each with all parts above it that go switched off as well. Beyond chance: a gain over six seeds or more of at "
        "least three times its standard error."
    )
    return head, rows, note


def _likely(step: dict[str, Any]) -> str:
    """Return the gain that many seeds tell from chance, of the part alone or with all before it."""
    for row in (step["alone"], step["together"]):
        if row.get("likely"):
            return f"{row['likely']['gain']:+.2%} ± {row['likely']['error']:.2%}, {row['likely']['at']}"
    return ""


def _by_gain(rows: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(rows.items(), key=lambda item: (item[1]["verdict"] != "needed", -item[1]["largest_gain"]))


def _row(part: str, row: dict[str, Any]) -> list[str]:
    has_gain = row["largest_gain"] > 0
    return [
        f"`{part}`",
        *_gain(row),
        f"{row['spread_there']:.2%}" if has_gain else "",
        row["largest_at"] if has_gain else "",
        str(row["helps"]),
        str(row["hurts"]),
        f"{len(row['points_that_count'])} of {row['points']}",
        str(row["lost"] or ""),
        str(row["won"] or ""),
    ]


def _gain(row: dict[str, Any]) -> list[str]:
    return [f"{row['mean_gain']:+.2%}", f"{row['largest_gain']:+.2%}"]


ABLATION_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {
    "ablation-search": ("ablation", search),
    "ablation-packing": ("ablation", packing),
    "ablation-elimination": ("ablation", elimination),
}
"""Each table by name: the script whose only result it shows, and what makes it."""
