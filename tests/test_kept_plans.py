"""Plans kept on disk: the same step and settings search once; anything else searches anew."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit import TrainingStep
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError
from memfit.plan import Problem, Result, Status
from memfit.planners import make_planner
from memfit.planning import Settings

SETTINGS = Settings(budget="80%", options={"iterations": 2_000})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    return tmp_path


def make_step() -> TrainingStep:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
    return TrainingStep(model=model, loss=nn.functional.mse_loss, batch=(torch.randn(256, 32), torch.randn(256, 32)))


def stages_of(settings: Settings) -> list[str]:
    heard: list[str] = []
    fit_step(make_step(), replace(settings, on_stage=heard.append))
    return heard


def test_the_second_fit_searches_nothing_and_gives_the_same_plan() -> None:
    first = fit_step(make_step(), SETTINGS)
    heard: list[str] = []
    second = fit_step(make_step(), replace(SETTINGS, on_stage=heard.append))
    assert "searching a plan" not in heard
    assert list(second.plan.schedule) == list(first.plan.schedule)
    assert second.plan.predicted == first.plan.predicted


def test_other_settings_search_anew() -> None:
    stages_of(SETTINGS)
    assert "searching a plan" in stages_of(replace(SETTINGS, budget="90%"))
    assert "searching a plan" in stages_of(replace(SETTINGS, seed=1))
    assert "searching a plan" in stages_of(replace(SETTINGS, options={"iterations": 2_000, "threads": 1}))


class Unlucky:
    """A planner for which nothing fits, whatever the budget; it says how low it came, though."""

    budget_bytes = 1

    def __init__(self, name: str, **options: Any) -> None:
        self.planner = make_planner(name, **options)

    def __repr__(self) -> str:
        return repr(self.planner)

    def plan(self, problem: Problem) -> Result:
        result = self.planner.plan(replace(problem, budget_bytes=self.budget_bytes))
        return replace(result, status=Status.INFEASIBLE, plan=None)


def test_the_least_budget_that_a_search_reports_is_met_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.planning.make_planner", Unlucky)
    step = make_step()
    with pytest.raises(InfeasibleBudgetError) as infeasible:
        fit_step(step, replace(SETTINGS, budget=1))
    least_bytes = infeasible.value.least_budget_found_bytes
    assert least_bytes is not None
    monkeypatch.setattr(Unlucky, "budget_bytes", 1 << 40)  # what it finds from now on is no leaner than the whole step
    with pytest.raises(InfeasibleBudgetError) as still:
        fit_step(step, replace(SETTINGS, budget=least_bytes - 1))
    assert still.value.least_budget_found_bytes == least_bytes
    planned = fit_step(step, replace(SETTINGS, budget=least_bytes + 1))
    assert planned.plan.budget_bytes == least_bytes + 1
    assert planned.plan.predicted.peak_bytes == planned.plan.bounds.least_budget_found_bytes == least_bytes
    planned.verify()


def test_a_damaged_file_is_said_and_planned_again(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    stages_of(SETTINGS)
    (file,) = (own_cache / "plans").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert "searching a plan" in stages_of(SETTINGS)
    assert "a kept plan cannot be read" in caplog.text


def test_a_kept_plan_of_another_problem_is_said_and_planned_again(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stages_of(SETTINGS)
    (first,) = (own_cache / "plans").iterdir()
    content = first.read_bytes()
    first.unlink()
    loose = replace(SETTINGS, budget="100%")
    stages_of(loose)
    (second,) = (own_cache / "plans").iterdir()
    budget_bytes = fit_step(make_step(), loose).plan.budget_bytes
    second.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert fit_step(make_step(), loose).plan.budget_bytes == budget_bytes
    assert "holds the plan of another problem" in caplog.text
    assert "searching a plan" not in stages_of(loose)
    assert "kept as" not in fit_step(make_step(), loose).plan.versions


def test_a_cache_that_cannot_be_written_costs_time_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file" / "cache"))
    step = fit_step(make_step(), SETTINGS)
    assert torch.isfinite(step(step.step.batch))
    assert "the plan is not kept" in caplog.text


def test_the_least_that_is_named_is_of_this_update_and_not_of_a_kept_plan_of_another() -> None:
    def within(budget: int | str, weight_decay: float) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)
        batch = torch.randn(8, 64), torch.randint(0, 5, (8,))
        step = TrainingStep(model=model, loss=nn.functional.cross_entropy, batch=batch, optimizer=optimizer)
        return fit_step(step, replace(SETTINGS, budget=budget))

    leasts: list[int] = []
    for weight_decay in (0.0, 0.1):  # the update's workspace tells them apart
        with pytest.raises(InfeasibleBudgetError) as error:
            within(10_000, weight_decay)
        least_bytes, bound_bytes = error.value.least_budget_found_bytes, error.value.least_budget_bound_bytes
        assert least_bytes is not None and bound_bytes is not None and bound_bytes <= least_bytes
        within(least_bytes, weight_decay).prove()
        leasts.append(least_bytes)
    assert leasts[0] < leasts[1]
