"""Generation: diffusion, autoencoders, flows, adversaries."""

from __future__ import annotations

import math
from typing import Any

import torch
from _models_kit import Make, Tried, itself, labels, mlp, plain
from _models_learning import averaged, frozen
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional


class Noise(nn.Module):
    """DDPM: a U-Net with an embedding of time, and a slow average of its weights (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Denoiser()
        self.slow = frozen(self.online)
        self.register_buffer("kept", torch.linspace(0.9999, 0.98, 50).cumprod(0))

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss of images `[batch, 3, 16, 16]`."""
        times, noise = torch.randint(0, 50, (len(images),)), torch.randn_like(images)
        kept = self.kept[times][:, None, None, None]
        return functional.mse_loss(self.online(kept.sqrt() * images + (1 - kept).sqrt() * noise, times), noise)


class Denoiser(nn.Module):
    """A small U-Net with attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = mlp(16, 32, 32, activation=nn.SiLU), nn.Conv2d(3, 16, 3, padding=1)
        self.down, self.up = nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.norm, self.attend = nn.GroupNorm(4, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.last = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Return the noise in images."""
        waves = times[:, None] * torch.exp(-torch.arange(8) * math.log(1e4) / 8)
        high = self.first(images)
        low = self.down(high) + self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]
        flat = self.norm(low).flatten(2).transpose(1, 2)
        low = low + self.attend(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(low)
        return self.last(torch.cat([high, self.up(functional.silu(low))], 1))


class Matching(nn.Module):
    """Flow matching, conditional on a class that is dropped now and then (Lipman et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.inner = nn.Embedding(11, 16), mlp(81, 128, 128, 64, activation=nn.SiLU)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of rows `[batch, 64]` and classes."""
        rows, kinds = batch
        time, noise = torch.rand(len(rows), 1), torch.randn_like(rows)
        kinds = torch.where(torch.rand(len(rows)) < 0.1, 10, kinds)
        mixed = (1 - time) * noise + time * rows
        return functional.mse_loss(self.inner(torch.cat([mixed, time, self.classes(kinds)], 1)), rows - noise)


class Codebook(nn.Module):
    """VQ-VAE with a codebook of moving averages, which the step writes (van den Oord et al. 2017)."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
        self.decode = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))
        for name, value in {"codes": torch.randn(32, 8), "counts": torch.ones(32), "sums": torch.randn(32, 8)}.items():
            self.register_buffer(name, value)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss of images `[batch, 3, 16, 16]`."""
        made = self.encode(images)
        flat = made.movedim(1, 3).reshape(-1, 8)
        nearest = torch.cdist(flat.detach(), self.codes).argmin(1)
        found = self.codes[nearest].view(*made.shape[:1], *made.shape[2:], 8).movedim(3, 1)
        with torch.no_grad():
            hits = functional.one_hot(nearest, 32).float()
            self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hits.T @ flat, alpha=0.1)
            self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
        shown = self.decode(made + (found - made).detach())
        return functional.mse_loss(shown, images) + 0.25 * functional.mse_loss(made, found.detach())


class Coupling(nn.Module):
    """A normalizing flow: affine couplings, and linear layers by their LU parts (Dinh et al. 2017, Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(8, 64, 64, 16) for _ in range(3))
        self.mixes = nn.ParameterList(torch.linalg.qr(torch.randn(16, 16)).Q for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of rows `[batch, 16]`."""
        volume = torch.zeros(())
        for net, mix in zip(self.nets, self.mixes, strict=True):
            rows, volume = rows @ mix, volume + torch.linalg.slogdet(mix).logabsdet
            left, right = rows.chunk(2, 1)
            scale, shift = net(left).chunk(2, 1)
            rows, volume = torch.cat([left, right * scale.tanh().exp() + shift], 1), volume + scale.tanh().sum(1)
        return (rows.square().sum(1) / 2 - volume).mean()


