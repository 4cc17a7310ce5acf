"""`memfit compare`: every planner at every budget, torch's own ways beside them, and a page that shows both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import unpacked
from chains import chain
from command_line import Run

from memfit.device import GENERIC
from memfit.plan import Bounds, Problem, Result, Status
from memfit.planners import PLANNERS
from memfit.planners.none import KeepEverything
from memfit.planning import TradeOff
from memfit.report.comparison import ComparedPoint, winner

KEYS = {"planner", "budget_bytes", "status", "peak_bytes", "overhead", "plan_seconds"}
SMALL = ("--set", "batch=4", "--set", "steps=6", "--set", "width=16")


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "chain.graph.json"
    chain(12, 4096).save(path)
    return path


def points_of(out: str) -> list[dict[str, Any]]:
    return json.loads(out)["points"]


def test_every_planner_at_every_budget_of_a_graph_file(run: Run, graph_file: Path) -> None:
    status, out, _ = run("compare", graph_file, "--budgets", 4, "--time-limit", 0.2, "--json")
    assert status == 0
    answer = json.loads(out)
    assert set(answer) == {
        "target", "device", "memfit_version", "unplanned", "least_budget_bound_bytes", "points"
    }  # fmt: skip
    points = answer["points"]
    without_link = {"offload", "vdnn", "tflms", "autoswap"}
    compared = set(PLANNERS) - {"mirror", "dqn"} - without_link  # nothing is marked; only by name; no link to a host
    assert {point["planner"] for point in points} == compared
    assert all(set(point) == KEYS for point in points)
    for name in compared:
        mine = [point for point in points if point["planner"] == name]
        assert len(mine) >= 4, name
        assert mine[0]["budget_bytes"] == answer["unplanned"]["peak_bytes"]
        assert mine[-1]["budget_bytes"] == answer["least_budget_bound_bytes"]
        for point in mine:
            assert (point["peak_bytes"] is None) == (point["status"] in ("infeasible", "timed_out"))
            assert point["peak_bytes"] is None or point["peak_bytes"] <= point["budget_bytes"]
        overheads = [point["overhead"] for point in mine if point["overhead"] is not None]
        assert overheads == sorted(overheads), name


class Staircase:
    """A planner that reaches 1,000 bytes at most, and says so."""

    name = "staircase"
    least_bytes = 1000

    def __init__(self) -> None:
        self.asked: list[int] = []

    def plan(self, problem: Problem) -> Result:
        self.asked.append(problem.budget_bytes)
        bounds = Bounds(least_budget_found_bytes=self.least_bytes, least_budget_bound_bytes=100)
        if problem.budget_bytes < self.least_bytes:
            return Result(status=Status.INFEASIBLE, plan=None, bounds=bounds)
        return replace(KeepEverything().plan(replace(problem, budget_bytes=1 << 40)), bounds=bounds)


def test_a_planner_is_drawn_down_to_its_own_least_memory() -> None:
    planner = Staircase()
    trade_off = TradeOff(Problem(graph=chain(4, 64), device=GENERIC, budget_bytes=1), planner)
    results = trade_off.reach([400, 800, 1200]).reach_least().results
    assert [budget for budget, result in results.items() if result.plan is not None] == [1000, 1200]
    assert planner.asked == [400, 800, 1200, 1000]


def test_auto_is_drawn_at_the_memory_of_every_other_point(run: Run, graph_file: Path) -> None:
    names = "sublinear,segments,none,auto"
    status, out, _ = run("compare", graph_file, "--planners", names, "--budgets", 3, "--time-limit", 0.2, "--json")
    assert status == 0
    points = [point for point in points_of(out) if point["peak_bytes"] is not None]
    auto = {point["budget_bytes"]: point["overhead"] for point in points if point["planner"] == "auto"}
    others = [point for point in points if point["planner"] != "auto"]
    assert {point["planner"] for point in others} == {"sublinear", "segments", "none"}
    assert {point["peak_bytes"] for point in others} <= set(auto)
    least = json.loads(out)["least_budget_bound_bytes"]
    assert min(auto) <= min(point["peak_bytes"] for point in others)
    assert min(auto) >= least


def test_a_budget_is_searched_only_where_another_planner_is_faster() -> None:
    planner = Staircase()
    trade_off = TradeOff(Problem(graph=chain(4, 64), device=GENERIC, budget_bytes=1), planner).reach([1200])
    trade_off.add(1500, least_overhead=0.0)
    assert planner.asked == [1200]
    assert trade_off.results[1500].plan is not None
    trade_off.add(1100, least_overhead=0.0)
    assert planner.asked == [1200]
    trade_off.add(300, least_overhead=0.5)
    assert planner.asked == [1200, 300]


def test_the_text_has_a_row_for_each_point(run: Run, graph_file: Path) -> None:
    status, out, _ = run("compare", graph_file, "--planners", "none,segments", "--budgets", 2)
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith(("none ", "segments "))]
    assert len(rows) == 5  # two budgets each, and the least memory of `segments`
    assert "measured" not in out


def test_the_page_is_whole_and_inert(run: Run, tmp_path: Path) -> None:
    graph = chain(6, 4096)
    path, page = tmp_path / "named.graph.json", tmp_path / "page.html"
    text = graph_text(graph, tmp_path).replace('"f0"', '"</script><b>@@plotly@@"')
    path.write_text(text, encoding="utf-8")
    status, _, _ = run("compare", path, "--planners", "none,segments", "--budgets", 2, "--report", page)
    assert status == 0
    html = page.read_text(encoding="utf-8")
    assert "</script><b>" not in html
    assert "<script src" not in html
    assert "<link" not in html
    assert "default-src 'none'" in html
    data = json.loads(unpacked(html)[0])
    assert "</script><b>@@plotly@@" in data["storages"]["name"]
    assert [len(point["kinds"]) for point in data["points"] if point["kinds"]] == [len(data["storages"]["name"])] * 3


def graph_text(graph: Any, folder: Path) -> str:
    path = folder / "plain.graph.json"
    graph.save(path)
    return path.read_text(encoding="utf-8")


def test_what_cannot_be_compared_is_refused(run: Run, graph_file: Path, tmp_path: Path) -> None:
    for words, message in (
        (("--planners", "sublinnear"), "--planners names 'sublinnear', expected all or some of none"),
        (("--planners", "torch:dp"), "--planners names 'torch:dp'"),
        (("--measure",), "a graph file can be planned but not run; leave out --measure"),
        (("--budgets", 0), "Invalid value for '--budgets': Input should be greater than or equal to 1"),
        (("--report", tmp_path / "no" / "page.html"), "there is no folder"),
    ):
        status, _, err = run("compare", graph_file, *words)
        assert status == 2
        assert message in err


@pytest.mark.slow
def test_baselines_stand_beside_planners_measured(run: Run) -> None:
    names = "none,sublinear,torch:dp,torch:greedy,checkpoint:stage"
    words = ("lstm", *SMALL, "--planners", names, "--budgets", 2, "--measure", "--repeats", 1, "--json")
    status, out, _ = run("compare", *words)
    assert status == 0
    points = points_of(out)
    kinds = {point["planner"] for point in points}
    assert kinds == set(names.split(","))
    for point in points:
        measured = point.get("measured")
        assert (measured is None) == (point["status"] in ("infeasible", "timed_out"))
        if measured is None:
            continue
        assert measured["peak_bytes"] > 0
        if ":" not in point["planner"]:
            assert measured["bitwise_equal"]
            assert measured["peak_bytes"] <= point["budget_bytes"]
        else:
            assert point["budget_bytes"] is None
            assert "setting" in point
    shares = [point["setting"] for point in points if point["planner"] == "torch:dp"]
    assert shares == [1.0, 0.0]


def test_torch_solvers_keep_less_for_a_smaller_share(run: Run) -> None:
    status, out, _ = run("compare", "lstm", *SMALL, "--planners", "torch:greedy,torch:dp", "--json")
    assert status == 0
    for name in ("torch:greedy", "torch:dp"):
        overheads = [point["overhead"] for point in points_of(out) if point["planner"] == name]
        assert len(overheads) == 10
        assert overheads[0] < overheads[-1]


@pytest.mark.slow
def test_a_step_that_torch_cannot_compile_is_still_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit import baselines

    def fail(*_arguments: object) -> None:
        raise RuntimeError("graph break")

    monkeypatch.setattr(baselines, "with_torch_budget", fail)
    words = ("lstm", *SMALL, "--planners", "torch:greedy,none", "--budgets", 1, "--measure", "--repeats", 1, "--json")
    status, out, _ = run("compare", *words)
    assert status == 0
    failed, none = sorted(points_of(out), key=lambda point: -len(point["planner"]))
    assert failed["status"] == "torch: RuntimeError"
    assert failed["peak_bytes"] is not None
    assert "measured" not in failed
    assert none["measured"]["bitwise_equal"]


def test_the_page_names_the_winner() -> None:
    def point(planner: str, budget_bytes: int, peak_bytes: int | None, overhead: float | None) -> ComparedPoint:
        return ComparedPoint(planner=planner, budget_bytes=budget_bytes, peak_bytes=peak_bytes, overhead=overhead)

    points = [
        point("sublinear", 2048, 2048, 0.3), point("search", 2048, 2000, 0.1),
        point("sublinear", 1024, None, None), point("search", 1024, 1024, 0.5), point("none", 4096, 4096, 0.0),
        point("search", 4096, 4096, 0.0),
    ]  # fmt: skip
    assert winner(points) == (
        "search adds the least time at 2 of the 2 budgets that several reach. "
        "The least memory is that of search: 1 KiB, +50.0% time."
    )
    assert winner(points[2:3]) == "No plan was found."
