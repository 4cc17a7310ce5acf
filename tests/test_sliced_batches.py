"""Batches that are slices of larger tensors, at other places in each step: the usual loop without a loader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit

ROWS = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(200) % 32
PAIRS = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))


class Layers(nn.Module):
    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.is_broken = is_broken

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        if self.is_broken and inputs.sum() > -1e9:
            inputs = inputs * 1.5
        return self.layers[0](inputs)


def _of_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def _of_two(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) * batch[1]).mean()


def _of_rows(number: int) -> slice:
    return slice(16 * number, 16 * number + 16)


KINDS: dict[str, tuple[Callable[[nn.Module, Any], torch.Tensor], Callable[[int], Any]]] = {
    "rows and labels": (_of_labels, lambda number: (ROWS[_of_rows(number)], LABELS[_of_rows(number)])),
    "halves of one tensor": (_of_two, lambda n: (PAIRS[_of_rows(n), :32], PAIRS[_of_rows(n), 32:])),
    "rows that overlap": (_of_two, lambda n: (ROWS[_of_rows(n)], ROWS[16 * n + 8 : 16 * n + 24])),
    "pieces": (_of_outputs, lambda number: ROWS[:160].chunk(10)[number]),
    "columns": (_of_outputs, lambda number: ROWS.t()[:, _of_rows(number)].t()),
    "every twelfth row": (_of_outputs, lambda number: ROWS[number::12][:16]),
    "the last first": (_of_outputs, lambda number: ROWS[_of_rows(9 - number)]),
    "one row again and again": (_of_outputs, lambda number: ROWS[number : number + 1].expand(16, 32)),
    "an array": (_of_outputs, lambda number: torch.from_numpy(ROWS.numpy()[_of_rows(number)])),
    "another dtype": (_of_outputs, lambda number: ROWS.view(torch.int32)[_of_rows(number)].view(torch.float32)),
    "slices and others": (_of_outputs, lambda number: ROWS[_of_rows(number)] if number % 2 else torch.ones(16, 32)),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_steps_have_eagers_bits(name: str, is_broken: bool) -> None:
    loss, make_batch = KINDS[name]
    model = Layers(is_broken)
    eager = copy.deepcopy(model)
    planned = memfit.fit(model, loss, make_batch(0), budget="64MiB", planner="none")
    step = memfit.TrainingStep(model=eager, loss=loss, batch=make_batch(0))
    for number in range(5):
        assert torch.equal(planned(make_batch(number)), step.run_eager(make_batch(number)))
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
