"""The retention model: equal to brute force over its family, never better than all schedules, never below a bound."""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chains import chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shortest_path import fastest_schedule
from strategies import graphs

from memfit.checker import check
from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem, Progress, Status
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound, least_recompute_seconds
from memfit.planners.engine.bounds.per_op import exact, least_recompute_seconds_at
from memfit.planners.engine.cpsat.solve import Proof, prove
from memfit.planners.engine.order import original_order
from memfit.planners.engine.peak_reducing_order import peak_reducing_order
from memfit.planners.engine.results import predict, unplanned_peak_bytes
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import Instance, build_instance
from memfit.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the scripts import one another as scripts do

from _training_chains import training_chain


def proof_of(instance: Instance) -> Proof:
    return prove(instance, known=None, known_recompute_seconds=math.inf, recompute_bound_seconds=0.0, limit_work=20.0)


def tight(graph: Graph, share: float) -> Problem:
    """A budget this far from the proved least to what the unplanned step takes."""
    least, _ = least_budget_bound(Problem(graph=graph, device=GENERIC, budget_bytes=1))
    most = unplanned_peak_bytes(graph, GENERIC)
    return Problem(graph=graph, device=GENERIC, budget_bytes=int(least + share * (most - least)))


def budgets(graph: Graph) -> set[int]:
    """The least budget that the bound leaves, a little more, the middle, and one at which nothing has to go."""
    least, _ = least_budget_bound(Problem(graph=graph, device=GENERIC, budget_bytes=1))
    most = unplanned_peak_bytes(graph, GENERIC)
    return {least, (3 * least + most) // 4, (least + most) // 2, most - 1, most}


def fastest_in_stages(instance: Instance) -> float | None:
    """The least seconds of the model's family, found the plainest way: stage by stage, single drops and computations.

    For graphs without boundaries and mutations. A state is the stage, the op last computed in it, all ops
    computed so far, and the storages on the device.
    """
    graph, budget_bytes = instance.graph, instance.problem.budget_bytes
    size = {s.id: s.bytes for s in graph.storages}
    resident = frozenset(s.id for s in graph.storages if s.resident)
    base = sum(size[s] for s in resident)
    at_end = {s.id for s in graph.storages if s.required_at_end} - resident
    waits = [bool(row["may_wait"]) for row in instance.tables.positions]
    last = len(graph.ops)
    start = (0, -1, frozenset[int](), frozenset[int]())
    best = {start: 0.0}
    ties = itertools.count()
    heap = [(0.0, next(ties), start)]
    while heap:
        seconds, _, state = heapq.heappop(heap)
        stage, latest, done, live = state
        if seconds > best[state]:
            continue
        if stage == last and at_end <= live and len(done) == last:
            return seconds
        steps = [(0.0, (stage, latest, done, live - {s})) for s in live]
        if stage < last and latest == -1 and waits[stage]:
            steps.append((0.0, (stage + 1, -1, done, live)))
        for op in graph.ops[latest + 1 : stage + 1]:
            if (op.id in done and op.computed_once) or not set(op.reads) <= live | resident:
                continue
            if op.id not in done and op.id < stage and not waits[op.id]:
                continue
            following = (stage + 1, -1) if op.id == stage else (stage, op.id)
            during = base + sum(size[s] for s in live) + sum(size[s] for s in op.writes) + (op.workspace_bytes or 0)
            gone = [0] + [size[r] for r, w in op.reuses if r in live and w not in live]
            dying = [-1] + [r for r, w in op.reuses if r in live and w not in live]
            for read, saved in zip(dying, gone, strict=True):
                if during - saved <= budget_bytes:
                    steps.append((op.seconds, (*following, done | {op.id}, (live - {read}) | set(op.writes))))
        for more, state in steps:
            if seconds + more < best.get(state, math.inf):
                best[state] = seconds + more
                heapq.heappush(heap, (seconds + more, next(ties), state))
    return None


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=5, boundaries=False, mutations=False))
def test_equal_to_brute_force_over_the_family(graph: Graph) -> None:
    once = sum(op.seconds for op in graph.ops)
    for budget_bytes in budgets(graph):
        problem = Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes)
        instance = build_instance(problem, original_order(graph))
        proof, expected = proof_of(instance), fastest_in_stages(instance)
        if expected is None:
            assert proof.sequence is None
            assert proof.recompute_seconds == math.inf
        else:
            assert proof.sequence is not None
            predicted = predict(problem, emit(instance, proof.sequence))
            assert predicted.peak_bytes <= budget_bytes
            assert predicted.seconds == pytest.approx(expected)
            assert proof.recompute_seconds == pytest.approx(expected - once, abs=1e-6)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=8, boundaries=False, mutations=False))
