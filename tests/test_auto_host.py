"""Planner `auto` with a host: its plans are legal and its bounds hold, by plain brute force over all schedules."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from devices import LINKED, linked
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from reference import IllegalError, Reference
from strategies import graphs

from memfit import schedule
from memfit.checker import check
from memfit.device import Device
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem, Status
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound, least_recompute_seconds
from memfit.planners.engine.cpsat.moments import least_seconds_with_copies
from memfit.planners.engine.results import unplanned_peak_bytes
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


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    graph=graphs(most_ops=3, boundaries=False, mutations=False),
    share=st.sampled_from((0.0, 0.3, 0.6)),
    host_bytes=st.sampled_from((PLENTY, 260)),
)
def test_plans_and_bounds_agree_with_brute_force(graph: Graph, share: float, host_bytes: int) -> None:
    task = middle_problem(graph, LINKED, share, host_bytes)
    once = sum(op.seconds for op in graph.ops)
    result = make_planner("auto", iterations=5_000).plan(task)
    most = result.plan.predicted.seconds if result.plan else 2 * once + 1.0
    fastest_seconds = brute_force(task, most + 1e-9)
    assume(fastest_seconds is not None)
    assert fastest_seconds is not None
    if result.plan is not None:
        assert result.plan.predicted.seconds >= fastest_seconds - 1e-9
        if result.status is Status.OPTIMAL:
            assert result.plan.predicted.seconds <= fastest_seconds + 1e-6 * once
        check(graph, result.plan.schedule)
        timeline = simulate(graph, result.plan.schedule, LINKED)
        assert timeline.peak_bytes <= task.budget_bytes
        assert timeline.host_peak_bytes <= host_bytes
    if fastest_seconds < math.inf:
        assert result.status is not Status.INFEASIBLE
        assert least_recompute_seconds(task).seconds <= fastest_seconds - once + 1e-9
        assert least_seconds_with_copies(task, enough_seconds=most) <= fastest_seconds - once + 1e-9


def away_graph(*, recomputable: bool = False) -> Graph:
    """An op that needs all room for its workspace, after one that makes a large storage, and before one that reads it.

    Every op takes a second.
    """
    sizes = {"x": 4, "large": 100, "small": 4, "hidden": 4, "more": 4, "out": 4}
    roles = {"x": Role.INPUT, "out": Role.OUTPUT}
    ops = [((0,), (1, 2), 0), ((2,), (3,), 100), ((3,), (4,), 0), ((1, 4), (5,), 0)]
    return Graph.build(
        name="away",
        storages=[
            Storage(id=i, name=name, bytes=sizes[name], role=roles.get(name, Role.ACTIVATION))
            for i, name in enumerate(sizes)
        ],
        ops=[
            Op(
                id=i,
                name=f"op{i}",
                phase=Phase.FORWARD,
                reads=reads,
                writes=writes,
                workspace_bytes=workspace_bytes,
                seconds=1.0,
                recomputable=recomputable,
            )
            for i, (reads, writes, workspace_bytes) in enumerate(ops)
        ],
    )


@pytest.mark.parametrize("latency_seconds", [0.0, 0.25])
def test_a_plan_that_waits_for_its_copies_is_proved_optimal(latency_seconds: float) -> None:
    """The large storage is there after 1 s, on the host after 2, away to 3, back after 5: the step ends after 6."""
    device = msgspec.structs.replace(linked(100.0, 50.0), copy_latency_seconds=latency_seconds)
    task = Problem(graph=away_graph(), device=device, budget_bytes=112, host_budget_bytes=100)
    assert least_recompute_seconds(task).seconds == 0.0, "the link has time for it, if not then"
    least_seconds = 2 + 2 * latency_seconds
    assert least_seconds_with_copies(task, enough_seconds=10.0) == pytest.approx(least_seconds, abs=1e-6)
    result = make_planner("auto", iterations=500).plan(task)
    assert result.plan is not None
    assert result.plan.predicted.seconds == pytest.approx(6 + 2 * latency_seconds)
    assert result.status is Status.OPTIMAL
    assert result.plan.is_optimal_in_every_order


def test_the_bound_chooses_between_copies_and_recomputation() -> None:
    """Recomputed, the large storage costs a second; copied over a fast link, nothing; with no room there, a second."""

    def least(task: Problem) -> float:
        return least_seconds_with_copies(task, enough_seconds=10.0)

    task = Problem(
        graph=away_graph(recomputable=True), device=linked(100.0, 50.0), budget_bytes=112, host_budget_bytes=100
    )
    assert least(task) == pytest.approx(1.0, abs=1e-6)
    assert least(replace(task, host_budget_bytes=99)) == pytest.approx(1.0, abs=1e-6)
    assert least(replace(task, device=linked(1e9, 1e9))) == pytest.approx(0.0, abs=1e-6)
