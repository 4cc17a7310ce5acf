"""Parts of a search, switched off one at a time."""

from __future__ import annotations

import dataclasses
import re

import pytest
from chains import network, problem
from test_search_by_moves import residual

from memfit.errors import InvalidOptionError
from memfit.plan import Result
from memfit.planners import make_planner, options_of
from memfit.planners.auto import AutoPlanner
from memfit.planners.engine.annealing.state import make_annealing_state
from memfit.planners.engine.order import original_order
from memfit.planners.engine.parts import Parts
from memfit.planners.engine.retention.instance import build_instance

NAMES = [field.name for field in dataclasses.fields(Parts)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_search_without_a_part_still_fits_the_budget(name: str) -> None:
    task = problem(residual(4, equal=True), 1150)
    result = make_planner("auto", iterations=500, without=name).plan(task)
    assert result.plan is not None
    assert result.plan.predicted.peak_bytes <= 1150


def test_the_bounds_without_their_parts_prove_no_more() -> None:
    task = problem(network([20 + 37 * number % 101 for number in range(9)]), 400)

    def without(names: str) -> Result:
        return make_planner("auto", iterations=500, without=names).plan(task)

    full = without("")
    less = without("boundary_candidates,last_large_op,exact_per_op,cpsat_proof")
    assert less.bounds.overhead <= full.bounds.overhead
    assert less.bounds.least_budget_bound_bytes <= full.bounds.least_budget_bound_bytes
    assert full.bounds.overhead_in_order is not None
    assert less.bounds.overhead_in_order is None


def test_moves_that_are_switched_off_give_their_share_to_toggles() -> None:
    graph = residual(4, equal=True)
    instance = build_instance(problem(graph, 1150), original_order(graph))
    moves = "exchange_until", "shift_until", "run_until", "evict_until", "forget_until"
    names = *moves, "each_reader_until", "later_stage_until"

    def shares(off: str) -> list[float]:
        totals = make_annealing_state(instance, 0, Parts.without(off)).totals
        return [float(totals[name][0]) for name in names]

    assert shares("") == [0.2, 0.3, 0.32, 0.42, 0.5, 0.05, 0.1]
    assert shares("exchange, drop_for_each_reader") == [0.0, 0.1, 0.12, 0.22, 0.3, 0.0, 0.05]
    assert shares("evict_at_peak,hold_from_later_stage") == [0.2, 0.3, 0.32, 0.0, 0.4, 0.05, 0.05]
    assert shares("forget_sources") == [0.2, 0.3, 0.32, 0.42, 0.42, 0.05, 0.1]


@pytest.mark.parametrize("planner", ["search", "auto", "offload"])
def test_an_unknown_part_is_refused_with_the_names_that_exist(planner: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"has no part 'warp'; its parts: full_stages, .*, cpsat_proof"):
        make_planner(planner, without="shift,warp").plan(problem(network([10, 10]), 1000))
    assert re.search("switch off", options_of(AutoPlanner)["without"])
