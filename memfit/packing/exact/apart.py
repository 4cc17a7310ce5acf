"""Parts of a trace that are apart in time: each is decided by itself, the one that is highest so far before the others.

Together they would have to be solved in one search, and a search that restarts would have to be lucky in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks, PackingProblem
from memfit.packing.improve.searching import Best, Steps


def parts_in_time(blocks: Blocks) -> list[NDArray[np.intp]]:
    """Return the blocks of each part, by place; no block is live in two of them.

    >>> from memfit.packing.blocks import Block
    >>> ranges = [(0, 2), (4, 6), (1, 3), (3, 4), (5, 7)]
    >>> blocks = Blocks.of(Block(id=i, bytes=1, start=s, end=e) for i, (s, e) in enumerate(ranges))
    >>> [part.tolist() for part in parts_in_time(blocks)]
    [[0, 2], [3], [1, 4]]
    """
    order = np.argsort(blocks.starts, kind="stable")
    ended = np.maximum.accumulate(blocks.ends[order])
    return np.split(order, np.flatnonzero(blocks.starts[order][1:] >= ended[:-1]) + 1)


def steps_apart(
    problem: PackingProblem,
    best: Best,
    parts: list[NDArray[np.intp]],
    steps_of: Callable[[PackingProblem, Best], Steps],
) -> Steps:
    """Search the highest part until another one is higher, or it is proven: then no layout of all parts is lower.

    Args:
        problem: all blocks.
        best: gets each lower layout and each higher bound.
        parts: from `parts_in_time`.
        steps_of: returns the search of a part, which offers its layouts to the part's best; its first step offers one.
    """
    blocks = problem.blocks
    problems = [replace(problem, blocks=blocks.part(part)) for part in parts]
    bests = [Best(each) for each in problems]
    searches = [steps_of(each, mine) for each, mine in zip(problems, bests, strict=True)]
    offsets = np.zeros(len(blocks), np.int64)
    while not best.proven:
        turn = max(range(len(parts)), key=lambda number: (bests[number].height_bytes, -number))
        before = bests[turn].height_bytes
        done = next(searches[turn], None)
        best.bound_bytes = max(best.bound_bytes, bests[turn].bound_bytes)
        if bests[turn].height_bytes < before:
            offsets[parts[turn]] = bests[turn].offsets_bytes
            if all(len(each.offsets_bytes) for each in bests):
                best.offer(offsets, bests[turn].packer)
        if done is not None:
            yield done
        elif not bests[turn].proven:
            return
