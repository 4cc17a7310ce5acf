"""Planner `recursive`: k results stored a level, and the same again on every path between them (Chen 2016, 4.4)."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.errors import InvalidOptionError
from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.mirrored import Counts, counts_of, evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import Program, build_program
from memfit.planners.segments import nearest
from memfit.planners.sublinear import Frontier

_TRIED_STORED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # k where none is given: about evenly spread in log(k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recursive:
    """Store k results, which leaves k + 1 paths; do the same on each path when its turn comes; and so on.

    Memory grows as g(n) = k + g(n / (k + 1)) = k log_{k+1}(n), time by a forward pass a level. By mirror counts: what
    level d stores has m(v) = d, so that Algorithm 2 does the recursion.

    Where the text leaves room: a layer is a forward op, and results are stored at the candidate places of planner
    `sublinear`, the nearest to an equal division; `levels` ends the recursion early, and everything inside is then
    computed again at once. Where no k is given, several are tried, and the fastest that fits is taken.

    Source: Chen et al. 2016, section 4.4, equations 2 and 3; Algorithm 2 with counts above one.
    """

    name: ClassVar[str] = "recursive"
    source: ClassVar[str] = "Chen et al. 2016, section 4.4"

    stored: int | None = field(
        default=None, metadata={"help": "k, the results stored on each path; 1 takes the least memory, O(log n)"}
    )
    levels: int | None = field(default=None, metadata={"help": "most levels of the recursion; as many as there are"})

    def plan(self, problem: Problem) -> Result:
        """Return the plan of this k, or the fastest of all that fits.

        Raises:
            InvalidOptionError: `stored` or `levels` below 1, a pin that cannot be honoured.
        """
        for option, value in (("stored", self.stored), ("levels", self.levels)):
            if value is not None and value < 1:
                raise InvalidOptionError(f"planner 'recursive': option {option} is {value}, expected 1 or more")
        started_seconds = problem.clock()
        program = build_program(problem, update_at_once_order(problem.graph))
        tried = _TRIED_STORED if self.stored is None else (self.stored,)
        found = [evaluate_mirror(program, recursive_counts(program, stored, self.levels)) for stored in tried]
        return answer(program, found, planner=self.name, started_seconds=started_seconds)


def recursive_counts(program: Program, stored: int, levels: int | None = None) -> Counts:
    """Return the mirror counts of the recursion with k = `stored`."""
    frontier = Frontier.of(program)
    depth_of_place, depth_of_path = _depths(frontier, stored, levels)
    counts = dict(zip(frontier.ops, depth_of_path, strict=True))
    writer_of = program.graph.writer_of
    for depth in sorted(set(depth_of_place.values()), reverse=True):
        places = [place for place, at in depth_of_place.items() if at <= depth]
        for storage in frontier.crossing(places):
            counts[writer_of[storage]] = min(depth, counts[writer_of[storage]])
    return counts_of(program, counts)


def _depths(frontier: Frontier, stored: int, levels: int | None) -> tuple[dict[int, int], list[int]]:
    """Return the level of each place that stores something, and of each op how many levels lie around its path."""
    candidates: list[int] = np.flatnonzero(frontier.is_candidate).tolist()
    depth_of_place: dict[int, int] = {}
    depth_of_path = [0] * len(frontier.ops)
    paths = [(0, len(frontier.ops), 0)]  # ops [first, end), and the level
    while paths:
        first, end, depth = paths.pop()
        inside = candidates[bisect.bisect_left(candidates, first) : bisect.bisect_left(candidates, end - 1)]
        places = divide(inside, first, end, stored) if levels is None or depth < levels else []
        if not places:
            depth_of_path[first:end] = [depth] * (end - first)
            continue
        borders = [first, *(place + 1 for place in places), end]
        for place in places:
            depth_of_place[place] = depth
        paths += [(begin, stop, depth + 1) for begin, stop in itertools.pairwise(borders)]
    return depth_of_place, depth_of_path


def divide(candidates: list[int], first: int, end: int, stored: int) -> list[int]:
    """Return up to `stored` of the candidates, nearest to where equal paths would end."""
    if not candidates:
        return []
    length = end - first
    wanted = [first + round(number * length / (stored + 1)) - 1 for number in range(1, stored + 1)]
    return sorted({nearest(candidates, place) for place in wanted})
