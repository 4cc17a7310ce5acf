"""Tables of what was tried: random steps, defects, models, versions, first fits, faults, loops, breaks, sizes."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from _cells import yes
from _measure import MIB

Payload = dict[str, Any]
Table = tuple[list[str], list[list[str]], str]

_ENDINGS = {
    "same": "all bits of 20 steps are eager's, within the budget",
    "refused": "refused, as the page on limits says",
    "unexpected": "refused for another reason",
    "different": "**other bits**",
    "over": "**over the budget, unreported**",
    "false bound": "**a step of eager is below the proved least budget**",
    "traceback": "**an error that is not memfit's own**",
    "eager": "eager itself cannot run the case",
}
_NAMES = [  # what stands for names in messages
    (r"/\S+/(\w+\.py)", r"\1"),
    (r"held up by [^;]+", "held up by ..."),
    (r"(the step sets ).+?( in its model)", r"\1...\2"),
    (r"(the step draws from ).+?(, whose)", r"\1...\2"),
    (r"(first in )[^:]+(: a parameter)", r"\1...\2"),
    (r"(a parameter that is used on both sides of the line).*", r"\1 ..."),
    (r"(; raise the time limit).*", r"\1 ..."),
]
_WAYS = {
    "eager": "eager",
    "eager_kept": "eager, malloc keeps memory",
    "planned": "planned",
    "planned_kept": "planned, malloc keeps memory",
    "arena": "planned, in an arena",
}
_STEPS = {"gpt2": "GPT-2 small, 256 tokens", "resnet50": "ResNet-50, 4 images"}


def fuzz(found: Payload) -> Table:
    """How the fuzzer's cases ended."""
    rows = [[words, str(found["outcomes"].get(kind, 0))] for kind, words in _ENDINGS.items()]
    seeds = " and ".join(f"{first} to {first + count - 1}" for first, count in found["seeds"])
    covered = (len(found[name]) for name in ("blocks", "losses", "optimizers", "changes", "ops"))
    note = "Seeds {}: {} kinds of blocks, {} losses, {} optimizers, {} changes between steps; {} operators."
    return ["a case ends with", "cases"], rows, note.format(seeds, *covered)


def fuzz_refusals(found: Payload) -> Table:
    """The messages of the refused cases; those that differ only in a name count as one."""
    counts: Counter[str] = Counter()
    for message, count in found["refusals"].items():
        text = message.partition(": ")[2]
        for pattern, name in _NAMES:
            text = re.sub(pattern, name, text)
        text = text.partition(", held up by")[0]  # long messages are stored up to a limit
        counts[text.replace("|", r"\|")] += count
    rows = [[text, str(count)] for text, count in counts.most_common()]
    return (
        ["message", "cases"],
        rows,
        "Numbers are #; names of ops, attributes and generators are left out.",
    )


def fuzz_defects(found: Payload) -> Table:
    """Which seed finds each defect that is put back."""
    rows = [
        [row["defect"], "**none**" if row["seed"] is None else str(row["seed"]), str(row["tried"]), row.get("kind", "")]
        for row in found["defects"]
    ]
    note = f"Of {found['seeds']:,} seeds, those that may show the defect were tried, in order, until one did."
    return ["defect, put back", "found by seed", "cases tried", "as"], rows, note


ENDS = ("held", "refused", "over", "other bits", "slow", "error")
"""How a model's run through a door may end."""


def models(stored: dict[str, Payload]) -> Table:
    """How many models end in which way, by door and share."""
    ended: dict[tuple[str, str], Counter[str]] = {}
    for payload in stored.values():
        for row in payload["rows"].values():
            ended.setdefault((row["door"], f"{row['share']:.0%}"), Counter())[row["ended"]] += 1
    rows = [[*key, str(found.total()), *(str(found[kind]) for kind in ENDS)] for key, found in sorted(ended.items())]
    return (
        ["door", "budget", "models", *ENDS],
        rows,
        f"{len(stored)} models. Budgets are shares of the bare loop's peak.",
    )


def models_failed(stored: dict[str, Payload]) -> Table:
    """Models that end in a way that memfit does not promise."""
    rows = [
        [payload["model"], row["door"], f"{row['share']:.0%}", row["ended"], _failure(row).replace("|", r"\|")]
        for payload in stored.values()
        for row in payload["rows"].values()
        if row["ended"] in ("over", "other bits", "error")
    ]
    return ["model", "door", "budget", "ended", "how"], rows, ""


