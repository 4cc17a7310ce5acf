"""The claims of MXNet's memory note, and what the stored results say of each."""

from __future__ import annotations

from collections.abc import Sequence

from _claim import (
    CNNS,
    NOTE,
    ON_A_CPU,
    PACKERS,
    Claim,
    Found,
    Measure,
    Results,
    Verdict,
    arena,
    captured,
    captured_steps,
    measured_steps,
    span,
    tested,
)


def shared_share(models: Sequence[str], low: float, high: float) -> Measure:
    """What is left of training's bytes if storages share memory, over every storage apart."""

    def measure(results: Results) -> Found:
        shares = [each["arena_over_apart"] for _, _, each in captured_steps(results, models, "training")]
        return Found(
            text=f"{span(shares, '.0%')} of the bytes are left", holds=low <= min(shares) <= max(shares) <= high
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
        return Found(text=f"{span(shares, '.0%')} of training's bytes for an image", holds=max(shares) <= most)

    return measure


def request_times(results: Results) -> Found:
    """What a request costs by a layout made before, and by torch's allocator."""
    timed = [step["per_request"] for _, _, step in measured_steps(results, CNNS, "") if "per_request" in step]
    arena = [each["arena_nanoseconds"] for each in timed]
    plain = [each["plain_nanoseconds"] for each in timed]
    text = f"{span(arena, '.0f')} ns a request; torch's allocator {span(plain, '.0f')}"
    return Found(text=text, holds=max(arena) < min(plain))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="mxnet-graphs",
        paper=NOTE,
        claim="Computation graphs, of layers or of small ops; an explicit backward path of separate nodes",
        module="memfit/capture/joint.py",
        command=tested(
            "test_capture", "test_the_unplanned_schedule_of_a_captured_step_is_legal_and_computes_each_op_once"
        ),
        against="the checker, on a step of forward, backward and update",
    ),
    Claim(
        row="mxnet-prune",
        paper=NOTE,
        claim="Backward prune: a result that no gradient reads is freed in forward",
        module="memfit/planners/engine/results.py",
        command=tested("test_claims", "test_a_result_that_backward_does_not_read_is_freed_in_forward"),
        against="the figure: F and C are freed before backward",
    ),
    Claim(
        row="mxnet-aggregation",
        paper=NOTE,
        claim="Backward aggregation: gradients are added up without a split layer in forward",
        module="memfit/capture/reuse.py",
        command=tested("test_reuse", "test_gradients_of_a_shared_weight_are_added_into_one_storage"),
        against="the sums in the captured graph, each in place",
    ),
    Claim(
        row="mxnet-in-place",
        paper=NOTE,
        claim="In-place operations: a chain of sigmoids takes constant memory",
        module="memfit/simulate/in_place.py",
        command=tested("test_packing_strategies", "test_a_chain_of_sigmoids_takes_one_storage"),
        against="the figure: one storage",
    ),
    Claim(
        row="mxnet-trap",
        paper=NOTE,
        claim="In-place trap: C is not written over B while F still needs B",
        module="memfit/simulate/in_place.py",
        command=tested("test_packing_strategies", "test_the_trap_is_not_stepped_into"),
        against="the figure",
    ),
    Claim(
        row="mxnet-sharing",
        paper=NOTE,
        claim="Standard sharing: storages of different sizes share memory as large as the larger",
        module=f"{PACKERS}/tags.py",
        command=tested("test_packing", "test_tags_take_from_the_box"),
        against="offsets solved by hand",
    ),
    Claim(
        row="mxnet-perceptron",
        paper=NOTE,
        claim="Allocation of a two-layer perceptron: act1, d(fc1), out, d(fc2) in place; d(act1) shares with d(A)",
        module="memfit/simulate/in_place.py",
        command=tested("test_packing_strategies", "test_the_notes_perceptron_takes_three_areas"),
        against="the figure",
    ),
    Claim(
        row="mxnet-static",
        paper=NOTE,
        claim="Static allocation is done once; dynamic allocation burdens each step",
        module="memfit/memory/arena/arena.py",
        command=arena(*CNNS),
        against="no figure in the note",
        measure=request_times,
        verdict=Verdict.OTHER,
        why=ON_A_CPU,
    ),
    Claim(
        row="mxnet-parallel",
        paper=NOTE,
        claim="Parallel allocation: a layout that is valid in series adds dependences between ops",
        module="memfit/packing/parallel.py",
        command=tested("test_packing_parallel", "test_a_serial_layout_without_its_dependences_gives_wrong_results"),
        against="results on four threads, with and without the dependences",
    ),
    Claim(
        row="mxnet-safe",
        paper=NOTE,
        claim="Safe first: with the dependences, or with memory shared only by ordered ops, results are right",
        module="memfit/packing/parallel.py",
        command=tested("test_packing_parallel", "test_a_hundred_runs_give_the_same_bits"),
        against="a hundred runs on four threads",
    ),
    Claim(
        row="mxnet-ancestors",
        paper=NOTE,
        claim="An ancestor relation allows sharing between ordered ops, in O(n²)",
        module="memfit/packing/parallel.py",
        command=tested("test_packing_parallel", "test_ancestors_share_more_than_paths_and_less_than_a_series"),
        against="heights computed by hand",
    ),
    Claim(
        row="mxnet-paths",
        paper=NOTE,
        claim="Path colouring: the first k longest paths each share memory, in O(n)",
        module="memfit/packing/parallel.py",
        command=tested("test_packing_parallel", "test_colours_are_paths"),
        against="each colour is a path, and the longest come first",
    ),
    Claim(
        row="mxnet-parallel-engine",
        paper=NOTE,
        claim="Ops that may run at the same time do run at the same time, in such a layout",
        module="memfit/packing/parallel.py",
        against="no figure in the note",
        verdict=Verdict.NOTHING,
        why="planned steps run one op after the other; these layouts are for other engines",
    ),
    Claim(
        row="mxnet-half",
        paper=NOTE,
        claim="Graphs of coarse ops take about half",
        module="memfit/packing/portfolio.py",
        command=captured(*CNNS),
        against='"roughly by half"',
        measure=shared_share(CNNS, 0.35, 0.6),
    ),
    Claim(
        row="mxnet-fine-grained",
        paper=NOTE,
        claim="Graphs of small ops take even less",
        module="memfit/packing/portfolio.py",
        command=captured("seq2seq"),
        against="less than half",
        measure=shared_share(("seq2seq",), 0, 0.35),
    ),
    Claim(
        row="mxnet-forward-only",
        paper=NOTE,
        claim="The memory cost script: forward alone takes much less than training",
        module="memfit/commands/estimate.py",
        command=captured(*CNNS),
        against='"extremely low compared to others"',
        measure=forward_only(most=0.25),
    ),
)
