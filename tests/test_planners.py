"""Planners: legal schedules, budgets kept, bounds that hold, and answers that brute force confirms."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from chains import chain, heads, network, problem
from hypothesis import HealthCheck, given, settings
from strategies import graphs

from memfit.checker import check
from memfit.device import GENERIC
from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Phase
from memfit.plan import Progress, Status
from memfit.planners import PLANNERS, make_planner, options_of
from memfit.planners.anneal import anneal
from memfit.planners.ask import unplanned_peak_bytes
from memfit.planners.bounds import least_budget_bound
from memfit.planners.course import make_course
from memfit.planners.frontier import plan_frontier
from memfit.planners.order import original_order, update_at_once_order
from memfit.planners.program import build_program
from memfit.planners.search import Search
from memfit.planners.shortest_path import fastest_schedule
from memfit.planners.windows import Windows, evaluate, held_bytes, keep_everything, keep_only, simulated
from memfit.simulate import simulate

SEARCH = Search(iterations=20_000)


def test_none_keeps_everything_of_a_chain() -> None:
    result = make_planner("none").plan(problem(chain(6), 10_000))
    assert result.status is Status.OPTIMAL
    assert result.plan is not None
    assert result.plan.predicted.seconds == 12.0
    assert result.plan.predicted.peak_bytes == 800


def test_search_trades_the_fewest_computations_of_a_chain() -> None:
    graph = chain(6)
    for budget_bytes, seconds in ((800, 12.0), (700, 13.0), (600, 15.0)):
        result = SEARCH.plan(problem(graph, budget_bytes))
        assert result.plan is not None
        assert result.plan.predicted.seconds <= seconds
        assert result.plan.predicted.peak_bytes <= budget_bytes


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_search_is_no_worse_than_the_best_kept_set(length: int) -> None:
    graph = chain(length)
    program = build_program(problem(graph, 1 << 40), original_order(graph))
    forward = [op.writes[0] for op in graph.ops if op.phase is Phase.FORWARD]
    found = []
    for count in range(len(forward) + 1):
        for kept in itertools.combinations(forward, count):
            evaluation = evaluate(program, simulated(program, keep_only(program, kept)))
            found.append((evaluation.peak_bytes, evaluation.seconds))
    for budget_bytes in sorted({peak for peak, _ in found}):
        best = min(seconds for peak, seconds in found if peak <= budget_bytes)
        result = SEARCH.plan(problem(graph, budget_bytes))
        assert result.plan is not None, budget_bytes
        assert result.plan.predicted.seconds <= best


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs())
def test_every_plan_is_legal_within_its_budget_and_above_the_bound(graph: Graph) -> None:
    bound, _ = least_budget_bound(problem(graph, 1))
    most = unplanned_peak_bytes(graph, GENERIC)
    assert bound <= most
    for name in PLANNERS:
        planner = make_planner(name, **({"iterations": 2_000} if name in ("search", "offload", "auto") else {}))
        for budget_bytes in (most, (bound + most) // 2, bound, max(1, bound - 1)):
            result = planner.plan(problem(graph, budget_bytes))
            if result.plan is None:
                assert result.status is Status.INFEASIBLE
                continue
            check(graph, result.plan.schedule)
            peak = simulate(graph, result.plan.schedule, GENERIC).peak_bytes
            assert bound <= peak == result.plan.predicted.peak_bytes <= budget_bytes
            assert result.bounds.overhead <= result.plan.overhead + 1e-9


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=7))
def test_the_shortest_path_over_all_states_finds_nothing_below_the_least_budget(graph: Graph) -> None:
    bound, ops = least_budget_bound(problem(graph, 1))
    fastest = fastest_schedule(problem(graph, bound - 1), until_seconds=math.inf)
    assert fastest is None or fastest.ops is None
    assert all(0 <= op < len(graph.ops) for op in ops)


def test_the_last_heavy_op_runs_beside_what_the_end_wants() -> None:
    bound, ops = least_budget_bound(problem(heads(), 1))
    assert bound == 10 + (100 + 40) + 2 * 40
    assert ops == (1, 3, 5)
    result = SEARCH.plan(problem(heads(), bound))
    assert result.plan is not None
    assert result.plan.predicted.peak_bytes == bound


def test_trips_to_the_host_leave_less_beside_the_last_heavy_op() -> None:
    bound, _ = least_budget_bound(replace(problem(heads(), 1), host_budget_bytes=1000))
    assert bound == 10 + 100 + 40


def test_a_step_that_takes_no_time_is_planned() -> None:
    graph = network([100] * 4, seconds=[0.0] * 4)
    graph = Graph.build(
        name="free", storages=graph.storages, ops=[msgspec.structs.replace(op, seconds=0.0) for op in graph.ops]
    )
    heard: list[Progress] = []
    budget_bytes = unplanned_peak_bytes(graph, GENERIC) - 100
    result = SEARCH.plan(problem(graph, budget_bytes, progress=heard.append))
    assert result.plan is not None
    assert result.plan.overhead == 0.0
    assert {each.best_overhead for each in heard} <= {None, 0.0}


def test_the_same_seed_and_iterations_give_the_same_plan() -> None:
    plans = [SEARCH.plan(problem(chain(12), 1000, seed=3)).plan for _ in range(2)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].schedule == plans[1].schedule


def test_rounds_that_begin_afresh_repeat_and_end_with_the_best_of_all() -> None:
    sizes = [1 + 37 * number % 101 for number in range(30)]
    graph = network(sizes, seconds=[1.0 + 53 * number % 17 for number in range(30)])
    budget_bytes = (least_budget_bound(problem(graph, 1))[0] + unplanned_peak_bytes(graph, GENERIC)) // 2
    searched: list[Progress] = []
    rounds = Search(iterations=1_500_000)  # several, for some 30 storages that may go
    first = rounds.plan(problem(graph, budget_bytes, progress=searched.append))
    second = rounds.plan(problem(graph, budget_bytes))
    assert first.plan is not None and second.plan is not None
    assert first.plan.schedule == second.plan.schedule
    assert first.stats["moves"] >= 1_500_000, "nothing ended the search before its last round"
    overheads = [progress.best_overhead for progress in searched if progress.best_overhead is not None]
    assert first.plan.overhead <= min(overheads) + 1e-9, "a round that found less than the one before does not count"


def test_a_budget_below_the_bound_is_infeasible_and_says_why() -> None:
    graph = chain(8)
    bound, ops = least_budget_bound(problem(graph, 1))
    result = SEARCH.plan(problem(graph, bound - 1))
    assert result.status is Status.INFEASIBLE
    assert result.plan is None
    assert result.bounds.least_budget_bound_bytes == bound
    assert result.bounds.least_budget_found_bytes is not None
    assert result.bounds.least_budget_found_bytes >= bound
    assert result.bounds.holding_ops == ops


def test_a_larger_budget_is_never_slower() -> None:
    graph = chain(16)
    budgets = [600, 700, 900, 1100, 1300, 1500, 1800]
    results = plan_frontier(problem(graph, 1), budgets, planner=Search(iterations=3_000))
    overheads = [result.plan.overhead for result in results if result.plan is not None]
    assert len(overheads) >= 5
    assert overheads == sorted(overheads, reverse=True)


def test_an_interruption_gives_the_best_plan_so_far() -> None:
    calls: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        calls.append(progress)
        if progress.best_overhead is not None:
            raise KeyboardInterrupt

    result = Search().plan(problem(chain(12), 1000, time_limit_seconds=30.0, progress=interrupt))
    assert result.plan is not None
    assert calls[-1].elapsed_seconds < 30.0


def test_pins_are_honoured() -> None:
    graph = chain(6)
    kept = {op.id: True for op in graph.ops}
    result = SEARCH.plan(problem(graph, 700, pinned=kept))
    assert result.status is Status.INFEASIBLE
    dropped = make_planner("none").plan(problem(graph, 10_000, pinned={2: False}))
    assert dropped.plan is not None
    assert dropped.plan.predicted.seconds > 12.0


def test_unknown_planners_and_options_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"no planner is called .sarch.; there are .*none.*search.*sublinear"):
        make_planner("sarch")
    with pytest.raises(InvalidOptionError, match="has no option 'depth'"):
        make_planner("search", depth=3)
    assert all(text for text in options_of(Search).values())


def test_the_published_resnet50_within_half_a_percent(shared_graphs: object) -> None:
    graph = Graph.load(shared_graphs / "monet_resnet50_184_checkmate.graph.json.gz")  # type: ignore[operator]
    result = Search(iterations=1_500_000).plan(problem(graph, 6 << 30))
    assert result.plan is not None
    assert result.plan.predicted.seconds <= 1.13578 * 1.005
    assert replace(result, plan=None).plan is None


def test_moves_leave_the_bytes_that_a_simulation_from_nothing_gives() -> None:
    program = build_program(problem(chain(300), 4000), update_at_once_order(chain(300)))
    state, course = simulated(program, keep_everything(program)), make_course(program, 1)
    course.totals["temperature"], course.totals["penalty"] = 1.0, 0.001
    for moves in [1] * 50 + [50] * 20:
        anneal(program.tables, state, course, moves, 1.0)
        windows = Windows(release=state.gaps["release"].copy(), hold=state.gaps["hold"].copy())
        held, excess = held_bytes(state), course.totals["excess"][0]
        assert held.tolist() == held_bytes(simulated(program, windows)).tolist()
        assert int(course.totals["peak_bytes"][0]) == held.max() == held[course.totals["peak_stage"][0]]
        assert excess == np.maximum(0, held - program.budget_bytes).sum()
    assert course.totals["accepted"][0] > 200


def test_ops_hold_the_least_budget_with_what_user_code_holds_beside_them() -> None:
    graph = chain(6)
    alone_bytes, holding = least_budget_bound(problem(graph, 10_000))
    assert holding
    assert least_budget_bound(replace(problem(graph, 10_000), bytes_outside=70)) == (alone_bytes + 70, holding)
