"""What the stored results say of each claim of the five papers: a short text, and whether the claim holds by it.

A function here takes `Results`, which gives what a script stored by the script's name, and returns a `Found`. It
compares our figures with the paper's, so that a figure that changes cannot leave a verdict behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from _paper_tables import GB
from offloading_planners import SHARES

MB = 1e6
GIB = 1 << 30
MEMONGER, TFLMS = "sublinear", "tflms"
SUPERNEURONS = ("superneurons_swap", "superneurons_recompute", "superneurons_both")
BASELINES = (MEMONGER, TFLMS, *SUPERNEURONS)
"""The curves of `offloading_planners.py` that are the baselines of the paper on `dqn`."""
AT = 0.45  # the share at which docs/offloading.md compares planners
TITAN, H100 = "gtx1080ti", "h100"
CNNS = ("alexnet", "googlenet", "resnet50", "inception_resnet_v2")  # of Sekiyama et al.
ON_CPU = {"googlenet": "bninception"}  # what `arena.py` measured in its place
LINEAR = ("alexnet", "vgg11", "vgg13", "vgg16", "vgg19")
_EQUAL = 1e-9  # of an overhead

Payload = dict[str, Any]
Results = Callable[[str], dict[str, Payload]]
"""What a script stored, by workload or by the script's own name, given the script's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What stored results say of a claim: the figures as text, and whether the claim holds by them."""

    text: str
    holds: bool


Measure = Callable[[Results], Found]


# Chen et al. 2016


def chen_system(least: float) -> Measure:
    """Figure 5a: what in-place writes and sharing save of a ResNet, at each depth; at least so many times."""

    def measure(results: Results) -> Found:
        times = _times(_figure(results, "5"), "none", "sharing")
        return Found(text=f"{_range(times, '.1f')} times less", holds=min(times) >= least)

    return measure


def chen_thousand_layers(most_gb: float) -> Measure:
    """Figure 5a: the deepest ResNet by `sublinear`, beside sharing."""

    def measure(results: Results) -> Found:
        found = _last(_figure(results, "5"))["bytes"]
        ours = found["sublinear"] / GB
        return Found(text=f"{found['sharing'] / GB:.1f} to {ours:.1f} GB", holds=ours <= most_gb)

    return measure


def chen_slope(low: float, high: float) -> Measure:
    """Figure 5a: the power of the depth by which the memory of `sublinear` grows."""

    def measure(results: Results) -> Found:
        slope = _figure(results, "5")["slopes"]["sublinear"]
        return Found(text=f"memory grows with the depth to the power of {slope:.2f}", holds=low <= slope <= high)

    return measure


def chen_drop(results: Results) -> Found:
    """Figure 5a: what dropping batch normalization and ReLU saves beside sharing, at the same growth."""
    figure = _figure(results, "5")
    times = _times(figure, "sharing", "drop")
    slope = figure["slopes"]["drop"]
    return Found(text=f"{_range(times, '.1f')} times less, slope {slope:.2f}", holds=min(times) > 1 and slope > 0.9)


def chen_long_sequences(least: float) -> Measure:
    """Figure 6a: `sublinear` beside the best plan without recomputation, at the most steps."""

    def measure(results: Results) -> Found:
        (times,) = _times({"points": {"": _last(_figure(results, "6"))}}, "sharing", "sublinear")
        return Found(text=f"{times:.1f} times less at {_deepest(results, '6')} steps", holds=times > least)

    return measure


def chen_lstm_in_place(least: float) -> Measure:
    """Figure 6a: what writing in place alone saves of an LSTM."""

    def measure(results: Results) -> Found:
        times = _times(_figure(results, "6"), "none", "inplace")
        return Found(text=f"{_range(times, '.1f')} times less", holds=min(times) >= least)

    return measure


def chen_total(figure: str, times: float) -> Measure:
    """Figures 5b and 6b: the process's memory by `sublinear`, at the deepest that was put through the allocator."""

    def measure(results: Results) -> Found:
        point = [each for each in _figure(results, figure)["points"].values() if each.get("total_bytes")][-1]
        planned, shared = (point["total_bytes"][name]["default"] / GB for name in ("sublinear", "sharing"))
        text = f"{shared:.1f} to {planned:.1f} GB, by the model of torch's allocator"
        return Found(text=text, holds=planned * times <= shared)

    return measure


