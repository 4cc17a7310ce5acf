"""Workload dcgan: a generator of images and a discriminator, trained in one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

from memfit.errors import InvalidOptionError
from memfit.workloads.parts import Options, Parts, autocast, autocast_dtype

_CHANNELS = 3
_FIRST_SIZE = 4  # height and width of the generator's first features
_NOISE = 100  # numbers that an image is made of
_SLOPE = 0.2  # of the discriminator's LeakyReLU


def _grow(inputs: int, outputs: int, *, stride: int = 2, padding: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _shrink(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(_SLOPE, inplace=True),
    )


class Adversaries(nn.Module):
    """A generator, (batch, 100, 1, 1) -> (batch, 3, size, size), and a discriminator, which gives a number an image.

    Args:
        width: features beside the images; each further resolution has twice as many.
        levels: number of resolutions between the first features, of 4 x 4, and the images.
    """

    def __init__(self, *, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.generator = nn.Sequential(
            _grow(_NOISE, widths[-1], stride=1, padding=0),
            *(_grow(inner, outer) for inner, outer in pairwise(reversed(widths))),
            nn.Sequential(nn.ConvTranspose2d(width, _CHANNELS, 4, 2, 1, bias=False), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            nn.Sequential(nn.Conv2d(_CHANNELS, width, 4, 2, 1, bias=False), nn.LeakyReLU(_SLOPE, inplace=True)),
            *(_shrink(outer, inner) for outer, inner in pairwise(widths)),
            nn.Conv2d(widths[-1], 1, _FIRST_SIZE, bias=False),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdversarialLoss:
    """The losses of both networks, added up; that of the generator has no gradient of the discriminator."""

    autocast: torch.dtype | None

    def __call__(self, model: Adversaries, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of real images `(batch, 3, size, size)` and of noise `(batch, 100, 1, 1)`."""
        images, noise = batch
        with autocast(images.device, self.autocast):
            made, judge = model.generator(noise), model.discriminator
            fair = softplus(-judge(images)).mean() + softplus(judge(made.detach())).mean()
            still = {name: parameter.detach() for name, parameter in judge.named_parameters()}
            return fair + softplus(-functional_call(judge, still, (made,))).mean()


def make(name: str, options: Options) -> Parts:
    """Return both networks, their losses, and a batch of noise, for the images too."""
    batch, size, width = (options[key] for key in ("batch", "size", "width"))
    levels = (size // _FIRST_SIZE).bit_length() - 1
    if levels < 1 or size != _FIRST_SIZE << levels:
        raise InvalidOptionError(
            f"workload {name}: size is {size}, expected a power of two, at least {2 * _FIRST_SIZE}"
        )
    return Parts(
        model=Adversaries(width=width, levels=levels),
        loss=AdversarialLoss(autocast=autocast_dtype(options)),
        batch=(torch.rand(batch, _CHANNELS, size, size) * 2 - 1, torch.randn(batch, _NOISE, 1, 1)),
    )


def places(model: nn.Module, granularity: str) -> list[nn.Module]:
    """Return the two networks, or the convolutions of each resolution."""
    networks = cast(Adversaries, model)
    if granularity == "stage":
        return [networks.generator, networks.discriminator]
    return [*networks.generator, *networks.discriminator]
