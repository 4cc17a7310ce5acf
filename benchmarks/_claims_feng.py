"""The claims of Feng and Huang 2018, and what the stored results say of each."""

from __future__ import annotations

from _claim import (
    FENG,
    MB,
    ON_A_CPU,
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

LINEAR = ("alexnet", "vgg11", "vgg13", "vgg16", "vgg19")
TABLE_1 = ("benchmarks/feng_table1.py", "--again")


def feng_others(results: Results) -> Found:
    """Sections 1 and 2: the division tree's least memory on networks that are no classifiers."""
    networks = only(results, "feng_others")["networks"]
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
        text = f"{span(cuts, '.0%')}; the paper's or more on {as_much} of {len(cuts)}"
        return Found(text=text, holds=as_much == len(cuts))

    return measure


def feng_regular(within: float) -> Measure:
    """Table 1: the memory of regular training, beside the paper's."""

    def measure(results: Results) -> Found:
        apart = [row["regular"]["bytes"] / MB / row["paper"]["regular"] - 1 for row in _feng(results).values()]
        return Found(text=f"{span(apart, '+.0%')} against the paper's MB", holds=max(map(abs, apart)) <= within)

    return measure


def feng_overheads(results: Results) -> Found:
    """Table 1: the time overhead of Re-forwarding; it holds if no network is slower than in the paper."""
    rows = _feng(results).values()
    ours = [row["re_forwarding"]["overhead"] for row in rows]
    papers = [row["paper"]["re_forwarding_seconds"] / row["paper"]["regular_seconds"] - 1 for row in rows]
    holds = all(mine <= other for mine, other in zip(ours, papers, strict=True))
    return Found(text=span(ours, ".0%"), holds=holds)


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
    text = f"`sublinear` plans {planned} of {len(rows)}, with {span(over, '+.0%')} memory against Re-forwarding"
    return Found(text=text, holds=planned == 0)


def feng_measured(results: Results) -> Found:
    """Table 1 at small batches on a CPU: bits and time."""
    rows = [row["measured"]["re_forwarding"] for row in _feng(results).values()]
    same = sum(row["bitwise_equal"] for row in rows)
    over = [row["overhead"] for row in rows]
    return Found(text=f"eager's bits on {same} of {len(rows)}, {span(over, '+.0%')} time", holds=same == len(rows))


def _feng(results: Results) -> dict[str, Payload]:
    return only(results, "feng_table1")["networks"]


CLAIMS: tuple[Claim, ...] = (
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
        measure=feng_cuts(linear=True),
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
        measure=feng_cuts(linear=False),
    ),
    Claim(
        row="feng-table-1-regular",
        paper=FENG,
        claim="Table 1: the memory of regular training, the difference of two batches",
        module="memfit/simulate/simulator.py",
        command=TABLE_1,
        against="the column, by network",
        measure=feng_regular(within=0.1),
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
        measure=feng_chens,
    ),
    Claim(
        row="feng-table-1-not-linear",
        paper=FENG,
        claim="Table 1: Chen's planner does not apply to networks that are not linear",
        module=f"{PLANNERS}/sublinear.py",
        command=(*TABLE_1[:1], "--only", "chen"),
        against="no figure for ten of ten",
        measure=feng_chen_not_linear,
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
        measure=feng_overheads,
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
        measure=feng_measured,
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
        measure=feng_others,
        verdict=Verdict.OTHER,
        why="on a GAN it ends where Chen's planners end, and on an LSTM above them",
    ),
)
