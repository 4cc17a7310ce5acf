"""Packer `auto`: a portfolio that answers at once, and improves until the lower bound or the time limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.packing.beam import beam_steps
from memfit.packing.best_fit import BestFit, fill_lines
from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.ejection import ejection_steps
from memfit.packing.exact import MOST_BLOCKS, exact_steps
from memfit.packing.first_fit import ORDERS, FirstFit, measure
from memfit.packing.fitting import fit_in_order, shelf_of
from memfit.packing.local_search import local_steps
from memfit.packing.searching import Best, Offsets, Steps, search
from memfit.packing.sections import Sections, sections_of
from memfit.packing.starts import first_start
from memfit.packing.tight import tight_steps

_FEW_BLOCKS, _RARELY = 600, 8  # of so few blocks exact and beam nearly always find more than the others
_QUICK_WORK, _RARE_QUICK_WORK = 1000, 16_000  # for each block, of a quick packer: few blocks, many blocks
_BEAM_LATER = 100_000  # for each block: what is easy, exact has found by then
_EXACT_LATER = 10_000  # for each block: trees of many blocks take a while to build
_EJECTION_LATER = 15000  # for each block: after the tight ones among many have been packed, and the others around them
_LOCAL_LATER = 30_000  # for each block: of so many blocks ejection finds more than the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Answer with the quick packers, then improve: `exact`, `local_search` and `ejection` in turns, and on
    up to 600 blocks a beam of layouts (`memfit.packing.beam`).

    They share what they find. The answer is never worse than that of the parts that have had their turn; it stops at
    the lower bound.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "memfit: a portfolio of its own packers"

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found by any part."""
        best, sections, count = Best(problem), sections_of(problem.blocks), len(problem.blocks)
        quick, exact = _quick_steps(problem.blocks, sections, best), exact_steps(problem, sections, best)
        local, ejection = local_steps(problem, sections, best), ejection_steps(problem, sections, best)
        if count <= _FEW_BLOCKS:
            beam = beam_steps(problem, sections, best)
            parts = {quick: 0, exact: 0, beam: _BEAM_LATER * count, _rarely(local): 0, _rarely(ejection): 0}
        elif count <= MOST_BLOCKS:
            parts = {quick: 0, exact: _EXACT_LATER * count, local: 0, ejection: 0}
        else:
            tight = tight_steps(problem, sections, best)
            parts = {quick: 0, tight: 0, local: _LOCAL_LATER * count, ejection: _EJECTION_LATER * count}
        return search(problem, best, list(parts), self.name, handicaps=list(parts.values()))


def _rarely(steps: Steps) -> Steps:
    """Count the work of these steps several times, so that their turn comes less often."""
    return (_RARELY * work for work in steps)


def _quick_steps(blocks: Blocks, sections: Sections, best: Best) -> Steps:
    work = len(blocks) * (_QUICK_WORK if len(blocks) <= MOST_BLOCKS else _RARE_QUICK_WORK)
    for packer, offsets in _quick_answers(blocks, sections):
        best.offer(offsets, int((offsets + blocks.sizes_bytes).max(initial=0)), packer)
        yield work


def _quick_answers(blocks: Blocks, sections: Sections) -> Iterator[tuple[str, Offsets]]:
    shelf = shelf_of(blocks, sections)
    yield FirstFit.name, fit_in_order(shelf, np.argsort(-first_start(blocks, sections), kind="stable"))
    yield BestFit.name, fill_lines(blocks, sections)
    for by in ORDERS:
        yield FirstFit.name, fit_in_order(shelf, np.argsort(-measure(blocks, by), kind="stable"))
