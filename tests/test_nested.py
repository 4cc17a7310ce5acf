"""Recursive checkpointing as retention: memory grows with the logarithm of a chain, and searches begin there."""

from __future__ import annotations

import pytest
from chains import chain, problem

from memfit.checker import check
from memfit.planners import make_planner
from memfit.planners.engine.order import original_order
from memfit.planners.engine.retention.decisions import evaluate, keep_everything, simulated
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import build_instance
from memfit.planners.engine.starts.candidates import recursive_checkpoints
from memfit.planners.search import SearchPlanner


@pytest.mark.parametrize(("length", "blocks"), [(16, 7), (64, 9), (256, 11)])
def test_a_block_more_for_each_doubling(length: int, blocks: int) -> None:
    graph = chain(length)
    instance = build_instance(problem(graph), original_order(graph))
    evaluation = evaluate(instance, simulated(instance, recursive_checkpoints(instance, 1)))
    check(graph, emit(instance, evaluation.sequence))
    assert evaluation.peak_bytes <= 100 * blocks
    assert evaluation.seconds <= evaluate(instance, simulated(instance, keep_everything(instance))).seconds * 5


def test_search_finds_what_recursion_finds_in_no_moves() -> None:
    graph = chain(256)
    least = make_planner("recursive", stored=1).plan(problem(graph, 1)).bounds.least_budget_found_bytes
    assert least is not None
    found = SearchPlanner(iterations=1).plan(problem(graph, 1)).bounds.least_budget_found_bytes
    assert found is not None
    assert found <= least
