"""Packer `local_search`: first fit again and again; blocks that end too high are placed earlier in the next round."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Layout, PackingProblem
from memfit.packing.fitting import make_shelf
from memfit.packing.improve.searching import STEP_WORK, Best, Steps, Turns, require_limit, search
from memfit.packing.improve.squeaky import make_wheel, play
from memfit.packing.improve.starts import drawn_starts, fixed_starts
from memfit.packing.improve.xorshift import random_state
from memfit.packing.sections import Sections, sections_of

_ROUND_WORK = 1000  # for each block
_MOST_ROUNDS = _NO_HEIGHT = 1 << 62
_ROUNDS_A_START = 64  # without a lower layout, after which new weights are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearch:
    """Play rounds of first fit; after each, the blocks above a random target between bound and height get heavier.

    The first weights are products of powers of size, length and the most live bytes met. If a start gives no lower
    layout for a while, other powers are drawn.

    Source: squeaky wheel optimisation, Joslin & Clements 1999, over first fit by weight.
    """

    name: ClassVar[str] = "local_search"
    source: ClassVar[str] = "Joslin & Clements 1999: squeaky wheel optimisation, over first fit"

    rounds: int = field(default=0, metadata={"help": "rounds to play; 0 plays until the bound or the time limit"})

    def __post_init__(self) -> None:
        require_limit(self.name, "rounds", self.rounds)

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found until the lower bound, the rounds or the time limit is reached."""
        best = Best(problem)
        steps = local_steps(problem, sections_of(problem.blocks), best, rounds=self.rounds or _MOST_ROUNDS)
        return search(problem, best, [Turns(steps)], self.name)


def local_steps(
    problem: PackingProblem, sections: Sections, best: Best, *, rounds: int = _MOST_ROUNDS, stacked: bool = True
) -> Steps:
    """Search in steps of some rounds: one round from each fixed start, then from the best of them, then from others.

    Args:
        problem: its blocks and its seed.
        sections: those of the blocks.
        best: gets each lower layout.
        rounds: how many in all.
        stacked: whether some starts stack the blocks of the tightest section first.
    """
    if rounds <= 0 or len(problem.blocks) == 0:
        return
    player = _Player(problem, sections, best)
    starts, heights = fixed_starts(problem.blocks, sections, stacked=stacked), list[int]()
    for weights in starts[:rounds]:
        yield player.begin(weights, 1)
        heights.append(player.lowest)
    rounds -= len(heights)
    others = drawn_starts(problem.blocks, sections, problem.seed, stacked=stacked)
    for weights in itertools.chain([starts[int(np.argmin(heights))]], others):
        played = 0
        while played < _ROUNDS_A_START:
            if rounds <= 0:
                return
            now, lowest = min(player.chunk, rounds), player.lowest if played else _NO_HEIGHT
            yield player.go_on(now) if played else player.begin(weights, now)
            played = now if player.lowest < lowest else played + now
            rounds -= now


class _Player:
    """Plays rounds of first fit over one set of weights after the other."""

    def __init__(self, problem: PackingProblem, sections: Sections, best: Best) -> None:
        self.best, self.count = best, len(problem.blocks)
        self.wheel = make_wheel(make_shelf(problem.blocks, sections))
        self.random, self.lowest = random_state(problem.seed), _NO_HEIGHT
        self.chunk = min(_ROUNDS_A_START, max(1, STEP_WORK // (_ROUND_WORK * self.count)))

    def begin(self, weights: NDArray[np.float64], rounds: int) -> int:
        """Play from new weights; return the work done.

        Args:
            weights: float64[n], one for each block; are copied.
            rounds: how many, each a first fit of all blocks; fewer if the bound is reached.
        """
        self.wheel.weights[:], self.lowest = weights, _NO_HEIGHT
        return self.go_on(rounds)

    def go_on(self, rounds: int) -> int:
        """Play more rounds from the weights as they are; return the work done."""
        self.lowest, self.random = play(rounds, self.best.bound_bytes, self.lowest, self.random, self.wheel)
        self.best.offer(self.wheel.best_offsets, LocalSearch.name)
        return rounds * self.count * _ROUND_WORK
