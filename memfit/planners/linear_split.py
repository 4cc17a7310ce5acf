"""Planner `linear_split`: the optimal split of a linear graph (Feng 2018, section 4, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import entry_point
from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.closed_sets import splitting_vertices
from memfit.planners.mirrored import evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import build_program
from memfit.planners.vertices import Vertices, vertices_of

_NEVER = 1 << 60  # more than any sum of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCost:
    """A solution of equation 1: the bytes that are stored, the largest re-forward, and the vertices in V^R."""

    stored_bytes: int
    largest_bytes: int
    stored: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """What equation 1 minimises."""
        return self.stored_bytes + self.largest_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSplit:
    """Store the vertices that make the stored bytes plus the largest re-forward least, and re-forward between them.

    The budget changes nothing but the status: the paper has one split for a network, that of least memory.

    Where the text leaves room: vertices and their costs are those of `memfit.planners.vertices`. On a graph that is not
    linear the chain is that of its splitting vertices, which all paths run through; what lies between two of them can
    be leapt over but not stored.

    Source: Feng and Huang 2018, "Cutting Down Training Memory by Re-forwarding", section 4, Algorithm 1.
    """

    name: ClassVar[str] = "linear_split"
    source: ClassVar[str] = "Feng and Huang 2018, Algorithm 1"

    def plan(self, problem: Problem) -> Result:
        """Return the plan of the optimal split, with status infeasible where it does not fit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        started_seconds = problem.clock()
        program = build_program(problem, update_at_once_order(problem.graph))
        vertices = vertices_of(program)
        chain, between = linear_chain(vertices)
        split = solve_chain([vertices.cost_bytes[vertex] for vertex in chain], between)
        stored = [chain[index] for index in split.stored]
        evaluation = evaluate_mirror(program, vertices.mirror_counts(program, stored))
        return answer(
            program,
            [evaluation],
            planner=self.name,
            started_seconds=started_seconds,
            stats={"stored_bytes": split.stored_bytes, "largest_bytes": split.largest_bytes},
        )


def linear_chain(vertices: Vertices) -> tuple[list[int], list[int]]:
    """Return the vertices that all paths run through, source and target included, and the bytes between each two."""
    chain = [0, *splitting_vertices(vertices.readers, range(len(vertices.readers))), len(vertices.readers) - 1]
    costs = vertices.cost_bytes
    return chain, [sum(costs[i + 1 : j]) for i, j in pairwise(chain)]


