"""The tables of long graphs and of ranks: what `planning_time.py`, `many_ranks.py` and `ranks.py` stored."""

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


def many_ranks(stored: dict[str, Payload]) -> Table:
    """A row for each budget of each number of ranks."""
    head = ["ranks", "budget", "peak, GiB", "resident, GiB", "ms a step", "overhead", "proved bound", "all-gathers"]
    head += ["ms a step if all is kept", "its peak, GiB"]
    payloads = sorted(stored.values(), key=lambda payload: payload["ranks"])
    rows = [_ranks_row(payload, point) for payload in payloads for point in payload["points"]]
    model = payloads[0]["model"]
    limits = sorted({payload["time_limit_seconds"] for payload in payloads})
    note = (
        f"All predicted, for one of so many H100s: Llama 3 8B, {model['layers']} layers, {model['batch']} sequences of "
        f"{model['length']:,} tokens on each rank, {payloads[0]['ops']:,} ops. Resident: parts of parameters and of "
        "optimizer states. All-gathers: how often a group of parameters is gathered in a step, on average. "
        f"{' or '.join(f'{limit:.0f}' for limit in limits)} s of search for each plan; capture took at most "
        f"{max(payload['capture_seconds'] for payload in payloads):.0f} s, and the process "
        f"{max(payload['process_bytes'] for payload in payloads) / 2**30:.1f} GiB."
    )
    return head, rows, note


def _ranks_row(payload: Payload, point: dict[str, Any]) -> list[str]:
    begin = [f"{payload['ranks']}", point["budget"].replace("GiB", " GiB")]
    if "peak_bytes" not in point:
        found = point["least_bytes"]
        reached = "no plan" if found is None else f"no plan; {_gibibytes(found)} were reached"
        return [*begin, f"{reached}, none is below {_gibibytes(point['bound_bytes'])}"]
    return [
        *begin,
        _gibibytes(point["peak_bytes"]),
        _gibibytes(payload["resident_bytes"]),
        f"{point['seconds'] * 1e3:,.0f}",
        f"{point['overhead']:.1%}",
        f"{point['bound']:.1%}",
        f"{point['gathers']:.2f}",
        f"{point['unplanned_seconds'] * 1e3:,.0f}",
        _gibibytes(point["unplanned_peak_bytes"]),
    ]


def ranks(payload: Payload) -> Table:
    """A row for each step on each number of ranks."""
    head = ["ranks", "step", "runs", "stock's bits", "furthest from stock", "different results of a rank"]
    head += ["over budget", "largest peak over budget", "prediction off by", "most gathers of a group"]
    rows = [
        [
            f"{each['ranks']}",
            each["what"],
            f"{each['runs']}",
            f"{each['same']} of {each['rows']}",
            f"{each['difference']:.1e}" if each["difference"] else "0",
            f"{each['results']}",
            f"{each['over']}",
            f"{each['peak_over_budget']:.3f}",
            f"{each['prediction_error']:.2%}",
            f"{each['gathers']}" if each["gathers"] else "",
        ]
        for each in payload["summaries"]
    ]
    note = (
        "All measured, with gloo, after 20 steps (SGD: 4). Stock's bits: of all ranks in all runs, those whose losses "
        "and parameters are those of the stock loop to the bit. Different results: 1 if all runs end with the same "
        "bits. The peak is that of the step on the rank that takes most."
    )
    return head, rows, note


def _gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


SCALE_SET_TABLES: dict[str, tuple[str, Callable[[dict[str, Payload]], Table]]] = {
    "many-ranks": ("many_ranks", many_ranks)
}
"""The same for tables of all results in a folder."""
SCALE_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {
    "planning-time": ("planning_time", planning_time),
    "ranks": ("ranks", ranks),
}
"""Each table by name: the script whose only result it shows, and what makes it."""
