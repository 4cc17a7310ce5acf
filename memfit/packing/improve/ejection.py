"""Packer `ejection`: blocks that end too high are put below a cap, and the blocks in their way are placed again."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Layout, PackingProblem
from memfit.packing.fitting import fit_in_order, make_shelf
from memfit.packing.improve.ejecting import eject, make_room, put_all, take_back, take_out
from memfit.packing.improve.searching import STEP_WORK, Best, Offsets, Steps, Turns, require_limit, search
from memfit.packing.improve.starts import first_order
from memfit.packing.improve.xorshift import random_state
from memfit.packing.sections import Sections, sections_of

_SHARES = (0.5, 0.75, 0.9)  # of the gap between bound and height that is left below the cap, one after the other
_CLOSE = 1 / 1000  # of the bound: a gap below it is closed at once
_PATIENCE = 10  # moves for each block of the smallest pool so far, after which the attempt ends
_LEAST_PATIENCE = 500
_MOVE_COST = 20_000  # work of a move, about
_FIRST_FIT_WORK, _SETUP_WORK = 1500, 500  # for each block
_FEW_OUT = 64  # blocks: so many are tried above the cap, where that may give a lower layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Ejection:
    """Lower a cap; put each block above it where the blocks in its way weigh least, and place those again.

    The first weights are areas. A block that has ejected others gets heavier, so chains of ejections reach other
    blocks. If an attempt fails, the next one begins from the best layout again, with a higher cap.

    Source: guided ejection search, Nagata & Bräysy 2009, over places in memory.
    """

    name: ClassVar[str] = "ejection"
    source: ClassVar[str] = "Nagata & Bräysy 2009: guided ejection search, over places in memory"

    attempts: int = field(default=0, metadata={"help": "caps to try; 0 tries until the bound or the time limit"})

    def __post_init__(self) -> None:
        require_limit(self.name, "attempts", self.attempts)

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found until the lower bound, the attempts or the time limit is reached."""
        best, sections = Best(problem), sections_of(problem.blocks)
        steps = ejection_steps(problem, sections, best, attempts=self.attempts or None)
        return search(problem, best, [Turns(steps)], self.name)


def ejection_steps(problem: PackingProblem, sections: Sections, best: Best, *, attempts: int | None = None) -> Steps:
    """Search in steps of about a millisecond; the first makes a layout by first fit if there is none.

    Args:
        problem: its blocks and its seed.
        sections: those of the blocks.
        best: gets each lower layout.
        attempts: how many caps are tried; none is no limit.
    """
    blocks = problem.blocks
    if len(blocks) == 0:
        return
    if not len(best.offsets_bytes):
        offsets = fit_in_order(make_shelf(blocks, sections), first_order(blocks, sections))
        best.offer(offsets, Ejection.name)
        yield len(blocks) * _FIRST_FIT_WORK
    yield from Ejections(problem, sections, best).attempts(attempts)


class Ejections:
    """Attempts to get all blocks below a cap, one after the other."""

    def __init__(self, problem: PackingProblem, sections: Sections, best: Best) -> None:
        blocks = problem.blocks
        self.order = np.argsort(sections.firsts, kind="stable")
        self.room = make_room(self.order, blocks.sizes_bytes, sections, random_state(problem.seed))
        self.areas = (blocks.sizes_bytes * (blocks.ends - blocks.starts).astype(np.float64))[self.order]
        self.room.weights[:] = self.areas / self.areas.max()
        self.best, self.count = best, len(blocks)

    def attempts(self, most: int | None) -> Steps:
        """Try one cap after the other, each from the best layout so far."""
        yield self.count * _SETUP_WORK
        share = 0
        numbers = itertools.count() if most is None else range(most)
        for _ in numbers:
            if self.best.proven:
                return
            height = self.best.height_bytes
            yield from self.attempt(self.cap(_SHARES[share]), self.best.offsets_bytes)
            share = 0 if self.best.height_bytes < height else (share + 1) % len(_SHARES)

    def cap(self, share: float) -> int:
        """Return the cap that leaves this share of the gap between bound and height, or the bound if it is near."""
        gap = self.best.height_bytes - self.best.bound_bytes
        close = gap <= self.best.bound_bytes * _CLOSE
        return self.best.bound_bytes + (0 if close else int(gap * share))

    def make_heavier(self, blocks: NDArray[np.int64], factor: float) -> None:
        """Make some blocks harder to eject.

        Args:
            blocks: int64, their numbers in the problem.
            factor: by which their weights are multiplied.
        """
        chosen = np.zeros(self.count, bool)
        chosen[blocks] = True
        self.room.weights[chosen[self.order]] *= factor

    def attempt(self, cap: int, offsets_bytes: Offsets) -> Steps:
        """Offer a layout within the cap, or with a few blocks above it; end when the pool has not shrunk for long.

        Args:
            cap: the height to reach, in bytes.
            offsets_bytes: int64[n], the layout to begin from; is left as it is.
        """
        room, best = self.room, self.best
        room.offsets[:] = offsets_bytes[self.order]
        fewest = tried = take_out(room, cap)
        taken = room.pool[:fewest]
        taken[:] = taken[np.argsort(self.areas[taken], kind="stable")]  # the largest is placed first
        patience = 0
        while patience < (_PATIENCE * fewest + _LEAST_PATIENCE) * _MOVE_COST:
            left, work = eject(room, cap, STEP_WORK)
            patience = 0 if left < fewest else patience + work
            fewest = min(fewest, left)
            if left == 0 or (left <= _FEW_OUT and 2 * left <= tried):
                tried = left
                height, more = put_all(room)
                if height < best.height_bytes:
                    offsets = np.empty_like(room.offsets)
                    offsets[self.order] = room.offsets
                    best.offer(offsets, Ejection.name)
                take_back(room)
                work += more
            yield work
            if left == 0 or best.height_bytes <= cap:
                return
