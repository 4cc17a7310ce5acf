"""The planners of Feng 2018: the published loop, brute force on small graphs, and the networks of the paper."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.papers.planners.closed_sets import ClosedSet, Kind, division_tree, splitting_vertices
from memfit.papers.planners.division_tree import solve_graph
from memfit.papers.planners.linear_split import SplitCost, linear_chain, solve_chain
from memfit.papers.planners.vertices import vertices_of
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.planners.engine.order import original_order
from memfit.planners.engine.retention.instance import Instance, build_instance

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from division_tree_picture import division_svg, unet_svg  # noqa: E402

Readers = list[list[int]]
NO_LIMIT = 1 << 60


# Section 4: linear graphs


def algorithm_1(cost_bytes: Sequence[int]) -> SplitCost:
    """Return the split that Algorithm 1 finds, as it is published: in O(N^4)."""
    count, costs = len(cost_bytes), list(cost_bytes)
    best: SplitCost | None = None
    for i in range(count):
        for j in range(i + 1, count):
            bound = sum(costs[i + 1 : j])  # line 2: the maximal term
            path = shortest_path(costs, bound)
            if path is not None:
                leaps = [sum(costs[a + 1 : b]) for a, b in itertools.pairwise(path)]
                stored_bytes = sum(costs[vertex] for vertex in path)
                found = SplitCost(stored_bytes=stored_bytes, largest_bytes=max(leaps), stored=tuple(path))
                if best is None or found.total_bytes < best.total_bytes:
                    best = found
    assert best is not None, "a chain has at least a source and a target"
    return best


def shortest_path(costs: list[int], bound: int) -> list[int] | None:
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


@given(inner=st.lists(st.integers(0, 30), max_size=9), ends=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_the_fast_solver_is_algorithm_1(inner: list[int], ends: tuple[int, int]) -> None:
    costs = [ends[0], *inner, ends[1]]
    fast, published = solve_chain(costs), algorithm_1(costs)
    assert fast.total_bytes == published.total_bytes
    assert fast.stored_bytes == sum(costs[vertex] for vertex in fast.stored)
    leaps = [sum(costs[i + 1 : j]) for i, j in itertools.pairwise(fast.stored)]
    assert fast.largest_bytes == max(leaps)
    assert fast.stored[0] == 0
    assert fast.stored[-1] == len(costs) - 1


@pytest.mark.parametrize("root", [2, 3, 5, 10, 31, 70])
def test_equal_chains_come_to_two_over_the_root_of_n(root: int) -> None:
    count = root * root
    split = solve_chain([0, *[1] * count, 0])
    # The paper counts the stored vertex of a segment among the recomputed ones, k/N + 1/k; it is not, so one less.
    assert split.total_bytes == 2 * root - 1
    assert split.total_bytes / count <= 2 / math.sqrt(count)


def test_a_chain_of_five_thousand_vertices_is_split() -> None:
    pick = random.Random(5)
    costs = [0, *(pick.randint(1, 1 << 30) for _ in range(5000)), 0]
    assert solve_chain(costs).total_bytes < 2.2 * sum(costs) / math.sqrt(5000)


# Section 5: arbitrary graphs


def graphs_of(count: int) -> Iterator[Readers]:
    """Every graph of so many vertices, numbered in topological order, in which all is between source and target."""
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    for mask in range(1 << len(pairs)):
        readers: Readers = [[] for _ in range(count)]
        is_read = [False] * count
        for bit, (i, j) in enumerate(pairs):
            if mask >> bit & 1:
                readers[i].append(j)
                is_read[j] = True
        if all(is_read[1:]) and all(readers[:-1]):
            yield readers


def brute_force(costs: Sequence[int], readers: Readers) -> int:
    """Equation 1 over every set of stored vertices that leaves closed sets between two stored vertices."""
    count = len(readers)
    return min(
        sum(costs[v] for v in stored) + max((sum(costs[v] for v in part) for part in parts), default=0)
        for size in range(count - 1)
        for inner in itertools.combinations(range(1, count - 1), size)
        if (parts := closed_parts(stored := {0, count - 1, *inner}, readers)) is not None
    )


def closed_parts(stored: set[int], readers: Readers) -> list[set[int]] | None:
    """The connected parts of what is not stored; None where one of them touches other than two stored vertices."""
    beside = [set(each) for each in readers]
    for vertex, each in enumerate(readers):
        for reader in each:
            beside[reader].add(vertex)
    left = set(range(len(readers))) - stored
    parts: list[set[int]] = []
    while left:
        waiting, part, ends = [left.pop()], set[int](), set[int]()
        while waiting:
            vertex = waiting.pop()
            part.add(vertex)
            ends |= beside[vertex] & stored
            waiting += beside[vertex] & left
            left -= beside[vertex]
        if len(ends) != 2:
            return None
        parts.append(part)
    return parts


def is_optimal(readers: Readers, costs: Sequence[int]) -> bool:
    """Say whether the split of a graph is one, takes what it says it takes, and is as small as brute force finds."""
    split = solve_graph(costs, readers)
    parts = closed_parts(set(split.stored), readers)
    return (
        parts is not None
        and split.total_bytes == brute_force(costs, readers)
        and max((sum(costs[v] for v in part) for part in parts), default=0) <= split.largest_bytes
        and sum(costs[v] for v in split.stored) == split.stored_bytes
    )


def not_optimal(graphs: Iterable[Readers], pick: random.Random) -> list[tuple[Readers, list[int]]]:
    """Return the graphs and costs, equal ones and drawn ones, whose split is not optimal."""
    found: list[tuple[Readers, list[int]]] = []
    for readers in graphs:
        inner = len(readers) - 2
        for costs in ([0, *[1] * inner, 0], [0, *(pick.randint(1, 9) for _ in range(inner)), 0]):
            found += [] if is_optimal(readers, costs) else [(readers, costs)]
    return found


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_every_small_graph_is_solved_as_by_brute_force(count: int) -> None:
    assert not_optimal(graphs_of(count), random.Random(count)) == []


@pytest.mark.parametrize("step", [300, pytest.param(10, marks=pytest.mark.slow)])
def test_graphs_of_seven_vertices_are_solved_as_by_brute_force(step: int) -> None:
    # There are 196,082 of them: a step of 1 tries them all, in ten minutes.
    assert not_optimal(itertools.islice(graphs_of(7), 0, None, step), random.Random(7)) == []


def connected_parts(stored: set[int], readers: Readers) -> list[set[int]]:
    """The connected parts of what is not stored, whatever they touch: each is recomputed at once."""
    beside = [set(each) for each in readers]
    for vertex, each in enumerate(readers):
        for reader in each:
            beside[reader].add(vertex)
    left = set(range(len(readers))) - stored
    parts: list[set[int]] = []
    while left:
        waiting, part = [left.pop()], set[int]()
        while waiting:
            vertex = waiting.pop()
            part.add(vertex)
            waiting += beside[vertex] & left
            left -= beside[vertex]
        parts.append(part)
    return parts


def least_of_all_stored_sets(costs: Sequence[int], readers: Readers) -> tuple[int, tuple[int, ...]]:
    """Equation 1 over every set of stored vertices, and the first set that is least by it."""
    last = len(readers) - 1
    return min(
        (
            sum(costs[v] for v in inner)
            + max((sum(costs[v] for v in part) for part in connected_parts({0, last, *inner}, readers)), default=0),
            inner,
        )
        for size in range(last)
        for inner in itertools.combinations(range(1, last), size)
    )


def drawn_graph(pick: random.Random, count: int) -> tuple[list[int], Readers]:
    """A graph of so many vertices between source and target, each of which reads one or two before it."""
    readers: Readers = [[] for _ in range(count + 2)]
    for vertex in range(1, count + 1):
        for before in pick.sample(range(vertex), min(vertex, pick.randint(1, 2))):
            readers[before].append(vertex)
    for vertex in range(count + 1):
        if not readers[vertex]:
            readers[vertex].append(count + 1)
    return [0, *(pick.randint(1, 9) for _ in range(count)), 0], readers


def test_a_stored_set_that_leaves_no_closed_sets_may_be_better() -> None:
    # A chain 0 to 4 in which 3 also reads 0. What is left beside a stored 2 is {1} and {3}, and 3 touches 0, 2 and 4.
    costs, readers = [0, 2, 1, 3, 0], [[1, 3], [2], [3], [4], []]
    assert solve_graph(costs, readers).total_bytes == 6
    assert least_of_all_stored_sets(costs, readers) == (1 + 3, (2,))
    assert closed_parts({0, 2, 4}, readers) is None


def test_division_trees_are_optimal_among_closed_sets_only() -> None:
    pick = random.Random(0)
    better = 0
    for _ in range(60):
        costs, readers = drawn_graph(pick, 7)
        total, least = solve_graph(costs, readers).total_bytes, least_of_all_stored_sets(costs, readers)[0]
        assert least <= total
        better += least < total
    assert better == 53  # as docs/papers.md says


def test_a_chain_is_solved_alike_by_both() -> None:
    pick = random.Random(1)
    costs = [0, *(pick.randint(1, 100) for _ in range(40)), 0]
    readers = [[vertex + 1] for vertex in range(41)] + [[]]
    assert solve_graph(costs, readers).total_bytes == solve_chain(costs).total_bytes


# Definitions 1 to 9, on the paper's figures


def test_the_types_of_figure_3() -> None:
    chain = division_tree([[1], [2], []])
    assert (chain.kind, chain.between) == (Kind.SPLITTABLE, (1,))
    branched = division_tree([[1, 2], [3], [3], []])
    assert (branched.kind, len(branched.children)) == (Kind.BRANCHED, 2)
    assert [child.kind for child in branched.children] == [Kind.SPLITTABLE, Kind.SPLITTABLE]
    skip = division_tree([[1, 2], [2], []])  # a residual connection: the edge is a branch of its own
    assert (skip.kind, [child.kind for child in skip.children]) == (Kind.BRANCHED, [Kind.SPLITTABLE, Kind.EDGE])


def test_the_maximal_split_of_figure_4c() -> None:
    # v1 = 0, v2, v3 = 3, 5, v4 = 8; each edge of the bridge carries a vertex: [s12] [s13] [s23] [s24] [s34]
    readers = [[1, 2], [3], [5], [4, 6], [5], [7], [8], [8], []]
    tree = division_tree(readers)
    assert tree.kind is Kind.WHOLE
    assert tree.between == (3, 5)
    assert [(child.first, child.last) for child in tree.children] == [(0, 3), (0, 5), (3, 5), (3, 8), (5, 8)]


def test_what_leaks_is_in_no_closed_set() -> None:
    # Of 1 and 2, which lie between 0 and 3, vertex 2 also feeds 4: s_03 is {1} alone.
    readers = [[1, 2], [3], [3, 4], [5], [5], []]
    tree = division_tree(readers)
    assert tree.kind is Kind.WHOLE
    assert [set(child.inside) for child in tree.children] == [{1}, {4}]
    assert tree.between == (2, 3)


def test_splitting_vertices_are_those_of_algorithm_2() -> None:
    for readers in graphs_of(5):
        assert splitting_vertices(readers, range(5)) == [v for v in range(1, 4) if algorithm_2(v, readers)]


def algorithm_2(vertex: int, readers: Readers) -> bool:
    """The published test of a splitting vertex, by the sets v_in and v_out."""
    count = len(readers)
    below: list[set[int]] = [set() for _ in range(count)]
    for v in reversed(range(count)):
        for reader in readers[v]:
            below[v] |= {reader} | below[reader]
    coming = {v for v in range(count) if vertex in below[v]}
    going = below[vertex]
    return (
        coming | going | {vertex} == set(range(count))
        and not coming & going
        and not any(reader in going for v in coming for reader in readers[v])
    )


def test_the_tree_is_complete() -> None:
    for readers in graphs_of(6):
        tree = division_tree(readers)
        for _, node in tree.walk():
            below = [vertex for child in node.children for vertex in child.inside]
            assert sorted([*below, *node.between]) == sorted(node.inside)
            assert (node.kind is Kind.EDGE) == (not node.inside)


def test_the_picture_shows_every_node() -> None:
    tree = division_tree([[1], [2, 3], [4], [4], [5], []])
    picture = division_svg(tree, ["source", "conv <1>", "a", "b", "cat", "target"], [0, 1, 5, 5, 1, 0])
    assert picture.startswith("<svg")
    assert picture.count("<rect") == sum(node.kind is not Kind.EDGE for _, node in tree.walk())
    assert "conv &lt;1&gt;" in picture
    assert "conv <1>" not in picture


def test_the_picture_in_the_documents_is_what_is_drawn() -> None:
    assert unet_svg() == (ROOT / "docs" / "division_tree.svg").read_text(encoding="utf-8")


# From steps to vertices


def program_of(ops: list[tuple[str, list[int], bool]]) -> Instance:
    """Forward ops (name, what they read by number, whether backward reads them), backward in reverse."""
    storages = [Storage(id=0, name="batch", bytes=64, role=Role.INPUT)]
    made: list[Op] = []
    for number, (name, reads, _) in enumerate(ops):
        storages.append(Storage(id=number + 1, name=name, bytes=64, role=Role.ACTIVATION))
        read = tuple(r + 1 for r in reads)
        made.append(Op(id=number, name=name, phase=Phase.FORWARD, reads=read, writes=(number + 1,), seconds=1.0))
    last = len(ops)
    for number in reversed(range(len(ops))):
        if ops[number][2]:
            storages.append(Storage(id=len(storages), name=f"g{number}", bytes=64, role=Role.GRADIENT))
            read = tuple(dict.fromkeys((number + 1, last)))
            last = len(storages) - 1
            op = Op(id=len(made), name=f"g{number}", phase=Phase.BACKWARD, reads=read, writes=(last,), seconds=1.0)
            made.append(op)
    graph = Graph.build(name="ops", storages=storages, ops=made)
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT)
    return build_instance(problem, original_order(graph))


def test_what_backward_does_not_read_joins_its_reader() -> None:
    instance = program_of([("conv", [-1], True), ("bn", [0], False), ("relu", [1], True), ("loss", [2], True)])
    vertices = vertices_of(instance)
    assert vertices.names == ("source", "conv", "relu", "loss", "target")
    assert vertices.cost_bytes == (0, 64, 64, 64, 0)
    assert vertices.ops[2] == (1, 2)
    assert linear_chain(vertices) == ([0, 1, 2, 3, 4], [0, 0, 0, 0])


def test_masks_join_and_shared_constants_are_kept() -> None:
    instance = program_of(
        [
            ("conv", [-1], True),
            ("mask", [], True),
            ("dropout", [0, 1], True),
            ("table", [], False),
            ("a", [2, 3], True),
            ("b", [4, 3], True),
        ]
    )
    vertices = vertices_of(instance)
    assert vertices.names == ("source", "conv", "dropout", "a", "b", "target")
    assert vertices.cost_bytes[2] == 128
    assert vertices.always_kept == (3,)


# The networks of the paper


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("densenet121", {"depth": 201}), ("inceptionv3", {"size": 299})])
def test_large_networks_take_less_memory(name: str, options: dict[str, int]) -> None:
    from memfit.capture import capture
    from memfit.workloads import build

    graph = capture(build(name, batch=2, **options)).graph
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT)
    unplanned = make_planner("none").plan(problem).plan
    plan = make_planner("division_tree").plan(problem).plan
    assert plan is not None
    assert unplanned is not None
    assert plan.predicted.peak_bytes < unplanned.predicted.peak_bytes


def test_a_closed_set_is_shown_by_its_ends() -> None:
    tree = division_tree([[1], []])
    assert tree == ClosedSet(kind=Kind.EDGE, first=0, last=1, inside=frozenset())
