"""The arrays of one search of `exact`: blocks, sections, placements, what is taken back, and rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.parts import RULES, Parts

_UNDOS = 256  # for each block and each section: a search that needs more room gives up
_BLOCK = np.dtype(
    [
        ("size", np.int64),
        ("floor", np.int64),  # the top of what is placed below it
        ("rise", np.int64),  # the least offset that it can take: its floor, or more if it is excluded from there
        ("offset", np.int64),
        ("support", np.int64),  # the least top that an excluded block can lie on; scratch
        ("first", np.int32),
        ("last", np.int32),
        ("rank", np.int32),  # in the order of the search
        ("placed", np.int32),
        ("excluded", np.int32),  # whether it is in `Tree.excluded`
        ("open", np.int32),  # an excluded block whose support is being looked for; scratch
        ("place", np.int32),  # where it stands in `Tree.left`
        ("entry", np.int64),  # where the place in the list of its first section stands in `Tree.places`
        ("step", np.int64),  # of the search in which the block was last put into `Tree.undo`
    ]
)
_SECTION = np.dtype(
    [
        ("left", np.int64),  # bytes of the blocks left in the section
        ("rise", np.int64),  # the least offset that any of them can take
        ("support", np.int64),  # the least top that any of them has if it lies on its floor
        ("head", np.int64),  # the section's blocks are `Tree.live[head:]`, those left first
        ("step", np.int64),  # as of a block
        ("count", np.int32),  # blocks left
        ("ready", np.int32),  # of which so many can lie at `rise`
        ("changed", np.int32),  # whether it is in `Tree.changed`
    ]
)
_PLACEMENT = np.dtype(
    [
        ("undos", np.int64),  # how many changes there were before it
        ("block", np.int32),
    ]
)
_UNDO = np.dtype(
    [
        ("kind", np.int32),
        ("number", np.int32),  # of the block or the section
        ("first", np.int64),  # what it had before
        ("second", np.int64),
        ("third", np.int64),
    ]
)
_STATE = np.dtype(
    [
        ("depth", np.int64),  # blocks placed
        ("undos", np.int64),  # changes in `Tree.undo`
        ("left", np.int64),  # blocks left
        ("excluded", np.int64),  # blocks in `Tree.excluded`
        ("changed", np.int64),  # sections in `Tree.changed`
        ("step", np.int64),  # counts placements and exclusions
        ("capacity", np.int64),
        ("nodes", np.int64),  # visited since `start`
        ("most", np.int64),  # blocks that were placed at once
    ]
)
_RULES = np.dtype([(name, np.bool_) for name in RULES])


class Tree(NamedTuple):
    """All arrays of one search. `live` and `left` are sets: their members stand first, so that undoing is counting."""

    blocks: NDArray[Any]
    sections: NDArray[Any]
    placements: NDArray[Any]
    undo: NDArray[Any]
    live: NDArray[np.int32]
    places: NDArray[np.int64]
    left: NDArray[np.int32]
    excluded: NDArray[np.int32]
    changed: NDArray[np.int32]
    state: NDArray[Any]
    rules: NDArray[Any]


def make_tree(sizes: NDArray[np.int64], firsts: NDArray[np.int32], lasts: NDArray[np.int32], parts: Parts) -> Tree:
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
