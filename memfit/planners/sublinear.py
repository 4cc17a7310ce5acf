"""Planner `sublinear`: segments of a network, of which only the borders are kept (Chen 2016, Algorithm 3,
appendix A).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from memfit.plan import Problem, Result
from memfit.planners.emit import emit
from memfit.planners.order import update_at_once_order
from memfit.planners.program import Program, build_program
from memfit.planners.result import make_result
from memfit.planners.windows import Evaluation, evaluate, keep_only, simulated

_GRID_POINTS = 6  # appendix A: "using a size 6 grid on [B/sqrt 2, sqrt 2 B]"


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
    there. B is first 0, which gives x and y; then sqrt(x y); then six points on [B / sqrt 2, B sqrt 2]. Each plan is
    judged by the exact simulation, and the fastest that fits is taken.

    Where the text leaves room: on a graph of ops the candidates C are the places where the bytes that later forward ops
    still need are at a local minimum, and what is kept at a split are all storages that cross it (a single one on a
    chain; the hidden and the cell state of an LSTM). Mirror counts are 0 for these and 1 for the rest.

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
        found = [judged(program, split) for split in appendix_a_splits(program)]
        best = choose(found, problem.budget_bytes)
        return make_result(
            problem,
            emit(program, best.sequence),
            planner=self.name,
            started_seconds=started_seconds,
            least_found_bytes=min(evaluation.peak_bytes for evaluation in found),
        )


def appendix_a_splits(program: Program) -> list[Split]:
    """Return the splits that appendix A judges: B = 0, sqrt(x y), and the grid around it."""
    frontier = Frontier.of(program)
    splits = [frontier.split(0)]
    middle = math.sqrt(splits[0].between_bytes * splits[0].stage_bytes)
    for step in range(_GRID_POINTS):
        splits.append(frontier.split(int(middle * 2.0 ** (step / (_GRID_POINTS - 1) - 0.5))))
    splits.append(frontier.split(int(middle)))
    return splits


def judged(program: Program, split: Split) -> Evaluation:
    """Return the exact simulation of a split."""
    return evaluate(program, simulated(program, keep_only(program, split.kept)))


def choose(found: list[Evaluation], budget_bytes: int) -> Evaluation:
    """Return the fastest evaluation that fits, else the one with the least peak."""
    fitting = [evaluation for evaluation in found if evaluation.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda evaluation: (evaluation.seconds, evaluation.peak_bytes))
    return min(found, key=lambda evaluation: (evaluation.peak_bytes, evaluation.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The forward part as Algorithm 3 sees it, one entry an op in order.

    Attributes:
        written_bytes: aligned bytes that each op writes.
        crossing: the storages written up to each op that later forward ops read.
        crossing_bytes: their aligned bytes.
        is_candidate: whether a stage may end behind the op.
    """

    written_bytes: tuple[int, ...]
    crossing: tuple[frozenset[int], ...]
    crossing_bytes: tuple[int, ...]
    is_candidate: tuple[bool, ...]

    @staticmethod
    def of(program: Program) -> Frontier:
        """Return the frontiers of a program's forward positions."""
        graph, device = program.graph, program.problem.device
        ops = [graph.ops[op] for op in program.op_at[: program.backward_start] if op >= 0]
        last_read = {storage: place for place, op in enumerate(ops) for storage in (*op.reads, *op.mutates)}
        size = {s: device.aligned(graph.storages[s].bytes) for op in ops for s in op.writes}
        live: set[int] = set()
        live_bytes = 0
        crossing: list[frozenset[int]] = []
        totals: list[int] = []
        for place, op in enumerate(ops):
            for storage in op.writes:
                if last_read.get(storage, -1) > place:
                    live.add(storage)
                    live_bytes += size[storage]
            for storage in {*op.reads, *op.mutates} & live:
                if last_read[storage] == place:
                    live.discard(storage)
                    live_bytes -= size[storage]
            crossing.append(frozenset(live))
            totals.append(live_bytes)
        around = [math.inf, *totals, math.inf]
        return Frontier(
            written_bytes=tuple(sum(size[s] for s in op.writes) for op in ops),
            crossing=tuple(crossing),
            crossing_bytes=tuple(totals),
            is_candidate=tuple(around[place] >= around[place + 1] <= around[place + 2] for place in range(len(totals))),
        )

    def split(self, budget_bytes: int) -> Split:
        """Return Algorithm 3's plan for the approximate budget B."""
        in_stage, between, largest = 0, 0, 0
        kept: set[int] = set()
        for place, written in enumerate(self.written_bytes):
            in_stage += written
            if self.is_candidate[place] and in_stage > budget_bytes:
                kept |= self.crossing[place]
                between += self.crossing_bytes[place]
                largest = max(largest, in_stage)
                in_stage = 0
        return Split(kept=frozenset(kept), between_bytes=between, stage_bytes=max(largest, in_stage))
