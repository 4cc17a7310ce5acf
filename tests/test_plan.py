"""Plans: their file, and what a plan refuses to be loaded with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from devices import linked
from small_step import KEEP_EVERYTHING, small_step

from memfit.errors import (
    InvalidDeviceError,
    InvalidFileError,
    InvalidGraphError,
    InvalidScheduleError,
    PlanMismatchError,
)
from memfit.graph import Graph
from memfit.plan import Bounds, Plan, Prediction, Problem, Progress, Status
from memfit.schedule import Schedule
from memfit.simulate import simulate

LINKED = linked(32.0, 16.0, alignment_bytes=64)
OFFLOADING = (
    *("compute 0", "compute 1 in_place_of 2", "offload 3", "compute 2", "compute 3", "wait 3", "drop 3", "compute 4"),
    *("compute 5", "boundary 0 bytes_outside 7", "prefetch 3", "compute 6", "compute 7", "compute 8"),
)


def make_plan(lines: tuple[str, ...] = OFFLOADING, graph: Graph | None = None, bytes_outside: int = 7) -> Plan:
    graph = graph or small_step()
    schedule = Schedule.parse(lines)
    timeline = simulate(graph, schedule, LINKED)
    outside = 0 if graph.boundaries else bytes_outside
    unplanned = Prediction(peak_bytes=2000, seconds=12.5)
    return Plan(
        graph=graph,
        device=LINKED,
        budget_bytes=timeline.peak_bytes + outside,
        host_budget_bytes=64,
        bytes_outside=bytes_outside,
        schedule=schedule,
        predicted=Prediction(
            peak_bytes=timeline.peak_bytes + outside,
            seconds=timeline.makespan_seconds,
            host_peak_bytes=timeline.host_peak_bytes,
        ),
        unplanned=unplanned,
        bounds=Bounds(least_budget_found_bytes=1200, least_budget_bound_bytes=1100, overhead=0.01, holding_ops=(7,)),
        status=Status.FEASIBLE,
        planner="by hand",
        seed=3,
        plan_seconds=0.25,
        versions={"memfit": "0.1.0", "torch": "2.13.0"},
    )


def tampered(folder: Path, change: Callable[[Any], None], plan: Plan | None = None) -> Path:
    """Save a plan, change its JSON, and return where it is."""
    path = folder / "plan.json"
    (plan or make_plan()).save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_a_plan_comes_back_whole(name: str, tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path / name)
    assert Plan.load(tmp_path / name) == plan
    assert Plan.load(str(tmp_path / name), graph=small_step()) == plan


def test_a_saved_plan_has_one_instruction_a_line(tmp_path: Path) -> None:
    make_plan().save(tmp_path / "plan.json")
    lines = [line.strip() for line in (tmp_path / "plan.json").read_text().splitlines()]
    assert '"compute 1 in_place_of 2",' in lines
    assert '"prefetch 3",' in lines


def test_overhead_is_planned_over_unplanned() -> None:
    plan = make_plan(KEEP_EVERYTHING)
    assert plan.overhead == pytest.approx(13.0 / 12.5 - 1)
    assert msgspec.structs.replace(plan, unplanned=Prediction(peak_bytes=1, seconds=0.0)).overhead == 0.0


def test_without_boundaries_the_bytes_outside_count_on_top(tmp_path: Path) -> None:
    whole = small_step()
    storages = [msgspec.structs.replace(s, resident=s.resident or s.name == "tangent") for s in whole.storages]
    graph = Graph.build(name="no boundary", storages=storages, ops=whole.ops)
    plan = make_plan(tuple(line for line in KEEP_EVERYTHING if "boundary" not in line), graph, bytes_outside=1000)
    plan.save(tmp_path / "plan.json")
    assert (
        Plan.load(tmp_path / "plan.json").predicted.peak_bytes
        == simulate(graph, plan.schedule, LINKED).peak_bytes + 1000
    )


def set_value(place: str, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        *path, last = place.split(".")
        for step in path:
            content = content[int(step)] if step.isdigit() else content[step]
        content[int(last) if last.isdigit() else last] = value

    return change


TAMPERED = {
    "an instruction that is none": (
        set_value("schedule.2", "fly 3"),
        InvalidScheduleError,
        "schedule line 3: 'fly 3' is not an instruction",
    ),
    "an instruction that is illegal": (
        set_value("schedule.2", "drop 3"),
        InvalidScheduleError,
        "instruction 3 Compute(dropout) reads storage 3 'relu', which was dropped at 2; compute op 1 'relu' first",
    ),
    "an op too few": (
        set_value("schedule.13", "wait 3"),
        InvalidScheduleError,
        "instruction 13 Wait(relu) waits for storage 3 'relu', but no offload of it is under way",
    ),
    "another time": (
        set_value("predicted.seconds", 12.0),
        InvalidScheduleError,
        "the schedule takes 17.0 seconds, the plan claims 12.0; the file was changed, plan again",
    ),
    "a smaller peak": (
        set_value("predicted.peak_bytes", 5),
        InvalidScheduleError,
        "the schedule's peak_bytes are 1287, the plan claims 5 within a budget of 1287",
    ),
    "a smaller budget": (
        set_value("budget_bytes", 5),
        InvalidScheduleError,
        "the schedule's peak_bytes are 1287, the plan claims 1287 within a budget of 5",
    ),
    "a smaller host budget": (
        set_value("host_budget_bytes", 63),
        InvalidScheduleError,
        "the schedule's host_peak_bytes are 64, the plan claims 64 within a budget of 63",
    ),
    "other bytes in the graph": (
        set_value("graph.storages.0.bytes", 101),
        InvalidFileError,
        "its graph does not match its fingerprint; the file was changed, plan again",
    ),
    "a graph that is none": (
        set_value("graph.ops.1.reads", [99]),
        InvalidGraphError,
        "op 'relu' names storage 99, expected 0 to 10 - at `$.ops[1].reads[0]`",
    ),
    "an unknown key": (
        set_value("colour", "red"),
        InvalidFileError,
        "Object contains unknown field `colour`",
    ),
    "an unknown status": (
        set_value("status", "great"),
        InvalidFileError,
        "Invalid enum value 'great' - at `$.status`",
    ),
    "a wrong type": (
        set_value("schedule.0", 3),
        InvalidFileError,
        "Expected `str`, got `int` - at `$.schedule[0]`",
    ),
    "a negative number": (
        set_value("bytes_outside", -1),
        InvalidFileError,
        "Expected `int` >= 0, got -1 - at `$.bytes_outside`",
    ),
    "a graph file instead": (
        set_value("format", "memfit-graph"),
        InvalidFileError,
        "is 'memfit-graph' version 1, expected 'memfit-plan' version 1",
    ),
    "a later version": (
        set_value("version", 2),
        InvalidFileError,
        "is 'memfit-plan' version 2, expected 'memfit-plan' version 1",
    ),
    "a device without a link": (
        set_value("device.to_host_bytes_per_second", None),
        InvalidDeviceError,
        "device 'linked' has no to_host_bytes_per_second",
    ),
    "hostile alignment": (
        set_value("device.alignment_bytes", 1 << 40),
        InvalidFileError,
        "Expected `int` <= 1073741824, got 1099511627776 - at `$.device.alignment_bytes`",
    ),
}


@pytest.mark.parametrize("case", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_changed_file_is_refused(case: tuple[Callable[[Any], None], type[Exception], str], tmp_path: Path) -> None:
    change, error, message = case
    path = tampered(tmp_path, change)
    with pytest.raises(error, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        Plan.load(path)


def test_a_graph_file_is_no_plan(tmp_path: Path) -> None:
    small_step().save(tmp_path / "graph.json")
    with pytest.raises(InvalidFileError, match=r"graph.json: Object "):
        Plan.load(tmp_path / "graph.json")


def test_a_truncated_plan_is_one_error(tmp_path: Path) -> None:
    make_plan().save(tmp_path / "plan.json")
    content = (tmp_path / "plan.json").read_bytes()
    for kept in range(0, len(content) - 2, 211):
        (tmp_path / "plan.json").write_bytes(content[:kept])
        with pytest.raises(InvalidFileError, match=r"plan.json: "):
            Plan.load(tmp_path / "plan.json")


def test_a_plan_for_another_graph_is_refused(tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    graph = small_step()
    storages = [msgspec.structs.replace(graph.storages[0], bytes=101), *graph.storages[1:]]
    other = Graph.build(name="batch 9", storages=storages, ops=graph.ops, boundaries=graph.boundaries)
    with pytest.raises(
        PlanMismatchError, match=r"made for graph 'small step' \(\w{32}\), this one is 'batch 9' \(\w{32}\)"
    ):
        Plan.load(tmp_path / "plan.json", graph=other)
    with pytest.raises(PlanMismatchError, match="plan again for this model, batch size and torch"):
        plan.require_graph(other)
    costlier = [msgspec.structs.replace(op, seconds=op.seconds * 2) for op in graph.ops]
    plan.require_graph(Graph.build(name="slower", storages=graph.storages, ops=costlier, boundaries=graph.boundaries))


def test_a_problem_takes_its_clock_and_progress_from_outside() -> None:
    seen: list[Progress] = []
    problem = Problem(graph=small_step(), device=LINKED, budget_bytes=1, clock=lambda: 5.0, progress=seen.append)
    problem.progress(Progress(elapsed_seconds=problem.clock(), best_overhead=None, best_peak_bytes=None))
    assert [report.elapsed_seconds for report in seen] == [5.0]
    silent = Problem(graph=small_step(), device=LINKED, budget_bytes=1)
    silent.progress(Progress(elapsed_seconds=0.0, best_overhead=0.1, best_peak_bytes=3, message="nobody listens"))


def test_the_gap_is_what_is_left_between_plan_and_bound() -> None:
    before = Progress(elapsed_seconds=0.0, best_overhead=None, best_peak_bytes=None, bound_overhead=0.25)
    after = Progress(elapsed_seconds=1.0, best_overhead=0.5, best_peak_bytes=3, bound_overhead=0.25)
    assert (before.gap, after.gap) == (None, 0.25)
