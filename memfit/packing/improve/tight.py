"""Stage of `auto` for many blocks: the tight blocks are packed alone, then the others around them.

A block is tight if nearly as many bytes as the lower bound are live somewhere in its live range. Few blocks are, and
they decide the height, so a search over them alone tries many more layouts in the same time. Then the other blocks
take the lowest free places. Those that end too high are few, and ejection finds places for them.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from memfit.packing.blocks import Blocks, PackingProblem
from memfit.packing.fitting import fit_in_order, make_shelf
from memfit.packing.improve.ejection import Ejections, ejection_steps
from memfit.packing.improve.local_search import local_steps
from memfit.packing.improve.searching import Best, Offsets, Steps
from memfit.packing.improve.starts import first_order, fixed_starts
from memfit.packing.sections import Sections, most_live_bytes, sections_of

_TIGHT_SHARE = 0.9  # of the lower bound, live in some section of a tight block; 0.8 and 0.95 gave higher layouts
_MOST_TIGHT = 0.5  # of all blocks
_HEAVIER = 4.0  # tight blocks are harder to eject by this factor: they have less room elsewhere
_SHARES = (0.5, 0.25, 0.0)  # of the gap between the best layout and that of the tight blocks: the caps to get below
_PHASE_WORK = 11_000  # for each block, on the tight ones before the others are placed; doubled each time
_AROUND_WORK = 2000  # for each block, to place the others around them


def tight_steps(problem: PackingProblem, sections: Sections, best: Best) -> Steps:
    """Search over the tight blocks in longer and longer phases; place the others around each lower layout.

    Args:
        problem: its blocks and its seed.
        sections: those of the blocks.
        best: gets each lower layout.
    """
    blocks = problem.blocks
    tight = np.flatnonzero(most_live_bytes(blocks, sections) > _TIGHT_SHARE * blocks.lower_bound_bytes)
    if len(tight) > _MOST_TIGHT * len(blocks):
        return  # a search over all of them does the same
    part = dataclasses.replace(problem, blocks=blocks.part(tight))
    tight_best = Best(part)
    search = _search(part, tight_best)
    order = first_order(blocks, sections, before=tight)
    ejections, height = None, tight_best.height_bytes
    for phase in itertools.count():
        yield from _some(search, (_PHASE_WORK << phase) * len(blocks))
        if tight_best.height_bytes < min(height, best.height_bytes):
            height = tight_best.height_bytes
            offsets = _around(blocks, sections, order, tight, tight_best.offsets_bytes)
            best.offer(offsets, "first_fit")
            if ejections is None:
                ejections = Ejections(problem, sections, best)
                ejections.make_heavier(tight, _HEAVIER)
            yield _AROUND_WORK * len(blocks)
            for share in _SHARES:
                if best.height_bytes > height:
                    cap = height + int(share * (best.height_bytes - height))
                    yield from ejections.attempt(cap, offsets)
                    offsets = best.offsets_bytes if best.height_bytes <= cap else offsets
        if tight_best.proven:
            return


def _search(problem: PackingProblem, best: Best) -> Steps:
    """First fit from each fixed start, then ejection."""
    sections = sections_of(problem.blocks)
    yield from local_steps(problem, sections, best, rounds=len(fixed_starts(problem.blocks, sections)))
    yield from ejection_steps(problem, sections, best)


def _some(steps: Steps, work: int) -> Steps:
    while work > 0:
        done = next(steps, None)
        if done is None:
            return
        work -= done
        yield done


def _around(blocks: Blocks, sections: Sections, order: Offsets, tight: Offsets, offsets_bytes: Offsets) -> Offsets:
    fixed = np.full(len(blocks), -1, np.int64)
    fixed[tight] = offsets_bytes
    return fit_in_order(make_shelf(blocks, sections, fixed), order)
