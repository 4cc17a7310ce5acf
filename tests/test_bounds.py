"""Lower bounds: never above a schedule that is legal and fits, on drawn graphs, published ones and captured ones."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from devices import COSTLY_COPIES, LINKED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_steps import NAMES, small_step
from shortest_path import fastest_schedule
from strategies import graphs, legal_schedules

from memfit.capture import capture
from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.plan import Problem, Status
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound, least_recompute_seconds
from memfit.planners.engine.bounds.per_op import least_recompute_seconds_at
from memfit.planners.engine.cpsat.moments import least_seconds_with_copies
from memfit.planners.engine.results import unplanned_peak_bytes
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


def bounds_above(graph: Graph, schedule: Schedule, device: Device) -> list[str]:
    """Return the bounds that exceed a schedule; the budgets are its peaks on the device and on the host."""
    timeline = simulate(graph, schedule, device)
    task = Problem(
        graph=graph, device=device, budget_bytes=timeline.peak_bytes, host_budget_bytes=timeline.host_peak_bytes
    )
    once = graph.compute_seconds
    bounds = {f"op {op}": seconds for op, seconds in least_recompute_seconds_at(task).items()}
    bounds["all ops"] = least_recompute_seconds(task).seconds
    if task.host_budget_bytes > 0:
        bounds["with copies"] = least_seconds_with_copies(task, enough_seconds=math.inf, limit_work=0.2)
    most = timeline.makespan_seconds + ROUNDING
    above = [f"{name}: {seconds} s" for name, seconds in bounds.items() if once + seconds > most]
    least_bytes = least_budget_bound(task)[0]
    return [*above, f"budget: {least_bytes} bytes"] if least_bytes > timeline.peak_bytes else above


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=12, collectives=True), device=st.sampled_from((LINKED, COSTLY_COPIES)), data=st.data())
def test_below_any_legal_schedule(graph: Graph, device: Device, data: st.DataObject) -> None:
    assert bounds_above(graph, data.draw(legal_schedules(graph)), device) == []


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=8, boundaries=False, collectives=True), share=st.sampled_from((0.0, 0.2, 0.5, 0.8)))
def test_below_the_fastest_schedule_of_a_small_graph(graph: Graph, share: float) -> None:
    least, _ = least_budget_bound(Problem(graph=graph, device=LINKED, budget_bytes=1))
    budget_bytes = least + int(share * (unplanned_peak_bytes(graph, LINKED) - least))
    task = Problem(graph=graph, device=LINKED, budget_bytes=budget_bytes)
    fastest = fastest_schedule(task)
    if fastest is not None and fastest.ops is not None:
        recompute_seconds = fastest.seconds - sum(op.seconds for op in graph.ops)
        assert least_recompute_seconds(task).seconds <= recompute_seconds + ROUNDING
        assert max(least_recompute_seconds_at(task).values(), default=0.0) <= recompute_seconds + ROUNDING


def bounds_above_plans(graph: Graph, shares: tuple[float, ...] = (0.1, 0.5)) -> list[str]:
    """Return the bounds that exceed a plan at one of a few budgets, or the least budget that its search reached.

    Args:
        graph: of a step, with seconds.
        shares: of the way from the least budget of any plan to the peak without a plan.
    """
    least, _ = least_budget_bound(Problem(graph=graph, device=GENERIC, budget_bytes=1))
    most = unplanned_peak_bytes(graph, GENERIC)
    above = [f"least budget {least}, unplanned {most}"] if least > most else []
    for share in shares:
        task = Problem(graph=graph, device=GENERIC, budget_bytes=least + int(share * (most - least)))
        result = make_planner("search", iterations=3_000).plan(task)
        bounds, found = result.bounds, result.bounds.least_budget_found_bytes
        if found is None or bounds.least_budget_bound_bytes > found:
            above.append(f"at {share}: least budget {bounds.least_budget_bound_bytes}, found {found}")
        if result.plan is None:
            above += [f"at {share}: {result.status}"] if result.status is not Status.TIMED_OUT else []
        elif not 0.0 <= bounds.overhead <= result.plan.overhead + ROUNDING:
            above.append(f"at {share}: overhead {bounds.overhead}, of the plan {result.plan.overhead}")
    return above


def test_the_bound_is_asked_at_ops_behind_the_forward_backward_boundary(shared_graphs: Path) -> None:
    """The op that writes the first large gradient holds 50 MB more than any op before it."""
    graph = Graph.load(shared_graphs / "dtr_inceptionv4_64_functional.graph.json.gz")
    bound = least_recompute_seconds(Problem(graph=graph, device=GENERIC, budget_bytes=4 * 10**9))
    assert bound.op is not None
    assert graph.ops[bound.op].name == "avg_pool2d_backward"
    assert bound.seconds / sum(op.seconds for op in graph.ops) > 0.1154


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_below_plans_of_published_graphs(name: str, shared_graphs: Path) -> None:
    assert bounds_above_plans(Graph.load(shared_graphs / f"{name}.graph.json.gz")) == []


def with_seconds(graph: Graph) -> Graph:
    """Captured graphs have no times before they are measured: some, the same each time."""
    ops = [msgspec.structs.replace(op, seconds=1e-4 * (1 + op.id * 7919 % 13)) for op in graph.ops]
    return Graph.build(name=graph.name, storages=graph.storages, ops=ops, boundaries=graph.boundaries)


@pytest.mark.parametrize("name", NAMES)
def test_below_plans_of_captured_steps(name: str) -> None:
    assert bounds_above_plans(with_seconds(capture(small_step(name)).graph)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_below_plans_of_captured_workloads(name: str) -> None:
    assert bounds_above_plans(with_seconds(capture(build(name)).graph), (0.3,)) == []
