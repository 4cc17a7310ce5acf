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


_KINDS = ("parameters", "gradients", "state", "activations", "gathers")


def many_ranks(stored: dict[str, Payload]) -> Table:
    """A row for each budget of each model on a number of ranks."""
    head = ["model", "ranks", "budget, GiB", *_KINDS, "peak, GiB", "ms a step", "overhead", "proved bound"]
    head += ["all-gathers", "all kept: GiB, ms", "search, s", "command, s", "of a core, s", "command, GiB"]
    payloads = sorted(stored.values(), key=lambda payload: (len(payload["model"]), payload["ranks"]))
    rows = [_ranks_row(payload, point) for payload in payloads for point in payload["points"]]
    shapes = dict.fromkeys(
        f"{payload['batch']} x {payload['length']:,} tokens ({payload['model']})" for payload in payloads
    )
    limits = sorted({payload["time_limit_seconds"] for payload in payloads})
    note = (
        "All but the last four columns predicted, for one of so many H100s in nodes of 8: Llama 3, fully sharded, "
        f"bfloat16 compute, AdamW in float32; a rank has {' and '.join(shapes)}. The kinds are GiB at the peak. "
        "All-gathers: how often a group of parameters is gathered in a step, on average. The command is one `memfit "
        f"plan --ranks` with a limit of {' or '.join(f'{limit:.0f}' for limit in limits)} s for its search, from its "
        "start to its answer, on a machine that others used as well, and the most memory that its process had."
    )
    return head, rows, note


def _ranks_row(payload: Payload, point: dict[str, Any]) -> list[str]:
    begin = [f"{payload['model']}", f"{payload['ranks']}", point["budget"].removesuffix("GiB")]
    took = [f"{point[name]:.0f}" for name in ("wall_seconds", "processor_seconds")]
    took.append(_gibibytes(point["process_bytes"]))
    if "predicted" not in point:
        bound = _gibibytes(point["least_budget_bound_bytes"])
        return [*begin, *("" for _ in _KINDS), f"no plan; none is below {bound}", *([""] * 6), *took]
    by_kind = point["rank"]["by_kind"]
    return [
        *begin,
        *(_gibibytes(by_kind[kind]) for kind in _KINDS),
        _gibibytes(point["predicted"]["peak_bytes"]),
        f"{point['predicted']['seconds'] * 1e3:,.0f}",
        f"{point['overhead']:.1%}",
        f"{point['bounds']['overhead']:.1%}",
        f"{point['rank']['gathers']:.2f}",
        f"{_gibibytes(point['unplanned']['peak_bytes'])}, {point['unplanned']['seconds'] * 1e3:,.0f}",
        f"{point['plan_seconds']:.1f}",
        *took,
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


def absent_ranks(stored: dict[str, Payload]) -> Table:
    """A row for each step on each number of ranks: the bytes predicted beforehand, and the bytes measured."""
    head = ["ranks", "step", "budget", "predicted, MiB", "measured, MiB", "off by"]
    rows: list[list[str]] = []
    for row in (row for _, payload in sorted(stored.items()) for row in payload["rows"]):
        predicted, measured = row["predicted_bytes"], row["measured_bytes"]
        name, sizes = row["step"].replace("_", " "), [f"{size / 2**20:.3f}" for size in (predicted, measured)]
        rows.append([f"{row['ranks']}", name, row["budget"], *sizes, f"{predicted / measured - 1:.2%}"])
    note = (
        "Planned by `memfit plan --ranks` in one process, whose plan file the ranks then ran by `memfit.fit(..., "
        "plan=file)`; measured with gloo, on the rank that took most. A budget is a share of the unplanned peak."
    )
    return head, rows, note


def _gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


SCALE_SET_TABLES: dict[str, tuple[str, Callable[[dict[str, Payload]], Table]]] = {
    "absent-ranks": ("absent_ranks", absent_ranks),
    "many-ranks": ("many_ranks", many_ranks),
}
"""The same for tables of all results in a folder."""
SCALE_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {
    "planning-time": ("planning_time", planning_time),
    "ranks": ("ranks", ranks),
}
"""Each table by name: the script whose only result it shows, and what makes it."""
