"""The arrays of one search of `exact`: blocks, sections, nodes, what is taken back, and rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.parts import RULES, Parts

_BLOCK = np.dtype(
    [
        ("size", np.int64),
        ("least", np.int64),  # the top of what is placed below it
        ("rise", np.int64),  # the least offset it can take: `least`, or more if it is excluded from there
        ("offset", np.int64),
        ("first", np.int32),
        ("last", np.int32),
        ("placed", np.int32),
    ]
)
_SECTION = np.dtype(
    [
        ("left", np.int64),  # bytes of the blocks left in the section
        ("crossing", np.int64),  # blocks left that cross the border to the section before
        ("next", np.int64),  # the least offset of any remaining block above the level; scratch
        ("ready", np.int64),  # how many can lie at the level; scratch
        ("support", np.int64),  # the least top that any remaining block can have; scratch
    ]
)
# A frame is a node, which tries blocks one after the other, or a list of parts, which are searched one after the other.
_FRAME = np.dtype(
    [
        ("level", np.int64),  # where the node puts a block
        ("undos", np.int64),  # how many changes there were before this frame
        ("begin", np.int32),  # its blocks are `pool[begin:end]`
        ("end", np.int32),
        ("low", np.int32),  # in the sections `[low, high)`
        ("high", np.int32),
        ("section", np.int32),  # the one that the node has to cover, or -1: its block may be excluded
        ("number", np.int32),  # the block tried last, or -1
        ("is_node", np.int32),  # 0 for a list of parts
    ]
)
_UNDO = np.dtype([("least", np.int64), ("rise", np.int64), ("block", np.int64)])
_STATE = np.dtype(
    [
        ("depth", np.int64),  # frames in use
        ("undos", np.int64),  # changes in `undo`
        ("capacity", np.int64),
        ("nodes", np.int64),  # visited since `start`
    ]
)
_RULES = np.dtype([(name, np.bool_) for name in RULES])


class Tree(NamedTuple):
    """All arrays of one search; block numbers are ranks in its order."""

    blocks: NDArray[Any]
    sections: NDArray[Any]
    frames: NDArray[Any]
    pool: NDArray[np.int32]
    undo: NDArray[Any]
    state: NDArray[Any]
    rules: NDArray[Any]


def make_tree(sizes: NDArray[np.int64], firsts: NDArray[np.int32], lasts: NDArray[np.int32], parts: Parts) -> Tree:
    """Return a tree over blocks in the order of these arrays.

    Args:
        sizes: int64[n], in units of the capacity.
        firsts: int32[n], the first section of each block.
        lasts: int32[n], the section after its last one.
        parts: which rules are switched on.
    """
    count = len(sizes)
    blocks = np.zeros(count, _BLOCK)
    blocks["size"], blocks["first"], blocks["last"] = sizes, firsts, lasts
    rules = np.zeros(1, _RULES)
    for name in RULES:
        rules[name] = getattr(parts, name)
    return Tree(
        blocks=blocks,
        sections=np.zeros(int(lasts.max()) + 1, _SECTION),
        frames=np.zeros(2 * count + 4, _FRAME),
        pool=np.zeros((count + 2) * (count + 2), np.int32),
        undo=np.zeros((count + 1) * (count + 2), _UNDO),
        state=np.zeros(1, _STATE),
        rules=rules,
    )
