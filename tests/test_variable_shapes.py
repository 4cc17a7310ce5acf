"""Batches of many sizes: plans are carried over, every step is within the budget, and all bits are eager's."""

from __future__ import annotations

import copy
import gc
import linecache
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import TiedLanguageModel
from torch import nn

import memfit
from memfit.near_plans import PROVISIONAL
from memfit.plan_cache import MOST_BYTES
from memfit.planners.engine.carried import CARRIED
from memfit.planning import SEARCHING
from memfit.step.behind import Behind
from memfit.step.measure import resident_bytes
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import record
from memfit.workloads import build

Loss = Callable[[nn.Module, Any], torch.Tensor]
LENGTHS = (48, 40, 31, 56, 64, 17, 63, 48, 33)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep measured costs of all tests together, apart from those of other files."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_kept_plans(cache: Path) -> Path:
    """Delete the plans of the test before."""
    shutil.rmtree(cache / "plans", ignore_errors=True)
    return cache / "plans"


class Stages(list[str]):
    """Hears the stages of a step."""

    @property
    def searches(self) -> int:
        return self.count(SEARCHING)

    @property
    def comparisons(self) -> int:
        return self.count("comparing with eager's calls")


def sentences(tokens: int, *, rows: int = 8) -> dict[str, torch.Tensor]:
    identifiers = torch.randint(300, (rows, tokens))
    return {"input_ids": identifiers, "labels": identifiers.clone()}


def gpt2() -> tuple[nn.Module, Loss]:
    step = build("gpt2", layers=2, width=64, vocabulary=300, tokens=64, batch=2)
    return step.model, step.loss


def trained_eagerly(model: nn.Module, loss: Loss, batches: Sequence[Any]) -> tuple[list[torch.Tensor], nn.Module]:
    """Train a copy as plain PyTorch does; return the losses and the copy."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    losses: list[torch.Tensor] = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return losses, model


def fitted(model: nn.Module, loss: Loss, batch: Any, share: str, **how: Any) -> tuple[PlannedStep, Stages]:
    stages = Stages()
    how = {"options": {"iterations": 3_000}, "search_behind": False} | how
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = memfit.fit(model, loss, batch, optimizer=optimizer, budget=share, on_stage=stages.append, **how)
    assert isinstance(step, PlannedStep)
    return step, stages


def check_same_training(
    make: Callable[[], tuple[nn.Module, Loss]], batches: Sequence[Any], share: str, **how: Any
) -> tuple[PlannedStep, Stages]:
    """Fit the first batch, train on all, and compare losses, parameters and measured bytes with eager and budget."""
    torch.manual_seed(0)
    model, loss = make()
    expected, eager = trained_eagerly(model, loss, batches)
    step, stages = fitted(model, loss, batches[0], share, **how)
    torch.manual_seed(7)
    for number, batch in enumerate(batches):
        assert torch.equal(step(batch), expected[number]), number
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for batch in batches:
        with record("cpu") as usage:
            step(batch)
        assert usage.peak_bytes + resident_bytes(step, batch) <= step.plan.budget_bytes
    assert step.corrections == []
    return step, stages


@pytest.mark.slow
def test_lengths_up_and_down_are_planned_without_a_search() -> None:
    step, stages = check_same_training(gpt2, [sentences(tokens) for tokens in LENGTHS], "75%")
    assert stages.searches == 1
    assert len(step.plans) == len(set(LENGTHS))
    assert all(plan.predicted.peak_bytes <= plan.budget_bytes == step.plan.budget_bytes for plan in step.plans)
    assert {plan.planner for plan in step.plans[1:]} <= set(PROVISIONAL)


def test_a_smaller_size_takes_the_schedule_of_a_larger_one() -> None:
    torch.manual_seed(0)
    step, _ = fitted(*gpt2(), sentences(64), "60%")
    step(sentences(63))
    first, second = step.plans
    assert second.planner == CARRIED
    kept, moved = ([line for line in plan.schedule.lines() if "compute" in line] for plan in (first, second))
    assert [line.split()[1] for line in kept] == [line.split()[1] for line in moved]
    assert second.overhead > 0


def test_a_size_that_fits_as_it_is_recomputes_nothing() -> None:
    torch.manual_seed(0)
    step, _ = fitted(*gpt2(), sentences(64), "60%")
    step(sentences(9))
    assert step.plan.overhead > 0
    assert step.plans[1].overhead == 0


def test_batch_tails_and_single_rows() -> None:
    batches = [sentences(48, rows=8), sentences(48, rows=7), sentences(48, rows=1), sentences(20, rows=3)]
    check_same_training(gpt2, batches, "70%")


def test_padding_masks_choose_their_own_programs() -> None:
    def padded(tokens: int, padding: int) -> dict[str, torch.Tensor]:
        batch = sentences(tokens)
        mask = torch.ones(8, tokens, dtype=torch.long)
        mask[1, tokens - padding :] = 0
        return {**batch, "attention_mask": mask}

    batches = [padded(48, 0), padded(48, 5), padded(40, 0), padded(40, 7), padded(33, 2), padded(56, 0)]
    check_same_training(gpt2, batches, "85%")


def test_tied_weights_and_random_ops() -> None:
    def make() -> tuple[nn.Module, Loss]:
        model = TiedLanguageModel()

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

        return model, loss

    def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(40, (4, tokens))
        return words, words.roll(1, 1)

    check_same_training(make, [batch(tokens) for tokens in (16, 11, 12, 9)], "90%")


class Layered(nn.Module):
    """Runs one layer more for each ten rows: its structure changes with the size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: len(x) // 10]:
            x = torch.tanh(layer(x))
        return x


