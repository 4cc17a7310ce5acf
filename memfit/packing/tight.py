"""Part of `auto` for many blocks: those that meet the tightest moments are packed apart, the others around them.

What makes a layout too high are the moments at which nearly as much is live as at the worst. Few blocks meet them, so
that a search over these alone tries much more in the same time. Then the others take the lowest places that are free;
those that end up too high are few, have room, and find it by ejection.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from memfit.packing.blocks import Blocks, PackingProblem
from memfit.packing.ejection import Ejections, ejection_steps
from memfit.packing.fitting import fit_in_order, make_shelf
from memfit.packing.local_search import local_steps
from memfit.packing.searching import Best, Offsets, Steps
from memfit.packing.sections import Sections, most_live_bytes, sections_of
from memfit.packing.starts import first_start, fixed_starts

_TIGHT_SHARE = 0.9  # of the lower bound: so much is live at some moment of a tight block; 0.8 and 0.95 gave more height
_MOST_TIGHT = 0.5  # of all blocks
_HEAVIER = 4.0  # tight blocks are harder to eject by this factor, as they have less room elsewhere
_SHARES = (0.5, 0.25, 0.0)  # of the gap between the best layout and that of the tight blocks: the caps to get below
_PHASE_WORK = 11000  # for each block, on the tight ones before the others come; doubled each time
_AROUND_WORK = 2000  # for each block, to put the others around


def tight_steps(problem: PackingProblem, sections: Sections, best: Best) -> Steps:
    """Search over the tight blocks, and put the others around them each time that it got lower; in longer and longer
    phases."""
    blocks = problem.blocks
    tight = np.flatnonzero(most_live_bytes(blocks, sections) > _TIGHT_SHARE * blocks.lower_bound_bytes)
    if len(tight) > _MOST_TIGHT * len(blocks):
        return  # a search over all of them does the same
    part = dataclasses.replace(problem, blocks=_part_of(blocks, tight))
    tight_best = Best(part)
    search = _search(part, tight_best)
    order = _order(blocks, sections, tight)
    ejections, height = None, tight_best.height_bytes
    for phase in itertools.count():
        yield from _some(search, (_PHASE_WORK << phase) * len(blocks))
        if tight_best.height_bytes < min(height, best.height_bytes):
            height = tight_best.height_bytes
            offsets = _around(blocks, sections, order, tight, tight_best.offsets_bytes)
            best.offer(offsets, int((offsets + blocks.sizes_bytes).max()), "first_fit")
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


def _part_of(blocks: Blocks, chosen: Offsets) -> Blocks:
    return Blocks(
        ids=chosen, sizes_bytes=blocks.sizes_bytes[chosen], starts=blocks.starts[chosen], ends=blocks.ends[chosen]
    )


def _search(problem: PackingProblem, best: Best) -> Steps:
    """First fit from each fixed start, and ejection then."""
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


def _order(blocks: Blocks, sections: Sections, tight: Offsets) -> Offsets:
    """Return the tight blocks first, then the others as first fit likes them."""
    weights = first_start(blocks, sections)
    weights[tight] = np.inf
    return np.argsort(-weights, kind="stable")


def _around(blocks: Blocks, sections: Sections, order: Offsets, tight: Offsets, offsets_bytes: Offsets) -> Offsets:
    fixed = np.full(len(blocks), -1, np.int64)
    fixed[tight] = offsets_bytes
    return fit_in_order(make_shelf(blocks.sizes_bytes, sections.firsts, sections.lasts, fixed), order)