def chen_time(network: str, low: float, high: float) -> Measure:
    """Figure 7: how much longer a step takes by the plan, at each depth."""

    def measure(results: Results) -> Found:
        points = _figure(results, "7")[network]["points"].values()
        more = [point["time_ratio"] - 1 for point in points]
        same = all(point["first_difference"] is None for point in points)
        text = f"{_range(more, '.0%')} more time, {'the same bits' if same else 'other bits'}"
        return Found(text=text, holds=low <= min(more) and max(more) <= high and same)

    return measure


def chen_linear_time(low: float, high: float) -> Measure:
    """Figure 7: the power of the depth by which the time grows, unplanned and planned."""

    def measure(results: Results) -> Found:
        parts = _figure(results, "7")
        slopes = {
            f"{network}, {words}": part["slopes"][key]
            for network, part in parts.items()
            for words, key in (("unplanned", "unplanned_seconds"), ("planned", "seconds"))
        }
        text = "powers of the depth: " + "; ".join(f"{name} {slope:.2f}" for name, slope in slopes.items())
        return Found(text=text, holds=all(low <= slope <= high for slope in slopes.values()))

    return measure


def chen_planning_time(most_seconds: float) -> Measure:
    """Appendix A: seconds to search the plans of Figures 5 and 6."""

    def measure(results: Results) -> Found:
        most = {name: max(p["search_seconds"] for p in _figure(results, name)["points"].values()) for name in "56"}
        text = f"{most['5']:.1f} s at most on the ResNets, {most['6']:.1f} s on the LSTMs"
        return Found(text=text, holds=max(most.values()) <= most_seconds)

    return measure


# Feng and Huang 2018


def feng_others(results: Results) -> Found:
    """Sections 1 and 2: the division tree's least memory on networks that are no classifiers."""
    networks = _one(results, "feng_others")["networks"]
    shares = {name: row["division_tree"]["bytes"] / row["unplanned_bytes"] for name, row in networks.items()}
    return Found(
        text=", ".join(f"{name} {share:.0%}" for name, share in shares.items()), holds=max(shares.values()) < 1
    )


def feng_cuts(*, linear: bool) -> Measure:
    """Table 1: on how many networks of a kind Re-forwarding cuts as much as in the paper, in whole percents."""

    def measure(results: Results) -> Found:
        cuts: list[float] = []
        as_much = 0
        for name, row in _feng(results).items():
            if (name in LINEAR) != linear:
                continue
            cut = 1 - row["re_forwarding"]["bytes"] / row["regular"]["bytes"]
            papers = 1 - row["paper"]["re_forwarding"] / row["paper"]["regular"]
            cuts.append(cut)
            as_much += round(cut, 2) >= round(papers, 2)
        text = f"{_range(cuts, '.0%')}; the paper's or more on {as_much} of {len(cuts)}"
        return Found(text=text, holds=as_much == len(cuts))

    return measure


def feng_regular(within: float) -> Measure:
    """Table 1: the memory of regular training, beside the paper's."""

    def measure(results: Results) -> Found:
        apart = [row["regular"]["bytes"] / MB / row["paper"]["regular"] - 1 for row in _feng(results).values()]
        return Found(text=f"{_range(apart, '+.0%')} against the paper's MB", holds=max(map(abs, apart)) <= within)

    return measure


def feng_overheads(results: Results) -> Found:
    """Table 1: the time overhead of Re-forwarding; it holds if no network is slower than in the paper."""
    rows = _feng(results).values()
    ours = [row["re_forwarding"]["overhead"] for row in rows]
    papers = [row["paper"]["re_forwarding_seconds"] / row["paper"]["regular_seconds"] - 1 for row in rows]
    holds = all(mine <= other for mine, other in zip(ours, papers, strict=True))
    return Found(text=_range(ours, ".0%"), holds=holds)


def feng_chens(results: Results) -> Found:
    """Table 1: Re-forwarding takes no more than Chen's plan on linear networks."""
    rows = [_feng(results)[name] for name in LINEAR]
    less = sum(row["re_forwarding"]["bytes"] <= row["chen"]["bytes"] for row in rows)
    text = f"no more than `sublinear` on {less} of {len(rows)}"
    return Found(text=text, holds=less == len(rows))


def feng_chen_not_linear(results: Results) -> Found:
    """Table 1: whether Chen's planner has no plan for networks that are not linear."""
    rows = [row for name, row in _feng(results).items() if name not in LINEAR]
    planned = sum("bytes" in row["chen"] for row in rows)
    over = [row["chen"]["bytes"] / row["re_forwarding"]["bytes"] - 1 for row in rows]
    text = f"`sublinear` plans {planned} of {len(rows)}, with {_range(over, '+.0%')} memory against Re-forwarding"
    return Found(text=text, holds=planned == 0)