_LEAST = re.compile(
    r"(?:a budget of|reached|[Rr]aise the budget to|needs at least)[^(0-9]*(?:[\d.]+ [KM]iB \()?(\d+) bytes"
)
_BOUND = re.compile(r"no plan fits [^(]*\((\d+) bytes.*no plan can go below [^(]*\((\d+) bytes")
_ALL = 0.97  # of the bare loop's peak: the door lets nothing go that counts


def models_refused(stored: dict[str, Payload]) -> Table:
    """What the doors reached that refused a model, as shares of the bare loop's peak."""
    found: dict[tuple[str, str], list[tuple[float | None, bool, float]]] = {}
    for payload in stored.values():
        peak_bytes, state_bytes = payload["bare_bytes"], payload["state_bytes"]
        for row in payload["rows"].values():
            if row["ended"] == "refused":
                least, bound = _LEAST.search(row["message"]), _BOUND.search(row["message"])
                is_proved = bound is not None and int(bound[2]) > int(bound[1])
                share = None if least is None else int(least[1]) / peak_bytes
                found.setdefault((row["door"], f"{row['share']:.0%}"), []).append(
                    (share, is_proved, state_bytes / peak_bytes)
                )
    rows = []
    for (door, budget), each in sorted(found.items()):
        shares = [share for share, _, _ in each if share is not None]
        median = f"{statistics.median(shares):.2f}" if shares else "not said"
        most = f"{sum(share >= _ALL for share in shares)}" if shares else "not said"
        proved, state = sum(is_proved for _, is_proved, _ in each), statistics.median(state for _, _, state in each)
        rows.append([door, budget, str(len(each)), median, most, str(proved), f"{state:.2f}"])
    head = ["door", "budget", "refused", "least that was reached", "of these above 0.97", "proved that no plan fits"]
    note = "Shares of the bare loop's peak, medians; state: parameters, gradients, moments, buffers and batch."
    return [*head, "state"], rows, note


def _failure(row: dict[str, Any]) -> str:
    if row["ended"] == "over":
        most = f"{max(row['over'].values()):.3f} of the budget in step {max(row['over'], key=row['over'].get)}"
        return most + (", unsaid" if row["unsaid"] else ", with a warning")
    return row.get("other") or row["message"].splitlines()[0]


def first_fit(found: Payload) -> Table:
    """Where the seconds of a first fit go."""
    stages = ["capturing the step", "measuring each op", "searching a plan", "comparing with eager's calls"]
    head = ["searches", "model", "budget", "caches", "fit, s", *(f"{stage}, s" for stage in stages), "compiling, s"]
    head.append("processors that others took")
    rows = [
        [
            each["searches"],
            each["case"],
            each["budget"],
            each["caches"],
            f"{each['fit_seconds']:.1f}",
            *(f"{each['stages'].get(stage, 0.0):.1f}" for stage in stages),
            f"{each['compile_seconds']:.1f}",
            f"{each['load']:.0%}",
        ]
        for each in found["fits"]
        if "fit_seconds" in each
    ]
    packs = "; ".join(
        f"{each['searches']}, {each['caches']}: {each['ratio']:.3f} of the bound after {each['seconds']:.1f} s"
        for each in found["packs"]
    )
    note = f"Without imports; at most {found['time_limit_seconds']:.0f} s of search. `memfit pack` of a trace of "
    return head, rows, f"{note}MiniMalloc's: {packs}. The library took {found['build_seconds']:.0f} s to build."


def versions(stored: dict[str, Payload]) -> Table:
    """How many tests passed on each version."""
    rows = [
        [
            each["machine"]["python"],
            each["machine"]["torch"],
            str(each["tests"] - each["failures"] - each["errors"] - each["skipped"]),
            str(each["failures"] + each["errors"]),
            str(each["skipped"]),
        ]
        for each in stored.values()
    ]
    return ["Python", "torch", "passed", "failed", "skipped"], rows, "Tests marked `gpu` are left out."


def page_faults(stored: dict[str, Payload]) -> Table:
    """Page faults and seconds of one step, run in several ways."""
    rows = [
        [
            f"{_STEPS[workload]}: {words}",
            f"{payload[way]['minor_faults']:,.0f}",
            f"{payload[way]['user_seconds']:.2f}",
            f"{payload[way]['kernel_seconds']:.2f}",
        ]
        for workload, payload in stored.items()
        for way, words in _WAYS.items()
    ]
    return ["step", "page faults", "seconds in user code", "seconds in the kernel"], rows, "Medians of three steps."


