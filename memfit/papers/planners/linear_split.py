"""Planner `linear_split`: the optimal split of a linear graph (Feng and Huang 2018, section 4, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from memfit.papers.planners.closed_sets import splitting_vertices
from memfit.papers.planners.recompute_counts import CountPlanner, Counts
from memfit.papers.planners.vertices import Vertices, vertices_of
from memfit.planners.engine.retention.instance import Instance
from memfit.system.compiled import entry_point
from memfit.system.records import Integers

_NEVER = 1 << 60  # more than any sum of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCost:
    """A solution of the paper's equation 1.

    Attributes:
        stored_bytes: of the stored vertices.
        largest_bytes: of the largest segment between two stored vertices, which is recomputed at once.
        stored: the stored vertices, ascending (V^R in the paper).
    """

    stored_bytes: int
    largest_bytes: int
    stored: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """The sum that equation 1 minimises."""
        return self.stored_bytes + self.largest_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSplit(CountPlanner):
    """Store some vertices and recompute the segments between them, with the least sum of two terms.

    The terms are the stored bytes and the bytes of the largest segment. The paper has one split for a network, that of
    least memory: the budget decides only the status.

    Where the paper leaves a choice: vertices and their costs are those of `memfit.papers.planners.vertices`. On a
    graph that is not linear the chain consists of the splitting vertices, which lie on all paths; the vertices between
    two of them are never stored.

    Source: Feng and Huang 2018, "Cutting Down Training Memory by Re-forwarding", section 4, Algorithm 1.
    """

    name: ClassVar[str] = "linear_split"
    source: ClassVar[str] = "Feng and Huang 2018, Algorithm 1"

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts of the split; see the class."""
        vertices = vertices_of(instance)
        chain, between = linear_chain(vertices)
        split = solve_chain([vertices.cost_bytes[vertex] for vertex in chain], between)
        return [vertices.recompute_counts(instance, [chain[index] for index in split.stored])]


def linear_chain(vertices: Vertices) -> tuple[list[int], list[int]]:
    """Return the vertices on all paths, source and target included, and the bytes between each two of them."""
    chain = [0, *splitting_vertices(vertices.readers, range(len(vertices.readers))), len(vertices.readers) - 1]
    costs = vertices.cost_bytes
    return chain, [sum(costs[i + 1 : j]) for i, j in pairwise(chain)]


def solve_chain(cost_bytes: Sequence[int], between_bytes: Sequence[int] | None = None) -> SplitCost:
    """Return the split of a chain that is optimal by equation 1; the first and the last vertex are always stored.

        >>> solve_chain([0, 1, 1, 1, 0]).stored
        (0, 2, 4)

    For a bound C on the bytes of each segment, the least stored bytes f(C) are a shortest path in the accessibility
    graph. One path takes O(N): the vertices from which a vertex can be reached are a window that moves along the chain.
    f never increases with C. A range of bounds is therefore skipped once f at its end plus its least C is no better
    than the best split. Few of the O(N^2) bounds of the published loop are solved, and the result is the same.

    Args:
        cost_bytes: l of each vertex.
        between_bytes: of each gap between a vertex and the next, the bytes that cannot be stored; 0 on a linear graph.

    Source: Feng and Huang 2018, Algorithm 1.
    """
    stored = np.array(cost_bytes, np.int64)
    gaps = np.array([0] * (len(stored) - 1) if between_bytes is None else between_bytes, np.int64)
    chain = Chain(stored=stored, gaps=gaps, expanded=np.full(len(gaps), _NEVER, np.int64))
    return least_total(int(stored[1:-1].sum() + gaps.sum()), chain.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain of N vertices that can be stored, with gaps between them that cannot.

    A gap is expanded only if its bytes exceed the bound: then its own split is used, and it parts two segments.

    Attributes:
        stored: int64[N], the bytes of each vertex.
        gaps: int64[N - 1], the bytes between each vertex and the next.
        expanded: int64[N - 1], the bytes that each gap stores once it is expanded; `_NEVER` if it cannot be.
    """

    stored: Integers
    gaps: Integers
    expanded: Integers

    def split(self, bound_bytes: int) -> SplitCost | None:
        """Return the split that stores least with segments within the bound, or None; expanded gaps count as stored."""
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
        segments = [self._segment_bytes(i, j) for i, j in pairwise(path)]
        return SplitCost(
            stored_bytes=int(total[-1]),
            largest_bytes=max((segment for segment in segments if segment <= bound_bytes), default=0),
            stored=tuple(path),
        )

    def _segment_bytes(self, first: int, last: int) -> int:
        return int(self.stored[first + 1 : last].sum() + self.gaps[first:last].sum())


def least_total(most_bytes: int, split: Callable[[int], SplitCost | None]) -> SplitCost:
    """Return a split of least total over all bounds from 0 to `most_bytes`.

    Args:
        most_bytes: a bound that allows a single segment.
        split: bound -> the split of least stored bytes, or None; a larger bound never stores more.
    """
    best = split(most_bytes)
    assert best is not None, "without a bound a single segment is allowed"
    ranges = [(0, best.largest_bytes - 1, best.stored_bytes)]  # first and last bound, and the least stored bytes
    while ranges:
        low, high, least_stored = ranges.pop()
        if low > high or least_stored + low >= best.total_bytes:
            continue
        middle = (low + high) // 2
        found = split(middle)
        if found is None:
            ranges.append((middle + 1, high, least_stored))
            continue
        if found.total_bytes < best.total_bytes:
            best = found
        if found.stored_bytes > least_stored:
            ranges.append((middle + 1, high, least_stored))
        ranges.append((low, found.largest_bytes - 1, found.stored_bytes))
    return best


@entry_point
def _shortest(
    stored: Integers,
    gaps: Integers,
    expanded: Integers,
    bound: int,
    total: Integers,
    previous: Integers,
    scratch: Integers,
) -> None:
    """Write the least stored bytes up to each vertex, and the stored vertex before it.

    The vertices from which j can be reached are a window. `scratch` holds those of the window, by rising total, that no
    later one beats. `scratch[count + j]` are the bytes of all vertices and gaps before vertex j.
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
