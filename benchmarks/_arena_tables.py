"""The tables of docs/arena.md: what `arena.py` and `arena_captured.py` stored, by model and batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _measure import MIB
from arena import NETWORKS, SEQ2SEQ

SINGLE_SIZES = "single_sizes"
ARENA_NAMES = (*NETWORKS, SEQ2SEQ, SINGLE_SIZES)

Stored = dict[str, dict[str, Any]]
Table = tuple[list[str], list[list[str]], str]
"""Head, rows, and the note below them."""


def captured(stored: Stored) -> Table:
    """Figure 2 and 4 at full size: memory, and the solver's seconds."""
    head = ["model", "step", "blocks", "every block apart, MiB", "peak of live bytes, MiB", "arena, MiB"]
    head += ["arena / peak", "arena / apart", "on a GPU: pool, MiB", "expandable, MiB", "arena, MiB", "arena / pool"]
    head += ["solver, s"]
    rows = [
        [
            *[model, step, f"{result['blocks']:,}", _mib(result["apart_bytes"]), _mib(result["peak_live_bytes"])],
            *[_mib(result["arena_bytes"]), f"{result['arena_over_peak']:.4f}", f"{result['arena_over_apart']:.3f}"],
            *[_mib(result["reserved"][by]) for by in ("pool", "expandable", "arena")],
            f"{result['reserved']['arena'] / result['reserved']['pool']:.2f}",
            f"{result['solver_seconds']:.2f}",
        ]
        for model, step, result in _results(stored)
    ]
    note = "Captured at full size, nothing allocated: predicted, but for the solver's seconds. "
    note += "On a GPU: all that the process takes, parameters, gradients and momentum included."
    return head, rows, note


def growth(payload: dict[str, Any]) -> Table:
    """Figure 2c and 2d: what sentences of varying length take of a GPU."""
    names = {"exact": "pool of exact sizes", "pool": "torch's pool", "expandable": "expandable", "arena": "arena"}
    head = ["batch", *(f"{name}, MiB after 1 and {payload['mini_batches']}" for name in names.values()), "arena / pool"]
    head.append("arena / exact")
    rows: list[list[str]] = []
    for step, result in payload["results"].items():
        after = result.get("after_bytes")
        if after:
            sizes = [f"{_mib(after[way][0])}, {_mib(after[way][-1])}" for way in names]
            shares = [f"{after['arena'][-1] / after[way][-1]:.2f}" for way in ("pool", "exact")]
            rows.append([step.removeprefix("training "), *sizes, *shares])
    note = "Predicted by the model of torch's allocator: steps captured at full size, nothing allocated; parameters, "
    note += "gradients and Adam's state included. A pool of exact sizes gives a block to requests of its own size only."
    return head, rows, note


def widest(payload: dict[str, Any]) -> Table:
    """Section 5.2: the largest batches that fit the paper's GPU."""
    named = {name.removeprefix("widest "): each for name, each in payload["results"].items() if "batches" in each}
    head = ["network", "pool", "expandable segments", "arena", "arena / pool"]
    rows = [
        [
            name,
            *(str(each["batches"][way]) for way in _WAYS),
            f"{each['batches']['arena'] / each['batches']['pool']:.2f}",
        ]
        for name, each in named.items()
    ]
    note = "The largest batch, of multiples of eight, whose training step takes at most 16 GiB, predicted by the model "
    note += "of torch's allocator; kernels take no workspaces in it."
    return head, rows, note


def measured(stored: Stored) -> Table:
    """Figures 2, 3 and 4, measured at sizes that the machine holds."""
    head = ["model", "step", "every block apart, MiB", "peak of live bytes, MiB", "arena, MiB", "arena / peak"]
    head += ["time against torch's allocator", "solver, s", "not served"]
    rows = [
        [
            *[model, step, _mib(result["apart_bytes"]), _mib(result["peak_live_bytes"]), _mib(result["arena_bytes"])],
            *[f"{result['arena_over_peak']:.4f}", f"{result['time_ratio']:.3f}"],
            *[f"{result.get('solver_seconds_all', result['solver_seconds']):.2f}", str(result["not_served"])],
        ]
        for model, step, result in _results(stored)
    ]
    note = "Measured; times in turns with the same step outside the arena, medians of pairs."
    return head, rows, note


def per_request(stored: Stored) -> Table:
    """What a request and its free cost."""
    head = ["requests", "arena, ns", "torch's allocator, ns"]
    timed = [
        (f"of {model}, {step}", result["per_request"])
        for model, step, result in _results(stored)
        if "per_request" in result
    ]
    single = stored.get(SINGLE_SIZES, {}).get("results", {}).get("all", {})
    timed += [(f"of {int(size):,} bytes, ten alive", times) for size, times in single.items() if size.isdigit()]
    rows = [[name, f"{one['arena_nanoseconds']:.0f}", f"{one['plain_nanoseconds']:.0f}"] for name, one in timed]
    return head, rows, "One request and its free, in nanoseconds, memory not touched. Measured."


def _results(stored: Stored) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what was found of each model and step; with keys and without, for sentences of varying length."""
    for model, payload in stored.items():
        for step, result in payload["results"].items():
            if model == SINGLE_SIZES or "error" in result:
                continue
            if "keyed" in result:
                yield model, f"{step}, a key for each pair of lengths", result["keyed"]
                yield model, f"{step}, no keys", result["unkeyed"]
            else:
                yield model, step, result


def _mib(count: int) -> str:
    return f"{count / MIB:.1f}"


_WAYS = ("pool", "expandable", "arena")
ARENA_RESULT_TABLES = {"arena-growth": ("arena_growth", growth), "arena-widest": ("arena_growth", widest)}


ARENA_TABLES = {
    "arena-captured": ("arena_captured", captured),
    "arena-measured": ("arena", measured),
    "arena-requests": ("arena", per_request),
}