def test_never_faster_than_the_shortest_path_over_all_states(graph: Graph) -> None:
    once = sum(op.seconds for op in graph.ops)
    for budget_bytes in budgets(graph):
        problem = Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes)
        fastest = fastest_schedule(problem)
        proof = proof_of(build_instance(problem, original_order(graph)))
        if fastest is not None:
            assert proof.recompute_seconds >= fastest.seconds - once - 1e-6
        if fastest is not None and fastest.ops is not None:
            by_moments = max(least_recompute_seconds_at(problem).values(), default=0.0)
            by_cuts = least_recompute_seconds(problem)
            assert by_cuts.seconds - 1e-6 <= by_moments <= fastest.seconds - once + 1e-6
            assert by_cuts.seconds <= exact(problem, by_cuts).seconds <= by_moments + 1e-6


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=12), data=st.data())
def test_plans_of_any_graph_are_legal_fit_and_are_no_slower_than_the_searchs(graph: Graph, data: st.DataObject) -> None:
    once = sum(op.seconds for op in graph.ops)
    pins = data.draw(st.sets(st.integers(0, len(graph.ops) - 1), max_size=2))
    for budget_bytes in budgets(graph):
        problem = Problem(
            graph=graph,
            device=GENERIC,
            budget_bytes=budget_bytes + 50,
            bytes_outside=50,
            pinned=dict.fromkeys(pins, True),
        )
        found = make_planner("search", iterations=500, threads=1).plan(problem).plan
        instance = build_instance(problem, peak_reducing_order(graph, GENERIC))
        proof = proof_of(instance)
        if proof.sequence is not None:
            schedule = emit(instance, proof.sequence)
            check(graph, schedule)
            predicted = predict(problem, schedule)
            assert predicted.peak_bytes <= problem.budget_bytes
            assert predicted.seconds == pytest.approx(once + proof.recompute_seconds, abs=1e-6)
            computed = schedule.operands[schedule.codes == 0].tolist()
            assert all(computed.count(op) == 1 for op in pins)
        if found is not None:
            by_moments = max(least_recompute_seconds_at(problem).values(), default=0.0)
            assert by_moments <= found.predicted.seconds - once + 1e-6
            assert proof.recompute_seconds <= found.predicted.seconds - once + 1e-6


