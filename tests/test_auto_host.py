"""Planner `auto` with a host: equal to the shortest path over all states, and that to plain brute force."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from reference import IllegalError, Reference
from strategies import LINKED, graphs

from memfit import schedule
from memfit.checker import check
from memfit.device import Device
from memfit.graph import Graph
from memfit.plan import Problem, Status
from memfit.planners import make_planner
from memfit.planners.ask import unplanned_peak_bytes
from memfit.planners.bounds import least_budget_bound, least_seconds_again
from memfit.planners.offload import Offload
from memfit.planners.shortest_path_host import fastest_with_host
from memfit.schedule import Compute, Drop, DropHost, Instruction, Prefetch, Wait
from memfit.simulate import simulate

PLENTY = 1 << 40
MOST_STATES = 5_000


def brute_force(task: Problem, most_seconds: float) -> float | None:
    """The seconds of the fastest schedule of at most `most_seconds`, by single instructions, all that are legal.

    Infinite where there is none, None where there are too many states. What each instruction does, `Reference` says.
    """
    start, ties, seen = Reference(task.graph, task.device), itertools.count(), set[object]()
    heap = [(0.0, next(ties), start)]
    while heap:
        seconds, _, reference = heapq.heappop(heap)
        if is_finished(reference):
            return seconds
        for instruction in instructions(task.graph, reference):
            after = copied(reference)
            try:
                after.run(instruction)
            except IllegalError:
                continue
            _, _, device_bytes, host_bytes = after.rows.pop()
            end = max(after.clocks)
            if device_bytes > task.budget_bytes or host_bytes > task.host_budget_bytes or end > most_seconds:
                continue
            if (key := state_of(after)) not in seen:
                seen.add(key)
                heapq.heappush(heap, (end, next(ties), after))
            if len(seen) > MOST_STATES:
                return None
    return math.inf


def instructions(graph: Graph, reference: Reference) -> Iterator[Instruction]:
    for op in graph.ops:
        for taken in {None, *(read for read, _ in op.reuses)}:
            yield Compute(op=op.id, in_place_of=taken)
    for storage in sorted({*reference.versions, *reference.host}):
        yield from (kind(storage=storage) for kind in (Drop, schedule.Offload, Wait, Prefetch, DropHost))


def copied(reference: Reference) -> Reference:
    after = copy.copy(reference)
    for name in ("versions", "host", "stale", "offloading", "prefetching", "users", "computed", "clocks", "rows"):
        setattr(after, name, copy.copy(getattr(after, name)))
    after.computed = sorted(set(after.computed))
    return after


def state_of(reference: Reference) -> object:
    under_way = (tuple(sorted(each.items())) for each in (reference.offloading, reference.prefetching))
    there = (frozenset(reference.versions), frozenset(reference.host), frozenset(reference.computed))
    return (*there, *under_way, tuple(reference.clocks))


def is_finished(reference: Reference) -> bool:
    try:
        reference.finish()
    except IllegalError:
        return False
    return True


def middle_problem(graph: Graph, device: Device, share: float, host_bytes: int = PLENTY) -> Problem:
    task = Problem(graph=graph, device=device, budget_bytes=1, host_budget_bytes=host_bytes)
    least, _ = least_budget_bound(task)
    most = unplanned_peak_bytes(graph, device)
    return replace(task, budget_bytes=least + int(share * (most - least)))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    graph=graphs(most_ops=3, boundaries=False, mutations=False),
    share=st.sampled_from((0.0, 0.3, 0.6)),
    host_bytes=st.sampled_from((PLENTY, 260)),
)
def test_the_shortest_path_is_what_brute_force_finds(graph: Graph, share: float, host_bytes: int) -> None:
    task = middle_problem(graph, LINKED, share, host_bytes)
    once = sum(op.seconds for op in graph.ops)
    most = 2 * once + 1.0
    fastest = fastest_with_host(task, below_seconds=most, until_seconds=math.inf)
    assert fastest is not None
    expected = brute_force(task, fastest.seconds if fastest.schedule else most)
    assume(expected is not None)
    if fastest.schedule is None:
        assert expected is math.inf
    else:
        assert fastest.seconds == pytest.approx(expected)
        check(graph, fastest.schedule)
        timeline = simulate(graph, fastest.schedule, LINKED)
        assert timeline.makespan_seconds == pytest.approx(fastest.seconds)
        assert timeline.peak_bytes <= task.budget_bytes
        assert timeline.host_peak_bytes <= host_bytes


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=6, boundaries=False, mutations=False), share=st.sampled_from((0.1, 0.5)))
def test_auto_is_equal_to_the_shortest_path(graph: Graph, share: float) -> None:
    require_the_shortest_path(graph, share)


@pytest.mark.exhaustive
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=10, boundaries=False, mutations=False), share=st.sampled_from((0.1, 0.3, 0.5, 0.8)))
def test_auto_is_equal_to_the_shortest_path_on_graphs_of_up_to_ten_ops(graph: Graph, share: float) -> None:
    require_the_shortest_path(graph, share)


def require_the_shortest_path(graph: Graph, share: float) -> None:
    task = middle_problem(graph, LINKED, share)
    alone = Offload(iterations=5_000).plan(task).plan
    result = make_planner("auto", iterations=5_000).plan(task)
    below_seconds = result.plan.predicted.seconds * (1 + 1e-6) + 1e-9 if result.plan else math.inf
    fastest = fastest_with_host(task, below_seconds=below_seconds, until_seconds=math.inf)
    assume(fastest is not None)  # a few graphs have too many states: see benchmarks/prove_tiny_graphs.py
    assert fastest is not None
    if fastest.schedule is None:
        assert result.plan is None and alone is None
        return
    assert result.plan is not None
    assert result.plan.predicted.seconds == pytest.approx(fastest.seconds)
    assert alone is None or alone.predicted.seconds >= fastest.seconds - 1e-9
    once = sum(op.seconds for op in graph.ops)
    assert least_seconds_again(task).seconds <= fastest.seconds - once + 1e-9
    if result.plan.unplanned.seconds > 0:
        assert result.status is Status.OPTIMAL
