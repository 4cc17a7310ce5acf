"""Gradients leave a compiled graph in eager's order, where DistributedDataParallel sorts its buckets by it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import memfit
from memfit.dynamo import backend


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embedding((x[:, 0] * 4).long().abs() % 16))))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.side = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(torch.relu(y) * self.scale) + self.side(y) * self.scale


MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 4)),
    lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 1, 1)
    ),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
    Tied,
    Branches,
]


def order_of(model: nn.Module, call: nn.Module) -> list[str]:
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    torch.manual_seed(0)
    call(torch.randn(6, 8)).square().sum().backward()
    return order


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_ready_in_eagers_order(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "ddp_sorts_buckets", lambda: True)
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    expected = order_of(eager, eager)
    found = order_of(model, memfit.compile(model, budget="1GiB", reserve=0))
    assert found == expected
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # pyright: ignore[reportArgumentType]
