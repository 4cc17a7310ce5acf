"""The planners of Feng 2018: the published loop, brute force on small graphs, and the networks of the paper."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.planners.closed_sets import ClosedSet, Kind, division_tree, splitting_vertices
from memfit.planners.division_picture import division_svg, picture_of
from memfit.planners.division_tree import solve_graph
from memfit.planners.linear_split import linear_chain, published_split, solve_chain
from memfit.planners.order import original_order
from memfit.planners.program import Program, build_program
from memfit.planners.vertices import vertices_of

Readers = list[list[int]]
NO_LIMIT = 1 << 60
DOCS = Path(__file__).parents[1] / "docs"


# Section 4: linear graphs


@given(inner=st.lists(st.integers(0, 30), max_size=9), ends=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_the_fast_solver_is_algorithm_1(inner: list[int], ends: tuple[int, int]) -> None:
    costs = [ends[0], *inner, ends[1]]
    fast, published = solve_chain(costs), published_split(costs)
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
    # The paper counts the stored vertex of a segment among those computed again, k/N + 1/k; it is not, so one less.
    assert split.total_bytes == 2 * root - 1
    assert split.total_bytes / count <= 2 / math.sqrt(count)


def test_five_thousand_vertices_take_seconds() -> None:
    pick = random.Random(5)
    costs = [0, *(pick.randint(1, 1 << 30) for _ in range(5000)), 0]
    solve_chain(costs[:9])  # compiles
    started = time.perf_counter()
    split = solve_chain(costs)
    assert time.perf_counter() - started < 30
    assert split.total_bytes < 2.2 * sum(costs) / math.sqrt(5000)


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


def require_optimal(readers: Readers, pick: random.Random) -> None:
    inner = len(readers) - 2
    for costs in ([0, *[1] * inner, 0], [0, *(pick.randint(1, 9) for _ in range(inner)), 0]):
        split = solve_graph(costs, readers)
        assert split.total_bytes == brute_force(costs, readers), (readers, costs)
        parts = closed_parts(set(split.stored), readers)
        assert parts is not None
        assert max((sum(costs[v] for v in part) for part in parts), default=0) <= split.largest_bytes
        assert sum(costs[v] for v in split.stored) == split.stored_bytes


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_every_small_graph_is_solved_as_by_brute_force(count: int) -> None:
    pick = random.Random(count)
    for readers in graphs_of(count):
        require_optimal(readers, pick)


@pytest.mark.parametrize("step", [100, pytest.param(1, marks=pytest.mark.slow)])
def test_graphs_of_seven_vertices_are_solved_as_by_brute_force(step: int) -> None:
    # There are 196,082 of them: two minutes on a quiet machine.
    pick = random.Random(7)
    for readers in itertools.islice(graphs_of(7), 0, None, step):
        require_optimal(readers, pick)


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
    from memfit.capture import capture
    from memfit.workloads import build

    graph = capture(build("unet", batch=2, size=32, width=4, levels=3)).graph
    drawn = picture_of(Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT))
    assert drawn == (DOCS / "division_tree.svg").read_text(encoding="utf-8")


# From steps to vertices


def program_of(ops: list[tuple[str, list[int], bool]]) -> Program:
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
    return build_program(problem, original_order(graph))


def test_what_backward_does_not_read_joins_its_reader() -> None:
    program = program_of([("conv", [-1], True), ("bn", [0], False), ("relu", [1], True), ("loss", [2], True)])
    vertices = vertices_of(program)
    assert vertices.names == ("source", "conv", "relu", "loss", "target")
    assert vertices.cost_bytes == (0, 64, 64, 64, 0)
    assert vertices.ops[2] == (1, 2)
    assert linear_chain(vertices) == ([0, 1, 2, 3, 4], [0, 0, 0, 0])


def test_masks_join_and_shared_constants_are_kept() -> None:
    program = program_of(
        [
            ("conv", [-1], True),
            ("mask", [], True),
            ("dropout", [0, 1], True),
            ("table", [], False),
            ("a", [2, 3], True),
            ("b", [4, 3], True),
        ]
    )
    vertices = vertices_of(program)
    assert vertices.names == ("source", "conv", "dropout", "a", "b", "target")
    assert vertices.cost_bytes[2] == 128
    assert vertices.always_kept == (3,)


# The networks of the paper


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("densenet121", {"depth": 201}), ("inceptionv3", {"size": 299})])
def test_large_networks_take_less_than_30_seconds(name: str, options: dict[str, int]) -> None:
    from memfit.capture import capture
    from memfit.workloads import build

    graph = capture(build(name, batch=2, **options)).graph
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT)
    unplanned = make_planner("none").plan(problem).plan
    started = time.perf_counter()
    plan = make_planner("division_tree").plan(problem).plan
    assert time.perf_counter() - started < 30
    assert plan is not None
    assert unplanned is not None
    assert plan.predicted.peak_bytes < unplanned.predicted.peak_bytes


def test_a_closed_set_is_shown_by_its_ends() -> None:
    tree = division_tree([[1], []])
    assert tree == ClosedSet(kind=Kind.EDGE, first=0, last=1, inside=frozenset())
