"""The claims, figures, tables and algorithms of the five papers: where each stands in memfit, and what shows it.

A row is a `Claim`. Its command is a script of `benchmarks/`, or a test; the paper's own figure is typed here, from the
paper's text, and ours is read from what the script stored. The written verdict has to agree with `Found.holds`:
`tests/test_claims.py` fails where a stored figure says otherwise, and the table says so.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import _claim_figures as figures
from _claim_figures import CNNS, H100, TITAN, Measure, Results

from memfit.errors import InvalidOptionError

NOT_AS_WRITTEN = "**not as written**"


class Verdict(enum.Enum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    OTHER = "reproduced, other figure"
    NOT = "not reproduced"
    NOTHING = "nothing to measure here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper.

    Attributes:
        row: its short name.
        paper: whose it is.
        claim: what the paper says, in one sentence, after its place in the paper.
        module: the file of memfit/ where it stands; empty where there is none.
        command: what shows it: a script under benchmarks/ with its arguments, or a test; empty where nothing does.
        against: what it is held against: the paper's published figure, or what the test compares with.
        measure: reads the figure from what the script stored; None for a test.
        why: the reason of any verdict but `reproduced`.
    """

    row: str
    paper: str
    claim: str
    module: str = ""
    command: tuple[str, ...] = ()
    against: str
    measure: Measure | None = None
    verdict: Verdict = Verdict.REPRODUCED
    why: str = ""

    @property
    def is_test(self) -> bool:
        """Whether a test shows it."""
        return bool(self.command) and "::" in self.command[0]


def found_of(claim: Claim, results: Results) -> tuple[str, str]:
    """Return how a claim is reproduced, and its verdict, in words.

    Raises:
        KeyError, ValueError: the script that it reads stored nothing, or not enough.
    """
    written = f"{claim.verdict.value}: {claim.why}" if claim.why else claim.verdict.value
    if claim.measure is not None:
        found = claim.measure(results)
        agrees = found.holds == (claim.verdict in (Verdict.REPRODUCED, Verdict.OTHER))
        return found.text, written if agrees else f"{NOT_AS_WRITTEN}, which is: {written}"
    if claim.is_test:
        return f"the test `{claim.command[0].rpartition('::')[2]}`", written
    return "–", written


def claim_named(row: str) -> Claim:
    """Return the claim of a row; InvalidOptionError: no such row."""
    for claim in CLAIMS:
        if claim.row == row:
            return claim
    raise InvalidOptionError(f"no row is called {row!r}; `make evidence` lists the {len(CLAIMS)} that there are")


CHEN, FENG, NOTE, SEKIYAMA, DQN = "Chen 2016", "Feng 2018", "MXNet note", "Sekiyama 2018", "DQN 2020"
PLANNERS, PACKERS = "memfit/papers/planners", "memfit/papers/packers"
ON_A_CPU = "measured on a CPU, at sizes that fit it"
SIMULATED = "simulated, by a roofline of the GPU; the paper gives its curves as pictures only"
BY_THE_MODEL = "by memfit's model of torch's allocator; the pool of the paper's framework is another"
NO_GPU_RUN = "no run of a GPU is stored"
FIGURE_5 = ("benchmarks/chen_figures.py", "5")
FIGURE_6 = ("benchmarks/chen_figures.py", "6")
FIGURE_7 = ("benchmarks/chen_figures.py", "7")
TABLE_1 = ("benchmarks/feng_table1.py", "--again")
CAPTURED = ("benchmarks/arena_captured.py", "--again")
GROWTH = ("benchmarks/arena_growth.py", "seq2seq", "--again")


def captured(*models: str) -> tuple[str, ...]:
    """Return the command that captures and packs some of the models anew."""
    return "benchmarks/arena_captured.py", *models, "--again"


def arena(*models: str) -> tuple[str, ...]:
    """Return the command that measures some of the models in the arena anew."""
    return "benchmarks/arena.py", *(figures.ON_CPU.get(model, model) for model in models), "--again"


