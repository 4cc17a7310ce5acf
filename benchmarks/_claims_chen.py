"""The claims of Chen et al. 2016, and what the stored results say of each."""

from __future__ import annotations

from _claim import (
    CHEN,
    NO_GPU_RUN,
    ON_A_CPU,
    PACKERS,
    PLANNERS,
    Claim,
    Found,
    Measure,
    Payload,
    Results,
    Verdict,
    only,
    span,
    tested,
)
from _paper_tables import GB

FIGURE_5 = ("benchmarks/chen_figures.py", "5")
FIGURE_6 = ("benchmarks/chen_figures.py", "6")
FIGURE_7 = ("benchmarks/chen_figures.py", "7")


def chen_system(least: float) -> Measure:
    """Figure 5a: what in-place writes and sharing save of a ResNet, at each depth; at least so many times."""

    def measure(results: Results) -> Found:
        times = _times(_figure(results, "5"), "none", "sharing")
        return Found(text=f"{span(times, '.1f')} times less", holds=min(times) >= least)

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
    return Found(text=f"{span(times, '.1f')} times less, slope {slope:.2f}", holds=min(times) > 1 and slope > 0.9)


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
        return Found(text=f"{span(times, '.1f')} times less", holds=min(times) >= least)

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
        text = f"{span(more, '.0%')} more time, {'the same bits' if same else 'other bits'}"
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


def _figure(results: Results, figure: str) -> Payload:
    return only(results, "chen_figures_measured" if figure == "7" else "chen_figures")[figure]


def _last(figure: Payload) -> Payload:
    return figure["points"][max(figure["points"], key=int)]


def _deepest(results: Results, figure: str) -> str:
    return max(_figure(results, figure)["points"], key=int)


