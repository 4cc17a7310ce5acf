"""Workload unet: U-Net for segmentation, with padding and batch normalization."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from memfit.errors import InvalidOptionError
from memfit.workloads.parts import Options, Parts, cross_entropy

_CHANNELS = 3


class DoubleBlock(nn.Sequential):
    """Twice: convolution, batch normalization, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Down(nn.Module):
    """Halve the resolution, then a double block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.block = DoubleBlock(inputs, outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.block(self.pool(images))


class Up(nn.Module):
    """Double the resolution, concatenate the skip connection of the same level, then a double block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.block = DoubleBlock(2 * outputs, outputs)

    def forward(self, images: Tensor, skip: Tensor) -> Tensor:
        """Return features of the resolution of `skip`.

        Args:
            images: (batch, inputs, height, width), of the level below.
            skip: (batch, outputs, 2 height, 2 width).
        """
        return self.block(torch.cat((skip, self.upsample(images)), dim=1))


class UNet(nn.Module):
    """U-Net: the resolution is halved level by level, then doubled again with skip connections between equal levels.

    Args:
        width: features of the first level; each further level has twice as many.
        levels: number of resolutions.
        classes: features of the result.
    """

    def __init__(self, *, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.first = DoubleBlock(_CHANNELS, width)
        self.downs = nn.ModuleList(Down(*pair) for pair in pairwise(widths))
        self.ups = nn.ModuleList(Up(*pair) for pair in pairwise(reversed(widths)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = [self.first(images)]
        for down in self.downs:
            skips.append(down(skips[-1]))
        images = skips.pop()
        for up in self.ups:
            images = up(images, skips.pop())
        return self.head(images)


def make(name: str, options: Options) -> Parts:
    """Return a U-Net, cross entropy over pixels, and a batch of noise with random labels."""
    batch, size, levels, classes = (options[key] for key in ("batch", "size", "levels", "classes"))
    if size % 2 ** (levels - 1):
        raise InvalidOptionError(
            f"workload {name}: size is {size}, expected a multiple of {2 ** (levels - 1)} for {levels} levels"
        )
    model = UNet(width=options["width"], levels=levels, classes=classes)
    images = torch.randn(batch, _CHANNELS, size, size)
    labels = torch.randint(classes, (batch, size, size))
    return Parts(model=model, loss=cross_entropy(options), batch=(images, labels))


def places(model: nn.Module, granularity: str) -> list[nn.Module]:
    """Return the levels on both ways, or their double blocks."""
    network = cast(UNet, model)
    if granularity == "stage":
        return [network.first, *network.downs, *network.ups]
    return [module for module in network.modules() if isinstance(module, DoubleBlock)]
