"""Recursive checkpointing as windows: memory grows with the logarithm of a chain, and searches begin there."""

from __future__ import annotations

import pytest
from chains import chain, problem

from memfit.checker import check
from memfit.planners import make_planner
from memfit.planners.emit import emit
from memfit.planners.nested import nested_windows
from memfit.planners.order import original_order
from memfit.planners.program import build_program
from memfit.planners.search import Search
from memfit.planners.windows import evaluate, keep_everything, simulated


@pytest.mark.parametrize(("length", "blocks"), [(16, 7), (64, 9), (256, 11)])
def test_a_block_more_for_each_doubling(length: int, blocks: int) -> None:
    graph = chain(length)
    program = build_program(problem(graph), original_order(graph))
    evaluation = evaluate(program, simulated(program, nested_windows(program, 1)))
    check(graph, emit(program, evaluation.sequence))
    assert evaluation.peak_bytes <= 100 * blocks
    assert evaluation.seconds <= evaluate(program, simulated(program, keep_everything(program))).seconds * 5


def test_search_finds_what_recursion_finds_in_no_moves() -> None:
    graph = chain(256)
    least = make_planner("recursive", stored=1).plan(problem(graph, 1)).bounds.least_budget_found_bytes
    assert least is not None
    found = Search(iterations=1).plan(problem(graph, 1)).bounds.least_budget_found_bytes
    assert found is not None
    assert found <= least
