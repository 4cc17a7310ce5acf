"""Tables of own loops: `memfit.checkpoint` beside other ways, and the doors beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _measure import MIB

Payload = dict[str, Any]
Table = tuple[list[str], list[list[str]], str]

_WAYS = {
    "by hand": "checkpoints by hand",
    "memfit.checkpoint 90%": "`checkpoint` 90%",
    "memfit.checkpoint 70%": "70%",
    "memfit.checkpoint 50%": "50%",
    "memfit.checkpoint as by hand": "as by hand",
    "memfit.checkpoint least": "least",
    "memfit.fit 70%": "`fit` 70%",
    "memfit.fit 50%": "50%",
    "memfit.eager 70%": "`eager` 70%",
    "torch's budget 0.7": "torch's 0.7",
}
_RANK_WAYS = {
    "by hand": "checkpoints by hand",
    "memfit 90%": "`checkpoint` 90%",
    "memfit 70%": "70%",
    "memfit 50%": "50%",
    "memfit as by hand": "as by hand",
    "planned 70%": "planned graphs 70%",
    "planned as by hand": "as by hand",
}
_HOLDERS = {
    "auto": "its callback or `prepare`, by `memfit.checkpoint`",
    "auto, compile": 'its callback or `prepare`, with `door="compile"`',
    "checkpoint": "`memfit.checkpoint`",
    "backend": '`block.compile(backend="memfit")`',
    "compile": "`memfit.compile`",
    "eager": "`memfit.eager`",
    "fit": "`memfit.fit`",
}
_DOORS = ("checkpoint", "fit", "compile", "eager")
_GRAPHS = {"broken": "broken", "whole": "one", "varying": "another in each step"}
_OUT_OF_ORDER = {"refused": "refused", "broke off": "**broke off**"}


def own_loops(stored: dict[str, Payload]) -> Table:
    """Time and peak of each way, beside the bare loop's."""
    head = ["model", "bare: MiB", "ms", *_WAYS.values()]
    rows: list[list[str]] = []
    for payload in stored.values():
        by_way = {row["way"]: row for row in payload["rows"]}
        cells = [_cell(by_way.get(way), own_peak=way in ("by hand", "torch's budget 0.7")) for way in _WAYS]
        figures = f"{payload['bare_bytes'] / MIB:.0f}", f"{payload['bare_seconds'] * 1e3:.0f}"
        rows.append([payload["model"], *figures, *cells])
    note = (
        "Each cell: seconds as a multiple of the bare loop's, and the most that a step takes as a share of the bare "
        "loop's. Budgets are shares of the bare peak, too. Over: the most steps from the third on took more than the "
        "budget; refused: the door said that it cannot."
    )
    return head, rows, note


def doors(stored: dict[str, Payload]) -> Table:
    """Which door holds which loop."""
    head = ["loop", "graphs", "budget", "`checkpoint`", "`fit`", "`compile`", "`eager`"]
    rows: list[list[str]] = []
    held = dict.fromkeys(_DOORS, 0)
    for payload in stored.values():
        for point in payload["budgets"]:
            by_way = {row["way"]: row for row in point["rows"]}
            cells = [_cell(by_way.get(door)) for door in _DOORS]
            rows.append([payload["case"], _GRAPHS[payload["kind"]], f"{point['share']:.0%}", *cells])
            for door in _DOORS:
                held[door] += _is_held(by_way.get(door, {}))
    counts = ", ".join(f"{door} {count}" for door, count in held.items())
    note = (
        "Each cell: seconds as a multiple of the bare loop's, and the most that a step takes as a share of its peak. "
        f"Of {len(rows)} budgets, held from the third step on, with the bare loop's bits: {counts}."
    )
    return head, rows, note


def refusals(stored: dict[str, Payload]) -> Table:
    """Why doors did not run loops."""
    rows = [
        [payload["case"], f"{point['share']:.0%}", row["way"], row["error"].replace("|", r"\|")]
        for payload in stored.values()
        for point in payload["budgets"]
        for row in point["rows"]
        if "error" in row
    ]
    return ["loop", "budget", "door", "message"], rows, f"{len(rows)} of the table above."


def ranks(payload: Payload) -> Table:
    """Time and peak of each wrapper and library on ranks, beside the bare loop's."""
    head = ["loop", "ranks", "bare: MiB a rank", "ms", *_RANK_WAYS.values()]
    rows: list[list[str]] = []
    for row in sorted(payload["rows"], key=lambda row: (row["ranks"], row["row"])):
        by_way = {way["way"]: way for way in row.get("ways", [])}
        figures = f"{row['bare_bytes'] / MIB:.0f}", f"{row['bare_seconds'] * 1e3:.0f}"
        cells = [_cell(by_way.get(way), own_peak=way == "by hand") for way in _RANK_WAYS]
        rows.append([row["row"], str(row["ranks"]), *figures, *cells])
    note = (
        "Each cell: seconds of the processor as a multiple of the bare loop's, and the most that a step takes as a "
        "share of the bare loop's, of the rank with the most. Over: so many steps of all ranks, from the third on, "
        "took more than the budget."
    )
    return head, rows, note


