"""Lower bounds: never above a schedule that is legal and fits, on drawn graphs, published ones and captured ones."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_steps import NAMES, small_step
from strategies import LINKED, graphs, legal_schedules

from memfit.capture import capture
from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.plan import Problem, Status
from memfit.planners import make_planner
from memfit.planners.ask import unplanned_peak_bytes
from memfit.planners.bounds import least_budget_bound, least_seconds_again
from memfit.planners.moments import least_seconds_again_at
from memfit.planners.shortest_path import fastest_schedule
from memfit.schedule import Schedule
from memfit.simulate import simulate
from memfit.workloads import WORKLOADS, build

PUBLISHED = (
    "dtr_inceptionv4_64_functional",
    "dtr_tv_densenet121_84_functional",
    "monet_resnet50_184_checkmate",
    "monet_unet_11_checkmate",
)
ROUNDING = 1e-9


def require_bounds_below(graph: Graph, schedule: Schedule, device: Device) -> None:
    """All bounds for a budget of just what the schedule takes, on the device and on the host, hold for it."""
    timeline = simulate(graph, schedule, device)
    task = Problem(
        graph=graph, device=device, budget_bytes=timeline.peak_bytes, host_budget_bytes=timeline.host_peak_bytes
    )
    once = sum(op.seconds for op in graph.ops)
    assert least_budget_bound(task)[0] <= timeline.peak_bytes
    assert once + least_seconds_again(task).seconds <= timeline.makespan_seconds + ROUNDING
    for op, seconds in least_seconds_again_at(task).items():
        assert once + seconds <= timeline.makespan_seconds + ROUNDING, op


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=12), data=st.data())
def test_below_any_legal_schedule(graph: Graph, data: st.DataObject) -> None:
    require_bounds_below(graph, data.draw(legal_schedules(graph)), LINKED)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=8, boundaries=False), share=st.sampled_from((0.0, 0.2, 0.5, 0.8)))
def test_below_the_fastest_schedule_of_a_small_graph(graph: Graph, share: float) -> None:
    least, _ = least_budget_bound(Problem(graph=graph, device=LINKED, budget_bytes=1))
    budget_bytes = least + int(share * (unplanned_peak_bytes(graph, LINKED) - least))
    task = Problem(graph=graph, device=LINKED, budget_bytes=budget_bytes)
    fastest = fastest_schedule(task, until_seconds=math.inf)
    if fastest is not None and fastest.ops is not None:
        again_seconds = fastest.seconds - sum(op.seconds for op in graph.ops)
        assert least_seconds_again(task).seconds <= again_seconds + ROUNDING
        assert max(least_seconds_again_at(task).values(), default=0.0) <= again_seconds + ROUNDING


def require_bounds_below_plans(graph: Graph, iterations: int = 5_000) -> None:
    """The bounds hold for plans at a few budgets, and for what the searches reach."""
    least, _ = least_budget_bound(Problem(graph=graph, device=GENERIC, budget_bytes=1))
    most = unplanned_peak_bytes(graph, GENERIC)
    assert least <= most
    for share in (0.1, 0.3, 0.6):
        task = Problem(graph=graph, device=GENERIC, budget_bytes=least + int(share * (most - least)))
        result = make_planner("search", iterations=iterations).plan(task)
        found = result.bounds.least_budget_found_bytes
        assert found is not None and result.bounds.least_budget_bound_bytes <= found
        if result.plan is None:
            assert result.status is Status.INFEASIBLE
        else:
            assert 0.0 <= result.bounds.overhead <= result.plan.overhead + ROUNDING


def test_an_op_a_few_behind_the_turning_point_is_tried(shared_graphs: Path) -> None:
    """Where the first large gradient is written beside what its op reads, 50 MB are taken that no moment before has."""
    graph = Graph.load(shared_graphs / "dtr_inceptionv4_64_functional.graph.json.gz")
    bound = least_seconds_again(Problem(graph=graph, device=GENERIC, budget_bytes=4 * 10**9))
    assert bound.op is not None
    assert graph.ops[bound.op].name == "avg_pool2d_backward"
    assert bound.seconds / sum(op.seconds for op in graph.ops) > 0.1154


@pytest.mark.parametrize("name", PUBLISHED)
def test_below_plans_of_published_graphs(name: str, shared_graphs: Path) -> None:
    require_bounds_below_plans(Graph.load(shared_graphs / f"{name}.graph.json.gz"))


def with_seconds(graph: Graph) -> Graph:
    """Captured graphs have no times before they are measured: some, the same each time."""
    ops = [msgspec.structs.replace(op, seconds=1e-4 * (1 + op.id * 7919 % 13)) for op in graph.ops]
    return Graph.build(name=graph.name, storages=graph.storages, ops=ops, boundaries=graph.boundaries)


@pytest.mark.parametrize("name", NAMES)
def test_below_plans_of_captured_steps(name: str) -> None:
    require_bounds_below_plans(with_seconds(capture(small_step(name)).graph))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_below_plans_of_captured_workloads(name: str) -> None:
    require_bounds_below_plans(with_seconds(capture(build(name)).graph))
