"""Packer `auto`: a portfolio that answers at once, and improves until the lower bound or the time limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.packing.best_fit import BestFit, fill_lines
from memfit.packing.blocks import Blocks, Layout, PackingProblem, PackingProgress, make_layout
from memfit.packing.exact.exact import MOST_BLOCKS, exact_steps
from memfit.packing.first_fit import FirstFit
from memfit.packing.fitting import fit_in_order, make_shelf
from memfit.packing.improve.ejection import ejection_steps
from memfit.packing.improve.local_search import local_steps
from memfit.packing.improve.searching import Best, Steps, Turns, require_limit, search
from memfit.packing.improve.starts import first_order
from memfit.packing.improve.tight import tight_steps
from memfit.packing.parts import NAMES, WITHOUT_HELP, Parts, parts_without
from memfit.packing.sections import Sections, sections_of

_FEW_BLOCKS, _RARELY = 600, 8  # of so few blocks exact nearly always finds more than the others
_QUICK_WORK, _RARE_QUICK_WORK = 1000, 16_000  # for each block, of a quick packer: few blocks, many blocks
_EXACT_LATER = 10_000  # for each block: trees of many blocks take a while to build
_EJECTION_LATER = 15_000  # for each block: after the tight ones among many have been packed, and the others around them
_LOCAL_LATER = 30_000  # for each block: of so many blocks ejection finds more than the others
_MOST_AT_ONCE = 1 << 20  # blocks; of more, time is cut into stretches, so that ten million take less than 1 GB
_STRETCH = 1 << 19  # blocks that start in one


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """Answer with the quick packers, then improve by several searches in turns, which share the best layout.

    Which searches take part depends on the number of blocks; `memfit.packing.parts.Parts` lists them. The answer is
    never worse than that of any part that has had a turn. The search stops at the lower bound.

    Of more than a million blocks, a million at a time are placed by first fit, in the order of their starts.
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
        if len(problem.blocks) > _MOST_AT_ONCE:
            return pack_stretches(problem, self.name)
        best, sections = Best(problem), sections_of(problem.blocks)
        searches = _searches(problem, sections, best, parts_without(self.name, self.without))
        return search(problem, best, searches, self.name, most_work=self.work or None)


def _searches(problem: PackingProblem, sections: Sections, best: Best, parts: Parts) -> list[Turns]:
    """Return the searches that are switched on and are worth their time at this number of blocks."""
    count = len(problem.blocks)
    few, many = count <= _FEW_BLOCKS, count > MOST_BLOCKS
    quick = _quick_steps(problem.blocks, sections, best, parts)
    exact = exact_steps(problem, sections, best, parts=parts)
    tight = tight_steps(problem, sections, best)
    local = local_steps(problem, sections, best, stacked=parts.stacked_starts)
    ejection = ejection_steps(problem, sections, best)
    often = _RARELY if few else 1
    stages = [
        (True, Turns(quick)),
        (parts.exact and not many, Turns(exact, handicap=0 if few else _EXACT_LATER * count)),
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


def pack_stretches(problem: PackingProblem, packer: str, stretch: int = _STRETCH) -> Layout:
    """Return the layout by first fit of one stretch after the other, around what is still live from those before.

    Args:
        problem: its blocks, clock and progress count.
        packer: names the layout.
        stretch: the number of blocks that start in one.
    """
    blocks, started = problem.blocks, problem.clock()
    bound_bytes, height_bytes = blocks.lower_bound_bytes, 0  # the bound first: it takes most memory
    order = np.argsort(blocks.starts, kind="stable").astype(np.int32)
    offsets, live = np.zeros(len(blocks), np.int64), order[:0]
    for place in range(0, len(blocks), stretch):
        begin = int(blocks.starts[order[place]])
        live = live[blocks.ends[live] > begin]
        members = np.concatenate([live, order[place : place + stretch]])
        offsets[members] = _fit_stretch(blocks, members, offsets[live], begin)
        live = members
        height_bytes = max(height_bytes, int((offsets[members] + blocks.sizes_bytes[members]).max()))
        problem.progress(
            PackingProgress(seconds=problem.clock() - started, height_bytes=height_bytes, packer=FirstFit.name)
        )
    return make_layout(blocks, offsets, packer=packer, proven=height_bytes <= bound_bytes)


def _fit_stretch(
    blocks: Blocks, members: NDArray[np.int32], fixed_bytes: NDArray[np.int64], begin: int
) -> NDArray[np.int64]:
    """Return the offsets of some blocks by first fit.

    Args:
        blocks: all.
        members: the numbers of those that are live in the stretch.
        fixed_bytes: the offsets of the first of them, which are placed already.
        begin: the step that the stretch begins with.
    """
    part = Blocks(
        ids=members,
        sizes_bytes=blocks.sizes_bytes[members],
        starts=np.maximum(blocks.starts[members], begin),
        ends=blocks.ends[members],
        alignment_bytes=blocks.alignment_bytes,
    )
    fixed = np.full(len(members), -1, np.int64)
    fixed[: len(fixed_bytes)] = fixed_bytes
    sections = sections_of(part)
    order = first_order(part, sections, before=np.arange(len(fixed_bytes)))
    return fit_in_order(make_shelf(part, sections, fixed), order)
