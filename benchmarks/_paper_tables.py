"""The tables of docs/papers.md: what `chen_figures.py`, `feng_table1.py` and `feng_others.py` stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MB, GB = 1e6, 1e9  # the papers' units
MIB = 1 << 20

Payload = dict[str, Any]
Table = tuple[list[str], list[list[str]], str]
"""Head, rows, and the note below them."""


def figure_memory(figure: str, across: str) -> Callable[[Payload], Table]:
    """Return what makes the table of Figure 5 or 6: GB by layers or steps, and the fitted slopes."""

    def table(payload: Payload) -> Table:
        found = payload[figure]
        names = list(found["slopes"])
        rows = [
            [size, *(_gigabytes(point["bytes"][name]) for name in names)] for size, point in found["points"].items()
        ]
        rows.append(["fitted slope", *(f"{found['slopes'][name]:.3f}" for name in names)])
        return [across, *names], rows, f"{found['title']}: GB of feature maps and gradients. All predicted."

    return table


def figure_totals(figure: str, across: str) -> Callable[[Payload], Table]:
    """Return what makes the table of Figure 5b or 6b: GB that the process takes, beside those of feature maps."""
    head = [across]
    for name in _TOTALS:
        head += [f"{name}, feature maps", f"{name}, total", f"{name}, total, expandable segments"]

    def table(payload: Payload) -> Table:
        rows: list[list[str]] = []
        replayed = {size: point for size, point in payload[figure]["points"].items() if "total_bytes" in point}
        for size, point in replayed.items():
            row = [size]
            for name in _TOTALS:
                total = point["total_bytes"][name]
                row += [_gigabytes(each) for each in (point["bytes"][name], total["default"], total["expandable"])]
            rows.append(row)
        note = (
            f"{payload[figure]['title']}: GB. Total: what torch's allocator reserves for two steps, parameters and "
            "batch included, without CUDA's context and workspaces. All predicted."
        )
        return head, rows, note

    return table


_TOTALS = ("sharing", "sublinear")


def figure_time(payload: Payload) -> Table:
    """Figure 7: seconds by depth, measured."""
    head = ["network", "depth", "unplanned, s", "sublinear, s", "ratio", "predicted peak, MB", "same bits"]
    rows = [
        [
            network,
            depth,
            f"{point['unplanned_seconds']:.3f}",
            f"{point['seconds']:.3f}",
            f"{point['time_ratio']:.2f}",
            f"{point['peak_bytes'] / MB:.0f} of {point['unplanned_peak_bytes'] / MB:.0f}",
            "yes" if point["first_difference"] is None else f"no: {point['first_difference']}",
        ]
        for network, part in payload["7"].items()
        for depth, point in part["points"].items()
    ]
    fitted = "; ".join(
        f"{network} {part['slopes']['unplanned_seconds']:.2f} unplanned and {part['slopes']['seconds']:.2f} planned"
        for network, part in payload["7"].items()
    )
    return head, rows, f"Seconds are a processor's, of one thread, measured. Fitted slopes: {fitted}."


def full_plans(payload: Payload) -> Table:
    """What it takes to plan the largest networks and to lay them out."""
    head = ["network", "instructions", "blocks", "graph, plan, layout: s", "of a processor, s", "process peak, GB"]
    head += ["layout, GB", "above its bound"]
    rows: list[list[str]] = []
    for name, plan in payload["plans"].items():
        stages = ("graph", "plan", "layout")
        rows.append(
            [
                name,
                f"{plan['instructions']:,}",
                f"{plan['blocks']:,}",
                ", ".join(f"{plan['seconds'][stage]:.0f}" for stage in stages),
                f"{sum(plan['processor_seconds'].values()):.0f}",
                f"{plan['process_peak_bytes'] / GB:.1f}",
                f"{plan['height_bytes'] / GB:.3f}",
                f"{plan['height_bytes'] / plan['height_bound_bytes'] - 1:.2%}",
            ]
        )
    return head, rows, "From nothing to a checked schedule with an address for each storage, in a process of its own."


def table_1(payload: Payload) -> Table:
    """Table 1: ours, the paper's in brackets; whether memfit needs half of Re-forwarding's overhead or less."""
    head = ["network, batch", "regular, MB", "Chen's, MB", "Re-forwarding, MB", "cut", "overhead"]
    head += ["memfit's overhead", "no plan below", "half or less"]
    rows: list[list[str]] = []
    for network, row in payload["networks"].items():
        paper, theirs, ours = row["paper"], row["re_forwarding"], row["memfit"]
        cut, slower = (1 - theirs["bytes"] / row["regular"]["bytes"], theirs["overhead"])
        paper_cut = 1 - paper["re_forwarding"] / paper["regular"]
        paper_slower = paper["re_forwarding_seconds"] / paper["regular_seconds"] - 1
        rows.append(
            [
                f"{network}, {row['batch']}",
                *(_beside(row[name]["bytes"], paper[name]) for name in ("regular", "chen", "re_forwarding")),
                f"{cut:.0%} ({paper_cut:.0%})",
                f"{slower:.0%} ({paper_slower:.0%})",
                "none found" if ours["overhead"] is None else f"{ours['overhead']:.1%}",
                f"{ours['overhead_bound']:.1%}",
                _verdict(ours, slower / 2),
            ]
        )
    moves = max(row["memfit"]["moves"] for row in payload["networks"].values())
    note = (
        f"All predicted, by roofline of {payload['card']}; in brackets the paper's. memfit: planner `search`, "
        f"{moves:,} moves at most, given Re-forwarding's memory."
    )
    return head, rows, note


def table_1_measured(payload: Payload) -> Table:
    """Table 1 at a small batch on a CPU."""
    head = ["network, batch", "eager, MB", "Re-forwarding, MB", "memfit, MB", "same bits"]
    head += ["Re-forwarding, time above eager", "memfit, time above eager"]
    rows: list[list[str]] = []
    for network, row in payload["networks"].items():
        measured = row.get("measured", {})
        if "memfit" not in measured:
            continue
        planned = [measured[name] for name in ("re_forwarding", "memfit")]
        resident = measured["resident_bytes"]
        rows.append(
            [
                f"{network}, {measured['batch']}",
                *(
                    f"{resident / MB:,.0f} + {(bytes_ - resident) / MB:,.0f}"
                    for bytes_ in (measured["eager_peak_bytes"], *(each["peak_bytes"] for each in planned))
                ),
                "yes" if all(each["bitwise_equal"] for each in planned) else "**no**",
                *(f"{each['overhead']:+.0%}" if "overhead" in each else "" for each in planned),
            ]
        )
    note = (
        "All measured: residents (parameters, buffers, batch) + the rest (with gradients). Times are of one thread, "
        "in processor seconds, where they were taken."
    )
    return head, rows, note


def other_graphs(payload: Payload) -> Table:
    """Networks that are no convolutional classifiers: least memory and its overhead of each planner of the papers."""
    planners = payload["planners"]
    head = ["workload", "unplanned, MiB", *(f"`{name}`" for name in planners), "memfit there", "no plan below"]
    rows: list[list[str]] = []
    for name, row in payload["networks"].items():
        found = row["memfit"]
        rows.append(
            [
                name,
                f"{row['unplanned_bytes'] / MIB:.1f}",
                *(f"{row[each]['bytes'] / MIB:.1f}, {row[each]['overhead']:.0%}" for each in planners),
                f"{row['best_bytes'] / MIB:.1f}, "
                + ("none found" if found["overhead"] is None else f"{found['overhead']:.1%}"),
                f"{found['overhead_bound']:.1%}",
            ]
        )
    note = (
        f"Least memory above parameters and batch, and the overhead there. memfit there: planner `search`, "
        f"{payload['moves']:,} moves, within the least memory of any of these planners. All predicted, by roofline of "
        f"{payload['card']}."
    )
    return head, rows, note


def _gigabytes(size: int) -> str:
    return f"{size / GB:.2f}" if size < 10 * GB else f"{size / GB:.1f}"


def _beside(ours: int, papers: float | None) -> str:
    return f"{ours / MB:,.0f} ({'–' if papers is None else f'{papers:,.0f}'})"


def _verdict(ours: dict[str, Any], half: float) -> str:
    if ours["overhead"] is not None and ours["overhead"] <= half:
        return "yes"
    return f"no plan can: half is {half:.1%}" if ours["overhead_bound"] > half else "**no**"


PAPER_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {
    "chen-5": ("chen_figures", figure_memory("5", "layers")),
    "chen-6": ("chen_figures", figure_memory("6", "steps")),
    "chen-5b": ("chen_figures", figure_totals("5", "layers")),
    "chen-6b": ("chen_figures", figure_totals("6", "steps")),
    "chen-7": ("chen_figures_measured", figure_time),
    "chen-plans": ("chen_figures_measured", full_plans),
    "feng-1": ("feng_table1", table_1),
    "feng-1-measured": ("feng_table1", table_1_measured),
    "feng-others": ("feng_others", other_graphs),
}
"""Each table by name: the script whose only result it shows, and what makes it."""
