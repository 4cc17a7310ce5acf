"""Fields: equations of physics, operators between functions, radiance, volumes."""

from __future__ import annotations

import torch
from _models_kit import Make, Tried, itself, mlp, plain, square
from torch import Tensor, nn
from torch.nn import functional


class Heat(nn.Module):
    """A network of physics: the residual of the heat equation, by second derivatives (Raissi et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(2, 48, 48, 48, 1, activation=nn.Tanh)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of points `[points, 2]` inside and at the beginning."""
        inside, start = batch
        place, time = inside[:, :1].clone().requires_grad_(), inside[:, 1:].clone().requires_grad_()
        values = self.inner(torch.cat([place, time], 1))
        slope, change = torch.autograd.grad(values.sum(), [place, time], create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), place, create_graph=True)
        start_values = self.inner(torch.cat([start, torch.zeros_like(start)], 1))
        return (change - 0.1 * bend).square().mean() + (start_values - (3 * start).sin()).square().mean()


class Operator(nn.Module):
    """DeepONet: a branch for the function, a trunk for the point (Lu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = mlp(32, 64, 64, 32), mlp(1, 64, 64, 32, activation=nn.Tanh)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return values at points `[points, 1]` of functions `[batch, 32]`."""
        return self.branch(batch[0]) @ self.trunk(batch[1]).T + self.bias


class Planes(nn.Module):
    """A Fourier neural operator in two dimensions, with complex weights (Li et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Conv2d(1, 12, 1), nn.Conv2d(12, 1, 1)
        self.weights = nn.ParameterList(torch.randn(12, 12, 6, 6, dtype=torch.cfloat) / 12 for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map fields `[batch, 1, 32, 32]` to fields."""
        values = self.lift(inputs)
        for weight, local in zip(self.weights, self.local, strict=True):
            modes = torch.fft.rfft2(values)
            kept = torch.zeros_like(modes)
            kept[..., :6, :6] = torch.einsum("bixy,ioxy->boxy", modes[..., :6, :6], weight)
            values = functional.gelu(torch.fft.irfft2(kept, s=inputs.shape[-2:]) + local(values))
        return self.out(values)


class Trajectory(nn.Module):
    """A neural ODE by fixed steps of Runge-Kutta (Chen et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.field = mlp(3, 48, 48, 2, activation=nn.Tanh)

    def slope(self, state: Tensor, time: float) -> Tensor:
        """Return the derivative of states `[batch, 2]`."""
        return self.field(torch.cat([state, torch.full_like(state[:, :1], time)], 1))

    def forward(self, state: Tensor) -> Tensor:
        """Return the states after ten steps."""
        step = 0.1
        for number in range(10):
            time = number * step
            first = self.slope(state, time)
            second = self.slope(state + step / 2 * first, time + step / 2)
            third = self.slope(state + step / 2 * second, time + step / 2)
            fourth = self.slope(state + step * third, time + step)
            state = state + step / 6 * (first + 2 * second + 2 * third + fourth)
        return state


class Energy(nn.Module):
    """A Hamiltonian network: its field is the gradient of an energy (Greydanus et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(2, 64, 64, 1, activation=nn.Tanh)

    def forward(self, state: Tensor) -> Tensor:
        """Return the derivatives of states `[batch, 2]`."""
        state = state.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)


class Radiance(nn.Module):
    """NeRF: Fourier features, densities along rays, their integral (Mildenhall et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(24, 48, 48, 4)

    def forward(self, rays: Tensor) -> Tensor:
        """Return the colours of rays `[rays, 6]`."""
        depths = torch.linspace(0.5, 2, 16) + torch.rand(len(rays), 16) * 0.05
        points = rays[:, None, :3] + depths[..., None] * rays[:, None, 3:]
        waves = points[..., None] * 2.0 ** torch.arange(4)
        values = self.inner(torch.cat([waves.sin(), waves.cos()], 3).flatten(2))
        lost = 1 - (-functional.softplus(values[..., 3]) * 0.1).exp()
        left = torch.cat([torch.ones(len(rays), 1), 1 - lost + 1e-10], 1).cumprod(1)[:, :-1]
        return ((lost * left)[..., None] * values[..., :3].sigmoid()).sum(1)


class Implicit(nn.Module):
    """A signed distance field of sines, whose gradient has length one (Gropp et al. 2020, SIREN)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inner, outer) for inner, outer in ((3, 48), (48, 48), (48, 1)))

    def forward(self, points: Tensor) -> Tensor:
        """Return the loss of points `[points, 3]`."""
        points = points.detach().requires_grad_()
        values = points
        for layer in self.layers[:-1]:
            values = (10 * layer(values)).sin()
        values = self.layers[-1](values)
        (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        return values.abs().mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()


class Volume(nn.Module):
    """A U-Net in three dimensions (Cicek et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = self._block(1, 8), self._block(8, 16)
        self.lift, self.up, self.out = nn.ConvTranspose3d(16, 8, 2, 2), self._block(16, 8), nn.Conv3d(8, 2, 1)

    def _block(self, inner: int, outer: int) -> nn.Sequential:
        layers = [nn.Conv3d(inner, outer, 3, padding=1), nn.InstanceNorm3d(outer, affine=True), nn.LeakyReLU()]
        return nn.Sequential(*layers)

    def forward(self, volumes: Tensor) -> Tensor:
        """Return logits of voxels of volumes `[batch, 1, 16, 16, 16]`."""
        high = self.down(volumes)
        low = self.middle(functional.max_pool3d(high, 2))
        return self.out(self.up(torch.cat([high, self.lift(low)], 1)))


def _moved(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[:2]), batch[2])


def _diced(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0]).softmax(1)[:, 1]
    dice = 1 - 2 * (found * batch[1]).sum() / (found.sum() + batch[1].sum() + 1)
    return dice + functional.binary_cross_entropy(found.clamp(1e-5, 1 - 1e-5), batch[1].float())


def _rays(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(16 * rows, 6), torch.rand(16 * rows, 3)


def _states(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(32 * rows, 2), torch.randn(32 * rows, 2)


def _implicit() -> Tried:
    return Tried(model=Implicit(), loss=itself, batch=lambda rows: torch.randn(32 * rows, 3))


FIELDS: dict[str, Make] = {
    "heat equation": plain(Heat, itself, lambda rows: (torch.rand(16 * rows, 2), torch.rand(4 * rows, 1))),
    "deeponet": plain(
        Operator, _moved, lambda rows: (torch.randn(8 * rows, 32), torch.rand(64, 1), torch.randn(8 * rows, 64))
    ),
    "fourier operator, 2-D": plain(
        Planes, square, lambda rows: (torch.randn(rows, 1, 32, 32), torch.randn(rows, 1, 32, 32))
    ),
    "neural ode": plain(Trajectory, square, _states),
    "hamiltonian network": plain(Energy, square, _states),
    "nerf": plain(Radiance, square, _rays),
    "signed distances": _implicit,
    "u-net, 3-D": plain(
        Volume,
        _diced,
        lambda rows: (torch.randn(rows, 1, 16, 16, 16), torch.randint(0, 2, (rows, 16, 16, 16))),
        rows=8,
    ),
}
"""Makers of models, by name."""
