"""The tables of docs/cuda-memory.md: the model of torch's allocator beside the allocator, and what plans reserve."""

from __future__ import annotations

from typing import Any

from _measure import MIB

Table = tuple[list[str], list[list[str]], str]
"""Head, rows, and the note below them."""

_SETTINGS = {
    "default": "torch's defaults",
    "expandable": "`expandable_segments:True`",
    "max_split": "`max_split_size_mb:32`",
}
_KINDS = {"unplanned": "unplanned", "half": "half of that", "least": "least found"}
_MODES = ("arena", "expandable", "default")


def equality(payload: dict[str, Any]) -> Table:
    """How many traces and events were compared, and how many traces differ."""
    head = ["settings", "traces", "events", "requests refused", "traces that differ"]
    rows: list[list[str]] = []
    for name, found in payload["results"].items():
        setting, _, plans = name.partition(", ")
        traces = f"plans of the eight workloads: {found['traces']}" if plans else f"random: {found['traces']:,}"
        cells = (f"{found['events']:,}", f"{found['refused']:,}", str(found["differ"]))
        rows.append([_SETTINGS[setting], traces, *cells])
    versions = sorted({found["torch"] for found in payload["results"].values()})
    note = f"Allocated bytes, reserved bytes and segments after every event, against torch {', '.join(versions)}."
    return head, rows, note


def reserved(stored: dict[str, dict[str, Any]]) -> Table:
    """What a plan takes in each mode, beyond its peak of live bytes."""
    head = [
        "workload",
        "plan",
        "planned peak, MiB",
        "predicted overhead",
        "in an arena",
        "expandable segments",
        "default",
    ]
    rows = [
        [
            *[_sized(workload, payload), _KINDS[kind], f"{point['peak_bytes'] / MIB:,.0f}", f"{point['overhead']:.1%}"],
            *(f"{point[f'{mode}_bytes'] / point['peak_bytes'] - 1:+.1%}" for mode in _MODES),
        ]
        for workload, payload in stored.items()
        for kind in _KINDS
        for point in [payload[kind]]
    ]
    return head, rows, "All predicted; the last three columns are bytes taken from the device, above the planned peak."


def within(stored: dict[str, dict[str, Any]]) -> Table:
    """The price of a plan whose bytes on the device are within the budget."""
    head = ["workload", "budget, MiB", "overhead by live bytes", "in an arena", "expandable segments", "default"]
    rows = [
        [
            *[_sized(workload, payload), f"{payload['budget_bytes'] / MIB:,.0f}", f"{payload['half']['overhead']:.1%}"],
            *("above the budget" if "error" in each else f"{each['overhead']:.1%}" for each in _by_mode(payload)),
        ]
        for workload, payload in stored.items()
    ]
    return head, rows, "All predicted. *Above the budget*: six plans, for less and less, all took more."


def _by_mode(payload: dict[str, Any]) -> list[dict[str, Any]]:
    return [payload["within"][mode] for mode in _MODES]


def _sized(workload: str, payload: dict[str, Any]) -> str:
    return f"{workload}, batch {payload['options']['batch']}"


CUDA_TABLES = {"cuda-allocator": ("cuda_allocator", equality)}
"""Of a script that stores one result."""
CUDA_SET_TABLES = {"cuda-reserved": ("cuda_reserved", reserved), "cuda-within": ("cuda_reserved", within)}
