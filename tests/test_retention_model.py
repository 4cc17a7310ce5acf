"""The retention model: equal to brute force over its family, never better than all schedules, never below a bound."""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import graphs

from memfit.checker import check
from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import INTERRUPTED, Problem, Progress, Status
from memfit.planners import make_planner
from memfit.planners.ask import unplanned_peak_bytes
from memfit.planners.bounds import least_budget_bound, least_seconds_again
from memfit.planners.emit import emit
from memfit.planners.lean_order import lean_order
from memfit.planners.moments import exact, least_seconds_again_at
from memfit.planners.order import original_order
from memfit.planners.program import Program, build_program
from memfit.planners.result import predict
from memfit.planners.retention_proof import Proof, prove
from memfit.planners.shortest_path import fastest_schedule
from memfit.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the scripts import one another as scripts do

from _training_chains import training_chain


def proof_of(program: Program) -> Proof:
    return prove(program, known=None, known_again_seconds=math.inf, again_bound_seconds=0.0, limit_work=20.0)


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


def fastest_in_stages(program: Program) -> float | None:
    """The least seconds of the model's family, found the plainest way: stage by stage, single drops and computations.

    For graphs without boundaries and mutations. A state is the stage, what was last computed in it, what has been
    computed so far, and what is on the device.
    """
    graph, budget_bytes = program.graph, program.problem.budget_bytes
    size = {s.id: s.bytes for s in graph.storages}
    resident = frozenset(s.id for s in graph.storages if s.resident)
    base = sum(size[s] for s in resident)
    at_end = {s.id for s in graph.storages if s.required_at_end} - resident
    waits = [bool(row["may_wait"]) for row in program.tables.positions]
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
        program = build_program(problem, original_order(graph))
        proof, expected = proof_of(program), fastest_in_stages(program)
        if expected is None:
            assert proof.sequence is None
            assert proof.again_seconds == math.inf
        else:
            assert proof.sequence is not None
            predicted = predict(problem, emit(program, proof.sequence))
            assert predicted.peak_bytes <= budget_bytes
            assert predicted.seconds == pytest.approx(expected)
            assert proof.again_seconds == pytest.approx(expected - once, abs=1e-6)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=8, boundaries=False, mutations=False))
def test_never_faster_than_the_shortest_path_over_all_states(graph: Graph) -> None:
    once = sum(op.seconds for op in graph.ops)
    for budget_bytes in budgets(graph):
        problem = Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes)
        fastest = fastest_schedule(problem, until_seconds=math.inf)
        proof = proof_of(build_program(problem, original_order(graph)))
        if fastest is not None:
            assert proof.again_seconds >= fastest.seconds - once - 1e-6
        if fastest is not None and fastest.ops is not None:
            by_moments = max(least_seconds_again_at(problem).values(), default=0.0)
            by_cuts = least_seconds_again(problem)
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
        program = build_program(problem, lean_order(graph, GENERIC))
        proof = proof_of(program)
        if proof.sequence is not None:
            schedule = emit(program, proof.sequence)
            check(graph, schedule)
            predicted = predict(problem, schedule)
            assert predicted.peak_bytes <= problem.budget_bytes
            assert predicted.seconds == pytest.approx(once + proof.again_seconds, abs=1e-6)
            computed = schedule.operands[schedule.codes == 0].tolist()
            assert all(computed.count(op) == 1 for op in pins)
        if found is not None:
            by_moments = max(least_seconds_again_at(problem).values(), default=0.0)
            assert by_moments <= found.predicted.seconds - once + 1e-6
            assert proof.again_seconds <= found.predicted.seconds - once + 1e-6


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
    by_cuts = least_seconds_again(problem)
    assert 2.3 < by_cuts.seconds < 2.6  # 50 bytes, and a fifth of the next 50, for 2 s each
    moment = exact(problem, by_cuts)
    assert moment.seconds == pytest.approx(3.0, abs=1e-6)
    assert moment.cuts[0].again_seconds == 3.0
    result = make_planner("search", iterations=100_000).plan(problem)
    assert result.plan is not None
    assert result.status is Status.OPTIMAL
    assert result.plan.predicted.seconds == 14.0
    assert result.stats["moves"] == 0


