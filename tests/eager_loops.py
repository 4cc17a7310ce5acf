"""Small training loops, run with and without a budget in eager mode."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memfit
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.system.recorder import allocated_bytes, record

CPU = torch.device("cpu")


class Trained:
    """A model, its optimizer, and what one of its steps does with a random generator."""

    def __init__(self, make: Callable[[], nn.Module], loss: Callable[[nn.Module, int], torch.Tensor]) -> None:
        torch.manual_seed(0)
        self.model, self.loss = make(), loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def run(self, steps: int, after: Callable[[], None] = lambda: None) -> list[float]:
        torch.manual_seed(1)
        losses: list[float] = []
        for number in range(steps):
            losses.append(self.step(number))
            after()
        return losses

    def step(self, number: int) -> float:
        loss = self.loss(self.model, number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in (*self.model.parameters(), *self.model.buffers())]


def checked(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    share: float,
    *,
    steps: int = 3,
    largest: int = 0,
    after: Callable[[Any], None] = lambda _block: None,
    **options: Any,
) -> Any:
    """Train a model with and without a budget, compare all bits, and return the report.

    The budget is so much of what the bare loop takes above its parameters, gradients and momenta.

    Args:
        make: returns the model.
        loss: of the model in a step.
        share: see above.
        steps: of the loop.
        largest: the step whose peak is meant.
        after: called with the block after each of its steps.
        options: of `memfit.eager`, beside the budget.
    """
    plain = Trained(make, loss)
    allocated_bytes(CPU)
    torch.manual_seed(1)
    plain.step(largest)
    gc.collect()
    torch.manual_seed(1)
    with record(CPU) as usage:
        plain.step(largest)
    held_bytes = 2 * sum(p.nbytes for p in plain.model.parameters())
    plain = Trained(make, loss)
    losses, state = plain.run(steps), plain.state()
    del plain
    gc.collect()
    budgeted = Trained(make, loss)
    budget = bytes_of_tensors(CPU) + held_bytes + int(share * usage.peak_bytes)
    with memfit.eager(budgeted.model, budget=budget, **options) as block:
        again = budgeted.run(steps, lambda: after(block))
    report = block.report()
    assert again == losses
    assert all(torch.equal(one, other) for one, other in zip(state, budgeted.state(), strict=True))
    assert report.peak_bytes <= budget, report
    return report


def mlp() -> nn.Module:
    return nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 4))


def mlp_loss(model: nn.Module, _number: int) -> torch.Tensor:
    return model(torch.randn(2048, 64)).square().mean()


def images_loss(model: nn.Module, _number: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(torch.randn(8, 3, 16, 16)), torch.randint(0, 4, (8,)))


def convolutions() -> nn.Module:
    def block(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]

    blocks = [each for _ in range(9) for each in block(16)]
    return nn.Sequential(*block(3), *blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 4))
