"""OffloadPlanner intervals: simulated as the simulator does, legal, within both budgets, never slower than keeping."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from devices import LINKED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import graphs
from test_planners import chain

from memfit.checker import check
from memfit.cli import main
from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.plan import Problem, Progress
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound, least_recompute_seconds
from memfit.planners.engine.offloading.host_stays import (
    choose_again,
    host_stays,
    is_possible,
    make_draft,
    with_host_stays,
)
from memfit.planners.engine.offloading.intervals import find_offload_intervals, with_offloads
from memfit.planners.engine.offloading.streams import make_possible, make_streams
from memfit.planners.engine.peak_reducing_order import peak_reducing_order
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.planners.engine.retention.decisions import evaluate, keep_only, simulated
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import build_instance
from memfit.planners.engine.retention.live_bytes import weigh
from memfit.planners.offload import OffloadPlanner
from memfit.planners.search import SearchPlanner
from memfit.schedule import Code, Schedule
from memfit.simulate import simulate

FAST = Device(name="fast", to_host_bytes_per_second=400.0, to_device_bytes_per_second=400.0)
PLENTY = 1 << 40


def linked(graph: Graph, budget_bytes: int, **fields: object) -> Problem:
    return Problem(graph=graph, device=LINKED, budget_bytes=budget_bytes, host_budget_bytes=PLENTY, **fields)  # type: ignore[arg-type]


def some_schedule(task: Problem, pick: random.Random) -> Schedule:
    """The schedule of random retention: storages dropped and recomputed in any part of the step."""
    instance = build_instance(task, peak_reducing_order(task.graph, task.device))
    kept = {storage.id for storage in task.graph.storages if pick.random() < 0.7}
    return emit(instance, evaluate(instance, simulated(instance, keep_only(instance, kept))).sequence)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=14), seed=st.integers(0, 1 << 30))
def test_streams_give_what_the_simulator_gives(graph: Graph, seed: int) -> None:
    pick = random.Random(seed)
    outside = pick.choice((0, 300))
    task = linked(graph, 0, bytes_outside=outside)
    schedule = some_schedule(task, pick)
    peak = simulate(graph, schedule, LINKED).peak_bytes
    found = find_offload_intervals(task, schedule)
    budget = int(peak * pick.uniform(0.3, 1.1))
    streams = make_streams(found, budget, pick.choice((PLENTY, 200)), seed)
    found.intervals["chosen"] = [pick.random() < 0.5 for _ in found.intervals]
    make_possible(streams)
    made = with_offloads(found)
    check(graph, made)
    timeline = simulate(graph, made, LINKED)
    totals = streams.totals[0]
    assert timeline.makespan_seconds == pytest.approx(totals["seconds"])
    assert timeline.host_peak_bytes == totals["host_peak_bytes"]
    inside = 0 if graph.boundaries else outside
    assert timeline.peak_bytes + inside <= max(totals["peak_bytes"], budget)
    assert (totals["excess"] > 0) == (totals["peak_bytes"] > budget)
    assert int((made.codes == Code.COMPUTE).sum()) == int((schedule.codes == Code.COMPUTE).sum())


def not_recomputable(graph: Graph) -> Graph:
    ops = [msgspec.structs.replace(op, recomputable=False) for op in graph.ops]
    return Graph.build(name=graph.name, storages=graph.storages, ops=ops)


def test_a_chain_that_cannot_be_computed_again_goes_to_the_host_for_nothing() -> None:
    """Each op takes a second, each copy a quarter: only the first storages have time to go, and that is enough."""
    graph = not_recomputable(chain(6))
    task = Problem(graph=graph, device=FAST, budget_bytes=600, host_budget_bytes=PLENTY)
    assert SearchPlanner(iterations=1_000).plan(task).plan is None
    plan = OffloadPlanner(iterations=4_000).plan(task).plan
    assert plan is not None
    assert plan.predicted.peak_bytes <= 600
    assert plan.predicted.seconds == 12.0
    assert plan.predicted.host_peak_bytes == 200


def test_the_host_budget_is_kept() -> None:
    graph = not_recomputable(chain(6))
    task = Problem(graph=graph, device=FAST, budget_bytes=600, host_budget_bytes=100)
    result = OffloadPlanner(iterations=4_000).plan(task)
    assert result.plan is None
    assert result.bounds.least_budget_found_bytes == 700


def test_a_slow_link_is_left_alone_and_a_fast_one_is_used() -> None:
    graph = chain(6)
    seconds: list[float] = []
    for rate in (1.0, 100.0, 400.0):
        device = Device(name="d", to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
        task = Problem(graph=graph, device=device, budget_bytes=500, host_budget_bytes=PLENTY)
        plan = OffloadPlanner(iterations=20_000).plan(task).plan
        assert plan is not None
        assert (plan.predicted.host_peak_bytes == 0) == (rate == 1.0)
        seconds.append(plan.predicted.seconds)
    assert seconds[0] > seconds[1] >= seconds[2] == 12.0


def test_where_the_link_is_of_no_use_the_search_has_the_rest_of_the_moves() -> None:
    graph = chain(24)
    device = Device(name="d", to_host_bytes_per_second=0.1, to_device_bytes_per_second=0.1)
    task = Problem(graph=graph, device=device, budget_bytes=900, host_budget_bytes=PLENTY)
    alone = SearchPlanner(iterations=60_000).plan(replace(task, host_budget_bytes=0)).plan
    both = OffloadPlanner(iterations=60_000).plan(task)
    assert alone is not None and both.plan is not None
    assert both.plan.predicted.host_peak_bytes == 0
    assert both.plan.predicted.seconds <= alone.predicted.seconds * 1.001
    assert both.stats["moves"] >= 60_000


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=10))
def test_a_plan_with_offloading_is_legal_and_never_slower_than_one_without(graph: Graph) -> None:
    least, _ = least_budget_bound(linked(graph, 1))
    most = unplanned_peak_bytes(graph, LINKED)
    for budget_bytes in (least, (least + most) // 2, most):
        task = linked(graph, budget_bytes)
        alone = SearchPlanner(iterations=10_000).plan(replace(task, host_budget_bytes=0)).plan
        both = OffloadPlanner(iterations=10_000).plan(task).plan
        assert alone is None or (both is not None and both.predicted.seconds <= alone.predicted.seconds * (1 + 1e-9))
        if both is not None:
            check(graph, both.schedule)
            assert simulate(graph, both.schedule, LINKED).peak_bytes <= budget_bytes
            assert both.bounds.overhead <= both.overhead + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["offload", "auto"])
@pytest.mark.parametrize("rate", [0.1, 20.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_never_slower_than_the_search_in_as_many_moves(planner: str, rate: float, seed: int) -> None:
    graph = uneven_chain(12, seed)
    device = Device(name="d", to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
    least, _ = least_budget_bound(Problem(graph=graph, device=device, budget_bytes=1))
    most = unplanned_peak_bytes(graph, device)
    for share, moves in itertools.product((0.15, 0.4), (50, 2_000)):
        budget_bytes = least + int(share * (most - least))
        task = Problem(graph=graph, device=device, budget_bytes=budget_bytes, host_budget_bytes=PLENTY, seed=seed)
        alone = SearchPlanner(iterations=moves).plan(replace(task, host_budget_bytes=0)).plan
        both = make_planner(planner, iterations=moves).plan(task).plan
        if alone is not None:
            assert both is not None
            assert both.predicted.seconds <= alone.predicted.seconds * (1 + 1e-12)


def uneven_chain(length: int, seed: int) -> Graph:
    """A chain whose ops take one to nine seconds: the choice of ops to recompute matters, and few choices are equal."""
    pick, graph = random.Random(seed), chain(length)
    ops = [msgspec.structs.replace(op, seconds=float(pick.randint(1, 9))) for op in graph.ops]
    return Graph.build(name=graph.name, storages=graph.storages, ops=ops)


def test_the_bound_falls_with_the_link_and_the_host_budget() -> None:
    graph = chain(6)
    bounds: list[float] = []
    for rate, host_bytes in ((400.0, 0), (0.1, PLENTY), (5.0, PLENTY), (400.0, 100), (400.0, PLENTY)):
        device = Device(name="d", to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
        task = Problem(graph=graph, device=device, budget_bytes=500, host_budget_bytes=host_bytes)
        bounds.append(least_recompute_seconds(task).seconds)
        plan = OffloadPlanner(iterations=10_000).plan(task).plan
        assert plan is not None and bounds[-1] <= plan.predicted.seconds - 12.0 + 1e-9
    assert bounds[0] >= bounds[1] >= bounds[2] >= bounds[4] == 0.0
    assert bounds[0] > bounds[3] > 0.0
    assert bounds[2] > 0.0


def test_the_same_seed_gives_the_same_plan() -> None:
    task = Problem(graph=chain(12), device=FAST, budget_bytes=700, host_budget_bytes=400, seed=3)
    plans = [OffloadPlanner(iterations=20_000).plan(task).plan for _ in range(2)]
    assert plans[0] is not None and plans[1] is not None
    assert plans[0].schedule == plans[1].schedule


def test_without_a_link_or_a_host_budget_it_is_the_search() -> None:
    graph = chain(6)
    for device, host_bytes in ((GENERIC, PLENTY), (FAST, 0)):
        task = Problem(graph=graph, device=device, budget_bytes=600, host_budget_bytes=host_bytes)
        plan, expected = (
            OffloadPlanner(iterations=5_000).plan(task).plan,
            SearchPlanner(iterations=5_000).plan(task).plan,
        )
        assert plan is not None and expected is not None
        assert plan.schedule == expected.schedule


@pytest.mark.parametrize("reports", [1, 4, 7])
def test_an_interrupted_search_answers_with_its_best(reports: int) -> None:
    heard: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        heard.append(progress)
        if len(heard) >= reports:
            raise KeyboardInterrupt

    task = Problem(
        graph=chain(10),
        device=FAST,
        budget_bytes=700,
        host_budget_bytes=PLENTY,
        progress=interrupt,
    )
    result = OffloadPlanner().plan(task)
    assert result.interrupted
    assert result.plan is not None or reports < 4


def test_the_command_line_takes_a_host_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, profile = tmp_path / "chain.graph.json", tmp_path / "fast.json"
    not_recomputable(chain(6)).save(file)
    profile.write_bytes(msgspec.json.encode(FAST))
    asked = ["plan", str(file), "--budget", "600", "--option", "iterations=4000", "--json", "--host-budget"]
    assert main([*asked, "1KiB"]) == 2
    assert "no link" in capsys.readouterr().err
    assert main([*asked, "60%", "--device-profile", str(profile)]) == 2
    assert "expected a size" in capsys.readouterr().err
    assert main([*asked, "1KiB", "--device-profile", str(profile)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["overhead"] == 0.0
    assert answer["host"] == {"budget_bytes": 1024, "peak_bytes": 200, "offloaded_bytes": 200}
    assert answer["counts"]["offloaded"] == 2


def test_planners_are_compared_with_a_host_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, profile, page = tmp_path / "chain.graph.json", tmp_path / "fast.json", tmp_path / "compared.html"
    not_recomputable(chain(6)).save(file)
    profile.write_bytes(msgspec.json.encode(FAST))
    asked = ["compare", str(file), "--budgets", "2", "--time-limit", "0.3", "--json", "--device-profile", str(profile)]
    asked += ["--host-budget", "1KiB", "--planners", "search,offload", "--report", str(page)]
    assert main(asked) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    least = {point["planner"]: point["overhead"] for point in points if point["budget_bytes"] < 800}
    assert least["search"] is None
    assert least["offload"] is not None
    assert page.stat().st_size > 0


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=14, boundaries=False), seed=st.integers(0, 1 << 30))
def test_bytes_of_host_stays_do_not_count_for_the_search(graph: Graph, seed: int) -> None:
    pick = random.Random(seed)
    task = linked(graph, 0)
    instance = build_instance(task, peak_reducing_order(graph, task.device))
    retention = keep_only(instance, {storage.id for storage in graph.storages if pick.random() < 0.7})
    draft = make_draft(instance, task, retention)
    draft.offloads.intervals["chosen"] = [pick.random() < 0.5 for _ in draft.offloads.intervals]
    make_possible(make_streams(draft.offloads, draft.peak_bytes * 2 // 3, PLENTY, seed))
    stays = host_stays(draft)
    held = draft.offloads.stops["held_bytes"].copy()
    for stay in stays:
        gone = (draft.stage_of >= stay.first) & (draft.stage_of <= stay.last)
        held[gone] -= LINKED.aligned(graph.storages[stay.storage].bytes)
    around = with_host_stays(instance, stays)
    assert is_possible(around, draft.retention)
    peak_bytes, _ = weigh(simulated(around, draft.retention), 0)
    assert peak_bytes + instance.base_bytes == held.max()
    again = make_draft(instance, task, draft.retention)
    choose_again(again, stays)
    chosen = again.offloads.intervals["chosen"]
    assert (chosen <= draft.offloads.intervals["chosen"]).all()
    assert chosen.sum() == len(stays)
