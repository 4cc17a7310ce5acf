"""Dense cuts of layouts: they can be packed at their lower bound, and `auto` does so."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cut_up import cut_up

from memfit.packing import Blocks, PackingProblem, check_layout, make_packer
from memfit.packing.blocks import make_layout
from memfit.packing.trace_file import read_trace

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the cuts are those of the benchmark

from _dense_cuts import KINDS, LEAST_BLOCKS, MOST_BLOCKS, Pieces, dense_cut, pieces_of

DATA = Path(__file__).parent / "data" / "packing"
NO_TIME_LIMIT = 1e9


@cache
def layout_of(name: str) -> Pieces:
    blocks = read_trace(DATA / f"{name}.csv")
    layout = make_packer("auto", work=20_000_000_000).pack(
        PackingProblem(blocks=blocks, time_limit_seconds=NO_TIME_LIMIT)
    )
    assert layout.proven
    return pieces_of(blocks, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_has_a_layout_as_high_as_its_lower_bound(kind: str) -> None:
    made = dense_cut(layout_of("K.1048576"), kind, seed=3)
    assert made is not None
    cut, height = made
    blocks = cut.blocks()
    layout = make_layout(blocks, cut.lows, packer="cut")
    check_layout(blocks, layout)
    assert layout.height_bytes == height == blocks.lower_bound_bytes
    assert LEAST_BLOCKS <= len(blocks) <= MOST_BLOCKS
    again = dense_cut(layout_of("K.1048576"), kind, seed=3)
    assert again is not None
    assert all(np.array_equal(one, other) for one, other in zip(cut, again[0], strict=True))


@pytest.mark.parametrize(
    ("name", "kind", "seed"),
    [(name, kind, seed) for name in ("K.1048576", "resnet50") for kind in KINDS for seed in (0, 1)],
)
def test_cuts_are_packed_at_their_lower_bound(name: str, kind: str, seed: int) -> None:
    made = dense_cut(layout_of(name), kind, seed)
    if made is None:
        pytest.skip("the layout has no such cut")
    blocks = made[0].blocks()
    layout = make_packer("auto", work=4_000_000_000).pack(
        PackingProblem(blocks=blocks, time_limit_seconds=NO_TIME_LIMIT)
    )
    check_layout(blocks, layout)
    assert layout.ratio == 1.0


def test_traces_one_after_the_other_are_packed_each_for_itself() -> None:
    traces = [read_trace(DATA / f"{name}.csv") for name in ("E.1048576", "K.1048576", "E.1048576")]
    begins = np.cumsum([0, *(int(each.ends.max()) for each in traces)])[:-1]
    blocks = Blocks(
        ids=np.arange(sum(map(len, traces))),
        sizes_bytes=np.concatenate([each.sizes_bytes for each in traces]),
        starts=np.concatenate([each.starts + begin for each, begin in zip(traces, begins, strict=True)]),
        ends=np.concatenate([each.ends + begin for each, begin in zip(traces, begins, strict=True)]),
    )
    packer = make_packer("auto", work=6_000_000_000)
    layout = packer.pack(PackingProblem(blocks=blocks, time_limit_seconds=NO_TIME_LIMIT))
    check_layout(blocks, layout)
    assert layout.ratio == 1.0


def test_a_search_reaches_the_same_twice_on_two_cores() -> None:
    blocks = cut_up(150, 60, 1 << 16, 5)
    problem = PackingProblem(blocks=blocks, time_limit_seconds=NO_TIME_LIMIT, seed=2)
    layouts = [make_packer("exact", nodes=40_000).pack(problem) for _ in range(2)]
    assert np.array_equal(layouts[0].offsets_bytes, layouts[1].offsets_bytes)


@pytest.mark.parametrize("seed", range(12))
def test_what_leaves_no_gap_is_put_together(seed: int) -> None:
    blocks = cut_up(60, 40, 1 << 12, seed)
    layout = make_packer("exact", nodes=400_000).pack(PackingProblem(blocks=blocks, time_limit_seconds=NO_TIME_LIMIT))
    check_layout(blocks, layout)
    assert layout.ratio == 1.0
