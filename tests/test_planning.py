"""The one way to a plan: every caller takes it, with all settings, and an answer without a plan says what is proved."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from chains import chain
from command_line import MOVES, Run, json_of
from torch import nn
from walk import functions_of_target

from memfit import TrainingStep, plan_cache
from memfit.device import GENERIC
from memfit.errors import (
    InfeasibleBudgetError,
    InvalidOptionError,
    NoPlanError,
    TimeLimitError,
)
from memfit.plan import Bounds, Plan, Problem, Result, Status
from memfit.planners import PLANNERS, make_planner
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.planners.none import KeepEverything
from memfit.planning import SEARCHING, Settings, make_plan
from memfit.system.files import cache_folder

SMALL = ("--set", "batch=4", "--set", "steps=6", "--set", "width=16")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@dataclass(frozen=True)
class Unlucky:
    """A planner that finds nothing and proves nothing."""

    name: ClassVar[str] = "unlucky"
    source: ClassVar[str] = "made up"

    def plan(self, problem: Problem) -> Result:  # noqa: ARG002
        bounds = Bounds(least_budget_found_bytes=4321, least_budget_bound_bytes=1234)
        return Result(status=Status.TIMED_OUT, plan=None, bounds=bounds)


@dataclass(frozen=True)
class Interrupted:
    """A planner that Ctrl-C ended after it had found a plan."""

    name: ClassVar[str] = "interrupted"
    source: ClassVar[str] = "made up"

    def plan(self, problem: Problem) -> Result:
        return replace(KeepEverything().plan(problem), interrupted=True)


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "chain.graph.json"
    chain(6, 1024).save(path)
    return path


def test_nothing_found_and_nothing_proved_is_exit_status_5(
    run: Run, graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLANNERS, "unlucky", Unlucky)
    status, out, err = run("plan", graph_file, "--budget", 5000, "--planner", "unlucky", "--json")
    document = json_of(out)
    assert status == document["exit_status"] == 5
    assert document["status"] == "timed_out"
    assert document["least_budget_found_bytes"] == 4321
    assert document["least_budget_bound_bytes"] == 1234
    assert "found no plan within 4.883 KiB (5000 bytes), and nothing proves that there is none" in err


def test_a_search_that_found_nothing_is_in_the_table_of_a_comparison(
    run: Run, graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLANNERS, "unlucky", Unlucky)
    status, out, err = run("compare", graph_file, "--planners", "unlucky", "--budgets", 2)
    assert (status, err) == (0, "")
    assert out.count("none found") == 3  # at both budgets, and at the least budget that it names


def test_a_planner_that_has_tried_all_its_plans_does_not_speak_for_others(run: Run, graph_file: Path) -> None:
    below = unplanned_peak_bytes(chain(6, 1024), GENERIC) - 1
    status, out, err = run("plan", graph_file, "--budget", below, "--planner", "none", "--json")
    assert status == json_of(out)["exit_status"] == 5
    assert json_of(out)["status"] == "timed_out"
    assert "planner 'none' has no plan within" in err
    assert "(it tried all of its plans); another planner may" in err
    status, out, err = run("plan", graph_file, "--budget", 1, "--planner", "none", "--json")
    assert status == 3
    assert "no plan fits 1 B" in err
    assert json_of(out)["status"] == "infeasible"


@pytest.mark.parametrize("budget", ["100%", "110%"])
@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_no_planner_refuses_the_unplanned_peak(name: str, budget: str) -> None:
    graph = chain(6, 1024)
    settings = Settings(budget=budget, planner=name, time_limit_seconds=0.1)
    plan = make_plan(graph, GENERIC, settings)
    assert plan.predicted.peak_bytes <= plan.budget_bytes


def test_an_interrupted_search_is_said_by_its_result(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "interrupted", Interrupted)
    graph, settings = chain(6, 1024), Settings(budget="100%", planner="interrupted")
    assert make_plan(graph, GENERIC, settings).planner == "none"
    with pytest.raises(KeyboardInterrupt):
        make_plan(graph, GENERIC, replace(settings, stops_on_interrupt=True))
    assert not list(own_cache.rglob("*.plan.json.gz")), "the plan of an interrupted search is not kept"


def test_a_kept_plan_is_used_unless_the_settings_say_otherwise() -> None:
    graph = chain(6, 1024)
    stages: list[str] = []
    settings = Settings(budget="80%", options={"iterations": 500}, on_stage=stages.append)
    first = make_plan(graph, GENERIC, settings)
    assert make_plan(graph, GENERIC, settings) == first
    assert stages == [SEARCHING]
    make_plan(graph, GENERIC, replace(settings, reads_kept_plans=False))
    assert stages == [SEARCHING] * 2


@pytest.mark.slow
@pytest.mark.parametrize("order", [("plan", "fit"), ("fit", "plan")])
def test_plan_and_fit_give_the_same_plan_byte_for_byte(run: Run, tmp_path: Path, order: tuple[str, str]) -> None:
    for command in order:
        words = (command, "lstm", *SMALL, "--budget", "90%", *MOVES, "--save", tmp_path / command)
        status, _, err = run(*words, "--json")
        assert status == 0, err
    assert (tmp_path / "plan").read_bytes() == (tmp_path / "fit").read_bytes()


def _kept_by(monkeypatch: pytest.MonkeyPatch, searches: Iterator[tuple[str, float]], settings: Settings) -> Plan:
    """Return the plan of a small step whose search finds the plan of a planner, while others took so much."""
    graph = chain(8)

    def plan(_: object, problem: Problem) -> Result:
        found, load = next(searches)
        monkeypatch.setattr(plan_cache.Load, "others", lambda _: load)
        return make_planner(found, **({"iterations": 300} if found == "search" else {})).plan(problem)

    with monkeypatch.context() as patched:
        patched.setattr(PLANNERS["auto"], "plan", plan)
        return make_plan(graph, GENERIC, settings)


def test_the_fastest_plan_is_kept_and_tells_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(budget="80%")
    searches = iter([("search", 0.0), ("sublinear", 0.0)])
    first = _kept_by(monkeypatch, searches, settings)
    assert first.age_seconds is None
    slower = _kept_by(monkeypatch, searches, replace(settings, reads_kept_plans=False))
    assert slower.predicted.seconds > first.predicted.seconds
    (file,) = (cache_folder() / "plans").glob("*.gz")
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 7_500))
    kept = _kept_by(monkeypatch, searches, settings)
    assert kept == first
    assert kept.age_seconds == pytest.approx(7_500, abs=600)
    assert ", kept 2 hours ago: " in kept.explain()
    assert (_kept_by(monkeypatch, searches, settings).age_seconds or 0) > 7_000, "to be used makes it no younger"


@pytest.mark.parametrize(("second", "is_faster"), [("search", True), ("sublinear", False)])
def test_a_search_beside_other_processes_is_made_once_more(
    monkeypatch: pytest.MonkeyPatch, second: str, is_faster: bool
) -> None:
    settings = Settings(budget="80%")
    first_found = "sublinear" if is_faster else "search"
    searches = iter([(first_found, 0.5), (second, 0.5)])
    first = _kept_by(monkeypatch, searches, settings)
    again = _kept_by(monkeypatch, searches, settings)
    assert (again.predicted.seconds < first.predicted.seconds) == is_faster
    assert again.versions == first.versions
    assert _kept_by(monkeypatch, searches, settings) == again, "and no third time"


def test_no_cache_searches_again(run: Run, graph_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Problem] = []

    @dataclass(frozen=True)
    class Counted(KeepEverything):
        def plan(self, problem: Problem) -> Result:
            searches.append(problem)
            return super().plan(problem)

    monkeypatch.setitem(PLANNERS, "none", Counted)
    words = ("plan", graph_file, "--budget", "100%", "--planner", "none", "--save", tmp_path / "plan.json")
    for more, count in (((), 1), ((), 1), (("--no-cache",), 2), ((), 2)):
        assert run(*words, *more)[0] == 0
        assert len(searches) == count


class Breaks(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.before(values))
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        return self.after(hidden)


@pytest.fixture
def breaking() -> Iterator[TrainingStep]:
    torch.compiler.reset()
    torch.manual_seed(0)
    batch = torch.randn(40, 12), torch.randint(0, 3, (40,))
    yield TrainingStep(model=Breaks(), loss=nn.CrossEntropyLoss(), batch=batch)
    torch.compiler.reset()


def roomy(**more: Any) -> Settings:
    return Settings(budget=64 << 20, **more)


def test_the_errors_without_a_plan_carry_both_least_budgets() -> None:
    for kind, status in ((InfeasibleBudgetError, 3), (TimeLimitError, 5)):
        error = kind("no plan", least_budget_found_bytes=None, least_budget_bound_bytes=7)
        assert isinstance(error, NoPlanError)
        assert (error.least_budget_bound_bytes, error.exit_status) == (7, status)


def test_a_target_passes_twelve_modules_at_most_and_none_twice(run: Run) -> None:
    walk = functions_of_target(
        "lstm", lambda: run("plan", "lstm", *SMALL, "--budget", "100%", "--planner", "none", "--json")
    )
    assert walk[0] == "commands.plan.plan"
    walk = [step for step in walk if step != "commands.plan._answer"]  # shows the plan
    assert "planning.make_plan" in walk
    modules = [step.rpartition(".")[0] for step in walk]
    visits = [module for module, _ in itertools.groupby(modules)]
    assert len(visits) == len(set(visits)) <= 12, "\n".join(walk)


def test_settings_say_what_they_are() -> None:
    documented = inspect.getdoc(Settings) or ""
    for field in dataclasses.fields(Settings):
        assert f"    {field.name}: " in documented, field.name
    with pytest.raises(InvalidOptionError, match="time_limit_seconds is 0, expected"):
        Settings(budget=1, time_limit_seconds=0)
    assert json.dumps(Settings(budget="60%").is_in_bytes) == "false"
