"""Packer `local_search`: first fit again and again, in an order that learns which blocks stand too high."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Layout, PackingProblem
from memfit.packing.fitting import shelf_of
from memfit.packing.searching import STEP_WORK, Best, Steps, search
from memfit.packing.sections import Sections, sections_of
from memfit.packing.squeaky import improve
from memfit.packing.starts import drawn_starts, fixed_starts

_SEED_FACTOR, _SEED_MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1
_ROUND_WORK = 1000  # for each block
_MOST_ROUNDS = _NO_HEIGHT = 1 << 62
_ROUNDS_A_START = 64  # without a better layout, after which new weights are drawn


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
    """Search in steps of some rounds: one round from each fixed start, then from the best of them, then from others."""
    if rounds <= 0 or len(problem.blocks) == 0:
        return
    wheel = _Wheel(problem, sections, best)
    starts, heights = fixed_starts(problem.blocks, sections), list[int]()
    for weights in starts[:rounds]:
        yield wheel.begin(weights.copy(), 1)
        heights.append(wheel.lowest)
    rounds -= len(heights)
    others = drawn_starts(problem.blocks, sections, problem.seed)
    for weights in itertools.chain([starts[int(np.argmin(heights))]], others):
        played = 0
        while played < _ROUNDS_A_START:
            if rounds <= 0:
                return
            now, lowest = min(wheel.chunk, rounds), wheel.lowest if played else _NO_HEIGHT
            yield wheel.go_on(now) if played else wheel.begin(weights, now)
            played = now if wheel.lowest < lowest else played + now
            rounds -= now


class _Wheel:
    """Rounds of first fit over one set of weights after the other."""

    def __init__(self, problem: PackingProblem, sections: Sections, best: Best) -> None:
        count = len(problem.blocks)
        self.best, self.count = best, count
        self.shelf = shelf_of(problem.blocks, sections)
        self.order, self.spare = np.arange(count), np.arange(count)
        self.offsets, self.found = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.weights = np.zeros(count)
        self.random, self.lowest = random_state(problem.seed), _NO_HEIGHT
        self.chunk = min(_ROUNDS_A_START, max(1, STEP_WORK // (_ROUND_WORK * count)))

    def begin(self, weights: NDArray[np.float64], rounds: int) -> int:
        self.weights, self.lowest = weights, _NO_HEIGHT
        return self.go_on(rounds)

    def go_on(self, rounds: int) -> int:
        arrays = (self.shelf, self.order, self.weights, self.spare, self.offsets, self.found)
        self.lowest, self.random = improve(rounds, self.best.bound_bytes, self.lowest, self.random, *arrays)
        self.best.offer(self.found, self.lowest, LocalSearch.name)
        return rounds * self.count * _ROUND_WORK


def random_state(seed: int) -> int:
    """Return a state for `squeaky.next_random`, never 0."""
    return ((seed + 1) * _SEED_FACTOR & _SEED_MASK) | 1
