"""Planner `division_tree`: the optimal split of an arbitrary graph (Feng 2018, section 5, Algorithm 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.closed_sets import ClosedSet, Kind, division_tree
from memfit.planners.linear_split import Chain, SplitCost, least_total
from memfit.planners.mirrored import evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import build_program
from memfit.planners.vertices import vertices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionTree:
    """Store the vertices that make the stored bytes plus the largest re-forward least, on any graph.

    For each bound on the re-forwards the division tree is walked from the root: a closed set that is within the bound
    is not expanded; one that is not is divided, and its division is solved. The segments of a splittable set are solved
    as a chain, where what is expanded can only be passed through. The best of all bounds is the plan. The budget
    changes nothing but the status.

    Where the text leaves room: vertices and their costs are those of `memfit.planners.vertices`, closed sets those of
    `memfit.planners.closed_sets`. Bounds are looked at as in `memfit.planners.linear_split`, not one by one. A closed
    set without vertices costs nothing and is never expanded.

    Source: Feng and Huang 2018, "Cutting Down Training Memory by Re-forwarding", section 5, Algorithm 5.
    """

    name: ClassVar[str] = "division_tree"
    source: ClassVar[str] = "Feng and Huang 2018, Algorithm 5"

    def plan(self, problem: Problem) -> Result:
        """Return the plan of the optimal split, with status infeasible where it does not fit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        started_seconds = problem.clock()
        program = build_program(problem, update_at_once_order(problem.graph))
        vertices = vertices_of(program)
        split = solve_graph(vertices.cost_bytes, vertices.readers)
        evaluation = evaluate_mirror(program, vertices.mirror_counts(program, split.stored))
        return answer(
            program,
            [evaluation],
            planner=self.name,
            started_seconds=started_seconds,
            stats={"stored_bytes": split.stored_bytes, "largest_bytes": split.largest_bytes},
        )


def solve_graph(cost_bytes: Sequence[int], readers: Sequence[Sequence[int]]) -> SplitCost:
    """Return the split of a graph that is optimal by equation 1; the source and the target are always stored.

        >>> solve_graph([0, 1, 5, 5, 1, 0], [[1], [2, 3], [4], [4], [5], []])  # a chain with a diamond in it
        SplitCost(stored_bytes=2, largest_bytes=5, stored=(0, 1, 4, 5))

    Args:
        cost_bytes: l of each vertex, in topological order.
        readers: who reads each vertex; the first is the source of all, the last the target.
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
        """The cost of a closed set: of all vertices inside."""
        return self._bytes_in[id(node)]

    def split(self, bound: int) -> SplitCost | None:
        """Return the least stored bytes of the whole graph with every re-forward within the bound."""
        ends = self.cost_bytes[self.tree.first], self.cost_bytes[self.tree.last]
        inner = self._solve(self.tree, bound)
        return SplitCost(
            stored_bytes=sum(ends) + inner.stored_bytes,
            largest_bytes=inner.largest_bytes,
            stored=(self.tree.first, *sorted(inner.stored), self.tree.last),
        )

    def _solve(self, node: ClosedSet, bound: int) -> SplitCost:
        """Return what has to be stored inside a closed set whose ends are stored."""
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
        """Solve the linear segments of a splittable set; members beyond the bound are expanded, and part them."""
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
        assert path is not None, "what is beyond the bound can be expanded"
        passed = set(pairwise(path.stored))
        inner = [each for place, each in expanded.items() if (place, place + 1) in passed]
        assert len(inner) == len(expanded), "a member beyond the bound cannot be leapt over"
        return SplitCost(
            stored_bytes=path.stored_bytes,
            largest_bytes=max([path.largest_bytes, *(each.largest_bytes for each in inner)]),
            stored=(
                *(node.between[index - 1] for index in path.stored[1:-1]),
                *(vertex for each in inner for vertex in each.stored),
            ),
        )
