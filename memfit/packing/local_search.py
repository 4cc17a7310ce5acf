"""Packer `local_search`: first fit again and again, in an order that learns which blocks stand too high."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Layout, PackingProblem
from memfit.packing.first_fit import measure
from memfit.packing.fitting import shelf_of
from memfit.packing.searching import STEP_WORK, Best, Steps, search
from memfit.packing.sections import Sections, sections_of
from memfit.packing.squeaky import improve

_SEED_FACTOR, _SEED_MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1
_ROUND_WORK = 1000  # for each block
_MOST_ROUNDS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearch:
    """Play rounds of first fit; after each, the blocks above a random target between bound and height get heavier.

    Source: squeaky wheel optimisation, Joslin & Clements 1999, over first fit by size times the root of the length.
    """

    name: ClassVar[str] = "local_search"
    source: ClassVar[str] = "Joslin & Clements 1999: squeaky wheel optimisation, over first fit"

    rounds: int = field(default=0, metadata={"help": "rounds to play; 0 plays until the bound or the time limit"})

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise InvalidOptionError(f"local_search has rounds {self.rounds}, expected 0 (no limit) or more")

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found until the lower bound, the rounds or the time limit is reached."""
        best = Best(problem)
        steps = local_steps(problem, sections_of(problem.blocks), best, rounds=self.rounds or _MOST_ROUNDS)
        return search(problem, best, [steps], self.name)


def local_steps(problem: PackingProblem, sections: Sections, best: Best, *, rounds: int = _MOST_ROUNDS) -> Steps:
    """Search in steps of some rounds."""
    blocks = problem.blocks
    shelf = shelf_of(blocks, sections)
    weights = measure(blocks, "size") * np.sqrt(measure(blocks, "length"))
    order = np.arange(len(blocks))
    offsets, found, spare = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64), order.copy()
    random = random_state(problem.seed)
    chunk = max(1, STEP_WORK // (_ROUND_WORK * max(len(blocks), 1)))
    while rounds > 0:
        arrays = (shelf, order, weights, spare, offsets, found)
        now = min(chunk, rounds)
        height, random = improve(now, best.bound_bytes, best.height_bytes, random, *arrays)
        if height < best.height_bytes:
            best.offer(found, height, LocalSearch.name)
        rounds -= now
        yield now * len(blocks) * _ROUND_WORK


def random_state(seed: int) -> int:
    """Return a state for `squeaky.next_random`, never 0."""
    return ((seed + 1) * _SEED_FACTOR & _SEED_MASK) | 1
