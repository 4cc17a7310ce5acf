"""Packer `local_search`: first fit again and again, in an order that learns which blocks stand too high."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Layout, PackingProblem, Progress, make_layout
from memfit.packing.first_fit import measure
from memfit.packing.fitting import shelf_of
from memfit.packing.sections import sections_of
from memfit.packing.squeaky import improve

_CALL_SECONDS = 0.02  # of rounds between two looks at the clock
_SEED_FACTOR, _SEED_MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1
_NO_HEIGHT = 1 << 62


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
        blocks, started = problem.blocks, problem.clock()
        if len(blocks) == 0:
            return make_layout(blocks, np.zeros(0, np.int64), packer=self.name)
        shelf = shelf_of(blocks, sections_of(blocks))
        weights = measure(blocks, "size") * np.sqrt(measure(blocks, "length"))
        order = np.arange(len(blocks))
        offsets, found, spare = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64), order.copy()
        best, random = _NO_HEIGHT, random_state(problem.seed)
        left, chunk = self.rounds or _NO_HEIGHT, 1
        while left > 0 and best > blocks.lower_bound_bytes:
            before, now = best, problem.clock()
            if before < _NO_HEIGHT and now - started >= problem.time_limit_seconds:
                break
            best, random, played = improve(
                min(chunk, left),
                blocks.lower_bound_bytes,
                best,
                random,
                shelf,
                order,
                weights,
                spare,
                offsets,
                found,
            )
            left -= played
            if best < before:
                problem.progress(Progress(seconds=problem.clock() - started, height_bytes=best, packer=self.name))
            chunk = rounds_for(played, problem.clock() - now)
        return make_layout(blocks, found, packer=self.name)


def random_state(seed: int) -> int:
    """Return a state for `next_random`, never 0."""
    return ((seed + 1) * _SEED_FACTOR & _SEED_MASK) | 1


def rounds_for(played: int, seconds: float) -> int:
    """Return how many rounds fill one call, given how long the last one took."""
    return max(1, min(2 * played, int(played * _CALL_SECONDS / max(seconds, 1e-9))))