def planned(*workloads: str, machine: str = TITAN, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command that plans some workloads anew with the paper's planners, and others."""
    curves = ("dqn", *figures.BASELINES, *more)
    return "benchmarks/offloading_planners.py", *workloads, "--machines", machine, "--planners", *curves, "--again"


def tested(file: str, name: str) -> tuple[str, ...]:
    """Return a test as a command."""
    return (f"tests/{file}.py::{name}",)


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
        measure=figures.chen_planning_time(most_seconds=10),
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
        measure=figures.chen_system(least=2),
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
        measure=figures.chen_drop,
    ),
    Claim(
        row="chen-figure-5",
        paper=CHEN,
        claim="Figure 5a: a ResNet of 1,000 layers trains in less than 7 GB",
        module=f"{PLANNERS}/sublinear.py",
        command=FIGURE_5,
        against="48 to 7 GB",
        measure=figures.chen_thousand_layers(most_gb=7),
    ),
    Claim(
        row="chen-figure-5-slope",
        paper=CHEN,
        claim="Section 4.3, Figure 5a: memory grows with the square root of the depth",
        module=f"{PLANNERS}/sublinear.py",
        command=FIGURE_5,
        against="a power of 0.5",
        measure=figures.chen_slope(low=0.45, high=0.55),
    ),
    Claim(
        row="chen-figure-5b",
        command=FIGURE_5,
        measure=figures.chen_total("5", 2.0),
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
        measure=figures.chen_long_sequences(least=4),
    ),
    Claim(
        row="chen-figure-6-in-place",
        paper=CHEN,
        claim="Figure 6a: writing in place helps the LSTM a lot, as weight gradients are added to one cell",
        module="memfit/capture/reuse.py",
        command=FIGURE_6,
        against='"inplace helps a lot here"',
        measure=figures.chen_lstm_in_place(least=4),
        verdict=Verdict.NOT,
        why="torch's kernels write the product of each step to memory of its own before they add it",
    ),
    Claim(
        row="chen-figure-6b",
        command=FIGURE_6,
        measure=figures.chen_total("6", 2.0),
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
        measure=figures.chen_time("resnet", low=0.25, high=0.35),
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
        measure=figures.chen_time("lstm", low=0.25, high=0.35),
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
        measure=figures.chen_linear_time(low=0.8, high=1.1),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; the first layers of the ResNet cost the same at every depth",
    ),
    Claim(
        row="feng-case-1",
        paper=FENG,
        claim="Equation 1, case 1: a chain of N equal vertices comes to 2/√N of its memory",
        module=f"{PLANNERS}/linear_split.py",
        command=tested("test_feng", "test_equal_chains_come_to_two_over_the_root_of_n"),
        against="the analytic form, for six N",
    ),
    Claim(
        row="feng-algorithm-1",
        paper=FENG,
        claim="Algorithm 1: the optimal split of a linear graph",
        module=f"{PLANNERS}/linear_split.py",
        command=tested("test_feng", "test_the_fast_solver_is_algorithm_1"),
        against="the published loop in O(N⁴), on random chains",
    ),
    Claim(
        row="feng-figure-3",
        paper=FENG,
        claim="Definitions 1 to 6, Figure 3, Algorithm 3: closed sets are splittable, branched or non-branched",
        module=f"{PLANNERS}/closed_sets.py",
        command=tested("test_feng", "test_the_types_of_figure_3"),
        against="the figure's graphs, with a skip connection",
    ),
    Claim(
        row="feng-algorithm-2",
        paper=FENG,
        claim="Algorithm 2: judges whether a vertex splits a closed set",
        module=f"{PLANNERS}/closed_sets.py",
        command=tested("test_feng", "test_splitting_vertices_are_those_of_algorithm_2"),
        against="the published test, on every graph of five vertices",
    ),
    Claim(
        row="feng-algorithm-4",
        paper=FENG,
        claim="Algorithm 4, Figure 4c: the maximal split of a non-branched set",
        module=f"{PLANNERS}/closed_sets.py",
        command=tested("test_feng", "test_the_maximal_split_of_figure_4c"),
        against="the figure's division into five closed sets",
    ),
    Claim(
        row="feng-figure-5",
        paper=FENG,
        claim="Definition 9, Figure 5, Theorem 1: the division tree has every vertex",
        module=f"{PLANNERS}/closed_sets.py",
        command=tested("test_feng", "test_the_tree_is_complete"),
        against="every graph of six vertices",
    ),
    Claim(
        row="feng-algorithm-5",
        paper=FENG,
        claim="Algorithm 5: the best split of any graph into closed sets",
        module=f"{PLANNERS}/division_tree.py",
        command=tested("test_feng", "test_every_small_graph_is_solved_as_by_brute_force"),
        against="every stored set that leaves closed sets, on every graph of two to six vertices",
    ),
    Claim(
        row="feng-theorem-1",
        paper=FENG,
        claim="Theorem 1: the optimal split of the division tree is that of the graph",
        module=f"{PLANNERS}/division_tree.py",
        command=tested("test_claims", "test_another_stored_set_can_be_better"),
        against="Equation 1 over every stored set",
        verdict=Verdict.NOT,
        why="the test has a graph of five vertices on which another stored set is better",
    ),
    Claim(
        row="feng-table-1-linear",
        paper=FENG,
        claim="Table 1: memory is cut by 26 to 48% on linear networks",
        module=f"{PLANNERS}/linear_split.py",
        command=TABLE_1,
        against="26, 39, 38, 42, 48%",
        measure=figures.feng_cuts(linear=True),
        verdict=Verdict.NOT,
        why="less on VGG11, where one op of torch needs all of that memory (above); the others are as published",
    ),
    Claim(
        row="feng-table-1-any-graph",
        paper=FENG,
        claim="Table 1: memory is cut by 46 to 83% on networks that are not linear",
        module=f"{PLANNERS}/division_tree.py",
        command=TABLE_1,
        against="46 to 83%, by network",
        measure=figures.feng_cuts(linear=False),
    ),
    Claim(
        row="feng-table-1-regular",
        paper=FENG,
        claim="Table 1: the memory of regular training, the difference of two batches",
        module="memfit/simulate/simulator.py",
        command=TABLE_1,
        against="the column, by network",
        measure=figures.feng_regular(within=0.1),
        verdict=Verdict.OTHER,
        why="within a tenth, with another version of torch",
    ),
    Claim(
        row="feng-table-1-chen",
        paper=FENG,
        claim="Table 1: Re-forwarding takes no more memory than Chen's planner on linear networks",
        module=f"{PLANNERS}/linear_split.py",
        command=TABLE_1,
        against="no more on five of five",
        measure=figures.feng_chens,
    ),
    Claim(
        row="feng-table-1-not-linear",
        paper=FENG,
        claim="Table 1: Chen's planner does not apply to networks that are not linear",
        module=f"{PLANNERS}/sublinear.py",
        command=(*TABLE_1[:1], "--only", "chen"),
        against="no figure for ten of ten",
        measure=figures.feng_chen_not_linear,
        verdict=Verdict.NOT,
        why="Algorithm 3 takes any graph that has places to split",
    ),
    Claim(
        row="feng-table-1-time",
        paper=FENG,
        claim="Table 1: Re-forwarding takes 29 to 45% more time",
        module=f"{PLANNERS}/division_tree.py",
        command=TABLE_1,
        against="29 to 45% (40, 35, 31, 30, 29; 40, 36, 40, 37, 39; 42, 39, 43, 45; 35)",
        measure=figures.feng_overheads,
        verdict=Verdict.OTHER,
        why="less on each; by a roofline of the card, without the time of the host",
    ),
    Claim(
        row="feng-table-1-measured",
        paper=FENG,
        claim="Abstract: moderate time, and no other results",
        module="memfit/step/verify.py",
        command=(*TABLE_1, "--measure"),
        against="eager's bits; around 40%",
        measure=figures.feng_measured,
        verdict=Verdict.OTHER,
        why=ON_A_CPU,
    ),
    Claim(
        row="feng-any-network",
        paper=FENG,
        claim="Section 2: applies to any network and their combinations, as GANs and networks of videos",
        module=f"{PLANNERS}/division_tree.py",
        command=("benchmarks/feng_others.py",),
        against="Chen's planners at their least memory; the paper has no figures",
        measure=figures.feng_others,
        verdict=Verdict.OTHER,
        why="on a GAN it ends where Chen's planners end, and on an LSTM above them",
    ),
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
        measure=figures.request_times,
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
        measure=figures.shared_share(CNNS, 0.35, 0.6),
    ),
    Claim(
        row="mxnet-fine-grained",
        paper=NOTE,
        claim="Graphs of small ops take even less",
        module="memfit/packing/portfolio.py",
        command=captured("seq2seq"),
        against="less than half",
        measure=figures.shared_share(("seq2seq",), 0, 0.35),
    ),
    Claim(
        row="mxnet-forward-only",
        paper=NOTE,
        claim="The memory cost script: forward alone takes much less than training",
        module="memfit/commands/estimate.py",
        command=captured(*CNNS),
        against='"extremely low compared to others"',
        measure=figures.forward_only(most=0.25),
    ),
    Claim(
        row="sekiyama-dsa",
        paper=SEKIYAMA,
        claim="Equations 1 to 6: storage allocation as a mixed-integer program",
        module=f"{PACKERS}/mip.py",
        command=tested("test_packing", "test_exact_packers_prove_the_least_height"),
        against="brute force on random blocks",
    ),
    Claim(
        row="sekiyama-figure-1",
        paper=SEKIYAMA,
        claim="Section 3.2, Figure 1: the best-fit heuristic",
        module="memfit/packing/best_fit.py",
        command=tested("test_packing", "test_best_fit_is_the_papers_example"),
        against="the figure's moves, by hand",
    ),
    Claim(
        row="sekiyama-section-4-2",
        paper=SEKIYAMA,
        claim="Sections 4.1, 4.2: one recorded step; then the n-th request gets the n-th address",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_steady_state_serves_everything"),
        against="requests served of all, on a training network",
    ),
    Claim(
        row="sekiyama-interrupt",
        paper=SEKIYAMA,
        claim="Section 4.3: interrupt and resume leave a part out",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_interrupt_and_resume"),
        against="what is served around parts of changing length",
    ),
    Claim(
        row="sekiyama-reoptimization",
        paper=SEKIYAMA,
        claim="Section 4.3: a larger request makes a new layout, a smaller one does not",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_a_larger_request_makes_a_new_layout"),
        against="the count of new layouts",
    ),
    Claim(
        row="sekiyama-settling",
        paper=SEKIYAMA,
        claim="Section 5.3: new layouts become rare as training with sentences proceeds",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_sequences_of_changing_length_settle_without_keys"),
        against="new layouts, early and late",
    ),
    Claim(
        row="sekiyama-profile",
        paper=SEKIYAMA,
        claim="Section 1: a step beyond the device is recorded by keeping memory elsewhere",
        module="memfit/memory/arena/spilling.py",
        command=tested("test_arena_spilling", "test_the_recording_and_the_bits_are_those_of_a_step_with_its_memory"),
        against="the recording and the bits of a step with its memory",
    ),
    Claim(
        row="sekiyama-workspace",
        paper=SEKIYAMA,
        claim="Sections 2, 5.1: workspaces of convolutions are packed too",
        module="memfit/memory/placed_plans.py",
        against="8 MB of workspace a convolution",
        verdict=Verdict.NOT,
        why="the captured steps of these tables have none, as no kernel ran; planned steps have addresses for theirs",
    ),
    Claim(
        row="sekiyama-figure-2a",
        paper=SEKIYAMA,
        claim="Figure 2a: training takes up to 49.5% less memory than with a pool",
        module="memfit/packing/portfolio.py",
        command=captured(*CNNS),
        against="up to 49.5%",
        measure=figures.pool_reduction(CNNS, "training", least=0.495),
        verdict=Verdict.NOT,
        why=f"less on each network; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-2a-most",
        paper=SEKIYAMA,
        claim="Figure 2a: it is the most effective for Inception-ResNet",
        module="memfit/packing/portfolio.py",
        command=captured(*CNNS),
        against="Inception-ResNet",
        measure=figures.most_effective,
        verdict=Verdict.NOT,
        why=f"another network; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-2a-fits",
        paper=SEKIYAMA,
        claim="Figure 2a: Inception-ResNet at batch 64 fits 16 GB, and does not with the pool",
        module="memfit/packing/portfolio.py",
        command=captured("inception_resnet_v2"),
        against="16 GB between the two",
        measure=figures.fits_with_the_arena(gib=16),
        verdict=Verdict.NOT,
        why="both fit by the model, in which kernels take no workspaces",
    ),
    Claim(
        row="sekiyama-figure-2b",
        paper=SEKIYAMA,
        claim="Figure 2b: inference of GoogLeNet and ResNet-50 takes 12.6 and 10.0% less",
        module="memfit/packing/portfolio.py",
        command=captured("googlenet", "resnet50"),
        against="12.6 and 10.0%",
        measure=figures.pool_reduction(("googlenet", "resnet50"), "inference", least=0.0, each=True),
        verdict=Verdict.OTHER,
        why=f"less of the one, more of the other; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-2c",
        paper=SEKIYAMA,
        claim="Figure 2c: the pool grows over mini-batches of sentences to the device's capacity, the arena does not",
        module="memfit/packing/portfolio.py",
        command=GROWTH,
        against="a pool at the capacity of 16 GB",
        measure=figures.growth_over_mini_batches(gib=16),
        verdict=Verdict.OTHER,
        why="predicted, with drawn lengths of sentences; a pool of exact sizes, as the paper does not describe its own",
    ),
    Claim(
        row="sekiyama-figure-2d",
        paper=SEKIYAMA,
        claim="Figure 2d: inference of seq2seq takes 14.6% less",
        module="memfit/packing/portfolio.py",
        command=GROWTH,
        against="14.6%",
        measure=figures.generation,
        verdict=Verdict.NOT,
        why=f"parameters are nearly all of it; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-3a",
        paper=SEKIYAMA,
        claim="Figure 3a: training of CNNs is faster, Inception-ResNet 2.19 times",
        module="memfit/memory/arena/arena.py",
        command=arena(*CNNS),
        against="as fast, or up to 2.19 times as fast",
        measure=figures.arena_times(CNNS, "training"),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; BN-Inception for GoogLeNet",
    ),
    Claim(
        row="sekiyama-figure-3b",
        paper=SEKIYAMA,
        claim="Figure 3b: inference is faster on all CNNs",
        module="memfit/memory/arena/arena.py",
        command=arena(*CNNS),
        against="faster on four of four",
        measure=figures.arena_times(CNNS, "inference"),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; BN-Inception for GoogLeNet",
    ),
    Claim(
        row="sekiyama-wider-batches",
        paper=SEKIYAMA,
        claim="Section 5.2: a larger mini-batch fits the same device",
        module="memfit/packing/portfolio.py",
        command=("benchmarks/arena_growth.py", "widest", "--again"),
        against="64 images of Inception-ResNet in place of 32, in 16 GB",
        measure=figures.wider_batches,
        verdict=Verdict.OTHER,
        why=f"less is gained; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-larger-batch",
        paper=SEKIYAMA,
        claim="Section 5.2: the larger batch that fits trains 3.95 times as many images in a second",
        module="memfit/memory/arena/arena.py",
        against="3.95 times",
        verdict=Verdict.NOT,
        why=NO_GPU_RUN,
    ),
    Claim(
        row="sekiyama-figure-3c",
        paper=SEKIYAMA,
        claim="Figure 3c: training of seq2seq is as fast or faster",
        module="memfit/memory/arena/arena.py",
        command=arena("seq2seq"),
        against="faster at batches of 32, 128 and 256, equal at 64",
        measure=figures.arena_times(("seq2seq",), "training"),
        verdict=Verdict.NOT,
        why=f"slower at a batch of 16, faster at 32 and 64; {ON_A_CPU}, with a key for each pair of lengths",
    ),
    Claim(
        row="sekiyama-figure-3c-no-keys",
        paper=SEKIYAMA,
        claim="Sections 4.3, 5.3: the cost of new layouts is low where lengths change",
        module="memfit/memory/arena/arena.py",
        command=arena("seq2seq"),
        against='"the recomputation cost in the training is low"',
        measure=figures.arena_times(("seq2seq",), "training", keys="unkeyed"),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; few requests are in the arena where steps of all lengths share one layout",
    ),
    Claim(
        row="sekiyama-figure-3d",
        paper=SEKIYAMA,
        claim="Figure 3d: inference of seq2seq takes 23.8% less time",
        module="memfit/memory/arena/arena.py",
        command=arena("seq2seq"),
        against="23.8% less",
        measure=figures.arena_times(("seq2seq",), "inference"),
        verdict=Verdict.NOT,
        why=f"as long, within the spread of the pairs; {ON_A_CPU}",
    ),
    Claim(
        row="sekiyama-optimal",
        paper=SEKIYAMA,
        claim="Section 5.2: the heuristic is optimal where the solver could tell (10,169,344 and 12,202,496 bytes)",
        module="memfit/packing/portfolio.py",
        command=CAPTURED,
        against="two inferences, by CPLEX in an hour",
        measure=figures.at_the_bound,
        verdict=Verdict.OTHER,
        why="packer `auto`, on all steps; other networks' bytes, as kernels are torch's",
    ),
    Claim(
        row="sekiyama-figure-4a",
        paper=SEKIYAMA,
        claim="Figure 4a: the heuristic is quick enough on CNNs",
        module="memfit/packing/portfolio.py",
        command=captured(*CNNS),
        against="the paper's picture; Python",
        measure=figures.solver_times(CNNS, most_seconds=1),
        verdict=Verdict.OTHER,
        why="packer `auto`, which begins with `best_fit`, in compiled code",
    ),
    Claim(
        row="sekiyama-figure-4b",
        paper=SEKIYAMA,
        claim="Figure 4b: for seq2seq the heuristic takes much longer in inference, as 100 words are generated",
        module="memfit/packing/portfolio.py",
        command=GROWTH,
        against="more blocks in inference than in training",
        measure=figures.inference_is_dearer,
        verdict=Verdict.NOT,
        why="layers are unrolled into kernels of single words here, also in training, which has the more blocks",
    ),
    Claim(
        row="dqn-figure-1",
        paper=DQN,
        claim="Figure 1: a variable is copied to the host beside compute, freed, and copied back before its use",
        module="memfit/simulate/simulator.py",
        command=tested("test_simulate", "test_an_offload_overlaps_and_wait_stalls_for_the_rest"),
        against="times computed by hand",
    ),
    Claim(
        row="dqn-figure-2",
        paper=DQN,
        claim="Figures 2, 3: recomputation and copies planned within a limit that the user sets",
        module="memfit/papers/dqn/planner.py",
        command=tested("test_dqn", "test_plans_are_legal_and_within_their_budgets"),
        against="the checker and the simulator, on random graphs",
    ),
    Claim(
        row="dqn-figure-4",
        paper=DQN,
        claim="Section 4.6, Figure 4: after an offload of 1.5 s the agent is at the fifth node",
        module="memfit/papers/dqn/environment.py",
        command=tested("test_dqn", "test_an_offload_takes_the_agent_to_the_next_node_after_its_copy"),
        against="the paper's example",
    ),
    Claim(
        row="dqn-figure-4-limit",
        paper=DQN,
        claim="Sections 4.6, 4.7: at the limit the next malloc waits, and the reward loses 0.5 s",
        module="memfit/papers/dqn/copies.py",
        command=tested("test_dqn", "test_at_the_limit_the_next_malloc_waits_for_the_copy"),
        against="the paper's example",
    ),
    Claim(
        row="dqn-equations-1-to-3",
        paper=DQN,
        claim="Equations 1 to 3: node states, graph state and Q values",
        module="memfit/papers/dqn/network.py",
        command=tested("test_dqn", "test_states_and_q_values_are_those_of_plain_loops"),
        against="the equations in plain loops",
    ),
    Claim(
        row="dqn-equations-4-5",
        paper=DQN,
        claim="Equations 4 and 5: the loss, with a constant y",
        module="memfit/papers/dqn/training.py",
        command=tested("test_dqn", "test_the_loss_is_equation_four_with_a_constant_y"),
        against="the equations",
    ),
    Claim(
        row="dqn-algorithm-1",
        paper=DQN,
        claim="Algorithm 1, section 4.5: episodes of valid actions, one at most for each node",
        module="memfit/papers/dqn/environment.py",
        command=tested("test_dqn", "test_every_episode_keeps_to_the_rules"),
        against="the rules of sections 4.5 to 4.8, on random graphs",
    ),
    Claim(
        row="dqn-transfer",
        paper=DQN,
        claim="Section 4.4.2: a network may be trained on a small graph and tuned on a large one",
        module="memfit/papers/dqn/planner.py",
        command=("benchmarks/dqn_curves.py",),
        against="no figure in the paper",
        measure=figures.transfer,
        verdict=Verdict.NOT,
        why="it goes on on the larger graph; over the seeds it neither helps nor harms",
    ),
    Claim(
        row="dqn-section-4-7",
        paper=DQN,
        claim="Section 4.7: a run that frees big results has roughly the right times",
        module="memfit/step/freed_run.py",
        command=("benchmarks/profile_without_memory.py",),
        against='"roughly correct"',
        measure=figures.freed_run(within=0.15),
        verdict=Verdict.NOT,
        why="on a CPU it takes fewer new pages from the system than eager does; not measured on a GPU",
    ),
    Claim(
        row="dqn-figure-5-vgg",
        paper=DQN,
        claim="Figure 5: on VGG, less overhead than MXNet-memonger, SuperNeurons and TFLMS at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("vgg16", "vgg19", "vgg16_cifar"),
        against="the lowest curve",
        measure=figures.lowest(("vgg16", "vgg19", "vgg16_cifar"), TITAN),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-figure-5-resnet",
        paper=DQN,
        claim="Figure 5: on ResNet, less overhead than the three at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("resnet50", "resnet101", "resnet50_cifar"),
        against="the lowest curve",
        measure=figures.lowest(("resnet50", "resnet101", "resnet50_cifar"), TITAN),
        verdict=Verdict.NOT,
        why="at the tightest budgets it finds no plan in its seconds; elsewhere it is the lowest; simulated",
    ),
    Claim(
        row="dqn-figure-5-unet",
        paper=DQN,
        claim="Figure 5: on U-Net, less overhead than the three at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("unet"),
        against="the lowest curve",
        measure=figures.lowest(("unet",), TITAN),
        verdict=Verdict.NOT,
        why="at the tightest budget it finds no plan in its seconds; elsewhere it is the lowest; simulated",
    ),
    Claim(
        row="dqn-figure-5-lstm",
        paper=DQN,
        claim="Figure 5: on the LSTM, less overhead than TFLMS at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("char_lstm"),
        against="the lowest curve",
        measure=figures.lowest(("char_lstm",), TITAN),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-figure-5-stochastic-depth",
        paper=DQN,
        claim="Figure 5: plans for a ResNet of stochastic depth, which the others do not have",
        module="memfit/papers/dqn/planner.py",
        command=planned("stochastic_depth"),
        against="the only curve",
        measure=figures.lowest(("stochastic_depth",), TITAN),
        verdict=Verdict.NOT,
        why="one draw stands for all, so that the others plan it too; at tight budgets it has no plan or a worse one",
    ),
    Claim(
        row="dqn-figure-5-kmeans",
        paper=DQN,
        claim="Figure 5: plans for k-means, which the others do not have",
        module="memfit/capture/row_chunks.py",
        command=planned("kmeans", more=("auto",)),
        against="the only curve",
        measure=figures.kmeans_planners,
        verdict=Verdict.NOT,
        why="its one large storage is read as soon as it is written; only chunks of rows, `auto`'s, go below the peak",
    ),
    Claim(
        row="dqn-figure-5-h100",
        paper=DQN,
        claim="Figure 5, on a newer machine: less overhead than the three",
        module="memfit/papers/dqn/planner.py",
        command=planned("vgg16", "vgg19", "resnet50", "resnet101", "unet", machine=H100),
        against="not in the paper, whose machine is a GTX 1080 Ti",
        measure=figures.lowest(("vgg16", "vgg19", "resnet50", "resnet101", "unet"), H100),
        verdict=Verdict.NOT,
        why="compute is faster there, so that copies hide less, and `sublinear` is better at tight budgets; simulated",
    ),
    Claim(
        row="dqn-utilization",
        paper=DQN,
        claim="Section 5.1: the GPU works for more of the time than with SuperNeurons",
        module="memfit/papers/dqn/planner.py",
        command=planned(),
        against="much higher; no figure in the paper",
        measure=figures.utilization,
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-lstm-others",
        paper=DQN,
        claim="Section 5.1: of the four, only TFLMS and this planner work on the LSTM",
        module=f"{PLANNERS}/superneurons.py",
        command=planned("char_lstm"),
        against="two of four",
        measure=figures.lstm_planners,
        verdict=Verdict.NOT,
        why="the planners here take any graph of ops; the paper's limits are those of the systems' programs",
    ),
    Claim(
        row="dqn-unet-harder",
        paper=DQN,
        claim="Section 5.2: U-Net has more overhead than ResNet and VGG",
        module="memfit/papers/dqn/planner.py",
        command=planned("unet", "resnet50", "vgg16"),
        against="more than both",
        measure=figures.harder("unet", ("resnet50", "vgg16")),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-lstm-harder",
        paper=DQN,
        claim="Section 5.2: the LSTM has more overhead than ResNet and VGG",
        module="memfit/papers/dqn/planner.py",
        command=planned("char_lstm", "resnet50", "vgg16"),
        against="more than both",
        measure=figures.harder("char_lstm", ("resnet50", "vgg16")),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-stochastic-depth-harder",
        paper=DQN,
        claim="Section 5.2: stochastic depth has more overhead than all others",
        module="memfit/papers/dqn/planner.py",
        command=planned("stochastic_depth", "resnet50", "vgg16", "unet", "char_lstm"),
        against="more than all",
        measure=figures.harder("stochastic_depth", ("resnet50", "vgg16", "unet", "char_lstm")),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-accuracy",
        paper=DQN,
        claim="Abstract: swapping and recomputation leave the results as they are",
        module="memfit/step/verify.py",
        command=tested("test_offload_step", "test_a_plan_that_offloads_gives_the_same_bits"),
        against="eager's bits",
    ),
)
"""All rows, by paper, in the order of the paper."""
