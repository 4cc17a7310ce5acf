"""Planner `auto`: never faster than the shortest path over all states, optimal in its order, above its own bound."""

from __future__ import annotations

import heapq
import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from strategies import graphs

from memfit.device import GENERIC
from memfit.graph import Graph
from memfit.plan import Problem, Status
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound, least_recompute_seconds
from memfit.planners.engine.results import unplanned_peak_bytes


def shortest_path(graph: Graph, budget_bytes: int) -> float | None:
    """The seconds of the fastest schedule, found the plainest way: single drops and computations, all of them.

    For graphs without boundaries and mutations; what is on the device besides residents, and which ops are done.
    """
    resident = frozenset(s.id for s in graph.storages if s.resident)
    size = {s.id: s.bytes for s in graph.storages}
    base = sum(size[s] for s in resident)
    start = (frozenset[int](), frozenset[int]())
    best = {start: 0.0}
    ties = itertools.count()
    heap = [(0.0, next(ties), start)]
    while heap:
        seconds, _, (done, live) = heapq.heappop(heap)
        if seconds > best[done, live]:
            continue
        if len(done) == len(graph.ops) and all(
            s.id in live for s in graph.storages if s.required_at_end and s.id not in resident
        ):
            return seconds
        steps = [(seconds, (done, live - {s})) for s in live]
        for op in graph.ops:
            again = op.id in done
            if not set(op.reads) <= live | resident or (again and op.computed_once):
                continue
            if (
                not again
                and op.random is not None
                and any(other.random == op.random and other.id < op.id and other.id not in done for other in graph.ops)
            ):
                continue
            during = base + sum(size[s] for s in live) + sum(size[s] for s in op.writes) + (op.workspace_bytes or 0)
            after = seconds + op.seconds, (done | {op.id}, live | set(op.writes))
            if during <= budget_bytes:
                steps.append(after)
            for read, written in op.reuses:
                if read in live and written not in live and during - size[read] <= budget_bytes:
                    steps.append((after[0], (after[1][0], after[1][1] - {read})))
        for total, state in steps:
            if total < best.get(state, float("inf")):
                best[state] = total
                heapq.heappush(heap, (total, next(ties), state))
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=5, boundaries=False, mutations=False))
def test_a_small_graph_is_planned_optimally_in_its_order_and_never_beyond_the_shortest_path(graph: Graph) -> None:
    least, _ = least_budget_bound(Problem(graph=graph, device=GENERIC, budget_bytes=1))
    most = unplanned_peak_bytes(graph, GENERIC)
    for budget_bytes in {least, (least + most) // 2, most}:
        task = Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes)
        result = make_planner("auto", iterations=1_000).plan(task)
        expected = shortest_path(graph, budget_bytes)
        if expected is None:
            assert result.plan is None
        elif result.plan is None:  # one order of ops is searched, and another may need less
            assert result.status is Status.TIMED_OUT
        else:
            assert result.status is Status.OPTIMAL
            assert result.plan.predicted.seconds >= expected - 1e-9
            if result.plan.is_optimal_in_every_order:
                assert result.plan.predicted.seconds == pytest.approx(expected, abs=1e-6)
            once = sum(op.seconds for op in graph.ops)
            assert least_recompute_seconds(task).seconds <= expected - once + 1e-9


@pytest.mark.parametrize(
    ("name", "gibibytes", "most_seconds"),
    [("monet_resnet50_184_checkmate", 8, 1.1060), ("monet_unet_11_checkmate", 8, 1.9500)],
)
def test_published_graphs_are_planned_close_to_the_bound(
    name: str, gibibytes: int, most_seconds: float, shared_graphs: Path
) -> None:
    graph = Graph.load(shared_graphs / f"{name}.graph.json.gz")
    task = Problem(graph=graph, device=GENERIC, budget_bytes=gibibytes << 30)
    result = make_planner("auto", iterations=300_000).plan(task)
    assert result.plan is not None
    assert result.plan.predicted.seconds <= most_seconds
    assert 0.02 < result.bounds.overhead <= result.plan.overhead < result.bounds.overhead + 0.01
