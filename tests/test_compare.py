"""`memfit compare`: every planner at every budget, torch's own ways beside them, and a page that shows both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chains import chain
from command_line import Run

from memfit.planners import PLANNERS

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
    compared = set(PLANNERS) - {"mirror", "offload"}  # nothing is marked, and there is no link to a host
    assert {point["planner"] for point in points} == compared
    assert all(set(point) == KEYS for point in points)
    for name in compared:
        mine = [point for point in points if point["planner"] == name]
        assert len(mine) == 4, name
        assert mine[0]["budget_bytes"] == answer["unplanned"]["peak_bytes"]
        for point in mine:
            assert (point["peak_bytes"] is None) == (point["status"] == "infeasible")
            assert point["peak_bytes"] is None or point["peak_bytes"] <= point["budget_bytes"]
        overheads = [point["overhead"] for point in mine if point["overhead"] is not None]
        assert overheads == sorted(overheads), name


def test_the_text_has_a_row_for_each_point(run: Run, graph_file: Path) -> None:
    status, out, _ = run("compare", graph_file, "--planners", "none,segments", "--budgets", 2)
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith(("none ", "segments "))]
    assert len(rows) == 4
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
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)[0])
    assert "</script><b>@@plotly@@" in data["storages"]["name"]
    assert [len(point["kinds"]) for point in data["points"] if point["kinds"]] == [len(data["storages"]["name"])] * 2


def graph_text(graph: Any, folder: Path) -> str:
    path = folder / "plain.graph.json"
    graph.save(path)
    return path.read_text(encoding="utf-8")


def test_what_cannot_be_compared_is_refused(run: Run, graph_file: Path, tmp_path: Path) -> None:
    for words, message in (
        (("--planners", "sublinnear"), "--planners names 'sublinnear', expected all or some of none"),
        (("--planners", "torch:dp"), "--planners names 'torch:dp'"),
        (("--measure",), "a graph file can be planned but not run; leave out --measure"),
        (("--budgets", 0), "--budgets is 0, expected 1 or more"),
        (("--report", tmp_path / "no" / "page.html"), "there is no folder"),
    ):
        status, _, err = run("compare", graph_file, *words)
        assert status == 2
        assert message in err


def test_rivals_stand_beside_planners_measured(run: Run) -> None:
    names = "none,sublinear,torch:dp,torch:greedy,checkpoint:stage"
    words = ("lstm", *SMALL, "--planners", names, "--budgets", 2, "--measure", "--repeats", 1, "--json")
    status, out, _ = run("compare", *words)
    assert status == 0
    points = points_of(out)
    kinds = {point["planner"] for point in points}
    assert kinds == set(names.split(","))
    for point in points:
        measured = point.get("measured")
        assert (measured is None) == (point["status"] == "infeasible")
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


def test_a_step_that_torch_cannot_compile_is_still_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.workloads import rivals

    def fail(*_arguments: object) -> None:
        raise RuntimeError("graph break")

    monkeypatch.setattr(rivals, "with_torch_budget", fail)
    words = ("lstm", *SMALL, "--planners", "torch:greedy,none", "--budgets", 1, "--measure", "--repeats", 1, "--json")
    status, out, _ = run("compare", *words)
    assert status == 0
    failed, none = sorted(points_of(out), key=lambda point: -len(point["planner"]))
    assert failed["status"] == "torch: RuntimeError"
    assert failed["peak_bytes"] is not None
    assert "measured" not in failed
    assert none["measured"]["bitwise_equal"]
