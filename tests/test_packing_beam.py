"""The beam of `auto`: layouts grown from below, of blocks that leave hardly a gap."""

from __future__ import annotations

import itertools

import numpy as np
from cut_up import cut_up
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.packing import PackingProblem, check_layout
from memfit.packing.blocks import make_layout
from memfit.packing.improve.beam import beam_steps
from memfit.packing.improve.searching import Best
from memfit.packing.sections import sections_of


def test_a_beam_puts_together_what_leaves_no_gap() -> None:
    """Counted in layers, so that a busy machine gives the same."""
    blocks = cut_up(60, 100, 1 << 12, 1)
    problem = PackingProblem(blocks=blocks)
    best, sections = Best(problem), sections_of(blocks)
    best.offer(np.cumsum(blocks.sizes_bytes) - blocks.sizes_bytes, "apart")
    for _ in itertools.islice(beam_steps(problem, sections, best), 20_000):
        pass
    layout = make_layout(blocks, best.offsets_bytes, packer=best.packer)
    check_layout(blocks, layout)
    assert (layout.packer, layout.ratio) == ("beam", 1.0)


@settings(deadline=None, max_examples=20)
@given(count=st.integers(2, 25), seed=st.integers(0, 1 << 20), height=st.integers(5, 40))
def test_a_beam_only_offers_layouts(count: int, seed: int, height: int) -> None:
    blocks = cut_up(count, 6, height, seed)
    problem = PackingProblem(blocks=blocks, seed=seed)
    best, sections = Best(problem), sections_of(blocks)
    best.offer(np.cumsum(blocks.sizes_bytes) - blocks.sizes_bytes, "apart")
    heights = [best.height_bytes]
    for _ in itertools.islice(beam_steps(problem, sections, best), 200):
        if best.height_bytes != heights[-1]:
            check_layout(blocks, make_layout(blocks, best.offsets_bytes, packer=best.packer))
            heights.append(best.height_bytes)
    assert heights == sorted(heights, reverse=True)
    assert len(blocks) < 5 or heights[-1] < heights[0] or best.proven
