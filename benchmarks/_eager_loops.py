"""The loops of `eager_mode.py`: models whose steps are seldom alike, with checkpoints placed by hand if asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit.workloads import build
from memfit.workloads.stochastic_depth import StochasticDepthResNet


class Experts(nn.Module):
    """A transformer whose tokens go to the two experts that their gates prefer.

    Args:
        width, experts, layers: of the transformer.
        checkpoints: whether what a layer computes is recomputed in backward.
    """

    def __init__(self, width: int = 128, experts: int = 4, layers: int = 4, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ExpertsLayer(width, experts) for _ in range(layers))
        self.run = _caller(checkpoints)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last layer gives."""
        for layer in self.layers:
            x = self.run(layer, x)
        return x


class _ExpertsLayer(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(1).topk(2, 1)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            flat = flat.index_add(0, row, expert(flat[row]) * weights[row, place].unsqueeze(1))
        return flat.view_as(x)


class Trees(nn.Module):
    """A tree LSTM over random binary trees (Tai et al. 2015).

    Args:
        width: of states.
        checkpoints: whether what a cell computes is recomputed in backward.
    """

    def __init__(self, width: int = 128, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(width, 2 * width), nn.Linear(2 * width, 5 * width)
        self.is_whole, self.run = False, _caller(checkpoints)

    def forward(self, x: Tensor, depth: int = 7) -> tuple[Tensor, Tensor]:
        """Return the hidden state and the cell's of a tree."""
        if depth == 0 or (depth < 5 and float(torch.rand(())) < 0.2 and not self.is_whole):
            hidden, cell = self.leaf(x).chunk(2, 1)
            return torch.tanh(hidden), cell
        left, right = self(x, depth - 1), self(x.roll(1, 1), depth - 1)
        return self.run(self._cell, *left, *right)

    def _cell(self, left: Tensor, left_cell: Tensor, right: Tensor, right_cell: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o, new = self.join(torch.cat([left, right], 1)).chunk(5, 1)
        cell = f.sigmoid() * left_cell + g.sigmoid() * right_cell + i.sigmoid() * new.tanh()
        return o.sigmoid() * cell.tanh(), cell


def _caller(checkpoints: bool) -> Callable[..., Any]:
    """Return what calls a block: with or without a checkpoint before it."""

    def kept(block: Callable[..., Any], *args: Tensor) -> Any:
        return block(*args)

    def again(block: Callable[..., Any], *args: Tensor) -> Any:
        return checkpoint(block, *args, use_reentrant=False)

    return again if checkpoints else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A model, and the loss of its step; `whole` is the loss of its largest step.

    Attributes:
        make: returns the model, `checkpoints=True` with checkpoints.
        loss, whole: see above.
        placed: where the checkpoints are.
    """

    make: Callable[..., nn.Module]
    loss: Callable[[nn.Module], Tensor]
    whole: Callable[[nn.Module], Tensor]
    placed: str


def _images(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(torch.randn(12, 3, 32, 32)), torch.randint(0, 10, (12,)))


def _whole(loss: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    def run(model: nn.Module) -> Tensor:
        model.is_whole = True  # pyright: ignore
        try:
            return loss(model)
        finally:
            model.is_whole = False  # pyright: ignore

    return run


def _tokens(model: nn.Module, tokens: int) -> Tensor:
    return model(torch.randn(8, tokens, 128)).square().mean()


def _sentence(model: nn.Module, tokens: int) -> Tensor:
    text = torch.randint(0, 5000, (4, tokens))
    return model(input_ids=text, labels=text).loss


def _trees(model: nn.Module) -> Tensor:
    return model(torch.randn(64, 128))[0].square().mean()


def _stochastic_depth(*, checkpoints: bool = False) -> nn.Module:
    model = StochasticDepthResNet(depth=110, classes=10, draw=None)
    if checkpoints:
        for stage in model.stages:
            for block in stage.blocks:  # pyright: ignore
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _full_depth(model: Any) -> Tensor:
    model.draw = 0
    try:
        return _images(model)
    finally:
        model.draw = None


def _gpt2(*, checkpoints: bool = False) -> nn.Module:
    model: Any = build("gpt2", layers=4, width=192, vocabulary=5000, tokens=216).model
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


LOOPS: dict[str, Loop] = {
    "stochastic depth": Loop(make=_stochastic_depth, loss=_images, whole=_full_depth, placed="each block"),
    "experts": Loop(
        make=Experts,
        loss=lambda model: _tokens(model, int(torch.randint(64, 129, ()))),
        whole=lambda model: _tokens(model, 128),
        placed="each layer",
    ),
    "sentences of 200 lengths": Loop(
        make=_gpt2,
        loss=lambda model: _sentence(model, int(torch.randint(16, 216, ()))),
        whole=lambda model: _sentence(model, 215),
        placed="each layer",
    ),
    "trees": Loop(make=Trees, loss=_trees, whole=_whole(_trees), placed="each cell"),
}


def made(loop: Loop, *, checkpoints: bool = False) -> nn.Module:
    """Return a loop's model, the same in every call, in training."""
    torch.manual_seed(0)
    return loop.make(checkpoints=checkpoints).train()


def train(loop: Loop, model: nn.Module, steps: int) -> Generator[float]:
    """Train from the same seed; yield the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(steps):
        loss = loop.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
