"""Packer `auto`: a portfolio that answers at once, and improves until the lower bound or the time limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.exact.exact import MOST_BLOCKS, exact_steps
from memfit.packing.fitting import fit_in_order, make_shelf
from memfit.packing.improve.beam import beam_steps
from memfit.packing.improve.ejection import ejection_steps
from memfit.packing.improve.local_search import local_steps
from memfit.packing.improve.searching import Best, Steps, Turns, require_limit, search
from memfit.packing.improve.starts import first_order
from memfit.packing.improve.tight import tight_steps
from memfit.packing.parts import NAMES, WITHOUT_HELP, Parts, parts_without
from memfit.packing.published.best_fit import BestFit, fill_lines
from memfit.packing.published.first_fit import FirstFit
from memfit.packing.sections import Sections, sections_of

_FEW_BLOCKS, _RARELY = 600, 8  # of so few blocks exact and beam nearly always find more than the others
_QUICK_WORK, _RARE_QUICK_WORK = 1000, 16_000  # for each block, of a quick packer: few blocks, many blocks
_BEAM_LATER = 100_000  # for each block: what is easy, exact has found by then
_EXACT_LATER = 10_000  # for each block: trees of many blocks take a while to build
_EJECTION_LATER = 15_000  # for each block: after the tight ones among many have been packed, and the others around them
_LOCAL_LATER = 30_000  # for each block: of so many blocks ejection finds more than the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """Answer with the quick packers, then improve by several searches in turns, which share the best layout.

    Which searches take part depends on the number of blocks; `memfit.packing.parts.Parts` lists them. The answer is
    never worse than that of any part that has had a turn. The search stops at the lower bound.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "memfit: a portfolio of its own packers"

    work: int = field(
        default=0, metadata={"help": "work to do in all, in operations of about a nanosecond; 0 has no limit"}
    )
    without: str = field(default="", metadata={"help": WITHOUT_HELP.format(", ".join(NAMES))})

    def __post_init__(self) -> None:
        parts_without(self.name, self.without)
        require_limit(self.name, "work", self.work)

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found by any part until it is proven, the work is done, or time is up."""
        best, sections = Best(problem), sections_of(problem.blocks)
        searches = _searches(problem, sections, best, parts_without(self.name, self.without))
        return search(problem, best, searches, self.name, most_work=self.work or None)


def _searches(problem: PackingProblem, sections: Sections, best: Best, parts: Parts) -> list[Turns]:
    """Return the searches that are switched on and are worth their time at this number of blocks."""
    count = len(problem.blocks)
    few, many = count <= _FEW_BLOCKS, count > MOST_BLOCKS
    quick = _quick_steps(problem.blocks, sections, best, parts)
    exact = exact_steps(problem, sections, best, parts=parts)
    beam, tight = beam_steps(problem, sections, best), tight_steps(problem, sections, best)
    local = local_steps(problem, sections, best, stacked=parts.stacked_starts)
    ejection = ejection_steps(problem, sections, best)
    often = _RARELY if few else 1
    stages = [
        (True, Turns(quick)),
        (parts.exact and not many, Turns(exact, handicap=0 if few else _EXACT_LATER * count)),
        (parts.beam and few, Turns(beam, handicap=_BEAM_LATER * count)),
        (parts.tight and many, Turns(tight)),
        (parts.local_search, Turns(local, handicap=_LOCAL_LATER * count if many else 0, weight=often)),
        (parts.ejection, Turns(ejection, handicap=_EJECTION_LATER * count if many else 0, weight=often)),
    ]
    return [turns for switched_on, turns in stages if switched_on]


def _quick_steps(blocks: Blocks, sections: Sections, best: Best, parts: Parts) -> Steps:
    work = len(blocks) * (_QUICK_WORK if len(blocks) <= MOST_BLOCKS else _RARE_QUICK_WORK)
    best.offer(fit_in_order(make_shelf(blocks, sections), first_order(blocks, sections)), FirstFit.name)
    yield work
    if parts.best_fit:
        best.offer(fill_lines(blocks, sections), BestFit.name)
        yield work