def feng_measured(results: Results) -> Found:
    """Table 1 at small batches on a CPU: bits and time."""
    rows = [row["measured"]["re_forwarding"] for row in _feng(results).values()]
    same = sum(row["bitwise_equal"] for row in rows)
    over = [row["overhead"] for row in rows]
    return Found(text=f"eager's bits on {same} of {len(rows)}, {_range(over, '+.0%')} time", holds=same == len(rows))


# MXNet's note, and Sekiyama et al. 2018: the arena


def shared_share(models: Sequence[str], low: float, high: float) -> Measure:
    """What is left of training's bytes if storages share memory, over every storage apart."""

    def measure(results: Results) -> Found:
        shares = [each["arena_over_apart"] for _, _, each in _captured(results, models, "training")]
        return Found(
            text=f"{_range(shares, '.0%')} of the bytes are left", holds=low <= min(shares) <= max(shares) <= high
        )

    return measure


def forward_only(most: float) -> Measure:
    """What forward takes of the bytes that training takes, for one image."""

    def measure(results: Results) -> Found:
        shares: list[float] = []
        for model in CNNS:
            steps = results("arena_captured")[model]["results"]
            batch, trained = next((int(name.split()[1]), each) for name, each in steps.items() if "training" in name)
            shares.append(steps["inference"]["arena_bytes"] / (trained["arena_bytes"] / batch))
        return Found(text=f"{_range(shares, '.0%')} of training's bytes for an image", holds=max(shares) <= most)

    return measure


def request_times(results: Results) -> Found:
    """What a request costs by a layout made before, and by torch's allocator."""
    timed = [step["per_request"] for _, _, step in _measured(results, CNNS, "") if "per_request" in step]
    arena = [each["arena_nanoseconds"] for each in timed]
    plain = [each["plain_nanoseconds"] for each in timed]
    text = f"{_range(arena, '.0f')} ns a request; torch's allocator {_range(plain, '.0f')}"
    return Found(text=text, holds=max(arena) < min(plain))


def pool_reduction(models: Sequence[str], kind: str, *, least: float, each: bool = False) -> Measure:
    """What the arena takes less of a GPU than the pool of torch's allocator; at best, or on each model."""

    def measure(results: Results) -> Found:
        steps = _captured(results, models, kind)
        found = [step["reserved"]["arena"] / step["reserved"]["pool"] - 1 for _, _, step in steps]
        said = ", ".join(f"{model} {share:+.1%}" for (model, _, _), share in zip(steps, found, strict=True))
        text = f"{said if each else _range(found, '+.0%')} memory against torch's pool"
        return Found(text=text, holds=-(max(found) if each else min(found)) >= least)

    return measure


def most_effective(results: Results) -> Found:
    """Figure 2a: on which network the arena saves most."""
    found = {
        (model, step): 1 - each["reserved"]["arena"] / each["reserved"]["pool"]
        for model, step, each in _captured(results, CNNS, "training")
    }
    model, step = max(found, key=lambda each: found[each])
    return Found(text=f"most on {model}, {step}: {found[model, step]:.0%}", holds=model == "inception_resnet_v2")


def fits_with_the_arena(gib: float) -> Measure:
    """Figure 2a: Inception-ResNet at batch 64 is within the device with the arena, and beyond it with the pool."""

    def measure(results: Results) -> Found:
        taken = results("arena_captured")["inception_resnet_v2"]["results"]["training 64"]["reserved"]
        pool, arena = (taken[name] / GIB for name in ("pool", "arena"))
        return Found(text=f"pool {pool:.1f} GiB, arena {arena:.1f} GiB", holds=arena <= gib < pool)

    return measure


def arena_times(models: Sequence[str], kind: str, *, keys: str = "keyed") -> Measure:
    """Figure 3: the time of a step in the arena over that of the same step outside; it holds if each is faster."""

    def measure(results: Results) -> Found:
        steps = [ON_CPU.get(model, model) for model in models]
        times = [step["time_ratio"] for _, _, step in _measured(results, steps, kind, keys)]
        text = f"{_range(times, '.2f')} of the time with torch's allocator"
        return Found(text=text, holds=max(times) < 1)

    return measure


def at_the_bound(results: Results) -> Found:
    """Section 5.2: how many layouts of the captured steps are as low as is proved."""
    steps = [each for _, _, each in _captured(results, (*CNNS, "bninception", "seq2seq"), "")]
    proven = sum(each["arena_bytes"] == each["lower_bound_bytes"] for each in steps)
    return Found(
        text=f"{proven} of {len(steps)} captured steps are packed at the lower bound", holds=proven == len(steps)
    )