_RUNS = {
    "lengths": "200 lengths, a first run",
    "second run": "200 lengths, a second run",
    "padded": "padded to multiples of 16",
    "tails": "last batches of 3, 1 and 2 rows",
}


def variable_shapes(payload: Payload) -> Table:
    """Batches of many sizes: bits, peaks, what a new size costs, and whole passes beside eager's."""
    head = ["loader", "sizes", "steps", "same bits", "largest peak / budget", "a new size, s", "capture, program"]
    head += ["costs", "plan", "first step", "a usual step, s", "eager's", "searches before a step", "programs"]
    head += ["memory grown, MiB", "first pass / eager", "later passes / eager"]
    rows = [
        [
            _RUNS[run["run"]],
            str(run["sizes"]),
            str(run["steps"]),
            yes(run["same_bits"]),
            f"{run['largest_share_of_budget']:.1%}",
            *(_median_and_most(run["new"][part]) for part in ("seconds", "capture_and_program", "costs", "plan")),
            _median_and_most(run["new"]["first_step"]),
            _median_and_most(run["usual_seconds"]),
            _median_and_most(run["eager_seconds"]),
            str(run["searches"]),
            str(run["programs"]),
            f"{run['grown_bytes'] / MIB:.0f}",
            *(f"{turn['seconds'] / turn['eager_seconds']:.2f}" for turn in run["passes"]),
        ]
        for run in payload["runs"]
    ]
    note = f"GPT-2, 6 layers; budget: {payload['share']} of the largest batch's peak. Median (90th percentile)."
    return head, rows, note


def _median_and_most(spread: dict[str, float] | None) -> str:
    return "" if spread is None else f"{spread['median']:.2f} ({spread['percentile_90']:.2f})"


def loop_cost(stored: dict[str, Payload]) -> Table:
    """Processor time an op of eager's steps, planned ones and their bare kernels."""
    columns = ("eager", "planned", "overloads", "functions")
    rows: list[list[str]] = []
    for case, payload in stored.items():
        spent = payload["microseconds"]
        loop = (spent["planned"] - spent[bare] for bare in columns[2:])
        cells = [f"{each:.2f}" for each in (*(spent[name] for name in columns), *loop)]
        rows.append([case, f"{payload['ops']:,}", *cells, f"{payload['time_ratio']:.3f}"])
    head = ["step", "ops", "eager", "planned", "kernels by overloads", "kernels by functions"]
    head += ["loop over overloads", "loop over functions", "planned / eager"]
    return head, rows, "Processor microseconds an op, one thread, medians of steps in turns."


def overhead_spread(found: Payload) -> Table:
    """Overheads measured on a busy machine, with their spreads, beside a long measurement without that work."""
    rows = [
        [
            name,
            f"{each['overhead']:+.1%}",
            f"{100 * each['spread'][0]:.1f} to {100 * each['spread'][1]:.1f}",
            str(each["turns"]),
            f"{each['load']:.0%}",
            "" if each is found["quiet"] else "yes" if each["spread"][0] <= quiet <= each["spread"][1] else "**no**",
        ]
        for quiet in [found["quiet"]["overhead"]]
        for name, each in [
            ("long", found["quiet"]),
            *((f"{at}, beside it", row) for at, row in enumerate(found["busy"], 1)),
        ]
    ]
    head = ["measurement", "overhead", "spread, points", "turns", "processors that others took", "covers the first row"]
    note = f"{found['covers']} of {len(found['busy'])} spreads cover the long measurement; "
    return head, rows, f"{note}the median one is {100 * found['median_width']:.0f} points wide."


TESTED_TABLES: dict[str, tuple[str, Callable[[Payload], Table]]] = {
    "fuzz": ("fuzz_steps", fuzz),
    "fuzz-later": ("fuzz_steps_later", fuzz),
    "fuzz-refusals": ("fuzz_steps", fuzz_refusals),
    "fuzz-defects": ("fuzz_defects", fuzz_defects),
    "first-fit": ("first_fit", first_fit),
    "overhead-spread": ("overhead_spread", overhead_spread),
    "variable-shapes": ("variable_shapes", variable_shapes),
}
"""Each table of one result by name: the script that stored it, and what makes it."""

TESTED_SET_TABLES: dict[str, tuple[str, Callable[[dict[str, Payload]], Table]]] = {
    "versions": ("versions", versions),
    "models": ("models", models),
    "models-failed": ("models", models_failed),
    "models-refused": ("models", models_refused),
    "page-faults": ("page_faults", page_faults),
    "loop-cost": ("loop_cost", loop_cost),
}
"""The same for tables of all results in a folder."""
