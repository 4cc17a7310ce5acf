"""What user code writes to between forward and backward is no source of what a plan recomputes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from occupied import bytes_now
from torch import nn

import memfit
from memfit.errors import UnsupportedStepError
from memfit.system.recorder import record

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
ROWS, WIDTH = 8192, 64


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Waves(nn.Module):
    """Saves for backward what it computes of its input, a buffer and an output, and none of these themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.register_buffer("table", torch.randn(ROWS, WIDTH))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.layers[0](torch.tanh(inputs)) * torch.exp(self.table)
        shown = first + 1.0
        hidden = torch.relu(shown) * torch.tanh(shown * 0.5)
        for _ in range(4):
            hidden = torch.sin(hidden + 0.5)  # which may be recomputed
        return shown, self.layers[1](hidden)


WRITES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], object]] = {
    "the input": lambda _model, inputs, _shown: inputs.add_(1.0),
    "the input, unseen": lambda _model, inputs, _shown: inputs.data.zero_(),
    "a buffer": lambda model, _inputs, _shown: model.table.mul_(0.5),
    "a buffer, unseen": lambda model, _inputs, _shown: model.table.data.zero_(),
    "an output, unseen": lambda _model, _inputs, shown: shown.data.zero_(),
}


def gradients(model: Any, write: Callable[[Any, torch.Tensor, torch.Tensor], object]) -> list[torch.Tensor]:
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    shown, outputs = model(inputs)
    loss = outputs.square().mean()
    write(model, inputs, shown)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_gradients_are_eagers_whatever_is_written_in_between(name: str) -> None:
    model = Waves()
    eager = copy.deepcopy(model)
    gc.collect()
    with record("cpu") as usage:
        expected = gradients(eager, WRITES[name])
    budget = bytes_now(torch.device("cpu")) + int(0.86 * usage.peak_bytes)
    memfit.compile(model, budget=budget, reserve=0)
    assert all(map(torch.equal, gradients(model, WRITES[name]), expected))


class Queue(nn.Module):
    """Compares with keys of former batches, as contrastive learning does; where the next go is read as a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("keys", torch.randn(8, 16))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        queries = self.layer(batch)
        compared = queries @ self.keys.clone().detach()
        place = int(self.place)
        with torch.no_grad():
            self.keys[:, place : place + 4] = queries[:4].T
            self.place[0] = (place + 4) % 16
        return compared.square().mean()


def test_a_queue_of_keys_behind_a_number_that_is_read() -> None:
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    models = [Queue() for _ in range(3)]
    step = memfit.fit(models[1], lambda model, batch: model(batch), batches[0], budget="64MiB")
    memfit.compile(models[2], budget="1GiB", reserve=0)
    for batch in batches:
        losses = [models[0](batch), step(batch), models[2](batch)]
        for own in (losses[0], losses[2]):
            own.backward()
        assert losses[0].item() == losses[1].item() == losses[2].item()
    for other in models[1:]:
        for mine, expected in zip(other.parameters(), models[0].parameters(), strict=True):
            assert mine.grad is not None and expected.grad is not None and torch.equal(mine.grad, expected.grad)
        for mine, expected in zip(other.buffers(), models[0].buffers(), strict=True):
            assert torch.equal(mine, expected)


def test_other_memory_in_between_is_refused() -> None:
    model = Waves()
    kept = [parameter.data for parameter in model.parameters()]
    memfit.compile(model, budget="1GiB", reserve=0)

    def give_back(model: Any, _inputs: torch.Tensor, _shown: torch.Tensor) -> None:
        for parameter, data in zip(model.parameters(), kept, strict=True):
            parameter.data = data.clone()

    with pytest.raises(UnsupportedStepError, match=r"shape \[64, 64\] .* was given other memory before backward"):
        gradients(model, give_back)


def test_hooks_that_give_copies_back_are_let_be() -> None:
    model = Waves()
    expected = gradients(copy.deepcopy(model), lambda *_: None)
    memfit.compile(model, budget="1GiB", reserve=0)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(model, lambda *_: None)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        again = gradients(model, lambda *_: None)
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(mine - before, before) for mine, before in zip(again, found, strict=True))
