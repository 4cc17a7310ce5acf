"""Planners: legal schedules, budgets kept, bounds that hold, and answers that brute force confirms."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chains import chain, counted, heads, network, problem
from hypothesis import HealthCheck, given, settings
from shortest_path import fastest_schedule
from strategies import graphs

from memfit.checker import check
from memfit.device import GENERIC
from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Progress, Status
from memfit.planners import PLANNERS, make_planner, options_of
from memfit.planners.engine.annealing.loop import anneal
from memfit.planners.engine.annealing.state import make_annealing_state
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.order import original_order, update_at_once_order
from memfit.planners.engine.results import Ending, make_result
from memfit.planners.engine.retention.decisions import (
    Retention,
    evaluate,
    held_bytes,
    keep_everything,
    keep_only,
    simulated,
)
from memfit.planners.engine.retention.instance import build_instance
from memfit.planners.search import SearchPlanner
from memfit.planning import plan_frontier, unplanned_peak_bytes
from memfit.schedule import Schedule
from memfit.simulate import simulate

SEARCH = SearchPlanner(iterations=20_000)
SEARCHES = ("search", "offload", "auto")


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
    instance = build_instance(problem(graph, 1 << 40), original_order(graph))
    forward = [op.writes[0] for op in graph.ops if op.phase is Phase.FORWARD]
    found = []
    for count in range(len(forward) + 1):
        for kept in itertools.combinations(forward, count):
            evaluation = evaluate(instance, simulated(instance, keep_only(instance, kept)))
            found.append((evaluation.peak_bytes, evaluation.seconds))
    for budget_bytes in sorted({peak for peak, _ in found}):
        best = min(seconds for peak, seconds in found if peak <= budget_bytes)
        result = SEARCH.plan(problem(graph, budget_bytes))
        assert result.plan is not None, budget_bytes
        assert result.plan.predicted.seconds <= best


def test_the_unplanned_peak_is_enough_where_overlap_makes_it_smaller() -> None:
    sizes = (0, 64, 100, 256, 0, 100, 64, 64)
    roles = (Role.INPUT, *[Role.ACTIVATION] * 7)
    storages = [
        Storage(id=n, name=f"s{n}", bytes=size, role=role, resident=n == 0, required_at_end=n in (3, 4))
        for n, (size, role) in enumerate(zip(sizes, roles, strict=True))
    ]
    op = partial(Op, phase=Phase.FORWARD)
    ops = [
        op(id=0, name="op0", reads=(), writes=(1, 2), seconds=0.5),
        op(id=1, name="op1", reads=(0,), writes=(3, 4), mutates=(1,), seconds=0.125, group="ranks", reuses=((0, 4),)),
        op(id=2, name="op2", reads=(4,), writes=(5,), seconds=0.5, workspace_bytes=30),
        op(id=3, name="op3", reads=(2,), writes=(6, 7), seconds=0.125, group="ranks"),
    ]
    graph = Graph(name="a gather is waited for later", storages=tuple(storages), ops=tuple(ops))
    most = unplanned_peak_bytes(graph, GENERIC)
    result = make_planner("none").plan(problem(graph, most))
    assert result.plan is not None
    assert result.plan.predicted.peak_bytes == most


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(collectives=True))
def test_every_plan_is_legal_within_its_budget_and_above_the_bound(graph: Graph) -> None:
    bound, _ = least_budget_bound(problem(graph, 1))
    most = unplanned_peak_bytes(graph, GENERIC)
    assert bound <= most
    for name in PLANNERS:
        planner = make_planner(name, **counted(name, 500))
        for budget_bytes in (most, (bound + most) // 2, bound, max(1, bound - 1)):
            result = planner.plan(problem(graph, budget_bytes))
            if result.plan is None:
                assert budget_bytes < most, f"{name} refuses the unplanned peak"
                is_proved = budget_bytes < result.bounds.least_budget_bound_bytes
                assert result.status is (Status.INFEASIBLE if is_proved else Status.TIMED_OUT)
                continue
            check(graph, result.plan.schedule)
            peak = simulate(graph, result.plan.schedule, GENERIC).peak_bytes
            assert bound <= peak == result.plan.predicted.peak_bytes <= budget_bytes
            assert result.bounds.overhead <= result.plan.overhead + 1e-9


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=7, collectives=True))
def test_the_shortest_path_over_all_states_finds_nothing_below_the_least_budget(graph: Graph) -> None:
    bound, ops = least_budget_bound(problem(graph, 1))
    fastest = fastest_schedule(problem(graph, bound - 1))
    assert fastest is None or fastest.ops is None
    assert all(0 <= op < len(graph.ops) for op in ops)


def test_the_last_large_op_runs_beside_what_the_end_requires() -> None:
    bound, ops = least_budget_bound(problem(heads(), 1))
    assert bound == 10 + (100 + 40) + 2 * 40
    assert ops == (1, 3, 5)
    result = SEARCH.plan(problem(heads(), bound))
    assert result.plan is not None
    assert result.plan.predicted.peak_bytes == bound


def test_offloading_leaves_less_beside_the_last_large_op() -> None:
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
    rounds = SearchPlanner(iterations=1_500_000)  # several, for some 30 storages that may go
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
    results = plan_frontier(problem(graph, 1), budgets, planner=SearchPlanner(iterations=3_000))
    overheads = [result.plan.overhead for result in results if result.plan is not None]
    assert len(overheads) >= 5
    assert overheads == sorted(overheads, reverse=True)


def test_an_interruption_gives_the_best_plan_so_far() -> None:
    calls: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        calls.append(progress)
        if progress.best_overhead is not None:
            raise KeyboardInterrupt

    result = SearchPlanner(iterations=1_000_000_000).plan(problem(chain(12), 1000, progress=interrupt))
    assert result.plan is not None
    assert result.interrupted
    assert result.stats["moves"] < 1_000_000_000


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_finds_nothing_is_no_proof_of_infeasibility(name: str) -> None:
    """All results are pinned to be kept, which takes 800 bytes; no bound counts pins."""
    graph = chain(6)
    task = problem(graph, 700, pinned=dict.fromkeys(range(len(graph.ops)), True))
    result = make_planner(name, iterations=500).plan(task)
    assert result.plan is None
    assert result.status is Status.TIMED_OUT
    assert result.bounds.least_budget_bound_bytes <= 700
    assert result.bounds.least_budget_found_bytes == 800


@pytest.mark.parametrize("name", ["none", "segments", "sublinear"])
def test_a_planner_that_has_tried_all_its_plans_proves_nothing(name: str) -> None:
    graph = chain(8)
    bound, _ = least_budget_bound(problem(graph, 1))
    result = make_planner(name).plan(problem(graph, bound))
    assert result.plan is None
    assert result.status is Status.TIMED_OUT
    assert result.tried_all
    assert result.bounds.least_budget_bound_bytes == bound


def test_a_schedule_that_does_not_fit_the_unplanned_peak_gives_way_to_keeping_everything() -> None:
    task = problem(chain(6), 800)
    wasteful = Schedule.parse("\n".join(f"compute {op.id}" for op in task.graph.ops))
    ending = Ending(planner="wasteful", started_seconds=0.0, schedule=wasteful, tried_all=True)
    result = make_result(task, ending)
    assert result.plan is not None
    assert result.plan.predicted.peak_bytes == 800
    assert make_result(replace(task, budget_bytes=799), ending).status is Status.TIMED_OUT


def test_pins_are_honoured() -> None:
    graph = chain(6)
    kept = {op.id: True for op in graph.ops}
    result = SEARCH.plan(problem(graph, 700, pinned=kept))
    assert result.status is Status.TIMED_OUT
    dropped = make_planner("none").plan(problem(graph, 10_000, pinned={2: False}))
    assert dropped.plan is not None
    assert dropped.plan.predicted.seconds > 12.0


def test_unknown_planners_and_options_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"no planner is called .sarch.; there are .*none.*search.*sublinear"):
        make_planner("sarch")
    with pytest.raises(InvalidOptionError, match="has no option 'depth'"):
        make_planner("search", depth=3)
    assert all(text for text in options_of(SearchPlanner).values())


def test_starting_points_bring_the_published_resnet50_within_a_third_of_a_percent_of_the_bound(
    shared_graphs: Path,
) -> None:
    task = problem(Graph.load(shared_graphs / "monet_resnet50_184_checkmate.graph.json.gz"), 6 << 30)
    result = SearchPlanner(iterations=20_000).plan(task)
    assert result.plan is not None
    assert result.plan.predicted.seconds <= 1.13226
    assert 0.10821 <= result.bounds.overhead <= result.plan.overhead <= 0.11117
    without = "full_stages,block_dynamic_program"
    annealed = SearchPlanner(iterations=20_000, without=without).plan(task).plan
    assert annealed is not None
    assert result.plan.predicted.seconds + 0.005 < annealed.predicted.seconds <= 1.1440


def test_moves_leave_the_bytes_that_a_simulation_from_nothing_gives() -> None:
    instance = build_instance(problem(chain(300), 4000), update_at_once_order(chain(300)))
    state, annealing = simulated(instance, keep_everything(instance)), make_annealing_state(instance, 1)
    annealing.totals["temperature"], annealing.totals["penalty"] = 1.0, 0.001
    for moves in [1] * 50 + [50] * 20:
        anneal(instance.tables, state, annealing, moves, 1.0)
        retention = Retention(release=state.intervals["release"].copy(), hold=state.intervals["hold"].copy())
        held, excess = held_bytes(state), annealing.totals["excess"][0]
        assert held.tolist() == held_bytes(simulated(instance, retention)).tolist()
        assert int(annealing.totals["peak_bytes"][0]) == held.max() == held[annealing.totals["peak_stage"][0]]
        assert excess == np.maximum(0, held - instance.budget_bytes).sum()
    assert annealing.totals["accepted"][0] > 200


def test_ops_hold_the_least_budget_with_what_user_code_holds_beside_them() -> None:
    graph = chain(6)
    alone_bytes, holding = least_budget_bound(problem(graph, 10_000))
    assert holding
    assert least_budget_bound(replace(problem(graph, 10_000), bytes_outside=70)) == (alone_bytes + 70, holding)
