"""Planner `division_tree`: a split of any graph into closed sets (Feng and Huang 2018, section 5, Algorithm 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from memfit.papers.planners.closed_sets import ClosedSet, Kind, division_tree
from memfit.papers.planners.linear_split import Chain, SplitCost, least_total
from memfit.papers.planners.recompute_counts import CountPlanner, Counts
from memfit.papers.planners.vertices import vertices_of
from memfit.planners.engine.retention.instance import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionTree(CountPlanner):
    """Store some vertices of any graph and recompute the closed sets between them, with the least sum of two terms.

    The terms are the stored bytes and the bytes of the largest set that is recomputed at once. For each bound on the
    second term the division tree is walked from its root. A closed set within the bound is not expanded; any other is
    divided, and its division is solved. The segments of a splittable set are solved as a chain. The best split of all
    bounds is the plan. The budget decides only the status.

    Where the paper leaves a choice: vertices and their costs are those of `memfit.papers.planners.vertices`, closed
    sets those of `memfit.papers.planners.closed_sets`. Bounds are skipped as in
    `memfit.papers.planners.linear_split`. A closed set without vertices costs nothing and is never expanded.

    The paper calls the split optimal for any graph. It is optimal among the stored sets between which closed sets are
    left; another stored set may be better by the same sum (tests/test_feng.py has such graphs).

    Source: Feng and Huang 2018, "Cutting Down Training Memory by Re-forwarding", section 5, Algorithm 5.
    """

    name: ClassVar[str] = "division_tree"
    source: ClassVar[str] = "Feng and Huang 2018, Algorithm 5"

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts of the split; see the class."""
        vertices = vertices_of(instance)
        split = solve_graph(vertices.cost_bytes, vertices.readers)
        return [vertices.recompute_counts(instance, split.stored)]


def solve_graph(cost_bytes: Sequence[int], readers: Sequence[Sequence[int]]) -> SplitCost:
    """Return the split of a graph that is optimal by equation 1 among those that leave closed sets.

    The source and the target are always stored.

        >>> solve_graph([0, 1, 5, 5, 1, 0], [[1], [2, 3], [4], [4], [5], []])  # a chain with a diamond in it
        SplitCost(stored_bytes=2, largest_bytes=5, stored=(0, 1, 4, 5))

    Args:
        cost_bytes: l of each vertex, in topological order.
        readers: of each vertex, the vertices that read it; the first is the source of all, the last the target.

    Source: Feng and Huang 2018, Algorithm 5.
    """
    tree = division_tree(readers)
    solver = _Solver(cost_bytes, tree)
    return least_total(solver.bytes_in(tree), solver.split)


class _Solver:
    def __init__(self, cost_bytes: Sequence[int], tree: ClosedSet) -> None:
        self.cost_bytes = cost_bytes
        self.tree = tree
        self._bytes_in = {id(node): sum(cost_bytes[v] for v in node.inside) for _, node in tree.walk()}

    def bytes_in(self, node: ClosedSet) -> int:
        """Return the cost of a closed set: of all vertices inside."""
        return self._bytes_in[id(node)]

    def split(self, bound: int) -> SplitCost | None:
        """Return the split of the whole graph that stores least, with every recomputed set within the bound (bytes)."""
        ends = self.cost_bytes[self.tree.first], self.cost_bytes[self.tree.last]
        inner = self._solve(self.tree, bound)
        return SplitCost(
            stored_bytes=sum(ends) + inner.stored_bytes,
            largest_bytes=inner.largest_bytes,
            stored=(self.tree.first, *sorted(inner.stored), self.tree.last),
        )

    def _solve(self, node: ClosedSet, bound: int) -> SplitCost:
        """Return the split inside a closed set whose ends are stored."""
        if self.bytes_in(node) <= bound:
            return SplitCost(stored_bytes=0, largest_bytes=self.bytes_in(node), stored=())
        if node.kind is Kind.SPLITTABLE:
            return self._solve_chain(node, bound)
        below = [self._solve(child, bound) for child in node.children]
        return SplitCost(
            stored_bytes=sum(self.cost_bytes[v] for v in node.between) + sum(each.stored_bytes for each in below),
            largest_bytes=max((each.largest_bytes for each in below), default=0),
            stored=(*node.between, *(vertex for each in below for vertex in each.stored)),
        )

    def _solve_chain(self, node: ClosedSet, bound: int) -> SplitCost:
        """Return the split of a splittable set; members beyond the bound are expanded, and part the segments."""
        expanded = {
            place: self._solve(child, bound)
            for place, child in enumerate(node.children)
            if self.bytes_in(child) > bound
        }
        gaps = np.array([self.bytes_in(child) for child in node.children], np.int64)
        chain = Chain(
            stored=np.array([0, *(self.cost_bytes[v] for v in node.between), 0], np.int64),
            gaps=gaps,
            expanded=np.array(
                [expanded[place].stored_bytes if place in expanded else 0 for place in range(len(gaps))], np.int64
            ),
        )
        path = chain.split(bound)
        assert path is not None, "a member beyond the bound can be expanded"
        passed = set(pairwise(path.stored))
        inner = [each for place, each in expanded.items() if (place, place + 1) in passed]
        assert len(inner) == len(expanded), "a member beyond the bound cannot be inside a segment"
        return SplitCost(
            stored_bytes=path.stored_bytes,
            largest_bytes=max([path.largest_bytes, *(each.largest_bytes for each in inner)]),
            stored=(
                *(node.between[index - 1] for index in path.stored[1:-1]),
                *(vertex for each in inner for vertex in each.stored),
            ),
        )
