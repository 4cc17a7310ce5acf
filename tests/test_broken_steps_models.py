"""Models whose Python code depends on values, as users write them: eager's bits within the budget."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_broken_steps import CPU, batch_of, planned_within, pytestmark
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.runtime.measure import measured_eager_peak
from memfit.runtime.state import StepState

__all__ = ["pytestmark"]
_WIDTH = 32


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH), nn.GELU())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = block(), block(), nn.Linear(_WIDTH, 5)
        self.blocks = nn.ModuleList(block() for _ in range(3))


class Experts(Model):
    """A mixture of experts that routes by indices."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weights, choice = values[:, :3].softmax(-1).max(-1)
        mixed = torch.zeros_like(values)
        for number in choice.unique().tolist():
            rows = (choice == number).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, self.blocks[number](values[rows]) * weights[rows, None])
        return self.last(self.first(mixed))


class MaskedExperts(Model):
    """A mixture of experts that writes to the rows of masks."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        choice = values[:, :3].argmax(-1)
        mixed = torch.zeros_like(values)
        for number, expert in enumerate(self.blocks):
            mask = choice == number
            if mask.any():
                mixed[mask] = expert(values[mask])
        return self.last(self.first(mixed))


class StochasticDepth(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            if torch.rand(()).item() < 0.7:
                values = values + each(values)
        return self.last(values)


class EarlyExit(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            values = each(values)
            if values.abs().mean().item() < 0.02:
                break
        return self.last(values)


class Numpy(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        scale = float(np.clip(hidden.detach().numpy().std(), 0.1, 10.0))
        return self.last(self.second(hidden / scale))


class Formats(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        self.seen = f"{hidden.detach().mean():.3f}"
        return self.last(self.second(hidden))


class Teacher(Model):
    """A teacher, the moving average of a block, answers in between, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            gap = (self.teacher(values) - hidden).abs().mean().item()
        return self.last(self.second(hidden)) * (1.0 + gap)


class Dropout(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.norm(self.first(values)), 0.3)
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        return self.last(functional.dropout(self.norm(self.second(hidden)), 0.3))


class Checkpointed(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(checkpoint(self.looks, values, use_reentrant=False)))

    def looks(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        return hidden if hidden.sum().item() < 1e9 else -hidden


class Chunks(Model):
    """Views of one tensor cross the break, so that gradients of views come back."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        upper, lower = self.first(values).chunk(2)
        if upper.sum().item() > 1e9:
            upper = -upper
        return self.last(self.second(torch.cat([lower.flip(0), 2.0 * upper])))


class Caches(Model):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        key = round(hidden.detach().mean().item())
        if key not in self.cache:
            self.cache[key] = torch.linspace(0.0, 1.0, _WIDTH)
        return self.last(self.second(hidden * self.cache[key]))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return 2.0 * loss if loss > 1.65 else loss


def step_of(kind: type[Model]) -> memfit.TrainingStep:
    torch.manual_seed(0)
    random.seed(0)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return memfit.TrainingStep(model=model, loss=loss_of, batch=batch_of(256), optimizer=optimizer)


def states_of_training(kind: type[Model], share: float | None, log: pytest.LogCaptureFixture) -> list[Any]:
    """Return the losses and the last state of six steps: eager's, or planned within a share of eager's peak.

    A way through the model that does not fit is said to exceed the budget.
    """
    step = step_of(kind)
    run: Any = step.run_eager
    if share is not None:
        budget_is = "soft" if kind is StochasticDepth else "firm"
        run = planned_within(step, int(share * measured_eager_peak(step, CPU)), budget_is=budget_is)
    torch.manual_seed(5)
    losses = [run(batch_of(256, shift=shift)) for shift in (0.0, 0.1, 0.0, -0.1, 0.1, 0.0)]
    state = StepState.take(step)
    if share is not None:
        said = "exceed the budget" in log.text
        assert run.measure(repeats=1).peak_bytes <= run.settings.budget or (said and kind is StochasticDepth)
    return [*losses, state]


SLOW = (Experts, Teacher, Dropout, Checkpointed, Chunks, Caches, Formats, EarlyExit)


@pytest.mark.parametrize(
    "kind",
    [MaskedExperts, StochasticDepth, Numpy, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)],
)
def test_models_as_users_write_them(kind: type[Model], caplog: pytest.LogCaptureFixture) -> None:
    *losses, state = states_of_training(kind, None, caplog)
    for share in (1.0, 0.9):
        *planned_losses, planned_state = states_of_training(kind, share, caplog)
        assert all(map(torch.equal, losses, planned_losses)), share
        assert state.first_difference(planned_state) is None, share