def rank_loops(payload: Payload) -> Table:
    """Which budget holds under which wrapper, in which loop, with which habits."""
    head = ["who wraps", "loop", "held by", "ranks", "habits of the loop", "most of the budget", "not held"]
    groups: dict[tuple[str, ...], list[Payload]] = {}
    for row in payload["rows"]:
        groups.setdefault((row["loop"], row["wrapper"], row["door"]), []).append(row)
    rows: list[list[str]] = []
    for (loop, wrapper, door), found in sorted(groups.items()):
        held = [row for row in found if _is_held(row)]
        habits = dict.fromkeys(row["habit"] for row in held)
        rest = [f"{row['habit']} ({_why_not(row)})" for row in found if not _is_held(row)]
        counts = " and ".join(str(count) for count in sorted({row["ranks"] for row in found}))
        most = f"{max(row['most'] for row in held):.3f}" if held else ""
        holder = _HOLDERS["auto, compile" if door == "compile" and loop != "own" else door]
        rows.append([wrapper, loop, holder, counts, ", ".join(habits), most, ", ".join(rest)])
    total, held = len(payload["rows"]), sum(map(_is_held, payload["rows"]))
    note = (
        f"{held} of {total} cases held: losses, norms and parameters of all ranks with the bits of the stock loop, run "
        f"before on the same ranks, and none of {payload['steps']} steps of any rank over its budget, which is 70 to "
        "100% of what that loop took."
    )
    return head, rows, note


def _why_not(row: Payload) -> str:
    if "error" in row:
        return "ended in an error"
    faults = ["other bits"] if not row["same_bits"] else []
    return ", ".join([*faults, *([f"over in {row['over']}"] if row["over"] else [])])


def _is_held(row: Payload) -> bool:
    return "error" not in row and row.get("over") == 0 and bool(row.get("same_bits"))


def _cell(row: Payload | None, *, own_peak: bool = False) -> str:
    """Return the text of a way's result: its time, its peak, and its faults."""
    if row is None:
        return ""
    if "error" in row:
        return _OUT_OF_ORDER.get(row["error"].partition(":")[0], "**too slow**")
    faults = [f"over in {row['over']}"] if row.get("over") else []
    faults += [] if row["same_bits"] else ["other bits"]
    figures = f"{row['time_ratio']:.2f}, {row['peak_share']:.3f}"
    return (
        figures
        if not faults
        else f"{figures}, {', '.join(faults)}"
        if own_peak
        else f"{figures}, **{', '.join(faults)}**"
    )


def scripts(payload: Payload) -> Table:
    """Scripts under `memfit run`, beside themselves."""
    shares = sorted({row["share"] for row in payload["rows"] if row["share"]}, reverse=True)
    head = ["script", "as it is: MiB", *(f"{share}%" for share in shares)]
    table: dict[str, list[str]] = {}
    for row in payload["rows"]:
        if row["share"] is None:
            table[row["script"]] = [row["script"], f"{row['peak_bytes'] / MIB:.1f}", *[""] * len(shares)]
            continue
        cells, place = table[row["script"]], 2 + shares.index(row["share"])
        cells[place] = "; ".join(filter(None, [cells[place], _ran(row)]))
    note = (
        "Each cell: what held it, and the most bytes of the process as a share of the budget. Prints, exit status and "
        "all that was stored are the script's own to the bit, unless it says otherwise."
    )
    return head, list(table.values()), note


def _ran(row: Payload) -> str:
    if row["error"]:
        return "refused" if row["door"] == "auto" else "refused in eager mode, too"
    by = " and ".join(door.removeprefix("memfit.") for door in row["by"])
    over = "" if row["is_held"] else ", **over**"
    return f"{by} {row['peak_bytes'] / row['budget_bytes']:.3f}{over}{'' if row['is_same'] else ', **other results**'}"


DOOR_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {
    "checkpoint-ranks": ("checkpoint_ranks", ranks),
    "run-scripts": ("run_scripts", scripts),
    "rank-loops": ("rank_loops", rank_loops),
}
"""Each table of one result by name: the script that stored it, and what makes it."""

DOOR_SET_TABLES: dict[str, tuple[str, Callable[[dict[str, Payload]], Table]]] = {
    "own-loops": ("checkpoint", own_loops),
    "doors": ("doors", doors),
    "doors-refusals": ("doors", refusals),
}
"""Each table of all results in a folder, by name: the script that stored them, and what makes it."""
