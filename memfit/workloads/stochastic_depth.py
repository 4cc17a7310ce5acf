"""Workload stochastic_depth: a ResNet on small images of which blocks are skipped at random, as dqn2020 trains it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.workloads.parts import Options, Parts, cross_entropy

LAST_SURVIVAL = 0.5  # probability that the last block runs; the first's is 1, and it decays linearly between them
_WIDTHS = (16, 32, 64)


class StochasticDepthResNet(nn.Module):
    """(batch, 3, size, size) -> (batch, classes): He et al. 2015, section 4.2, with stochastic depth.

    A skipped block passes on its input, or what brings it into shape. A block that runs is not scaled in training.

    Args:
        depth: layers with weights, 6n + 2.
        classes: number of classes.
        draw: seed of the blocks that are skipped in each step; 0 skips none, None draws others in each step from
            torch's generator, so that no two graphs are alike.
    """

    def __init__(self, *, depth: int, classes: int, draw: int | None) -> None:
        super().__init__()
        self.draw, self.count = draw, (depth - 2) // 6
        self.stem = _normed(3, _WIDTHS[0], 1)
        self.stages = nn.ModuleList(map(partial(_Stage, self.count), (_WIDTHS[0], *_WIDTHS), _WIDTHS))
        self.head = nn.Linear(_WIDTHS[-1], classes)
        self._runs = self._drawn(draw or 0)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(images))
        runs = self._drawn(None) if self.draw is None else self._runs
        for number, stage in enumerate(self.stages):
            hidden = stage(hidden, runs[number * self.count : (number + 1) * self.count])
        return self.head(hidden.mean((2, 3)))

    def _drawn(self, draw: int | None) -> list[bool]:
        count = len(_WIDTHS) * self.count
        if draw == 0:
            return [True] * count
        generator = None if draw is None else torch.Generator().manual_seed(draw)
        values = torch.rand(count, generator=generator)
        return [float(values[n]) >= (1 - LAST_SURVIVAL) * (n + 1) / count for n in range(count)]


class _Stage(nn.Module):
    """Blocks of one width."""

    def __init__(self, count: int, before: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(_Block(before if n == 0 else width, width) for n in range(count))

    def forward(self, hidden: Tensor, runs: list[bool]) -> Tensor:
        """Return the features after the last block.

        Args:
            hidden: (batch, features, height, width), of the stage before.
            runs: for each block whether it runs; one that does not passes on its input in the shape of its output.
        """
        for block, is_run in zip(self.blocks, runs, strict=True):
            hidden = block(hidden) if is_run else _passed(hidden, self.width)
        return hidden


class _Block(nn.Module):
    """Two convolutions of 3 by 3 beside a shortcut."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.second = _normed(before, width, 1 if before == width else 2), _normed(width, width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(hidden))) + _passed(hidden, self.width))


def _passed(hidden: Tensor, width: int) -> Tensor:
    """Return what a shortcut passes on: where the width grows, every other pixel, padded with zero features."""
    more = width - hidden.shape[1]
    return functional.pad(hidden[:, :, ::2, ::2], (0, 0, 0, 0, 0, more)) if more else hidden


def _normed(before: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width))


def make(_name: str, options: Options) -> Parts:
    """Return the network, cross entropy, and a batch of noise with random labels."""
    batch, classes, size = (options[key] for key in ("batch", "classes", "size"))
    model = StochasticDepthResNet(depth=options["depth"], classes=classes, draw=options["draw"])
    return Parts(
        model=model,
        loss=cross_entropy(options),
        batch=(torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))),
    )


def places(model: nn.Module, granularity: str) -> list[nn.Module]:
    """Return the stages of blocks of one width, or all blocks."""
    assert isinstance(model, StochasticDepthResNet)
    stages = list(model.stages)
    return stages if granularity == "stage" else [each for each in model.modules() if isinstance(each, _Block)]