def solver_times(models: Sequence[str], most_seconds: float) -> Measure:
    """Figure 4: seconds of the solver."""

    def measure(results: Results) -> Found:
        seconds = [each["solver_seconds"] for _, _, each in _captured(results, models, "")]
        return Found(text=f"{max(seconds):.2f} s at most", holds=max(seconds) <= most_seconds)

    return measure


def growth_over_mini_batches(gib: float) -> Measure:
    """Figure 2c: what a process takes after mini-batches of sentences: the pool the device, the arena the same."""

    def measure(results: Results) -> Found:
        after = [each["after_bytes"] for each in _growth(results).values() if "after_bytes" in each]
        grown = {way: [each[way][-1] / each[way][0] - 1 for each in after] for way in ("exact", "pool", "arena")}
        most = max(each["exact"][-1] for each in after) / GIB
        text = (
            f"in 10 mini-batches a pool of exact sizes grows by {_range(grown['exact'], '.0%')}, to {most:.1f} GiB at "
        )
        text += f"most; torch's by {_range(grown['pool'], '.0%')}; the arena by {_range(grown['arena'], '.0%')}"
        return Found(text=text, holds=most > gib and max(grown["arena"]) <= 0)

    return measure


def generation(results: Results) -> Found:
    """Figure 2d: what the arena takes less of a GPU where sentences are generated."""
    taken = _growth(results)["inference"]
    share = taken["arena"] / taken["pool"] - 1
    return Found(text=f"{share:+.1%} memory against torch's pool", holds=share < 0)


def inference_is_dearer(results: Results) -> Found:
    """Figure 4b: whether there are more blocks to place where sentences are generated than in training."""
    steps = _growth(results)
    training = [count for each in steps.values() if "after_bytes" in each for count in each["blocks"]]
    blocks = steps["inference"]["blocks"]
    text = f"{blocks:,} blocks in inference, {_range(training, ',')} in training"
    return Found(text=text, holds=blocks > max(training))


def wider_batches(results: Results) -> Found:
    """Section 5.2: the largest batches that fit 16 GiB, with the arena and with the pool."""
    found = {name: each["batches"] for name, each in _growth(results).items() if "batches" in each}
    text = ", ".join(
        f"{name.removeprefix('widest ')} {each['arena']} for {each['pool']}" for name, each in found.items()
    )
    return Found(text=text, holds=all(each["arena"] > each["pool"] for each in found.values()))


def _growth(results: Results) -> dict[str, Payload]:
    return _one(results, "arena_growth")["results"]


# The deep Q-network


def lowest(workloads: Sequence[str], machine: str, *, against: Iterable[str] = BASELINES) -> Measure:
    """Figure 5: at how many budgets `dqn` has the lowest overhead of the paper's planners, of those where one has."""
    others = tuple(against)

    def measure(results: Results) -> Found:
        won, budgets = 0, 0
        for workload in workloads:
            for share in SHARES:
                mine = _overhead(results, workload, machine, "dqn", share)
                theirs = [_overhead(results, workload, machine, other, share) for other in others]
                known = [each for each in theirs if each is not None]
                if mine is None and not known:
                    continue
                budgets += 1
                won += mine is not None and all(mine <= each + _EQUAL for each in known)
        return Found(text=f"`dqn` is lowest at {won} of {budgets} budgets", holds=won == budgets > 0)

    return measure


def harder(workload: str, than: Sequence[str]) -> Measure:
    """Section 5.2: the overhead of `dqn` on a workload beside others, at one budget."""

    def measure(results: Results) -> Found:
        found = {name: _overhead(results, name, TITAN, "dqn", AT) for name in (workload, *than)}
        text = ", ".join(f"{name} {'no plan' if value is None else f'{value:.1%}'}" for name, value in found.items())
        known = [value for name, value in found.items() if name != workload and value is not None]
        mine = found[workload]
        return Found(text=f"{text} (at {AT:.0%})", holds=mine is not None and mine > max(known))

    return measure


def utilization(results: Results) -> Found:
    """Section 5.1: the share of the step in which compute works, beside SuperNeurons with both means."""
    found: dict[str, list[float]] = {"dqn": [], "superneurons_both": []}
    for name, payload in results("offloading_planners").items():
        points = {curve: payload["points"].get(f"{curve}@{AT}", {}) for curve in found}
        if name.endswith(TITAN) and all("utilization" in point for point in points.values()):
            for curve, point in points.items():
                found[curve].append(point["utilization"])
    means = {curve: statistics.mean(each) for curve, each in found.items()}
    text = f"{means['dqn']:.0%}; SuperNeurons {means['superneurons_both']:.0%}, where both have plans"
    return Found(text=text, holds=means["dqn"] > means["superneurons_both"])


