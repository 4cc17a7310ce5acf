"""Plans kept on disk: the same step and settings search once; anything else searches anew."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit import TrainingStep
from memfit.runtime.fit import fit_step
from memfit.runtime.planning import Settings

SETTINGS = Settings(budget="80%", time_limit_seconds=0.3)


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
    assert "searching a plan" in stages_of(replace(SETTINGS, options={"threads": 1}))


def test_a_damaged_file_is_said_and_planned_again(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    stages_of(SETTINGS)
    (file,) = (own_cache / "plans").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert "searching a plan" in stages_of(SETTINGS)
    assert "a kept plan cannot be read" in caplog.text