class Scaled(nn.Module):
    """Computes with the number of rows as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) / len(x) ** 0.5 + float(len(x) % 7)


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 24), torch.randn(count, 24)


def test_a_structure_that_changes_with_the_size_is_planned_anew() -> None:
    batches = [rows_of(count) for count in (60, 49, 51, 30, 44, 40)]
    step, stages = check_same_training(lambda: (Layered(), squares), batches, "90%")
    structures = {len(plan.graph.ops) for plan in step.plans}
    assert len(structures) == 4  # of 3, 4, 5 and 6 layers
    assert stages.searches == 4


def test_a_size_that_is_a_number_of_the_step_is_that_number() -> None:
    batches = [rows_of(count) for count in (55, 41, 36, 40)]
    check_same_training(lambda: (Scaled(), squares), batches, "90%")


def test_without_carrying_over_each_size_is_searched() -> None:
    torch.manual_seed(0)
    step, stages = fitted(*gpt2(), sentences(48), "75%", carry_over=False)
    step(sentences(40))
    step(sentences(44))
    assert stages.searches == 3
    assert not {plan.planner for plan in step.plans} & set(PROVISIONAL)


def test_a_planner_that_does_not_search_is_asked_for_each_size() -> None:
    torch.manual_seed(0)
    step, _ = fitted(*gpt2(), sentences(48), "75%", planner="segments", options={})
    step(sentences(40))
    assert {plan.planner for plan in step.plans} == {"segments"}


@pytest.mark.slow
def test_a_structure_is_compared_with_eager_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    compare = memfit.capture.compare.require_as_eager

    def counted(*args: Any, **how: Any) -> bool:
        made.append(1)
        return compare(*args, **how)

    monkeypatch.setattr("memfit.capture.compare.require_as_eager", counted)
    torch.manual_seed(0)
    step, _ = fitted(*gpt2(), sentences(48), "75%")
    for tokens in (40, 44, 64):
        step(sentences(tokens))
    assert len(made) == 1
    step(sentences(40, rows=1))  # a size of 1 is another structure
    assert len(made) == 2


class AsksForFakes(nn.Module):
    """Takes another branch for fake tensors, from 50 rows on; each branch is another line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if len(x) >= 50 and "Fake" in type(x).__name__:
            return torch.sin(x)
        return torch.cos(x)


def test_code_that_asks_for_fakes_at_some_sizes_is_refused_there() -> None:
    torch.manual_seed(0)
    step, _ = fitted(AsksForFakes(), squares, rows_of(40), "1MiB")
    step(rows_of(44))
    with pytest.raises(memfit.MemfitError, match="not the one that eager runs"):
        step(rows_of(50))


def test_a_plan_is_searched_behind_the_steps_and_swapped_in() -> None:
    torch.manual_seed(0)
    model, loss = gpt2()
    step, _ = fitted(model, loss, sentences(64), "60%", search_behind=True, options={}, time_limit_seconds=1.0)
    batch = sentences(52)
    step(batch)
    assert step.plans[1].planner in PROVISIONAL
    before = step.plans[1].predicted.seconds
    assert step.wait_for_searches(60)
    expected, eager = trained_eagerly(model, loss, [])
    torch.manual_seed(3)
    value = step(batch)
    torch.manual_seed(3)
    assert torch.equal(value, loss(eager, batch))
    assert expected == []
    assert step.plans[1].predicted.seconds <= before
    assert step.plans[1].predicted.peak_bytes <= step.plan.budget_bytes


