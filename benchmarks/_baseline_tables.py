"""Tables of memfit beside torch's baselines, from the results of `torch_baselines.py` and `compare_baselines.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _cells import configuration, memory, memory_and_time, overhead, ratio, yes
from _measure import MIB
from torch_baselines import BASELINE_KINDS

_ON_FIRST_SCREEN = ("resnet50", "gpt2", "unet")

Stored = dict[str, dict[str, Any]]
Table = tuple[list[str], list[list[str]], str]
"""Head, rows, and the note below them."""


def compare(stored: Stored) -> Table:
    """memfit beside both baselines, at their memory and at its own least."""
    head = ["workload", "eager", "torch's budget, best", "memfit there"]
    head += ["checkpoints, best", "memfit there", "memfit, least memory"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        results = payload["results"]
        cells = [workload, memory(results.get("against budget", {}), "eager_bytes")]
        for kind in BASELINE_KINDS:
            result = results.get(f"against {kind}", {})
            cells.append(memory_and_time(result, "baseline_bytes", "baseline_time_ratio"))
            cells.append(memory_and_time(result, "memfit_bytes", "memfit_time_ratio"))
        cells.append(memory_and_time(results.get("least", {}), "measured_above_start_bytes", "time_ratio"))
        rows.append(cells)
    note = "Peak MiB above parameters, buffers and inputs, and time against eager; measured in turns in the same run."
    return head, rows, note


def first(stored: Stored) -> Table:
    """memfit beside the best hand-placed checkpoints, for the first screen of the README."""
    head = ["step", "eager", "checkpoints by hand, best", "memfit, at that memory", "memfit, least memory"]
    rows: list[list[str]] = []
    for workload in (each for each in _ON_FIRST_SCREEN if each in stored):
        results = stored[workload]["results"]
        against = results.get("against checkpoint", {})
        rows.append(
            [
                workload,
                memory(against, "eager_bytes"),
                memory_and_time(against, "baseline_bytes", "baseline_time_ratio"),
                memory_and_time(against, "memfit_bytes", "memfit_time_ratio"),
                memory_and_time(results.get("least", {}), "measured_above_start_bytes", "time_ratio"),
            ]
        )
    return head, rows, "Peak MiB above parameters, buffers and inputs, and time against eager; measured in turns."


def baselines(stored: Stored) -> Table:
    """Every point of torch's own, the ones with other bits than eager's marked."""
    head = ["workload", "configuration", "peak MiB", "time against eager", "first difference from eager"]
    rows = [
        [
            workload,
            configuration(point),
            memory(point, "peak_bytes"),
            ratio(point, "time_ratio"),
            point.get("error") or point["first_difference"] or "none",
        ]
        for workload, payload in stored.items()
        for point in payload["points"]
    ]
    return head, rows, "Peak above parameters, buffers and inputs; all measured."


def targets(stored: Stored) -> Table:
    """memfit at the memory of the published rows of ResNet-50."""
    head = ["workload", "given above resident", "measured peak MiB", "time against eager", "predicted overhead"]
    rows = [
        [workload, what, memory(result, "measured_above_start_bytes"), ratio(result, "time_ratio"), overhead(result)]
        for workload, payload in stored.items()
        for what, result in payload["results"].items()
        if what.endswith(" MiB")
    ]
    return head, rows, "Peak above parameters, buffers and inputs."


def halves(stored: Stored) -> Table:
    """memfit at the memory of torch's best budget, where half of its overhead and one percentage point are allowed."""
    head = ["workload", "torch's budget, best", "its overhead", "memfit's there", "half of it and 1 point", "met"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        result = payload["results"].get("against budget", {})
        cells = [workload, memory(result, "baseline_bytes")]
        if "memfit_time_ratio" in result:
            theirs, ours = result["baseline_time_ratio"] - 1, result["memfit_time_ratio"] - 1
            allowed = max(0.0, theirs) / 2 + 0.01
            cells += [f"{theirs:.1%}", f"{ours:.1%}", f"{allowed:.1%}", yes(ours <= allowed)]
        rows.append(cells + [""] * (len(head) - len(cells)))
    return head, rows, "Peak MiB above parameters, buffers and inputs; times against eager in the same run."


def margins(stored: Stored) -> Table:
    """How far the least budgets that were found are above the proved least."""
    head = ["workload", "proved least", "memfit", "`sublinear`", "checkpoints, best", "at most half of both"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        results = payload["results"]
        least = results.get("least", {})
        bound_bytes = least.get("least_budget_bound_bytes")
        if bound_bytes is None:
            continue
        found = [results.get(what, {}) for what in ("least", "least sublinear", "against checkpoint")]
        above = [result["budget_bytes"] - bound_bytes if "budget_bytes" in result else None for result in found]
        others = [each for each in above[1:] if each is not None]
        met = yes(bool(others) and above[0] is not None and all(2 * above[0] <= other for other in others))
        cells = ["" if each is None else f"+{each / MIB:.1f}" for each in above]
        rows.append([workload, f"{bound_bytes / MIB:.1f}", *cells, met])
    note = "Whole MiB of the proved least budget, and how many more each needs."
    return head, rows, note


def whole_step(stored: Stored) -> Table:
    """The step whose gradients never live all at once."""
    head = ["workload", "parameters + gradients MiB", "measured peak MiB, everything included", "time against eager"]
    rows = [
        [
            workload,
            memory(result, "parameters_and_gradients_bytes"),
            memory(result, "measured_peak_bytes"),
            ratio(result, "time_ratio"),
        ]
        for workload, payload in stored.items()
        if (result := payload["results"].get("whole step"))
    ]
    return head, rows, "Forward, loss, backward and SGD's update as one step."


def inductor(payload: dict[str, Any]) -> Table:
    """A row for each model and setting of torch's activation memory budget; setting 0 is memfit's least budget."""
    ways = ("eager", "torch", "memfit on inductor", "memfit on eager")
    head = ["model", "torch's budget", "eager", "torch", "memfit on Inductor", "memfit on eager's kernels"]
    head += ["memfit on Inductor over torch"]
    rows: list[list[str]] = []
    for row in payload["rows"]:
        found = row["ways"].get("memfit on inductor", {}).get("time_over_torch")
        setting = f"{row['share']}" if row["share"] else "least"
        cells = [_peak_and_time(row["ways"].get(way, {})) for way in ways]
        rows.append([row["model"], setting, *cells, "" if found is None else f"{found:.3f}"])
    note = (
        "Peak in MiB, time over eager's, seconds until compiled; memfit's budget is the peak that torch has there, in "
        f"whole pages. All measured, the times as medians of {payload['turns']} turns."
    )
    return head, rows, note


def inductor_masks(payload: dict[str, Any]) -> Table:
    """A row for each model, and a column for each setting of torch's activation memory budget."""
    shares = sorted({row["share"] for row in payload["rows"]}, reverse=True)
    rows: list[list[str]] = []
    for model in dict.fromkeys(row["model"] for row in payload["rows"]):
        for whose in ("torch", "memfit"):
            found = {row["share"]: row[whose] for row in payload["rows"] if row["model"] == model}
            rows.append([model, whose, *(f"{found[share]:.0e}" if found[share] else "0" for share in shares)])
    note = "How far gradients are from those without a budget, over the same seed: a share of their norm. All measured."
    return ["model", "halves", *map(str, shares)], rows, note


def _peak_and_time(found: dict[str, Any]) -> str:
    if "time_over_eager" not in found:
        return found.get("status", "")
    return f"{found['peak_bytes'] / MIB:.1f}, {found['time_over_eager']:.3f}, {found['compile_seconds']:.0f} s"


BASELINE_TABLES: dict[str, tuple[str, Callable[[Stored], Table]]] = {
    "compare": ("compare_baselines", compare),
    "first": ("compare_baselines", first),
    "targets": ("compare_baselines", targets),
    "halves": ("compare_baselines", halves),
    "margins": ("compare_baselines", margins),
    "whole-step": ("compare_baselines", whole_step),
    "baselines": ("torch_baselines", baselines),
}
"""Each table by name: the script whose results it shows, and what renders it."""
BASELINE_RESULT_TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], Table]]] = {
    "inductor": ("inductor", inductor),
    "inductor-masks": ("inductor_masks", inductor_masks),
}
"""The same for a script that stores one result."""