def _times(figure: Payload, large: str, small: str) -> list[float]:
    return [point["bytes"][large] / point["bytes"][small] for point in figure["points"].values()]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="chen-figure-1",
        paper=CHEN,
        claim="Figure 1: in a two-layer perceptron, outputs are written over inputs, and gradients share memory",
        module="memfit/simulate/in_place.py",
        command=tested("test_packing_strategies", "test_the_notes_perceptron_takes_three_areas"),
        against="the allocation as MXNet's note draws it",
        verdict=Verdict.OTHER,
        why="the test has the note's drawing of the same network",
    ),
    Claim(
        row="chen-figure-2-in-place",
        paper=CHEN,
        claim="Figure 2: an op writes over its input if no other op still waits for it",
        module="memfit/simulate/in_place.py",
        command=tested("test_packing_strategies", "test_the_trap_is_not_stepped_into"),
        against="steps 2 and 5 of the figure: C not over B, a later op in place",
    ),
    Claim(
        row="chen-figure-2-tags",
        paper=CHEN,
        claim="Figure 2: a counter of waiting readers, and a box of free tags, allocate memory in O(n)",
        module=f"{PACKERS}/tags.py",
        command=tested("test_packing", "test_tags_take_from_the_box"),
        against="offsets solved by hand",
    ),
    Claim(
        row="chen-colouring",
        paper=CHEN,
        claim="Section 3: colouring the graph of overlapping lifetimes allocates memory in O(n²)",
        module=f"{PACKERS}/colouring.py",
        command=tested("test_packing", "test_colouring_is_solved_by_hand"),
        against="colours solved by hand",
    ),
    Claim(
        row="chen-algorithm-1",
        paper=CHEN,
        claim="Algorithm 1: the outputs of segments are kept, and a segment is recomputed before its backward",
        module=f"{PLANNERS}/segments.py",
        command=tested("test_chen", "test_segments_of_a_chain_are_algorithm_1"),
        against="the order of the published loop",
    ),
    Claim(
        row="chen-algorithm-2",
        paper=CHEN,
        claim="Algorithm 2, Figure 3: the gradient graph of any mirror counts, in an order",
        module=f"{PLANNERS}/mirror.py",
        command=tested("test_chen", "test_the_mirror_construction_is_algorithm_2_for_any_counts"),
        against="the published algorithm, written apart, on random graphs and counts",
    ),
    Claim(
        row="chen-section-4-2",
        paper=CHEN,
        claim="Section 4.2: of convolution, batch normalization and activation, only the convolution is kept",
        module=f"{PLANNERS}/drop_cheap.py",
        command=tested("test_chen", "test_of_conv_bn_relu_only_conv_is_kept"),
        against="how often each op of the plan runs",
    ),
    Claim(
        row="chen-equation-1",
        paper=CHEN,
        claim="Equation 1: k equal segments take the largest segment and O(k), for one more forward pass",
        module=f"{PLANNERS}/segments.py",
        command=tested("test_chen", "test_equal_segments_take_the_memory_of_equation_1"),
        against="the equation, for five k",
    ),
    Claim(
        row="chen-algorithm-3",
        paper=CHEN,
        claim="Algorithm 3: splits where the bytes of a stage exceed B",
        module=f"{PLANNERS}/sublinear.py",
        command=tested("test_chen", "test_splits_are_algorithm_3"),
        against="the published loop, written apart, on random sizes and B",
    ),
    Claim(
        row="chen-algorithm-3-cost",
        paper=CHEN,
        claim="Section 4.3: Algorithm 3 may take the cost of ops into account, and keep dear results",
        module=f"{PLANNERS}/sublinear.py",
        command=tested("test_chen", "test_costly_results_are_kept_where_they_fit"),
        against="one sentence of the paper, without an algorithm: the same planner without it",
    ),
    Claim(
        row="chen-appendix-a",
        paper=CHEN,
        claim="Appendix A: B = 0, then √(xy), then a grid of six on [B/√2, √2 B]",
        module=f"{PLANNERS}/sublinear.py",
        command=tested("test_chen", "test_appendix_a_tries_zero_the_root_and_a_grid_of_six"),
        against="the eight budgets, computed by hand",
    ),
    Claim(
        row="chen-appendix-a-time",
        paper=CHEN,
        claim="Appendix A: the plans of the experiments take a few seconds",
        module=f"{PLANNERS}/sublinear.py",
        command=("benchmarks/chen_figures.py", "5", "6"),
        against='"a few seconds"',
        measure=chen_planning_time(most_seconds=10),
        verdict=Verdict.NOT,
        why="the graphs of long LSTMs have every kernel as an op; those of the ResNets take seconds",
    ),
    Claim(
        row="chen-section-4-4",
        paper=CHEN,
        claim="Equations 2 and 3, Figure 4: recursion takes k log_{k+1}(n) memory, for O(n log n) forward cost",
        module=f"{PLANNERS}/recursive.py",
        command=tested("test_chen", "test_recursion_takes_memory_as_g_of_n"),
        against="the equation and its cost, for five k and 2^4 to 2^14 layers",
    ),
    Claim(
        row="chen-section-4-5",
        paper=CHEN,
        claim="Section 4.5: users set the mirror attribute in the graph",
        module=f"{PLANNERS}/mirror.py",
        command=tested("test_chen", "test_a_mark_is_a_constraint_for_every_planner"),
        against="how often a marked op runs, with every planner",
    ),
    Claim(
        row="chen-same-gradients",
        paper=CHEN,
        claim="Section 5.1: all of these optimizations give equivalent gradients",
        module="memfit/step/verify.py",
        command=tested("test_planned_bits", "test_plans_at_the_least_memory_run_with_the_same_bits"),
        against="eager's bits, with every planner on four networks",
    ),
    Claim(
        row="chen-figure-5-system",
        paper=CHEN,
        claim="Figure 5a: in-place writes and sharing reduce a ResNet's memory two to three times",
        module="memfit/simulate/in_place.py",
        command=FIGURE_5,
        against="a factor of two to three",
        measure=chen_system(least=2),
        verdict=Verdict.OTHER,
        why="more is saved here; predicted",
    ),
    Claim(
        row="chen-figure-5-drop",
        paper=CHEN,
        claim="Figure 5a: dropping batch normalization and ReLU saves more, and still grows linearly",
        module=f"{PLANNERS}/drop_cheap.py",
        command=FIGURE_5,
        against="a curve below sharing's, parallel to it",
        measure=chen_drop,
    ),
    Claim(
        row="chen-figure-5",
        paper=CHEN,
        claim="Figure 5a: a ResNet of 1,000 layers trains in less than 7 GB",
        module=f"{PLANNERS}/sublinear.py",
        command=FIGURE_5,
        against="48 to 7 GB",
        measure=chen_thousand_layers(most_gb=7),
    ),
    Claim(
        row="chen-figure-5-slope",
        paper=CHEN,
        claim="Section 4.3, Figure 5a: memory grows with the square root of the depth",
        module=f"{PLANNERS}/sublinear.py",
        command=FIGURE_5,
        against="a power of 0.5",
        measure=chen_slope(low=0.45, high=0.55),
    ),
    Claim(
        row="chen-figure-5b",
        command=FIGURE_5,
        measure=chen_total("5", 2.0),
        paper=CHEN,
        claim="Figure 5b: the memory of the whole process on a Titan X, by nvidia-smi",
        module="memfit/simulate/cuda_allocator.py",
        against="a curve above that of feature maps",
        verdict=Verdict.OTHER,
        why=NO_GPU_RUN,
    ),
    Claim(
        row="chen-figure-6",
        paper=CHEN,
        claim="Figure 6a: a long LSTM takes more than four times less than the best plan without recomputation",
        module=f"{PLANNERS}/sublinear.py",
        command=FIGURE_6,
        against="more than 4 times",
        measure=chen_long_sequences(least=4),
    ),
    Claim(
        row="chen-figure-6-in-place",
        paper=CHEN,
        claim="Figure 6a: writing in place helps the LSTM a lot, as weight gradients are added to one cell",
        module="memfit/capture/reuse.py",
        command=FIGURE_6,
        against='"inplace helps a lot here"',
        measure=chen_lstm_in_place(least=4),
        verdict=Verdict.NOT,
        why="torch's kernels write the product of each step to memory of its own before they add it",
    ),
    Claim(
        row="chen-figure-6b",
        command=FIGURE_6,
        measure=chen_total("6", 2.0),
        paper=CHEN,
        claim="Figure 6b: the memory of the whole process for the LSTM",
        module="memfit/simulate/cuda_allocator.py",
        against="a curve above that of feature maps",
        verdict=Verdict.OTHER,
        why=NO_GPU_RUN,
    ),
    Claim(
        row="chen-figure-7a",
        paper=CHEN,
        claim="Figure 7a: a ResNet takes 30% more time with the sublinear plan",
        module=f"{PLANNERS}/sublinear.py",
        command=(*FIGURE_7, "--networks", "resnet"),
        against='"roughly 30%"',
        measure=chen_time("resnet", low=0.25, high=0.35),
        verdict=Verdict.OTHER,
        why=ON_A_CPU,
    ),
    Claim(
        row="chen-figure-7b",
        paper=CHEN,
        claim="Figure 7b: an LSTM takes 30% more time with the sublinear plan",
        module=f"{PLANNERS}/sublinear.py",
        command=(*FIGURE_7, "--networks", "lstm"),
        against='"roughly 30%"',
        measure=chen_time("lstm", low=0.25, high=0.35),
        verdict=Verdict.OTHER,
        why=ON_A_CPU,
    ),
    Claim(
        row="chen-figure-7-linear",
        paper=CHEN,
        claim="Figure 7: time grows linearly with the depth, with and without the plan",
        module=f"{PLANNERS}/sublinear.py",
        command=FIGURE_7,
        against="a power of 1",
        measure=chen_linear_time(low=0.8, high=1.1),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; the first layers of the ResNet cost the same at every depth",
    ),
)
