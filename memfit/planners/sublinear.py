"""Planner `sublinear`: segments of a network, of which only the borders are kept (Chen 2016, Algorithm 3,
appendix A).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.mirrored import counts_keeping, evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import Program, build_program
from memfit.planners.windows import Evaluation

_GRID_POINTS = 6  # appendix A: "using a size 6 grid on [B/sqrt 2, sqrt 2 B]"

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What Algorithm 3 gives for one budget B: the kept storages, x (bytes between stages), y (most bytes in a
    stage).
    """

    kept: frozenset[int]
    between_bytes: int
    stage_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublinear:
    """Keep the borders of segments, rematerialize what is inside, with the segments' size searched.

    Algorithm 3 walks the forward ops and adds up what they write; where the sum exceeds B at a candidate, it splits
    there: m(v) = 0, x grows by the bytes of v, y is the largest sum so far; everywhere else m(v) = 1. B is first 0,
    which gives x and y; then sqrt(x y); then six points on [B / sqrt 2, B sqrt 2]. Each mirror plan goes through
    Algorithm 2 (`memfit.planners.mirrored`) and is judged by its exact peak, which static allocation reaches within
    0.2% on the paper's networks (docs/papers.md); the fastest that fits is taken.

    Where the text leaves room: on a graph of ops the result of a split is all that crosses it (a single storage on a
    chain; the hidden and the cell state of an LSTM). The candidates C are an input of the algorithm, and it is run with
    two: all places where the bytes that later forward ops need to be computed again are at a local minimum, and those
    of them that a single storage crosses, as the result of a vertex does in the paper (between the units of a ResNet,
    not within); each has a grid of its own. Its points stand at equal steps, as in the code that the authors published
    (mxnet-memonger). As in the paper, y does not see the stage behind the last split.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", Algorithms 2 and 3, appendix A.
    """

    name: ClassVar[str] = "sublinear"
    source: ClassVar[str] = "Chen et al. 2016, Algorithm 3 and appendix A"

    def plan(self, problem: Problem) -> Result:
        """Return the fastest of the searched plans that fits, or the least peak reached.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        started_seconds = problem.clock()
        program = build_program(problem, update_at_once_order(problem.graph))
        splits = {split.kept: split for split in appendix_a_splits(program)}
        found = [judged(program, split) for split in splits.values()]
        return answer(program, found, planner=self.name, started_seconds=started_seconds)


def appendix_a_splits(program: Program) -> list[Split]:
    """Return the splits that appendix A judges: B = 0, sqrt(x y) and the grid around it, for each set of candidates."""
    frontier = Frontier.of(program)
    sets = [frontier.is_candidate]
    if any(frontier.is_narrow) and frontier.is_narrow != frontier.is_candidate:
        sets.append(frontier.is_narrow)
    return [split for candidates in sets for split in _searched(frontier, candidates)]


def _searched(frontier: Frontier, candidates: tuple[bool, ...]) -> list[Split]:
    first = frontier.split(0, candidates)
    middle = math.sqrt(first.between_bytes * first.stage_bytes)
    grid = np.linspace(middle / math.sqrt(2), middle * math.sqrt(2), _GRID_POINTS).tolist()
    return [first, *(frontier.split(int(budget), candidates) for budget in (middle, *grid))]


def judged(program: Program, split: Split) -> Evaluation:
    """Return the exact simulation of a split."""
    return evaluate_mirror(program, counts_keeping(program, split.kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The forward part as Algorithm 3 sees it, one place an op in order; a place is behind its op.

    Attributes:
        ops: the op of each place.
        written_bytes: aligned bytes that each op writes.
        crossing_bytes: aligned bytes, written up to each place, that later forward ops read; ops that are computed once
            do not count.
        is_candidate: whether a stage may end at the place.
        is_narrow: whether it may, and a single storage crosses the place.
        storages: the storages that cross any place, by id, and the first and the last place that each crosses.
    """

    ops: tuple[int, ...]
    written_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    is_candidate: tuple[bool, ...]
    is_narrow: tuple[bool, ...]
    storages: Integers
    first_place: Integers
    last_place: Integers

    @staticmethod
    def of(program: Program) -> Frontier:
        """Return the frontiers of a program's forward positions."""
        graph, device = program.graph, program.problem.device
        ops = [graph.ops[op] for op in program.op_at[: program.backward_start] if op >= 0]
        again = [(place, op) for place, op in enumerate(ops) if not op.computed_once]
        last_read = {storage: place for place, op in again for storage in op.reads}
        size = {s: device.aligned(graph.storages[s].bytes) for op in ops for s in op.writes}
        spans = [
            (s, place, last_read[s] - 1)
            for place, op in enumerate(ops)
            for s in op.writes
            if last_read.get(s, -1) > place
        ]
        change, more = np.zeros(len(ops) + 1, np.int64), np.zeros(len(ops) + 1, np.int64)
        for storage, first, last in spans:
            change[first] += size[storage]
            change[last + 1] -= size[storage]
            more[first] += 1
            more[last + 1] -= 1
        totals: list[int] = np.cumsum(change)[: len(ops)].tolist()
        crossing: list[int] = np.cumsum(more)[: len(ops)].tolist()
        around = [math.inf, *totals[:-1], math.inf, -math.inf]  # behind the last op there is nothing to split
        may_end = [around[place] >= around[place + 1] <= around[place + 2] for place in range(len(totals))]
        columns = np.array(spans, np.int64).reshape(-1, 3)
        return Frontier(
            ops=tuple(op.id for op in ops),
            written_bytes=tuple(sum(size[s] for s in op.writes) for op in ops),
            crossing_bytes=tuple(totals),
            is_candidate=tuple(may_end),
            is_narrow=tuple(may and count == 1 for may, count in zip(may_end, crossing, strict=True)),
            storages=columns[:, 0],
            first_place=columns[:, 1],
            last_place=columns[:, 2],
        )

    def crossing(self, places: Iterable[int]) -> frozenset[int]:
        """Return the storages that cross any of these places."""
        is_chosen = np.zeros(len(self.ops) + 1, np.int64)
        is_chosen[list(places)] = 1
        before = np.concatenate([[0], np.cumsum(is_chosen)])
        crosses = before[self.last_place + 1] > before[self.first_place]
        return frozenset(self.storages[crosses].tolist())

    def split(self, budget_bytes: int, candidates: Sequence[bool] | None = None) -> Split:
        """Return Algorithm 3's plan for the approximate budget B, over all candidate places or those given."""
        may_end = self.is_candidate if candidates is None else candidates
        in_stage, between, largest = 0, 0, 0
        places: list[int] = []
        for place, written in enumerate(self.written_bytes):
            in_stage += written
            if may_end[place] and in_stage > budget_bytes:
                places.append(place)
                between += self.crossing_bytes[place]
                largest = max(largest, in_stage)
                in_stage = 0
        return Split(kept=self.crossing(places), between_bytes=between, stage_bytes=largest)
