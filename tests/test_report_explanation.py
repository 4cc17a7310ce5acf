"""The explanation of a plan: the effect of more memory, the ops that set the least budget, and its JSON."""

from __future__ import annotations

import msgspec
import pytest
from chains import chain, counted, heads
from small_plans import plan_of, small_graph

from memfit.device import GENERIC
from memfit.graph import Graph
from memfit.plan import Plan, Problem, Status
from memfit.planners import make_planner
from memfit.planners.engine.results import unplanned_schedule
from memfit.report.curve import CurvePoint
from memfit.report.explanation import explained, explanation_keys
from memfit.report.more_memory import next_step_bytes
from memfit.report.text import explanation_text
from memfit.simulate import simulate

A, B, GRAD_B = 2, 3, 5  # storages of the small graph


def deep_plan(share: float = 0.5, planner: str = "search") -> Plan:
    """A plan that a planner made for a chain of 20 ops and their backward."""
    graph = chain(20, 1000)
    unplanned = simulate(graph, unplanned_schedule(Problem(graph=graph, device=GENERIC, budget_bytes=1)), GENERIC)
    budget_bytes = int(share * unplanned.peak_bytes)
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes)
    plan = make_planner(planner, **counted(planner, 5_000)).plan(problem).plan
    assert plan is not None
    return plan


# -- more memory ------------------------------------------------------------------------------------------------------


def test_more_memory_is_read_from_the_points_that_hold_for_the_larger_budget() -> None:
    plan = deep_plan()
    larger = plan.budget_bytes + next_step_bytes(plan)
    points = [
        CurvePoint(plan.budget_bytes - 1, 0.001, Status.FEASIBLE, 0.0009),  # of a smaller budget: says nothing
        CurvePoint(larger - 1, 0.02, Status.FEASIBLE, 0.015),  # its plan fits, its bound does not hold
        CurvePoint(larger, 0.03, Status.FEASIBLE, 0.01),
        CurvePoint(larger + 1, 0.0, Status.OPTIMAL, 0.002),  # its plan does not fit, its bound holds
    ]
    more = explained(plan, points).more_memory
    assert more is not None
    assert (more.budget_bytes, more.overhead) == (larger, plan.overhead)
    assert (more.found_overhead, more.bound_overhead) == (0.02, 0.01)


def test_the_plan_itself_takes_the_place_of_slower_points_that_it_fits() -> None:
    plan = deep_plan()
    smaller, larger = plan.budget_bytes - 1, plan.budget_bytes + next_step_bytes(plan)
    slower = [CurvePoint(smaller, 0.9, Status.FEASIBLE), CurvePoint(larger, 0.8, Status.FEASIBLE, 0.01)]
    explanation = explained(plan, [*slower, CurvePoint(larger + 1, None, Status.TIMED_OUT)])
    assert explanation.points[1] == (plan.budget_bytes, plan.overhead, plan.status, plan.bounds.overhead)
    assert [point.overhead for point in explanation.points] == [0.9, plan.overhead, plan.overhead, plan.overhead]
    assert "a search found no faster plan for that budget" in explanation_text(explanation)
    assert "time in place of" in explanation_text(explanation)  # the bound


def test_without_a_curve_nothing_is_searched_and_the_text_says_so() -> None:
    plan = deep_plan()
    more = explained(plan).more_memory
    assert more is not None
    assert (more.found_overhead, more.bound_overhead) == (None, 0.0)
    assert f"at most the {plan.overhead:+.1%} time of this plan; a trade-off curve says how much" in plan.explain()


def test_a_gib_more_is_asked_about_where_the_step_is_that_large() -> None:
    plan = deep_plan()
    assert next_step_bytes(plan) == plan.budget_bytes // 10
    large = msgspec.structs.replace(
        plan, budget_bytes=6 << 30, unplanned=msgspec.structs.replace(plan.unplanned, peak_bytes=7 << 30)
    )
    assert next_step_bytes(large) == 1 << 30


def test_a_plan_as_fast_as_the_unplanned_step_buys_nothing() -> None:
    plan = deep_plan(1.0, "none")
    assert explained(plan).more_memory is None
    assert "nothing: this plan is as fast as the unplanned step" in plan.explain()


# -- the least budget -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_outside", [0, 4096])
def test_the_least_budget_is_the_sum_of_its_parts(bytes_outside: int) -> None:
    graph = chain(20, 1000)
    problem = Problem(
        graph=graph, device=GENERIC, budget_bytes=20_000 + bytes_outside, bytes_outside=bytes_outside,
    )  # fmt: skip
    plan = make_planner("search", iterations=5_000).plan(problem).plan
    assert plan is not None
    least = explained(plan).least_budget
    assert least.ops
    for holding in least.ops:
        parts = sum(graph.storages[s].bytes for s in holding.reads + holding.writes) + (holding.workspace_bytes or 0)
        assert holding.total_bytes == parts - holding.written_over_bytes
        needed = least.resident_bytes + least.outside_bytes + holding.total_bytes + holding.kept_bytes
        assert needed == plan.bounds.least_budget_bound_bytes
    assert f"needs {least.ops[0].total_bytes / 1024:.4g} KiB at once" in plan.explain()


def test_what_is_kept_for_the_end_holds_the_least_budget_beside_an_op() -> None:
    plan = plan_of(heads(), unplanned_schedule(Problem(graph=heads(), device=GENERIC, budget_bytes=1)))
    least = explained(plan).least_budget
    assert [(holding.op, holding.total_bytes, holding.kept_bytes) for holding in least.ops] == [
        (1, 140, 80),
        (3, 140, 80),
        (5, 140, 80),
    ]
    assert "op1 needs 140 B at once" in plan.explain()
    assert "; with 80 B kept for the end of the step, beside 10 B always there" in plan.explain()


def test_gradients_that_are_handed_over_hold_the_least_budget() -> None:
    graph = small_graph()
    kept = [msgspec.structs.replace(s, required_at_end=s.id in (A, B, GRAD_B, 6, 7)) for s in graph.storages]
    graph = Graph.build(name="handed", storages=kept, ops=graph.ops[:-1])
    free = Problem(graph=graph, device=GENERIC, budget_bytes=1)
    least = explained(plan_of(graph, unplanned_schedule(free))).least_budget
    assert (least.ops, least.at_end_bytes, least.bound_bytes) == ((), 400 * 4 + 100 + 8, 150 + 1708)
    assert "1.668 KiB that the step hands over at its end" in _unplanned_words(graph, free)


def _unplanned_words(graph: Graph, problem: Problem) -> str:
    return plan_of(graph, unplanned_schedule(problem)).explain()


# -- JSON -------------------------------------------------------------------------------------------------------------


def test_the_explanation_as_json() -> None:
    explanation = explained(deep_plan())
    keys = msgspec.json.decode(msgspec.json.encode(explanation_keys(explanation)))
    assert len(keys["storages"]) == len(explanation.plan.graph.storages)
    extra = [row["extra_seconds"] for row in keys["storages"]]
    assert extra == sorted(extra, reverse=True)
    first = keys["storages"][0]
    assert first["fate"] == "rematerialized"
    assert len(first["live"]) == 1 + first["rematerialized"]
    assert keys["more_memory"]["budget_bytes"] > explanation.plan.budget_bytes
    assert keys["least_budget"]["bound_bytes"] == explanation.plan.bounds.least_budget_bound_bytes
