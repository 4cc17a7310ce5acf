"""Losses with derivatives in them: the doors that a refusal of `create_graph=True` names hold the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import memfit
from memfit.system.recorder import allocated_bytes, record

ROWS, WIDTH, STEPS, SHARE = 256, 32, 4, 0.75
Loss = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * self.narrow(torch.tanh(functional.silu(self.wide(x))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def forces(model: nn.Module, x: Tensor) -> Tensor:
    places = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(places).sum(), places, create_graph=True)
    return (slope + x).square().mean()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    between = (0.5 * x).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(x).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def curvature(model: nn.Module, x: Tensor) -> Tensor:
    loss, parameters = model(x).square().mean(), list(model.parameters())
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    return loss + 1e-3 * sum(((each * each.detach().sign()).sum() for each in slopes), start=x.sum() * 0).square()


def inner_steps(model: nn.Module, x: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    for _ in range(2):
        slopes = torch.autograd.grad(
            functional_call(model, weights, (x,)).square().mean(), [*weights.values()], create_graph=True
        )
        weights = {name: each - 0.05 * slope for (name, each), slope in zip(weights.items(), slopes, strict=True)}
    return functional_call(model, weights, (x,)).square().mean()


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def train(model: Any, loss: Loss, step: Callable[[Tensor], object] | None = None) -> tuple[list[bytes], int]:
    """Return the parameters' bits after some steps, and the most bytes that a step after the first took."""
    optimizer, most_bytes = torch.optim.SGD(model.parameters(), lr=0.05), 0
    for number in range(STEPS):
        x = batch(number)
        before_bytes = allocated_bytes(torch.device("cpu"))
        with record("cpu") as usage:
            if step is None:
                loss(model, x).backward()
            else:
                step(x)
            optimizer.step()
            optimizer.zero_grad()
        most_bytes = max(most_bytes, (before_bytes + usage.peak_bytes) * (number > 0))
    return [each.detach().numpy().tobytes() for each in model.parameters()], most_bytes


@pytest.mark.parametrize("loss", [forces, penalty, curvature, inner_steps])
def test_the_doors_that_a_refusal_names_hold_the_budget_to_the_bit(loss: Loss) -> None:
    gc.collect()
    before_bytes = allocated_bytes(torch.device("cpu"))  # of other tests
    expected, most_bytes = train(net(), loss)
    budget = int(SHARE * (most_bytes - before_bytes))
    model = net()
    with memfit.eager(model, budget=budget + before_bytes):
        assert train(model, loss)[0] == expected
    model = net()
    bits, most_bytes = train(model, loss, memfit.fit(model, loss, batch(0), budget=budget))
    assert bits == expected
    assert most_bytes - before_bytes <= budget
