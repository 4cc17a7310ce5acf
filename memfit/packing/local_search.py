"""Packer `local_search`: first fit again and again, in an order that learns which blocks stand too high."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.first_fit import measure
from memfit.packing.fitting import shelf_of
from memfit.packing.searching import STEP_WORK, Best, Steps, search
from memfit.packing.sections import Sections, most_live_bytes, sections_of
from memfit.packing.squeaky import improve

_SEED_FACTOR, _SEED_MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1
_ROUND_WORK = 1000  # for each block
_MOST_ROUNDS = _NO_HEIGHT = 1 << 62
_ROUNDS_A_START = 64  # without a better layout, after which new weights are drawn
_POWERS = (1.0, 0.25, 5.0)  # of size, length and most live bytes met: the best mean over made traces of 10,000 blocks
_MOST_POWERS = (1.0, 0.75, 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearch:
    """Play rounds of first fit; after each, the blocks above a random target between bound and height get heavier.

    Weights begin as products of powers of size, length and the most live bytes met. Where they lead no further, other
    powers are drawn.

    Source: squeaky wheel optimisation, Joslin & Clements 1999, over first fit by weight.
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
    blocks, draws = problem.blocks, np.random.default_rng(problem.seed)
    shelf, columns = shelf_of(blocks, sections), _logarithms(blocks, sections)
    order = np.arange(len(blocks))
    offsets, found, spare = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64), order.copy()
    random, powers = random_state(problem.seed), _POWERS
    chunk = min(_ROUNDS_A_START, max(1, STEP_WORK // (_ROUND_WORK * max(len(blocks), 1))))
    while rounds > 0:
        weights = np.exp(sum(power * column for power, column in zip(powers, columns, strict=True)))
        played, lowest = 0, _NO_HEIGHT
        while played < _ROUNDS_A_START and rounds > 0:
            now = min(chunk, rounds)
            arrays = (shelf, order, weights, spare, offsets, found)
            height, random = improve(now, best.bound_bytes, lowest, random, *arrays)
            played = 0 if height < lowest else played + now
            lowest = height
            best.offer(found, height, LocalSearch.name)
            rounds -= now
            yield now * len(blocks) * _ROUND_WORK
        powers = draws.uniform((1.0, 0.0, 0.0), _MOST_POWERS)


def _logarithms(blocks: Blocks, sections: Sections) -> list[NDArray[np.float64]]:
    """Return the logarithms of size, length, and most live bytes met over the most of all."""
    met = most_live_bytes(blocks, sections) / max(blocks.lower_bound_bytes, 1)
    return [np.log(measure(blocks, "size")), np.log(measure(blocks, "length")), np.log(met)]


def random_state(seed: int) -> int:
    """Return a state for `squeaky.next_random`, never 0."""
    return ((seed + 1) * _SEED_FACTOR & _SEED_MASK) | 1
