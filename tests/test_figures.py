"""The figures of one step: one estimate of its overhead, the same wherever it is told; costs of busy moments."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from command_line import MOVES, Run, json_of
from torch import nn

import memfit
from memfit.cost.environment import environment
from memfit.cost.observations import Observation, Observations
from memfit.step.measured import Measured
from memfit.step.overhead import ratio_of, spread_of
from memfit.step.planned_step import PlannedStep
from memfit.system.load import BUSY, Load

FILE = """
import memfit, torch
def step():
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 4))
    batch = torch.randn(256, 64), torch.randint(0, 4, (256,))
    return memfit.TrainingStep(model=model, loss=torch.nn.CrossEntropyLoss(), batch=batch)
"""


def test_the_overhead_is_one_number_in_the_line_the_table_the_json_and_the_page(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = PlannedStep.measure

    def measure(step: PlannedStep, batch: object = None, *, repeats: int | None = None) -> Measured:
        assert repeats is None
        seconds = {"step_seconds": 0.913, "baseline_step_seconds": 0.813, "overhead_spread": (0.05, 0.253), "turns": 7}
        return replace(whole(step, batch, repeats=1), **seconds)

    monkeypatch.setattr(PlannedStep, "measure", measure)
    file, page = tmp_path / "own.py", tmp_path / "step.html"
    file.write_text(FILE)
    words = ("fit", f"{file}:step", "--budget", "80%", *MOVES)
    found = json_of(run(*words, "--json")[1])
    _, text, _ = run(*words, "--report", page, "--curve", "0")
    told = "+12.3% (5.0 to 25.3)"
    assert (found["overhead"], found["overhead_spread"], found["turns"]) == (0.913 / 0.813 - 1, [0.05, 0.253], 7)
    line = next(each for each in text.splitlines() if each.startswith("overhead") and "turns" in each)
    row = next(each for each in text.splitlines() if each.startswith("overhead") and each != line)
    assert f"{told} measured, against eager, in 7 turns" in line
    assert told in row and f"{found['predicted']['overhead']:+.1%}" in row
    assert page.read_text().count(told) >= 1
    shown = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
    others = set(re.findall(r"[+-]\d+\.\d%", shown)) - {"+12.3%", f"{found['predicted']['overhead']:+.1%}"}
    assert not others, "another overhead"


def test_turns_are_taken_until_the_overhead_is_known() -> None:
    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, batch = nn.Sequential(*layers, nn.Linear(64, 4)), (torch.randn(256, 64), torch.randint(0, 4, (256,)))
    options = {"planner": "search", "options": {"iterations": 300}}
    step = memfit.fit(model, nn.CrossEntropyLoss(), batch, budget="90%", **options)  # pyright: ignore
    free = step.measure()
    assert 5 <= free.turns <= 40
    assert free.overhead_spread is not None and free.overhead is not None
    assert free.overhead_spread[0] <= free.overhead <= free.overhead_spread[1]
    assert step.measure(repeats=2).turns == 2


def test_the_spread_covers_the_truth_at_each_number_of_turns() -> None:
    random = np.random.default_rng(0)
    for turns in (5, 8, 15, 40):
        covered = 0
        for _ in range(300):
            load = random.lognormal(0, 0.3, turns)  # that hits both steps of a turn
            baseline = load * random.lognormal(0, 0.05, turns)
            planned = 1.2 * load * random.lognormal(0, 0.05, turns)
            low, high = spread_of(list(zip(baseline, planned, strict=True)))
            covered += low <= 0.2 <= high
        assert covered >= 0.88 * 300, turns


def test_the_estimate_is_the_ratio_of_the_medians_and_inside_its_spread() -> None:
    pairs = [(1.0, 1.2), (2.0, 2.1), (1.1, 1.9), (0.9, 1.0), (1.0, 1.3)]
    ratio = statistics.median(p for _, p in pairs) / statistics.median(b for b, _ in pairs)
    assert ratio_of(pairs) == ratio
    low, high = spread_of(pairs)
    assert low <= ratio - 1 <= high and spread_of(pairs[:1])[0] == pytest.approx(0.2)


def seen(seconds: float, load: float = 0.0) -> Observation:
    return Observation(seconds=seconds, workspace_bytes=0, overwrites={0: True}, load=load)


@pytest.mark.parametrize(
    ("before", "now", "load", "kept", "is_due"),
    [
        (None, 2.0, 0.5, 2.0, True),
        (None, 2.0, BUSY, 2.0, False),
        (9.0, 2.0, 0.0, 2.0, False),  # quiet at last
        (1.0, 2.0, 0.0, 2.0, False),
        (9.0, 2.0, 0.5, 2.0, True),  # both busy: the shorter
        (2.0, 9.0, 0.5, 2.0, True),
        (2.0, 2.1, 0.5, 2.0, False),  # they agree: the first one stays, and so does the plan that was kept for it
    ],
)
def test_costs_of_a_busy_moment_are_kept_until_better_ones_are_there(
    before: float | None, now: float, load: float, kept: float, is_due: bool
) -> None:
    old = None if before is None else seen(before, load=0.9)
    found = msgspec.structs.replace(seen(now), overwrites={1: False}).after(old, load)
    assert (found.seconds, found.load > 0) == (kept, is_due)
    assert found.overwrites == ({1: False} if old is None else {0: True, 1: False})


def model_and_batch() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(48, 48), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(48, 4)), (torch.randn(1024, 48), torch.randint(0, 4, (1024,)))


def fitted() -> PlannedStep:
    model, batch = model_and_batch()
    options = {"planner": "search", "options": {"iterations": 300}}
    step = memfit.fit(model, nn.CrossEntropyLoss(), batch, budget="100%", **options)  # pyright: ignore
    assert isinstance(step, PlannedStep)
    return step


def test_ops_of_a_busy_moment_are_measured_again_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(Load, "others", lambda _load: 0.6)
    fitted()
    known = Observations.load(environment(torch.device("cpu"))).by_key
    assert known and {each.load for each in known.values()} == {0.6}
    monkeypatch.setattr(Load, "others", lambda _load: 0.0)
    fitted()
    assert {each.load for each in Observations.load(environment(torch.device("cpu"))).by_key.values()} == {0.6}
    shutil.copytree(tmp_path / "costs", tmp_path / "elsewhere" / "costs")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "elsewhere"))  # measured by another process, as it seems
    fitted()
    assert {each.load for each in Observations.load(environment(torch.device("cpu"))).by_key.values()} == {0.0}


def test_costs_that_a_step_belies_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    first = fitted()
    known = Observations.load(environment(torch.device("cpu")))
    known.add({key: msgspec.structs.replace(each, seconds=1.0) for key, each in known.by_key.items()})
    belied = fitted()
    assert belied.plan.unplanned.seconds > 5
    assert "measured in a busy moment" in belied.measure(repeats=1).note
    mended = fitted()
    assert mended.plan.unplanned.seconds < 1 and first.plan.unplanned.seconds < 1
    assert "busy" not in mended.measure(repeats=1).note


def test_the_load_of_others_is_that_of_other_processes() -> None:
    load, until = Load(), time.perf_counter() + 0.5
    while time.perf_counter() < until:
        pass
    own = load.others()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        load = Load()
        time.sleep(1.0)
        assert load.others() > 0.5 / (os.cpu_count() or 1)
    finally:
        other.kill()
        other.wait()
    assert 0.0 <= own <= 1.0
