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


def at_least(stored: dict[str, dict[str, Any]]) -> Table:
    """The least budget that each mode was seen to keep: what the plan with the least peak takes there."""
    head = ["workload", "predicted overhead", "live bytes, MiB", "in an arena, MiB", "expandable segments, MiB"]
    rows = [
        [
            _sized(workload, payload),
            f"{payload['least']['overhead']:.1%}",
            *(f"{payload['least'][f'{mode}_bytes'] / MIB:,.0f}" for mode in ("peak", *_MODES)),
        ]
        for workload, payload in stored.items()
    ]
    return [*head, "default, MiB"], rows, "All predicted: one plan a workload, the one with the least peak."


def _by_mode(payload: dict[str, Any]) -> list[dict[str, Any]]:
    return [payload["within"][mode] for mode in _MODES]


def _sized(workload: str, payload: dict[str, Any]) -> str:
    return f"{workload}, batch {payload['options']['batch']}"


def in_front(payload: dict[str, Any]) -> Table:
    """What the arena did in front of torch's allocator, by version of torch."""
    head = ["torch", "random steps", "requests served", "ordinary memory", "calls beside it that work", "planned steps"]
    rows: list[list[str]] = []
    for version, found in sorted(payload["results"].items()):
        life = [found["life"][setting] for setting in _SETTINGS]
        counted = (sum(each[name] for each in life) for name in ("steps", *_SERVED))
        works = sum(outcome == "works" for outcome in found["beside"].values())
        steps = [
            step["reserved_bytes"] == answer["predicted_bytes"] and not step["not_served"]
            for name, answer in found["planned"].items()
            if name.endswith("arena")
            for step in answer["steps"]
        ]
        exact = f"{sum(steps)} of {len(steps)} as predicted"
        rows.append([version, *(f"{count:,}" for count in counted), f"{works} of {len(found['beside'])}", exact])
    return head, rows, "Over a GPU that is not there: addresses and bytes are measured, and nothing is computed."


def taken(payload: dict[str, Any]) -> Table:
    """What the same step reserves in each mode, on the newest torch that was tried."""
    head = ["step", "memory", "budget, MiB", "live, MiB", "reserved, MiB", "predicted, MiB", "first step reserved, MiB"]
    found = payload["results"][max(payload["results"])]
    rows = [
        [
            name.partition(", ")[0] if "capped" not in name else "AdamW, capped",
            name.rpartition(", ")[2],
            *(f"{answer[key] / MIB:,.1f}" for key in ("budget_bytes", "peak_bytes")),
            f"{max(step['reserved_bytes'] for step in answer['steps']) / MIB:,.1f}",
            f"{answer['predicted_bytes'] / MIB:,.1f}",
            f"{answer['steps'][0]['reserved_bytes'] / MIB:,.1f}",
        ]
        for name, answer in found["planned"].items()
    ]
    return head, rows, f"torch {found['torch']} over a GPU that is not there; reserved as torch counts it."


_SERVED = ("requests served", "requests that got ordinary memory")

CUDA_TABLES = {
    "cuda-allocator": ("cuda_allocator", equality),
    "cuda-arena": ("cuda_arena", in_front),
    "cuda-arena-steps": ("cuda_arena", taken),
}
"""Of a script that stores one result."""
CUDA_SET_TABLES = {
    "cuda-reserved": ("cuda_reserved", reserved),
    "cuda-within": ("cuda_reserved", within),
    "cuda-least": ("cuda_reserved", at_least),
}