class Game(nn.Module):
    """A GAN whose generator and discriminator step together; spectral normalization writes its vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(16, 64, 64, 32)
        self.judge = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(32, 64)), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def forward(self, real: Tensor) -> Tensor:
        """Return both losses of rows `[batch, 32]`, added up."""
        made = self.generator(torch.randn(len(real), 16))
        fair = functional.softplus(-self.judge(real)).mean() + functional.softplus(self.judge(made.detach())).mean()
        still = {name: each.detach() for name, each in self.judge.named_parameters()}
        return fair + functional.softplus(-functional_call(self.judge, still, (made,))).mean()


class Penalty(nn.Module):
    """The critic of WGAN-GP: a penalty of its gradient between real and made rows (Gulrajani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of real and made rows `[batch, 32]`."""
        real, made = batch
        between = torch.lerp(real, made, torch.rand(len(real), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return self.critic(made).mean() - self.critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


class Pixels(nn.Module):
    """PixelCNN: masked convolutions, whose weight is multiplied by the mask in each call (van den Oord et al. 2016)."""

    layers: Any
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1 if n == 0 else 24, 24, 5, padding=2) for n in range(3))
        self.out = nn.Conv2d(24, 16, 1)
        mask = torch.ones(5, 5)
        mask[2, 3:] = mask[3:] = 0
        self.register_buffer("mask", mask)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss of images `[batch, 16, 16]` of 16 greys."""
        values = images[:, None].float() / 8 - 1
        for number, layer in enumerate(self.layers):
            mask = self.mask.clone()
            if number == 0:
                mask[2, 2] = 0
            values = functional.conv2d(values, layer.weight * mask, layer.bias, padding=2).relu()
        return functional.cross_entropy(self.out(values), images)


class Masked(nn.Module):
    """A masked autoencoder: random patches stay, by sorting noise (He et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.place = nn.Linear(48, 32), nn.Parameter(torch.randn(1, 16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.inner, self.outer = (nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for _ in range(2))
        self.gap, self.out = nn.Parameter(torch.randn(1, 1, 32)), nn.Linear(32, 48)

    def forward(self, patches: Tensor) -> Tensor:
        """Return the loss of patches `[batch, 16, 48]`."""
        order = torch.rand(patches.shape[:2]).argsort(1)
        back = order.argsort(1)[..., None].expand(-1, -1, 32)
        values = self.lift(patches) + self.place
        kept = self.inner(values.gather(1, order[:, :4, None].expand(-1, -1, 32)))
        full = torch.cat([kept, self.gap.expand(len(patches), 12, -1)], 1).gather(1, back)
        missing = back[..., 0] >= 4
        return ((self.out(self.outer(full + self.place)) - patches).square().mean(2) * missing).sum() / missing.sum()


class Tied(nn.Module):
    """An autoencoder whose decoder has the encoder's weights, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(*sizes) / 8 for sizes in ((64, 96), (96, 32)))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of rows `[batch, 64]`, with L1 of the code."""
        code = rows
        for weight in self.weights:
            code = (code @ weight).relu()
        shown = code
        for weight in reversed(list(self.weights)):
            shown = shown @ weight.T
        return functional.mse_loss(shown, rows) + 1e-3 * code.abs().mean()


def _diffusion() -> Tried:
    def after(model: nn.Module) -> None:
        averaged(model.online, model.slow)

    return Tried(model=Noise(), loss=itself, batch=lambda rows: torch.randn(rows, 3, 16, 16), after=after)


MADE: dict[str, Make] = {
    "ddpm": _diffusion,
    "flow matching": plain(Matching, itself, lambda rows: (torch.randn(16 * rows, 64), labels(16 * rows))),
    "vq-vae": plain(Codebook, itself, lambda rows: torch.randn(rows, 3, 16, 16)),
    "normalizing flow": plain(Coupling, itself, lambda rows: torch.randn(16 * rows, 16)),
    "gan": plain(Game, itself, lambda rows: torch.randn(16 * rows, 32)),
    "wgan-gp": plain(Penalty, itself, lambda rows: (torch.randn(16 * rows, 32), torch.randn(16 * rows, 32))),
    "pixelcnn": plain(Pixels, itself, lambda rows: torch.randint(0, 16, (rows, 16, 16))),
    "masked autoencoder": plain(Masked, itself, lambda rows: torch.randn(rows, 16, 48)),
    "tied autoencoder": plain(Tied, itself, lambda rows: torch.randn(16 * rows, 64)),
}  # fmt: skip
"""Makers of models, by name."""