def test_a_second_run_starts_warm() -> None:
    def run() -> Stages:
        torch.manual_seed(0)
        step, stages = fitted(*gpt2(), sentences(64), "60%", search_behind=True)
        for tokens in (52, 40):
            step(sentences(tokens))
            step.wait_for_searches()
        return stages

    assert run().searches == 1
    assert run().searches == 0


def test_kept_plans_take_bounded_bytes(no_kept_plans: Path) -> None:
    torch.manual_seed(0)
    for share in ("100%", "95%", "90%", "80%"):
        fitted(*gpt2(), sentences(32), share)
    files = sorted(no_kept_plans.iterdir(), key=lambda file: file.stat().st_mtime)
    assert len(files) == 4
    with open(no_kept_plans / "0-0-0.plan.json.gz", "wb") as others:  # the next plan leaves room for one beside it
        others.truncate(MOST_BYTES - 2 * max(file.stat().st_size for file in files))
    os.utime(others.name, (4e9, 4e9))  # the last one used
    fitted(*gpt2(), sentences(32), "85%")
    left = set(no_kept_plans.iterdir()) - {Path(others.name)}
    assert len(left) == 2
    assert not left & set(files[:3])


def sources_of_programs() -> int:
    return sum(name.startswith("<memfit") for name in linecache.cache)


def test_programs_of_many_sizes_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
    step, _ = fitted(model, squares, rows_of(60), "1MiB")
    ops = len(step.plan.graph.ops)
    monkeypatch.setattr("memfit.step.variants.MOST_OPS", 6 * ops)
    first, sources = step.plan, sources_of_programs()
    for count in range(20, 50):
        step(rows_of(count))
        step(rows_of(48 if count > 22 else 60))  # what is used stays
    gc.collect()
    assert len(step.plans) == 6
    assert step.plan is first
    kept = {plan.graph.storages[plan.graph.ops[0].writes[0]].bytes for plan in step.plans}
    assert 48 * 24 * 4 in kept
    assert len(step._programs.sizes._structure_of) == 6
    assert sum(len(known.plans) for known in step._programs.sizes._structures.values()) == 6
    assert sources_of_programs() <= sources + 8
    assert sum(len(variant.resident_bytes) for variant in step._programs.variants) <= 2 * 6
    eager = copy.deepcopy(model)
    batch = rows_of(20)  # was dropped
    assert torch.equal(step(batch), squares(eager, batch))


def test_a_structure_of_which_no_size_is_kept_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.step.variants.MOST_OPS", 1)
    batches = [rows_of(count) for count in (60, 49, 51, 30, 44, 40)]
    torch.manual_seed(0)
    model = Layered()
    expected, eager = trained_eagerly(model, squares, batches)
    step, _ = fitted(model, squares, batches[0], "90%")
    for batch, loss in zip(batches, expected, strict=True):
        assert torch.equal(step(batch), loss)
    assert len(step.plans) == len(step._programs.sizes._structures) == 2  # the first, and the last
    assert all(torch.equal(mine, own) for mine, own in zip(model.parameters(), eager.parameters(), strict=True))


def test_an_error_behind_the_steps_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_listen: Any) -> Any:
        raise memfit.MemfitError("no luck")

    behind = Behind()
    with caplog.at_level(logging.WARNING):
        behind.add(fail)
        assert behind.wait(10)
    assert "a plan was not searched further: no luck" in caplog.text


def test_work_behind_the_steps_ends_when_it_is_stopped() -> None:
    began = time.monotonic()

    def search(listen: Any) -> Any:
        while True:
            listen(None)
            time.sleep(0.01)

    behind = Behind()
    behind.add(search)
    behind.add(search)
    with behind.paused():
        time.sleep(0.05)
    behind.stop()
    assert behind.wait(5)
    assert behind.take("any") is None
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_the_interpreter_ends_while_a_plan_is_searched() -> None:
    source = """
import torch, memfit, time
from memfit.workloads import build
torch.manual_seed(0)
step = build("gpt2", layers=2, width=64, vocabulary=300, tokens=64, batch=2)
def batch(tokens):
    words = torch.randint(300, (2, tokens))
    return {"input_ids": words, "labels": words}
planned = memfit.fit(step.model, step.loss, batch(64), budget="60%", time_limit_seconds=1.0)
planned._programs.settings = __import__("dataclasses").replace(planned.settings, time_limit_seconds=300.0)
planned(batch(52))
assert not planned.wait_for_searches(0.5)
print("began to end at", time.monotonic())
"""
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    ended = time.monotonic()
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert ended - float(run.stdout.split()[-1]) < 20
