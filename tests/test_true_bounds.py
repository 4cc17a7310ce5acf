"""Proved least budgets against measured steps: no step, eager's included, takes less than the bound of its graph."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import TrainingStep
from memfit.capture import capture, finish
from memfit.cost.calibration import local_device
from memfit.cost.measurement import measure
from memfit.plan import Problem
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.step.measure import resident_bytes
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import record

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
    "Muon": {},
}
KINDS: tuple[dict[str, bool], ...] = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})


class Measured(NamedTuple):
    """The step that `measured_peak_bytes` runs, as `resident_bytes` takes it."""

    step: TrainingStep
    device: torch.device = CPU
    held_bytes: int = 0
    constants: tuple[torch.Tensor, ...] = ()


def make_step(width: int = 64, layers: int = 4, rows: int = 16, dropout: float = 0.0) -> TrainingStep:
    torch.manual_seed(0)
    parts = [[nn.Linear(width, width, bias=False), nn.GELU(), nn.Dropout(dropout)] for _ in range(layers)]
    model = nn.Sequential(*(module for part in parts for module in part))
    batch = torch.randn(rows, width), torch.randn(rows, width)
    return TrainingStep(model=model, loss=nn.functional.mse_loss, batch=batch)


def updated(step: TrainingStep, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> TrainingStep:
    return TrainingStep(model=step.model, loss=step.loss, batch=step.batch, optimizer=optimizer, clip_norm=clip_norm)


def measured_peak_bytes(step: TrainingStep, steps: int = 2) -> list[int]:
    """Return what each of some eager steps takes, all that was there before it included."""
    peaks: list[int] = []
    for _ in range(steps):
        before = resident_bytes(Measured(step), step.batch)  # pyright: ignore[reportArgumentType]
        with record("cpu") as usage:
            step.run_eager(step.batch)
        peaks.append(before + usage.peak_bytes)
    return peaks


def bound_bytes(step: TrainingStep) -> int:
    captured = finish(capture(step))
    graph = measure(captured.graph, captured.binding, captured.observed)
    return least_budget_bound(Problem(graph=graph, device=local_device("cpu"), budget_bytes=1))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_no_eager_step_is_below_the_bound(name: str, clip_norm: float | None) -> None:
    tried = 0
    for kind in KINDS:
        step = make_step()
        try:
            with warnings.catch_warnings(action="ignore"):
                optimizer = getattr(torch.optim, name)(step.model.parameters(), **OPTIMIZERS[name], **kind)
        except (TypeError, RuntimeError):
            assert kind, name  # this optimizer has no such implementation
            continue
        step = updated(step, optimizer, clip_norm)
        before = bound_bytes(step)  # as the first step is planned, and as a later one
        peaks = measured_peak_bytes(step, steps=6)
        assert max(before, bound_bytes(step)) <= peaks[-1], kind  # RAdam's first five updates take less
        tried += 1
    assert tried


def test_the_budget_that_eager_meets_is_not_refused() -> None:
    step = make_step(width=256, layers=6, rows=64)
    step = updated(step, torch.optim.AdamW(step.model.parameters()), 1.0)
    budget = max(measured_peak_bytes(step))
    planned = memfit.fit(step.model, step.loss, step.batch, optimizer=step.optimizer, clip_norm=1.0, budget=budget)
    assert isinstance(planned, PlannedStep)
    before = resident_bytes(planned, step.batch)
    with record("cpu") as usage:
        planned(step.batch)
    assert before + usage.peak_bytes <= budget
    assert planned.corrections == []


class Thinned(nn.Module):
    """Dropout of a large tensor that needs no gradient: the step is at its fullest there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(values, 0.5).mean() * self.scale


def test_what_only_a_replay_needs_is_in_no_bound() -> None:
    for rows in (2, 500, 5000):
        step = TrainingStep(model=Thinned(), loss=lambda model, batch: model(batch), batch=torch.randn(rows, 4))
        assert bound_bytes(step) <= min(measured_peak_bytes(step))


def test_the_first_step_that_makes_states_and_the_next_one_stay_within_the_budget() -> None:
    """Small tensors: the state of a generator, 5,056 bytes, is more than most of them."""
    for rows in (4, 16, 64):
        step = make_step(width=16, layers=6, rows=rows, dropout=0.3)
        optimizer = torch.optim.Adam(step.model.parameters())
        planned: Any = None
        for share in ("100%", "85%", "70%"):
            try:
                planned = memfit.fit(
                    step.model, step.loss, step.batch, optimizer=optimizer, budget=share, time_limit_seconds=0.3
                )
            except memfit.errors.NoPlanError:
                continue
            for _ in range(3):
                before = resident_bytes(planned, step.batch)
                with record("cpu") as usage:
                    planned(step.batch)
                assert before + usage.peak_bytes <= planned.settings.budget, (rows, share)
            assert planned.corrections == []
            optimizer.state.clear()
        assert planned is not None


# -- 100% -------------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Layers in regions of torch.utils.checkpoint, with dropout in them."""

    def __init__(self, regions: int, use_reentrant: bool) -> None:
        super().__init__()
        part = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)]
        self.parts = nn.ModuleList(nn.Sequential(*(type(m)(*_arguments(m)) for m in part)) for _ in range(regions))
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 4)
        self.use_reentrant = use_reentrant

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for part in self.parts:
            values = checkpoint(part, values, use_reentrant=self.use_reentrant)
        return self.head(values)


def _arguments(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.p,) if isinstance(module, nn.Dropout) else ()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_hundred_percent_is_the_step_as_it_was_written(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed(6, use_reentrant), (torch.randn(512, 64), torch.randint(0, 4, (512,)))
    step = TrainingStep(model=model, loss=nn.CrossEntropyLoss(), batch=batch)
    eager_bytes = measured_peak_bytes(step, 1)[0]
    model.zero_grad(set_to_none=True)
    planned = memfit.fit(model, step.loss, batch, budget="100%", time_limit_seconds=0.5)
    # a reentrant region runs an autograd of its own, which holds copies of its input and of the gradient
    assert planned.plan.budget_bytes == pytest.approx(eager_bytes, rel=0.05 if use_reentrant else 0.02)
    assert planned.plan.unplanned.peak_bytes > 1.5 * eager_bytes
    less = memfit.fit(model, step.loss, batch, budget="99%", time_limit_seconds=0.5)
    assert less.plan.budget_bytes == int(planned.plan.budget_bytes * 0.99)