def test_an_exact_bound_leaves_alone_what_it_says_nothing_of() -> None:
    problem = Problem(graph=knapsack(), device=GENERIC, budget_bytes=1000)
    nothing = least_seconds_again(problem)
    assert exact(problem, nothing) is nothing


def chain() -> Graph:
    """Three forward ops of 1 s and their backward ops of 2 s, on storages of 100 bytes.

    a = f0(x), b = f1(a), c = f2(b); gc = b2(c), gb = b1(gc, b), ga = b0(gb, a), which is the output.
    """
    names = ["x", "a", "b", "c", "gc", "gb", "ga"]
    storages = [
        Storage(id=i, name=name, bytes=100, role=Role.OUTPUT if name == "ga" else Role.ACTIVATION, resident=name == "x")
        for i, name in enumerate(names)
    ]
    reads = [(0,), (1,), (2,), (3,), (4, 2), (5, 1)]
    ops = [
        Op(
            id=i,
            name=f"op{i}",
            phase=Phase.FORWARD if i < 3 else Phase.BACKWARD,
            reads=read,
            writes=(i + 1,),
            seconds=1.0 if i < 3 else 2.0,
        )
        for i, read in enumerate(reads)
    ]
    return Graph.build(name="chain", storages=storages, ops=ops)


@pytest.mark.parametrize(
    ("budget_bytes", "again"),
    [
        (500, 0.0),  # x, a, b, c, gc
        (400, 1.0),  # `a` is dropped in forward, and computed again for op5 beside gb: x, gb, a, ga
        (399, math.inf),  # op4 alone: x, gc, b, gb
    ],
)
def test_a_chain_solved_by_hand(budget_bytes: int, again: float) -> None:
    problem = Problem(graph=chain(), device=GENERIC, budget_bytes=budget_bytes)
    proof = proof_of(build_program(problem, original_order(problem.graph)))
    assert proof.again_seconds == pytest.approx(again, abs=1e-6)
    expected = {0.0: (0, 1, 2, 3, 4, 5, 6), 1.0: (0, 1, 2, 3, 4, 0, 5, 6), math.inf: None}
    assert proof.sequence == expected[again]


def test_what_is_pinned_to_be_rematerialized_is() -> None:
    problem = Problem(graph=chain(), device=GENERIC, budget_bytes=1000, pinned={1: False})
    proof = proof_of(build_program(problem, original_order(problem.graph)))
    assert proof.again_seconds == pytest.approx(1.0, abs=1e-6)
    assert proof.sequence is not None
    assert proof.sequence.count(1) == 2


def test_the_same_work_gives_the_same_answer() -> None:
    graph = training_chain(14, 2)
    program = build_program(tight(graph, 0.3), original_order(graph))
    ended = [
        prove(program, known=None, known_again_seconds=math.inf, again_bound_seconds=0.0, limit_work=0.3)
        for _ in range(2)
    ]
    assert ended[0] == ended[1]


def test_a_plan_of_another_order_is_beaten_or_left_alone() -> None:
    graph = training_chain(10, 1)
    problem = tight(graph, 0.3)
    program = build_program(problem, original_order(graph))
    best = proof_of(program)
    for known_again_seconds, found in ((2 * best.again_seconds, True), (0.9 * best.again_seconds, False)):
        proof = prove(
            program,
            known=Schedule.parse("compute 2\ncompute 1\ncompute 0"),
            known_again_seconds=known_again_seconds,
            again_bound_seconds=0.0,
            limit_work=20.0,
        )
        assert (proof.sequence is not None) == found
        assert proof.again_seconds == (pytest.approx(best.again_seconds) if found else math.inf)


def test_auto_proves_its_plan_in_its_order() -> None:
    graph = training_chain(12, 3)
    problem = tight(graph, 0.3)
    result = make_planner("auto", iterations=200_000, threads=1).plan(problem)
    assert result.plan is not None
    assert result.status is Status.OPTIMAL
    assert not result.plan.is_optimal_in_every_order
    assert least_seconds_again(problem).seconds < 0.999 * result.bounds.overhead * result.plan.unplanned.seconds
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
    assert result.stats[INTERRUPTED]
    assert result.bounds.overhead_in_order is not None
    assert result.bounds.overhead_in_order <= result.plan.overhead + 1e-9
