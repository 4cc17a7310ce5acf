"""Parts of the packers that are switched off: the layouts stay valid, and what is proven without a rule stays true."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from cut_up import cut_up
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InvalidOptionError
from memfit.packing import Block, Blocks, Layout, PackingProblem, check_layout, make_packer
from memfit.packing.parts import NAMES, RULES, STAGES, Parts, parts_without
from memfit.packing.trace_file import read_trace

WORK = 3_000_000
TRACES = Path(__file__).parent / "data" / "packing"


def dense_blocks(seed: int, count: int = 40) -> Blocks:
    """Return blocks that leave few gaps: rectangles of few sizes, many of them alike."""
    draws = np.random.default_rng(seed)
    starts = draws.integers(0, 20, count)
    return Blocks(
        ids=np.arange(count),
        sizes_bytes=draws.integers(1, 9, count),
        starts=starts,
        ends=starts + draws.integers(1, 9, count),
    )


def packed(blocks: Blocks, name: str, **options: object) -> Layout:
    layout = make_packer(name, **options).pack(PackingProblem(blocks=blocks, time_limit_seconds=60))
    check_layout(blocks, layout)
    return layout


def least_height(blocks: Blocks) -> int:
    """Return the least height by trying every order: some order of first fit gives an optimal layout."""
    best = int(blocks.sizes_bytes.sum())
    rows = list(blocks)
    for order in itertools.permutations(range(len(rows))):
        tops: dict[int, int] = {}
        offsets: dict[int, int] = {}
        for i in order:
            met = [j for j in offsets if rows[i].start < rows[j].end and rows[j].start < rows[i].end]
            at = 0
            for j in sorted(met, key=offsets.__getitem__):
                if offsets[j] >= at + rows[i].bytes:
                    break
                at = max(at, tops[j])
            offsets[i], tops[i] = at, at + rows[i].bytes
        best = min(best, max(tops.values()))
    return best


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(1, 4)), min_size=2, max_size=6),
    rule=st.sampled_from(["", *RULES]),
)
def test_exact_proves_the_least_height_without_any_one_rule(rows: list[tuple[int, int, int]], rule: str) -> None:
    blocks = Blocks.of(Block(id=i, bytes=b, start=s, end=s + n) for i, (b, s, n) in enumerate(rows))
    layout = packed(blocks, "exact", without=rule)
    assert (layout.height_bytes, layout.proven) == (least_height(blocks), True)


def test_exact_proves_the_least_height_without_all_rules() -> None:
    rows = [(3, 0, 2), (2, 1, 3), (3, 2, 4), (1, 0, 4), (2, 3, 5), (2, 4, 6)]
    blocks = Blocks.of(Block(id=i, bytes=b, start=s, end=e) for i, (b, s, e) in enumerate(rows))
    layout = packed(blocks, "exact", without=",".join(RULES))
    assert (layout.height_bytes, layout.proven) == (least_height(blocks), True)


@pytest.mark.parametrize("part", NAMES)
def test_auto_packs_without_any_one_part(part: str) -> None:
    blocks = dense_blocks(seed=1)
    assert packed(blocks, "auto", without=part, work=WORK).height_bytes >= blocks.lower_bound_bytes


def test_auto_without_stages_is_first_fit_by_its_first_start() -> None:
    blocks = dense_blocks(seed=2)
    alone = packed(blocks, "auto", without=",".join(STAGES), work=100 * WORK)
    assert alone.height_bytes >= packed(blocks, "auto", work=WORK).height_bytes


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_changes_the_search(rule: str) -> None:
    """By equal nodes, some layout is another one."""

    def offsets(blocks: Blocks, without: str) -> list[int]:
        return packed(blocks, "exact", nodes=20_000, without=without).offsets_bytes.tolist()

    instances = (
        cut_up(100, 24, 60, 0),
        cut_up(150, 40, 100, 0),
        *(read_trace(TRACES / f"{name}.1048576.csv") for name in "ACEK"),
    )
    assert any(offsets(blocks, rule) != offsets(blocks, "") for blocks in instances)


def test_equal_work_gives_the_same_layout() -> None:
    blocks = dense_blocks(seed=4, count=120)
    layouts = [packed(blocks, "auto", work=WORK, without="flush") for _ in range(2)]
    assert np.array_equal(layouts[0].offsets_bytes, layouts[1].offsets_bytes)


def test_an_unknown_part_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidOptionError, match="packer 'auto' has no part 'boats'; its parts: best_fit, exact,"):
        make_packer("auto", without="flush,boats")
    with pytest.raises(InvalidOptionError, match="packer 'exact' has no part 'ejection'; its parts: section_bound,"):
        make_packer("exact", without="ejection")
    with pytest.raises(InvalidOptionError, match="auto has work -1"):
        make_packer("auto", work=-1)


def test_names_are_read_with_spaces() -> None:
    assert parts_without("auto", " ejection , flush,") == Parts(ejection=False, flush=False)