def solve_chain(cost_bytes: Sequence[int], between_bytes: Sequence[int] | None = None) -> SplitCost:
    """Return the split of a chain that is optimal by equation 1; the first and the last vertex are always stored.

        >>> solve_chain([0, 1, 1, 1, 0]).stored
        (0, 2, 4)

    For each bound C on the re-forwards the least stored bytes f(C) are a shortest path in the accessibility graph,
    found in O(N) because what is reachable is a window that moves along the chain. f falls as C grows, so that an
    interval of bounds is cut off as soon as f at its end plus its least C is no better than the best split: few of
    the O(N^2) bounds of the published loop are looked at, and the result is the same.

    Args:
        cost_bytes: l of each vertex.
        between_bytes: bytes between each vertex and the next that cannot be stored; nothing on a linear graph.
    """
    stored = np.array(cost_bytes, np.int64)
    gaps = np.array([0] * (len(stored) - 1) if between_bytes is None else between_bytes, np.int64)
    chain = Chain(stored=stored, gaps=gaps, expanded=np.full(len(gaps), _NEVER, np.int64))
    return least_total(int(stored[1:-1].sum() + gaps.sum()), chain.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stored bytes of N vertices, the bytes in the N - 1 gaps between them, and what a gap stores once expanded.

    A gap is expanded only where it is larger than the bound, and never where `expanded` has `_NEVER`.
    """

    stored: NDArray[np.int64]
    gaps: NDArray[np.int64]
    expanded: NDArray[np.int64]

    def split(self, bound_bytes: int) -> SplitCost | None:
        """Return the least stored bytes with every leap within the bound; the gaps that must be expanded count too."""
        count = len(self.stored)
        total, previous = np.zeros(count, np.int64), np.zeros(count, np.int64)
        scratch = np.zeros(2 * count + 1, np.int64)
        _shortest(self.stored, self.gaps, self.expanded, bound_bytes, total, previous, scratch)
        if total[-1] >= _NEVER:
            return None
        path = [count - 1]
        while path[-1] > 0:
            path.append(int(previous[path[-1]]))
        path.reverse()
        leaps = [self._leap(i, j) for i, j in pairwise(path)]
        return SplitCost(
            stored_bytes=int(total[-1]),
            largest_bytes=max((leap for leap in leaps if leap <= bound_bytes), default=0),
            stored=tuple(path),
        )

    def _leap(self, first: int, last: int) -> int:
        return int(self.stored[first + 1 : last].sum() + self.gaps[first:last].sum())


def least_total(most_bytes: int, split: Callable[[int], SplitCost | None]) -> SplitCost:
    """Return a split of least total over all bounds from 0 to `most_bytes`.

    `split(bound)` gives the least stored bytes for a bound, or None; a larger bound never stores more.
    """
    best = split(most_bytes)
    assert best is not None, "without a bound, everything can be leapt over"
    intervals = [(0, best.largest_bytes - 1, best.stored_bytes)]  # bounds from, to, and the least that they can store
    while intervals:
        low, high, least_stored = intervals.pop()
        if low > high or least_stored + low >= best.total_bytes:
            continue
        middle = (low + high) // 2
        found = split(middle)
        if found is None:
            intervals.append((middle + 1, high, least_stored))
            continue
        if found.total_bytes < best.total_bytes:
            best = found
        if found.stored_bytes > least_stored:
            intervals.append((middle + 1, high, least_stored))
        intervals.append((low, found.largest_bytes - 1, found.stored_bytes))
    return best


def published_split(cost_bytes: Sequence[int]) -> SplitCost:
    """Return the split that Algorithm 1 finds as it is published, in O(N^4): only for tests, and to be read."""
    count, costs = len(cost_bytes), list(cost_bytes)
    best: SplitCost | None = None
    for i in range(count):
        for j in range(i + 1, count):
            bound = sum(costs[i + 1 : j])  # line 2: the maximal term
            path = _published_path(costs, bound)
            if path is not None:
                leaps = [sum(costs[a + 1 : b]) for a, b in pairwise(path)]
                stored_bytes = sum(costs[vertex] for vertex in path)
                found = SplitCost(stored_bytes=stored_bytes, largest_bytes=max(leaps), stored=tuple(path))
                if best is None or found.total_bytes < best.total_bytes:
                    best = found
    assert best is not None, "a chain has at least a source and a target"
    return best


def _published_path(costs: list[int], bound: int) -> list[int] | None:
    """Lines 3 and 4: the accessibility graph of a maximal term, and the shortest path in it."""
    total: list[int | None] = [costs[0]] + [None] * (len(costs) - 1)
    previous = [0] * len(costs)
    for j in range(1, len(costs)):
        for i in range(j):
            before = total[i]
            if before is None or sum(costs[i + 1 : j]) > bound:
                continue
            now = total[j]
            if now is None or before + costs[j] < now:
                total[j], previous[j] = before + costs[j], i
    if total[-1] is None:
        return None
    path = [len(costs) - 1]
    while path[-1] > 0:
        path.append(previous[path[-1]])
    return path[::-1]


@entry_point
def _shortest(stored: Any, gaps: Any, expanded: Any, bound: int, total: Any, previous: Any, scratch: Any) -> None:
    """Write the least stored bytes up to each vertex, and the stored vertex before it.

    The vertices from which j can be reached are a window; `scratch` holds those of them, by rising total, that no later
    one beats. `scratch[count + j]` are the bytes of all vertices and gaps before vertex j.
    """
    count = len(stored)
    for j in range(count - 1):
        scratch[count + j + 1] = scratch[count + j] + stored[j] + gaps[j]
    total[0] = stored[0]
    scratch[0] = 0
    head, tail = 0, 1
    for j in range(1, count):
        reached = scratch[count + j]
        while head < tail and reached - (scratch[count + scratch[head]] + stored[scratch[head]]) > bound:
            head += 1
        total[j] = _NEVER
        if head < tail:
            total[j] = total[scratch[head]] + stored[j]
            previous[j] = scratch[head]
        if gaps[j - 1] > bound and expanded[j - 1] < _NEVER and total[j - 1] < _NEVER:
            through = total[j - 1] + expanded[j - 1] + stored[j]
            if through < total[j]:
                total[j] = through
                previous[j] = j - 1
        if total[j] < _NEVER:
            while head < tail and total[scratch[tail - 1]] >= total[j]:
                tail -= 1
            scratch[tail] = j
            tail += 1
