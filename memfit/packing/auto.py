"""Packer `auto`: a portfolio that answers at once, and improves until the lower bound or the time limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.exact import exact_steps
from memfit.packing.first_fit import ORDERS, measure
from memfit.packing.fitting import fit_in_order, shelf_of
from memfit.packing.local_search import local_steps
from memfit.packing.searching import Best, Steps, search
from memfit.packing.sections import Sections, sections_of

_QUICK_WORK = 16000  # for each block: more than it takes, so that the searches have their turns between
_FEW_BLOCKS, _RARELY = 600, 8  # of so few blocks exact nearly always finds more than local search


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Answer with the quick packers, then improve: `exact` and `local_search` in turns, which share what they find.

    The answer is never worse than that of the parts that have had their turn; it stops at the lower bound.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "memfit: a portfolio of its own packers"

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found by any part."""
        best, sections = Best(problem), sections_of(problem.blocks)
        parts = [
            _quick_steps(problem.blocks, sections, best),
            exact_steps(problem, sections, best),
            _rarely(local_steps(problem, sections, best), _RARELY if len(problem.blocks) <= _FEW_BLOCKS else 1),
        ]  # first fit by size answers first, then best fit, with which exact begins
        return search(problem, best, parts, self.name)


def _rarely(steps: Steps, factor: int) -> Steps:
    """Count the work of these steps several times, so that their turn comes less often."""
    return (factor * work for work in steps)


def _quick_steps(blocks: Blocks, sections: Sections, best: Best) -> Steps:
    shelf = shelf_of(blocks, sections)
    for by in ORDERS:
        offsets = fit_in_order(shelf, np.argsort(-measure(blocks, by), kind="stable"))
        best.offer(offsets, int((offsets + blocks.sizes_bytes).max()), "first_fit")
        yield _QUICK_WORK * len(blocks)
