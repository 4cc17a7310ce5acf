"""The arrays of one search of `exact`: blocks, sections, placements, what is taken back, and rules."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.parts import RULES, Parts
from memfit.system.records import Integers, Table, record

_UNDOS = 256  # for each block and each section: a search that needs more room gives up
_BLOCK = record("size floor rise offset support entry step", short="first last rank placed excluded open place")
_SECTION = record("left rise support head step", short="count ready changed")
_PLACEMENT = record("undos", short="block")
_UNDO = record("first second third", short="kind number")
_STATE = record("depth undos left excluded changed step capacity nodes most")
_RULES = record(flags=" ".join(RULES))


class Tree(NamedTuple):
    """All arrays of one search. `live` and `left` are sets: their members stand first, so that undoing is counting.

    Attributes:
        blocks: record[blocks]: `floor` is the top of what is placed below the block; `rise`, the least offset that it
            can take, is more if it is `excluded` from there; `support` is the least top that an excluded block can lie
            on, and `open` says that it is being looked for (scratch); `rank` is its place in the order of the search,
            `place` in `left`; `entry` is the place in `places` of its first section; `step` is that of the search in
            which it was last put into `undo`.
        sections: record[sections]: `left` bytes of the blocks that are left; `rise`, the least offset that any of them
            can take, and `ready`, how many of them can lie there; `support`, the least top that any of them has if it
            lies on its floor; `live[head:]` are its blocks, the `count` left ones first; `step` as of a block;
            `changed`, whether it is in `changed`.
        placements: record[blocks + 1]: the block, and how many changes there were before it.
        undo: record[changes]: what a block or a section (`number`) had before.
        live: int32[entries], the blocks of each section.
        places: int64[entries], where each block stands in the lists of its sections.
        left: int32[blocks], those that are not placed.
        excluded, changed: the blocks and the sections that are.
        state: one record: how many blocks are placed (`depth`), left, excluded, and were placed at once (`most`); the
            numbers of undos and changed sections; `step` counts placements and exclusions; `nodes` since `start`.
        rules: one record: which rules are switched on.
    """

    blocks: Table
    sections: Table
    placements: Table
    undo: Table
    live: NDArray[np.int32]
    places: Integers
    left: NDArray[np.int32]
    excluded: NDArray[np.int32]
    changed: NDArray[np.int32]
    state: Table
    rules: Table


def make_tree(sizes: Integers, firsts: NDArray[np.int32], lasts: NDArray[np.int32], parts: Parts) -> Tree:
    """Return a tree over blocks, which `start` can use again and again.

    Args:
        sizes: int64[n], in units of the capacity.
        firsts: int32[n], the first section of each block.
        lasts: int32[n], the section after its last one.
        parts: which rules are switched on.
    """
    count, section_count, lengths = len(sizes), int(lasts.max()), (lasts - firsts).astype(np.int64)
    blocks, sections = np.zeros(count, _BLOCK), np.zeros(section_count, _SECTION)
    blocks["size"], blocks["first"], blocks["last"] = sizes, firsts, lasts
    blocks["entry"] = np.cumsum(lengths) - lengths
    begins = np.bincount(firsts, minlength=section_count + 1) - np.bincount(lasts, minlength=section_count + 1)
    live = np.cumsum(begins[:section_count])
    sections["head"] = np.cumsum(live) - live
    rules = np.zeros(1, _RULES)
    for name in RULES:
        rules[name] = getattr(parts, name)
    return Tree(
        blocks=blocks,
        sections=sections,
        placements=np.zeros(count + 1, _PLACEMENT),
        undo=np.zeros(_UNDOS * (count + section_count), _UNDO),
        live=np.zeros(int(lengths.sum()), np.int32),
        places=np.zeros(int(lengths.sum()), np.int64),
        left=np.zeros(count, np.int32),
        excluded=np.zeros(count, np.int32),
        changed=np.zeros(section_count, np.int32),
        state=np.zeros(1, _STATE),
        rules=rules,
    )
