"""Workload c3d: a network of three-dimensional convolutions on clips of video."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from memfit.errors import InvalidOptionError
from memfit.workloads.parts import Options, Parts, cross_entropy

_CHANNELS = 3
_STAGES = ((1, 1), (1, 2), (2, 4), (2, 8), (2, 8))  # convolutions, and their features as a multiple of the first ones
_DROPOUT = 0.5


def _stage(inputs: int, outputs: int, convolutions: int, *, is_first: bool, is_last: bool) -> nn.Sequential:
    """Return convolutions with ReLU, then pooling: of images alone in the first stage, of frames too in the others."""
    layers: list[nn.Module] = []
    for number in range(convolutions):
        layers += [nn.Conv3d(outputs if number else inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
    window = (1, 2, 2) if is_first else (2, 2, 2)
    return nn.Sequential(*layers, nn.MaxPool3d(window, window, (0, 1, 1) if is_last else 0))


class C3D(nn.Module):
    """(batch, 3, frames, size, size) -> (batch, classes).

    Args:
        width: features of the first convolution.
        feedforward: features of the two layers before the last one.
        frames: of a clip, a multiple of 16.
        size: height and width of a frame, in pixels; 16 or more.
        classes: features of the result.
    """

    def __init__(self, *, width: int, feedforward: int, frames: int, size: int, classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        inputs = _CHANNELS
        for place, (convolutions, times) in enumerate(_STAGES):
            stages.append(
                _stage(inputs, times * width, convolutions, is_first=place == 0, is_last=place == len(_STAGES) - 1)
            )
            inputs = times * width
        self.stages = nn.Sequential(*stages)
        across = (size >> (len(_STAGES) - 1)) // 2 + 1  # the last pooling pads
        seen = inputs * (frames >> (len(_STAGES) - 1)) * across**2
        self.head = nn.Sequential(
            *_dense(seen, feedforward), *_dense(feedforward, feedforward), nn.Linear(feedforward, classes)
        )

    def forward(self, clips: Tensor) -> Tensor:
        return self.head(self.stages(clips).flatten(1))


def _dense(inputs: int, outputs: int) -> Iterator[nn.Module]:
    yield from (nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(_DROPOUT))


def make(name: str, options: Options) -> Parts:
    """Return a C3D, cross entropy, and a batch of noise with random labels."""
    batch, frames, size, classes = (options[key] for key in ("batch", "frames", "size", "classes"))
    least = 1 << (len(_STAGES) - 1)
    if frames % least or size < least:
        raise InvalidOptionError(
            f"workload {name}: {frames} frames of size {size}, expected a multiple of {least} frames, and size {least} "
            "or more"
        )
    model = C3D(width=options["width"], feedforward=options["feedforward"], frames=frames, size=size, classes=classes)
    clips, labels = torch.randn(batch, _CHANNELS, frames, size, size), torch.randint(classes, (batch,))
    return Parts(model=model, loss=cross_entropy(options), batch=(clips, labels))


def places(model: nn.Module, granularity: str) -> list[nn.Module]:
    """Return the stages, or the convolutions with what follows each (pooling stays outside)."""
    stages = cast(C3D, model).stages
    if granularity == "stage":
        return [*stages]
    return [layer for stage in stages for layer in cast(nn.Sequential, stage) if isinstance(layer, nn.Conv3d)]
