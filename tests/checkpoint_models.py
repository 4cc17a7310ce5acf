"""Small models and loops for the tests of `memfit.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.system.recorder import record

Batch = tuple[torch.Tensor, torch.Tensor]


class Mlp(torch.nn.Module):
    """A block whose activations are many times its input."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.act, self.b = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.b(self.act(self.a(x)).tanh()))


class Conv(torch.nn.Module):
    """A residual unit with batch normalization, and writes in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.c1 = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.c2 = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.n1, self.n2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(channels)
        self.relu = torch.nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n2(self.c2(self.relu(self.n1(self.c1(x)))))
        y += x
        return self.relu(y)


class Pairs(torch.nn.Module):
    """A block with a kernel that calls operators which autocast casts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.pair = torch.nn.Linear(width, width), torch.nn.Bilinear(width, width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair(self.a(x).float().tanh(), x.float().sin()).relu()


class Net(torch.nn.Module):
    """Blocks in a list, after a layer and before another."""

    def __init__(self, blocks: list[torch.nn.Module], before: torch.nn.Module, after: torch.nn.Module) -> None:
        super().__init__()
        self.before, self.layers, self.after = before, torch.nn.ModuleList(blocks), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def mlps(count: int = 6, width: int = 64, dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    blocks: list[torch.nn.Module] = [Mlp(width, dropout) for _ in range(count)]
    return Net(blocks, torch.nn.Linear(8, width), torch.nn.Linear(width, 4))


def convs(count: int = 4, channels: int = 8) -> Net:
    torch.manual_seed(0)
    blocks: list[torch.nn.Module] = [Conv(channels) for _ in range(count)]
    after = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 4))
    return Net(blocks, torch.nn.Conv2d(3, channels, 3, padding=1), after)


def rows(step: int, count: int = 512) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 24, 24, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def pairs() -> Net:
    torch.manual_seed(0)
    return Net([Pairs(8) for _ in range(12)], torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))


def cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@dataclass(slots=True)
class Trained:
    """What a loop gave.

    Attributes:
        losses: of its steps.
        peaks: bytes that were live at most in each step, what was there before included.
        state: of the model at the end.
        random: the generator's state at the end.
    """

    losses: list[float]
    peaks: list[int]
    state: dict[str, torch.Tensor]
    random: torch.Tensor

    def same_bits(self, other: Trained) -> bool:
        return (
            self.losses == other.losses
            and self.state.keys() == other.state.keys()
            and all(torch.equal(self.state[name], other.state[name]) for name in self.state)
            and torch.equal(self.random, other.random)
        )


def train(
    model: torch.nn.Module,
    data: Callable[[int], Any] = rows,
    steps: int = 8,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor] = cross_entropy,
    optimizer: torch.optim.Optimizer | None = None,
    call: torch.nn.Module | None = None,
) -> Trained:
    """Train a model, or a wrapper of it, from the same random numbers."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    losses, peaks = [], []
    for step in range(steps):
        batch = data(step)
        with record("cpu") as usage:
            value = loss(model if call is None else call, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(value.item())
        del value
        peaks.append(usage.start_bytes + usage.peak_bytes)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Trained(losses, peaks, state, torch.get_rng_state())


class Outside(torch.nn.Module):
    """What takes the most is in no block, so that checkpoints free next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)) for _ in range(2))
        self.blocks = torch.nn.ModuleList(pairs)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        wide = values.repeat(1, 64)
        for _ in range(6):
            wide = torch.nn.functional.dropout(wide.sin().exp(), 0.1, self.training)
        return wide