def knapsack() -> Graph:
    """Three results of 60, 50 and 50 bytes and 3, 2 and 2 s, which backward wants in the opposite order."""
    sizes = {"x": 1, "a0": 60, "s0": 1, "a1": 50, "s1": 1, "a2": 50, "s2": 1, "y": 1, "g2": 1, "g1": 1, "g0": 1}
    number = {name: index for index, name in enumerate(sizes)}
    uses = [("x", "a0 s0"), ("s0", "a1 s1"), ("s1", "a2 s2"), ("s2", "y")]
    uses += [("y a2", "g2"), ("g2 a1", "g1"), ("g1 a0", "g0")]
    seconds = [3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    return Graph.build(
        name="knapsack",
        storages=[
            Storage(id=i, name=n, bytes=sizes[n], role=Role.OUTPUT if n == "g0" else Role.ACTIVATION, resident=n == "x")
            for n, i in number.items()
        ],
        ops=[
            Op(
                id=i,
                name=f"op{i}",
                phase=Phase.FORWARD if i < 4 else Phase.BACKWARD,
                reads=tuple(number[name] for name in reads.split()),
                writes=tuple(number[name] for name in writes.split()),
                seconds=seconds[i],
            )
            for i, (reads, writes) in enumerate(uses)
        ],
    )


def test_what_one_moment_keeps_at_best_is_where_a_search_begins_and_ends() -> None:
    problem = Problem(graph=knapsack(), device=GENERIC, budget_bytes=105)
    by_cuts = least_recompute_seconds(problem)
    assert 2.3 < by_cuts.seconds < 2.6  # 50 bytes, and a fifth of the next 50, for 2 s each
    moment = exact(problem, by_cuts)
    assert moment.seconds == pytest.approx(3.0, abs=1e-6)
    result = make_planner("search", iterations=100_000).plan(problem)
    assert result.plan is not None
    assert result.status is Status.OPTIMAL
    assert result.plan.predicted.seconds == 14.0
    assert result.stats["moves"] == 0


def test_an_exact_bound_leaves_alone_what_it_says_nothing_of() -> None:
    problem = Problem(graph=knapsack(), device=GENERIC, budget_bytes=1000)
    nothing = least_recompute_seconds(problem)
    assert exact(problem, nothing) is nothing


@pytest.mark.parametrize(
    ("budget_bytes", "again"),
    [
        (500, 0.0),  # b2 beside what is read later: the input, three outputs and the gradient that it writes
        (400, 1.0),  # the output of f0 is dropped in forward, and recomputed for b1
        (399, math.inf),  # b2 alone: the input, its reads and its writes
    ],
)
def test_a_chain_solved_by_hand(budget_bytes: int, again: float) -> None:
    problem = Problem(graph=chain(3), device=GENERIC, budget_bytes=budget_bytes)
    proof = proof_of(build_instance(problem, original_order(problem.graph)))
    assert proof.recompute_seconds == pytest.approx(again, abs=1e-6)
    expected = {0.0: (0, 1, 2, 3, 4, 5, 6), 1.0: (0, 1, 2, 3, 0, 4, 5, 6), math.inf: None}
    assert proof.sequence == expected[again]


def test_what_is_pinned_to_be_rematerialized_is() -> None:
    problem = Problem(graph=chain(3), device=GENERIC, budget_bytes=1000, pinned={1: False})
    proof = proof_of(build_instance(problem, original_order(problem.graph)))
    assert proof.recompute_seconds == pytest.approx(1.0, abs=1e-6)
    assert proof.sequence is not None
    assert proof.sequence.count(1) == 2


def test_the_same_work_gives_the_same_answer() -> None:
    graph = training_chain(14, 2)
    instance = build_instance(tight(graph, 0.3), original_order(graph))
    ended = [
        prove(instance, known=None, known_recompute_seconds=math.inf, recompute_bound_seconds=0.0, limit_work=0.3)
        for _ in range(2)
    ]
    assert ended[0] == ended[1]


def test_a_plan_of_another_order_is_beaten_or_left_alone() -> None:
    graph = training_chain(10, 1)
    problem = tight(graph, 0.3)
    instance = build_instance(problem, original_order(graph))
    best = proof_of(instance)
    for known_recompute_seconds, found in ((2 * best.recompute_seconds, True), (0.9 * best.recompute_seconds, False)):
        proof = prove(
            instance,
            known=Schedule.parse("compute 2\ncompute 1\ncompute 0"),
            known_recompute_seconds=known_recompute_seconds,
            recompute_bound_seconds=0.0,
            limit_work=20.0,
        )
        assert (proof.sequence is not None) == found
        assert proof.recompute_seconds == (pytest.approx(best.recompute_seconds) if found else math.inf)


def test_auto_proves_its_plan_in_its_order() -> None:
    graph = training_chain(12, 3)
    problem = tight(graph, 0.3)
    result = make_planner("auto", iterations=200_000, threads=1).plan(problem)
    assert result.plan is not None
    assert result.status is Status.OPTIMAL
    assert not result.plan.is_optimal_in_every_order
    assert least_recompute_seconds(problem).seconds < 0.999 * result.bounds.overhead * result.plan.unplanned.seconds
    assert result.bounds.overhead < result.plan.overhead
    assert result.bounds.overhead_in_order == pytest.approx(result.plan.overhead, abs=1e-7)
    assert result.plan.predicted.peak_bytes <= problem.budget_bytes
    assert "optimal in its order" in result.plan.explain()


def test_ctrl_c_keeps_the_plan_that_the_search_found() -> None:
    graph = training_chain(18, 3)

    def interrupt(progress: Progress) -> None:
        if progress.message.startswith("proving"):
            raise KeyboardInterrupt

    problem = replace(tight(graph, 0.3), progress=interrupt)
    result = make_planner("auto", iterations=200_000, threads=1).plan(problem)
    assert result.plan is not None
    assert result.interrupted
    assert result.bounds.overhead_in_order is not None
    assert result.bounds.overhead_in_order <= result.plan.overhead + 1e-9
