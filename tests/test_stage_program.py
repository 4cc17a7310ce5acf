"""What an integer program of full stages keeps: against all kept sets of small networks, pins, limits."""

from __future__ import annotations

import itertools
import random

import pytest
from chains import network, problem

from memfit.graph import Graph
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.retention.decisions import (
    Evaluation,
    Retention,
    evaluate,
    keep_everything,
    keep_only,
    simulated,
)
from memfit.planners.engine.retention.instance import Instance, build_instance
from memfit.planners.engine.starts.full_stages import kept_by_stages
from memfit.planners.search import SearchPlanner

LAYERS = 7


def program_of(graph: Graph, budget_bytes: int = 1 << 60, **fields: object) -> Instance:
    return build_instance(problem(graph, budget_bytes, **fields), update_at_once_order(graph))


def evaluated(instance: Instance, retention: Retention) -> Evaluation:
    return evaluate(instance, simulated(instance, retention))


def branching(seed: int) -> Graph:
    """Layers of random bytes and whole seconds, each reading the last one and one before it."""
    drawn = random.Random(seed)
    sizes = [drawn.randint(50, 150) for _ in range(LAYERS)]
    reads = [sorted({layer - 1, max(-1, layer - drawn.randint(1, 4))}) for layer in range(LAYERS)]
    return network(sizes, reads, [float(drawn.randint(1, 9)) for _ in range(LAYERS)])


def test_most_small_networks_get_the_fastest_of_all_kept_sets_that_fit() -> None:
    same, asked = 0, 0
    for seed in range(8):
        instance = program_of(branching(seed))
        layers = range(1, LAYERS + 1)
        sets = itertools.chain.from_iterable(itertools.combinations(layers, count) for count in range(LAYERS + 1))
        every = [evaluated(instance, keep_only(instance, kept)) for kept in sets]
        least, most = min(each.peak_bytes for each in every), max(each.peak_bytes for each in every)
        for share in (0.3, 0.6):
            budget_bytes = int(least + share * (most - least))
            best = min(each.seconds for each in every if each.peak_bytes <= budget_bytes)
            within = program_of(branching(seed), budget_bytes)
            found = [evaluated(within, retention) for retention in kept_by_stages(within)]
            fits = [each.seconds for each in found if each.peak_bytes <= budget_bytes]
            if evaluated(within, keep_everything(within)).peak_bytes <= budget_bytes:
                assert not found
                continue
            assert all(seconds >= best for seconds in fits)
            same += bool(fits) and min(fits) == best
            asked += 1
    assert asked >= 10
    assert same >= 0.75 * asked


def test_what_is_too_full_where_backward_computes_again_is_mended_by_another_row() -> None:
    """What is kept first is enough where backward begins, not where the large first layers come back."""
    instance = program_of(network([200, 200, 200, 20, 100, 100, 100, 100]), 1100)
    found = [evaluated(instance, retention) for retention in kept_by_stages(instance)]
    assert [(each.peak_bytes, each.seconds) for each in found] == [(985, 18.0), (1185, 18.0)]


@pytest.mark.parametrize("kept", [True, False])
def test_pins_are_honoured(kept: bool) -> None:
    instance = program_of(branching(0), 715, pinned={2: kept})
    found = kept_by_stages(instance)
    assert found
    for retention in found:
        again = list(evaluated(instance, retention).sequence).count(2) > 1
        assert again is not kept


def test_nothing_is_begun_that_the_time_is_too_short_for() -> None:
    instance = program_of(branching(0), 715)
    assert kept_by_stages(instance, instance.problem.clock()) == []
    assert kept_by_stages(instance, instance.problem.clock() + 60.0)


def test_a_search_without_moves_has_what_the_stages_keep() -> None:
    instance = program_of(branching(5), 966)
    best = min(
        each.seconds
        for each in (evaluated(instance, retention) for retention in kept_by_stages(instance))
        if each.peak_bytes <= 966
    )
    plan = SearchPlanner(iterations=0).plan(problem(branching(5), 966)).plan
    assert plan is not None
    assert plan.predicted.seconds <= best
