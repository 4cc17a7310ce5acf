"""The tables of docs/offloading.md: dqn2020's Figure 5 in numbers, joint plans, and steps profiled without memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _measure import MIB
from offloading_planners import CURVES, SHARES, WORKLOADS

Payload = dict[str, Any]
Table = tuple[list[str], list[list[str]], str]
"""Head, rows, and the note below them."""

_SHOWN = 0.45  # the share of the table; the pictures have all
_LEAST = 1e-9  # of an overhead: less is equal


def planners_on(machine: str) -> Callable[[dict[str, Payload]], Table]:
    """Return what makes the table of one machine."""

    def table(stored: dict[str, Payload]) -> Table:
        """Overheads of all planners at one budget a workload."""
        points = {name: stored[f"{name}_{machine}"]["points"] for name in WORKLOADS if f"{name}_{machine}" in stored}
        curves = [curve for curve in CURVES if any(f"{curve}@{_SHOWN}" in each for each in points.values())]
        rows = [
            [name, *(_overhead(each.get(f"{curve}@{_SHOWN}")) for curve in curves)] for name, each in points.items()
        ]
        used = [_utilization(points, curve) for curve in curves]
        rows.append(["*share of the step that compute works*", *used])
        below, total = _lowest(points)
        note = (
            f"Budget: {_SHOWN:.0%} of the way from the proved least to the unplanned peak; a dash is a planner without "
            f"a plan there. Of {total} points of other planners, at {len(SHARES)} budgets a workload, `auto` is slower "
            f"than {total - below}. Simulated."
        )
        return ["workload", *(f"`{curve}`" for curve in curves)], rows, note

    return table


def _overhead(point: Payload | None) -> str:
    if point is None:
        return ""
    return f"{point['overhead']:.1%}" if "overhead" in point else "-"


def _utilization(points: dict[str, Payload], curve: str) -> str:
    found = [each[f"{curve}@{_SHOWN}"] for each in points.values() if f"{curve}@{_SHOWN}" in each]
    shares = [point["utilization"] for point in found if "utilization" in point]
    return f"{statistics.mean(shares):.0%}" if shares else "-"


def _lowest(points: dict[str, Payload]) -> tuple[int, int]:
    """Return of how many points of other planners `auto` is no slower at the same budget, and how many there are."""
    pairs = list(_pairs(points))
    return sum(mine <= other + _LEAST for mine, other in pairs), len(pairs)


def _pairs(points: dict[str, Payload]) -> Iterator[tuple[float, float]]:
    for each in points.values():
        for share in SHARES:
            mine = each.get(f"auto@{share}", {})
            for curve in CURVES:
                other = each.get(f"{curve}@{share}", {})
                if curve != "auto" and "overhead" in other:
                    yield mine.get("overhead", float("inf")), other["overhead"]


def joint_plans(found: Payload) -> Table:
    """Recomputation alone, and with copies."""
    head = ["machine", "workload", "recomputing only", "bound", "with copies", "bound", "of recomputing's overhead"]
    rows = [
        [
            each["machine"],
            each["workload"],
            *(f"{each['recompute'][key]:.2%}" for key in ("overhead", "bound")),
            *(f"{each['joint'][key]:.2%}" for key in ("overhead", "bound")),
            f"{each['joint']['overhead'] / each['recompute']['overhead']:.0%}",
        ]
        for each in found["plans"]
    ]
    note = (
        f"Batch {found['plans'][0]['batch']}, at {found['share']:.0%} of the unplanned peak; {found['seconds']:.0f} s"
    )
    return head, rows, f"{note} of search each. Simulated, by roofline."


def profile_without_memory(found: Payload) -> Table:
    """Seconds of a step by three ways, and what recording it takes."""
    head = ["workload", "eager, s", "freed run", "ops one by one", "freed run, MiB", "unplanned peak, MiB"]
    head += ["recorded, MiB", "recorded while spilling, MiB", "same recording"]
    rows = [
        [
            each["workload"],
            f"{each['eager_seconds']:.3f}",
            *(f"{each[f'{way}_seconds'] / each['eager_seconds'] - 1:+.1%}" for way in ("freed_run", "one_by_one")),
            *(f"{each[f'{what}_bytes'] / MIB:.0f}" for what in ("freed_run_peak", "unplanned_peak")),
            *(f"{each[f'{what}_peak_bytes'] / MIB:.0f}" for what in ("recorded", "spilled")),
            "yes" if each["same_recording"] else "**no**",
        ]
        for each in found["workloads"]
    ]
    return head, rows, f"Seconds: medians of {found['rounds']} rounds, interleaved."


def disk_soak(stored: dict[str, Payload]) -> Table:
    """What long runs hold at their beginning and at their end."""
    rows = [
        [
            each["workload"],
            str(each["options"].get("batch", "")),
            f"{each['steps']:,}",
            *(f"{each['looks'][place]['resident_bytes'] / MIB:.0f}" for place in (1, -1)),
            *(f"{each['looks'][0][what]} / {each['looks'][-1][what]}" for what in ("open_files", "threads")),
        ]
        for name, each in stored.items()
        if name.startswith("soak_")
    ]
    head = ["workload", "batch", "steps", "resident MiB after 100 steps", "at the end", "open files", "threads"]
    return (
        head,
        rows,
        "Offloading only, at half of the unplanned peak; the first and the last step verified bit by bit.",
    )


def dqn_curves(found: Payload) -> Table:
    """When trainings reached the baselines, and where they ended: the range and the median over the seeds."""
    best = min(overhead for overhead in found["baselines"].values() if overhead is not None)
    rows: list[list[str]] = []
    for trained, words in {"afresh": "afresh", "from_resnet18": "from ResNet-18"}.items():
        runs = [run for run in found["runs"] if run["trained"] == trained]
        ends = sorted(run["overhead"] for run in runs if run["overhead"] is not None)
        reached = [run["reached_baseline"]["episode"] for run in runs if run["reached_baseline"] is not None]
        rows.append(
            [
                words,
                str(len(runs)),
                _range([run["first"]["overhead"] for run in runs if run["first"] is not None], ".1%"),
                f"{_range(reached, 'd')} ({len(reached)} of {len(runs)})",
                f"{statistics.median(ends):.1%}" if ends else "-",
                _range(ends, ".1%"),
            ]
        )
    note = (
        f"ResNet-50, batch 64, predicted for a GTX 1080 Ti, {found['share']:.0%} of the way from the proved least to "
        f"the unplanned peak; {found['episodes']} episodes, {found['small_episodes']} on ResNet-18. The best of the "
        f"paper's baselines has an overhead of {best:.1%}."
    )
    head = ["network", "seeds", "first plan", "as good as the best baseline in episode", "overhead, median", "range"]
    return head, rows, note


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}" if values else "-"


def disk_tier(found: Payload) -> Table:
    """Errors of predictions for plans that offload to a disk."""
    names = {
        "step": "seconds of the step, ops measured in their places",
        "step_one_by_one": "seconds of the step, ops measured one by one",
        "stall": "seconds that compute waited for copies",
        "overlap": "seconds that both worked at once",
    }
    rows = [
        [words, f"{found['errors'][name]['median']:.1%}", f"{found['errors'][name]['p90']:.1%}"]
        for name, words in names.items()
        if name in found["errors"]
    ]
    return (
        ["predicted against measured", "median error", "90th percentile"],
        rows,
        (f"{len(found['plans'])} plans; errors are shares of the measured step."),
    )


def chunked_loss(found: Payload) -> Table:
    """A projection and its cross entropy, by chunks in each of several ways."""
    rows = [
        [
            str(each["width"]),
            each["way"],
            f"{each['peak_bytes'] / MIB:.0f}",
            f"{each['ratio']:.2f}",
            f"{each['difference']:.0e}",
        ]
        for each in found["rows"]
    ]
    note = (
        f"{found['rows_at_once']:,} tokens, {found['classes']:,} classes, float32: projection, cross entropy, and "
        "their gradients. Peaks beside inputs and weight, gradients included. Difference: of loss and gradients from "
        "PyTorch's own, relative, the largest."
    )
    return ["width", "way", "peak, MiB", "time / PyTorch's", "difference"], rows, note


def host_states(found: Payload) -> Table:
    """Least bytes of a step, by what may go to the host."""
    rows = [
        [
            f"{each['step']}{', clipped' if each['clipped'] else ''}",
            each["way"],
            f"{each['eager_bytes'] / MIB:.1f}",
            f"{each['parameter_bytes'] / MIB:.1f}",
            f"{each['peak_bytes'] / MIB:.1f}",
            f"{each['ratio']:.2f}",
        ]
        for each in found["rows"]
    ]
    note = (
        "The least budget that was found, and 1%: measured peaks with all residents, and times over eager's in turns. "
        "`device`: recomputation alone; `activations`: planner `offload`, the state stays; `whole`: state on the host, "
        "and one update after clipping; `parts`: as it is. The host is a mapped file."
    )
    return ["step of AdamW", "way", "eager, MiB", "parameters, MiB", "peak, MiB", "time / eager's"], rows, note


def functions(found: Payload) -> Table:
    """Iterative functions at shares of their peaks."""
    rows = [
        [
            each["workload"],
            each["share"],
            *(
                [
                    ", ".join(map(str, each["chunks"])) or "none",
                    *(f"{each[key] / MIB:.0f}" for key in ("peak_bytes", "budget_bytes", "eager_peak_bytes")),
                    f"{each['overhead']:+.1%}",
                    "yes" if each["same_bits"] else "**no**",
                ]
                if "peak_bytes" in each
                else ["no plan", *["-"] * 5]
            ),
        ]
        for each in found["rows"]
    ]
    head = ["function", "budget", "chunks", "peak, MiB", "budget, MiB", "eager's peak, MiB", "time against eager"]
    note = (
        "k-means: 1,000,000 points of 16 numbers, 64 centres; power iteration: a kernel of 8,192 points. 100% is the "
        "peak of the captured function, which writes in place where eager does not. Whole peaks, with the data."
    )
    return [*head, f"same bits after {found['calls']} calls"], rows, note


def eager_cost(found: Payload) -> Table:
    """What eager mode costs when nothing has to go."""
    rows = [
        [
            each["workload"],
            f"{each['calls']:,}",
            *(f"{each['us_a_call'][name]:.1f}" for name in ("empty", "eager")),
        ]
        for each in found["costs"]
    ]
    head = ["workload", "operators in a step", "an empty dispatch mode, us an operator", "eager mode, us an operator"]
    return head, rows, f"Above the bare step, medians of {found['rounds']}; views are counted as operators."


_WAYS_OF_LOOPS = {
    "bare": "bare",
    "eager": "`memfit.eager`",
    "checkpoints": "checkpoints at {placed}",
    "eager, as checkpoints": "`memfit.eager` in their bytes",
    "plain DTR": "a plain DTR",
}


def eager_loops(found: Payload) -> Table:
    """Loops that seldom repeat, in several ways."""
    rows = [
        [
            each["loop"],
            _WAYS_OF_LOOPS[row["way"]].format(placed=each["placed"]),
            f"{row['peak_bytes'] / MIB:.1f}",
            f"{(row.get('budget_bytes') or each['budget_bytes']) / MIB:.1f}" if "passes" in row else "",
            "yes" if row["same_bits"] else "**no**",
            *(f"{row[key]:.2f}" for key in ("median_ratio", "later_ratio", "whole_ratio")),
            f"{row['made_again'] / row['calls']:.1%}" if "passes" in row else "",
            ", ".join(f"{count} {how}" for how, count in row.get("passes", {}).items() if count),
        ]
        for each in found["loops"]
        for row in each["rows"]
    ]
    head = ["loop", "way", "peak, MiB", "budget, MiB", "same bits", "median step", "after the first third", "all steps"]
    steps = max((each["steps"] for each in found["loops"]), default=0)
    note = (
        f"{steps} steps each, in turns, from the same seed; times are the processor's on one thread, as ratios to the "
        "bare loop's of the same steps. The budget is 60% of the largest step's peak, residents included, or what "
        "checkpoints take; so are all peaks. Bare and with checkpoints the peak is that of the largest step. Bits are "
        "those of all losses and final parameters. Eager mode counts the calls outside of backward passes and updates."
    )
    return [*head, "calls made again", "passes"], rows, note


OFFLOADING_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {
    "joint-plans": ("joint_plans", joint_plans),
    "profile-without-memory": ("profile_without_memory", profile_without_memory),
    "disk-tier": ("disk_tier/plans", disk_tier),
    "dqn-curves": ("dqn_curves", dqn_curves),
    "functions": ("functions", functions),
    "chunked-loss": ("chunked_loss", chunked_loss),
    "host-states": ("host_states", host_states),
    "eager-cost": ("eager_mode", eager_cost),
    "eager-loops": ("eager_mode", eager_loops),
}
"""Each table of one result by name: the script that stored it, and what makes it."""

OFFLOADING_SET_TABLES: dict[str, tuple[str, Callable[[dict[str, Payload]], Table]]] = {
    f"planners-{machine}": ("offloading_planners", planners_on(machine)) for machine in ("gtx1080ti", "h100", "cpu")
} | {"disk-soak": ("disk_tier", disk_soak)}
"""The same for tables of all results in a folder."""