def lstm_planners(results: Results) -> Found:
    """Section 5.1: which of the paper's planners have a plan for an LSTM."""
    found = [
        curve
        for curve in ("dqn", *BASELINES)
        if any(_overhead(results, "char_lstm", TITAN, curve, share) is not None for share in SHARES)
    ]
    text = f"plans by {', '.join(f'`{curve}`' for curve in found)}"
    return Found(text=text, holds=set(found) == {"dqn", TFLMS})


def kmeans_planners(results: Results) -> Found:
    """Figure 5: whether `dqn` has a plan for k-means below its peak; what memfit's own planner has."""
    plans = sum(_overhead(results, "kmeans", TITAN, "dqn", share) is not None for share in SHARES)
    ours = _overhead(results, "kmeans", TITAN, "auto", AT)
    mine = "none" if ours is None else f"{ours:.1%} more time at {AT:.0%}"
    return Found(text=f"`dqn`: plans at {plans} of {len(SHARES)} budgets; `auto`: {mine}", holds=plans > 0)


def transfer(results: Results) -> Found:
    """Section 4.4.2: what a network that was trained on a smaller graph ends with, beside one trained afresh."""
    runs = _one(results, "dqn_curves")["runs"]
    afresh = [run["overhead"] for run in runs if run["trained"] == "afresh"]
    carried = [run["overhead"] for run in runs if run["trained"] != "afresh"]
    ours, usual = statistics.median(carried), statistics.median(afresh)
    text = f"{ours:.1%} from ResNet-18 ({_range(carried, '.1%')}), {usual:.1%} afresh ({_range(afresh, '.1%')})"
    return Found(text=f"{text}, medians of {len(afresh)} seeds", holds=ours < 0.9 * usual)


def freed_run(within: float) -> Measure:
    """Section 4.7: how far the seconds of a run that frees what is big are from the step's."""

    def measure(results: Results) -> Found:
        rows = _one(results, "profile_without_memory")["workloads"]
        apart = [row["freed_run_seconds"] / row["eager_seconds"] - 1 for row in rows]
        return Found(text=f"{_range(apart, '+.0%')} against the step's seconds", holds=max(map(abs, apart)) <= within)

    return measure


# Reading


def _one(results: Results, script: str) -> Payload:
    (payload,) = results(script).values()
    return payload


def _figure(results: Results, figure: str) -> Payload:
    return _one(results, "chen_figures_measured" if figure == "7" else "chen_figures")[figure]


def _last(figure: Payload) -> Payload:
    return figure["points"][max(figure["points"], key=int)]


def _deepest(results: Results, figure: str) -> str:
    return max(_figure(results, figure)["points"], key=int)


def _times(figure: Payload, large: str, small: str) -> list[float]:
    return [point["bytes"][large] / point["bytes"][small] for point in figure["points"].values()]


def _feng(results: Results) -> dict[str, Payload]:
    return _one(results, "feng_table1")["networks"]


def _captured(results: Results, models: Iterable[str], kind: str) -> list[tuple[str, str, Payload]]:
    """Return (model, step, result) of the captured steps whose name begins with `kind`."""
    stored = results("arena_captured")
    return [
        (model, step, each)
        for model in models
        for step, each in stored[model]["results"].items()
        if step.startswith(kind)
    ]


def _measured(
    results: Results, models: Iterable[str], kind: str, keys: str = "keyed"
) -> list[tuple[str, str, Payload]]:
    """Return (model, step, result) of the measured steps whose name begins with `kind`; of sequences by `keys`."""
    stored = results("arena")
    steps = [
        (model, step, each.get(keys, each))
        for model in models
        for step, each in stored.get(ON_CPU.get(model, model), {"results": {}})["results"].items()
        if step.startswith(kind)
    ]
    return [(model, step, each) for model, step, each in steps if "error" not in each]


def _overhead(results: Results, workload: str, machine: str, curve: str, share: float) -> float | None:
    points = results("offloading_planners")[f"{workload}_{machine}"]["points"]
    return points.get(f"{curve}@{share}", {}).get("overhead")


def _range(values: Sequence[float], form: str) -> str:
    """Return the least and the largest value as text; one of them where they read alike."""
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
