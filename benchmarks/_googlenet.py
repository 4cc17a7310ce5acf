"""GoogLeNet by "Going deeper with convolutions" (Szegedy et al. 2014, table 1), with its two side classifiers."""

from __future__ import annotations

import torch
from torch import nn

# of each inception block: 1x1; 1x1 and 3x3; 1x1 and 5x5; what follows the pooling
_BLOCKS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}
_AFTER_POOLING = ("4a", "5a")
_BEFORE_SIDES = {"4a": 512, "4d": 528}
SIDE_WEIGHT = 0.3


def _convolution(given: int, made: int, size: int, **more: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, made, size, **more), nn.ReLU())


class Inception(nn.Module):
    """Convolutions of three sizes and a pooling beside one another."""

    def __init__(self, given: int, one: int, to_3: int, by_3: int, to_5: int, by_5: int, pooled: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _convolution(given, one, 1),
                nn.Sequential(_convolution(given, to_3, 1), _convolution(to_3, by_3, 3, padding=1)),
                nn.Sequential(_convolution(given, to_5, 1), _convolution(to_5, by_5, 5, padding=2)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _convolution(given, pooled, 1)),
            ]
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(given) for branch in self.branches], dim=1)


class GoogLeNet(nn.Module):
    """Returns the logits, and in training those of the side classifiers after them."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, 64, 7, stride=2, padding=3),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            nn.LocalResponseNorm(5),
            _convolution(64, 64, 1),
            _convolution(64, 192, 3, padding=1),
            nn.LocalResponseNorm(5),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
        )
        self.blocks = nn.ModuleDict({name: Inception(*sizes) for name, sizes in _BLOCKS.items()})
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.sides = nn.ModuleDict({name: _side(given, classes) for name, given in _BEFORE_SIDES.items()})
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, classes))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        at, sides = self.stem(images), list[torch.Tensor]()
        for name, block in self.blocks.items():
            at = block(self.pool(at) if name in _AFTER_POOLING else at)
            if self.training and name in self.sides:
                sides.append(self.sides[name](at))
        return (self.head(at), *sides) if self.training else self.head(at)


def _side(given: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(5, stride=3),
        _convolution(given, 128, 1),
        nn.Flatten(),
        nn.Linear(4 * 4 * 128, 1024),
        nn.ReLU(),
        nn.Dropout(0.7),
        nn.Linear(1024, classes),
    )


def classification_loss(outputs: tuple[torch.Tensor, ...] | torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of logits; those of side classifiers count less."""
    first, *sides = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = nn.functional.cross_entropy(first, labels)
    for each in sides:
        loss = loss + SIDE_WEIGHT * nn.functional.cross_entropy(each, labels)
    return loss
