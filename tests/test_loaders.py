"""Loaders whose batches change in size, form, dtype or order: all bits are eager's, within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.step.measure import resident_bytes
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import record

Case = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Sequence[Any]]


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


class Branches(nn.Module):
    """Runs another layer, another factor and other slices by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if len(x) % 3 == 0:
            x = torch.tanh(self.second(x))
        if len(x) == 37:
            x = x * 3
        whole = len(x) // 16 * 16
        return torch.cat([x[:whole].sin(), x[whole:].cos()])


def branches() -> Case:
    return Branches(), square, [torch.randn(rows, 24) for rows in (64, 48, 37, 36, 50, 38, 15)]


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float())


def dtypes() -> Case:
    forms = ((64, torch.float32), (64, torch.float64), (50, torch.float16), (49, torch.float64), (48, torch.int32))
    return Casts(), square, [torch.randn(rows, 24).to(dtype) for rows, dtype in forms]


def dictionaries() -> Case:
    def batch(rows: int, *, is_weighted: bool) -> dict[str, Tensor]:
        whole = {"x": torch.randn(rows, 24), "y": torch.randn(rows, 24)}
        return whole | ({"weights": torch.rand(rows, 1)} if is_weighted else {})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return ((model(batch["x"]) - batch["y"]) * batch.get("weights", 1.0)).square().mean()

    sizes = ((60, True), (60, False), (41, True), (42, False), (33, True))
    return Casts(), loss, [batch(rows, is_weighted=is_weighted) for rows, is_weighted in sizes]


def images() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d((2, 2)),
    )
    sizes = ((4, 48, 48), (4, 47, 48), (4, 41, 33), (1, 48, 48), (3, 31, 45), (5, 48, 48))
    batches = [torch.randn(rows, 3, height, width) for rows, height, width in sizes]
    return model, square, [*batches, batches[0].contiguous(memory_format=torch.channels_last)]


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(100, 24, mode="mean"), nn.Linear(24, 4)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.last(self.words(*batch))


def bags() -> Case:
    sizes = ((200, 16), (150, 16), (99, 12), (64, 16))
    return Bags(), square, [(torch.randint(100, (n,)), torch.arange(0, n, n // bags)[:bags]) for n, bags in sizes]


def sentences() -> Case:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    sizes = ((6, 40), (6, 1), (5, 33), (2, 9), (1, 40), (6, 39), (7, 42))  # shrinks, then grows beyond the first
    return model, square, [torch.randn(rows, tokens, 32) for rows, tokens in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "arena"),
    [*((case, False) for case in (branches, dtypes, dictionaries, images, bags, sentences)), (sentences, True)],
)
def test_every_batch_trains_as_eager_does(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, case: Callable[[], Case], arena: bool
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model, loss, batches = case()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters())
    own = torch.optim.AdamW(model.parameters())
    how: Any = {"budget": "140%", "arena": arena, "search_behind": False, "options": {"iterations": 500}}
    step = memfit.fit(model, loss, batches[0], optimizer=own, **how)
    assert isinstance(step, PlannedStep)
    for number, batch in enumerate(each for each in batches for _ in range(2)):
        torch.manual_seed(number)
        held_bytes = resident_bytes(step, batch)
        with record("cpu") as usage:
            value = step(batch)
        torch.manual_seed(number)
        expected = loss(eager, batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(value, expected.detach()), number
        for mine, theirs in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), number
        if number % 2:  # the first step of a size measures its operators too
            assert usage.peak_bytes + held_bytes + step.held_bytes <= step.plan.budget_bytes, number
    assert step.corrections == []
