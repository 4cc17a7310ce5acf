"""The blocks that models of the fuzzer are made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS = 16, 4


class Function(nn.Module):
    """A block that is a function of its inputs and of what it holds."""

    def __init__(self, function: Callable[..., Tensor], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply it."""
        return self.function(self, inputs)


class Tanh(torch.autograd.Function):
    """A custom function with a backward of its own."""

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        """Return tanh of the inputs."""
        context.save_for_backward(inputs.tanh())
        return inputs.tanh()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of tanh."""
        (results,) = context.saved_tensors
        return gradients[0] * (1 - results * results)


def _attention(block: Any, inputs: Tensor) -> Tensor:
    query, key, value = block.inner(inputs).view(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(-1, WIDTH)


def _moving_mean(block: Any, inputs: Tensor) -> Tensor:
    if block.training:
        block.mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
    return inputs - block.mean


def _counted(block: Any, inputs: Tensor) -> Tensor:
    block.calls += 1
    return inputs * (1 + block.calls / 10)


def _drawn_by_python(block: Any, inputs: Tensor) -> Tensor:
    return inputs * (0.5 + block.generator.random())


def _drawn_by_numpy(block: Any, inputs: Tensor) -> Tensor:
    return inputs + torch.from_numpy(block.generator.standard_normal(WIDTH)).to(inputs)


def _drawn_by_torch(block: Any, inputs: Tensor) -> Tensor:
    return inputs + torch.randn(WIDTH, generator=block.generator).to(inputs)


def _images(block: Any, inputs: Tensor) -> Tensor:
    return block.inner(inputs.view(-1, 1, 4, 4)).flatten(1)


def _half(_block: Any, inputs: Tensor) -> Tensor:
    left, right = inputs.chunk(2, 1)
    return torch.cat([left * right.sigmoid(), right], 1)


def _spectrum(_block: Any, inputs: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(inputs) * 0.5, n=WIDTH)


def _sorted(_block: Any, inputs: Tensor) -> Tensor:
    values, places = inputs.sort(1)
    return values.gather(1, places) + inputs.cumsum(1) / WIDTH


def _in_place(_block: Any, inputs: Tensor) -> Tensor:
    results = inputs * 2
    results.add_(1).clamp_(min=-3)
    results[:, ::2].mul_(0.5)
    return results


def _asks(_block: Any, inputs: Tensor) -> Tensor:
    """Libraries ask whether they are traced, and then compute in another way."""
    is_traced = is_fake(inputs) or torch.compiler.is_compiling() or torch.jit.is_tracing()
    return inputs.exp().log() if is_traced else inputs * 1.0


def _written_constant(_block: Any, inputs: Tensor) -> Tensor:
    scale = torch.tensor(float(WIDTH))
    scale.sqrt_().add_(inputs.detach().float().abs().mean())
    return inputs / scale.to(inputs)


def _value_read(block: Any, inputs: Tensor) -> Tensor:
    return inputs * block.plain.table.tolist()[1] + float(block.plain.table.numpy()[0])


def _values_listed(block: Any, inputs: Tensor) -> Tensor:
    return inputs + torch.tensor([block.plain.one, 2.0, block.plain.one]).to(inputs).sum()


def _value_asked(block: Any, inputs: Tensor) -> Tensor:
    return inputs * 2 if block.plain.one > 1.5 else inputs * 3


def _sizes_numbered(block: Any, inputs: Tensor) -> Tensor:
    number = block.sizes.setdefault(len(inputs), len(block.sizes))
    return inputs + block.inner.weight[number % 4].to(inputs)


def _noted(block: Any, inputs: Tensor) -> Tensor:
    block.seen, block.largest = tuple(inputs.shape), max(block.largest, len(inputs))
    return inputs / block.largest


def _draw_unused(block: Any, inputs: Tensor) -> Tensor:
    torch.rand(3)
    return functional.dropout(inputs, 0.2, block.training)


def _draw_into_slice(_block: Any, inputs: Tensor) -> Tensor:
    noise = torch.zeros_like(inputs)
    noise[:, :4].normal_()
    noise[:, 4:8].bernoulli_(0.3)
    return inputs + noise * 0.1


def _part_unused(block: Any, inputs: Tensor) -> Tensor:
    first, _ = block.inner(inputs).chunk(2, 1)
    block.other(inputs)
    return inputs + first


def _copied_then_written(_block: Any, inputs: Tensor) -> Tensor:
    results = inputs * 2
    kept = results[:, :4].clone()
    results[:, :4] = results[:, 4:8]
    results[:, 4:8] = kept
    return results


def _statistics_read(block: Any, inputs: Tensor) -> Tensor:
    normed = block.norm(inputs.to(block.norm.weight))
    return normed + block.norm.running_mean * 0.1


class Cached(nn.Module):
    """A block with a property that is computed once, and that reads what the object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), 1.5

    @cached_property
    def scale(self) -> float:
        """A number that is made of others."""
        return self.gain * len(vars(self)["_parameters"]) + 2.0

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply it."""
        return self.inner(inputs) * self.scale


def _curved(block: Any, inputs: Tensor) -> Tensor:
    curvature = torch.func.vmap(torch.func.hessian(lambda row: block.inner(row).tanh().sum()))(inputs[:4])
    return inputs + 0.01 * curvature.diagonal(dim1=-2, dim2=-1).mean()


def _plain() -> SimpleNamespace:
    """Return an object with tensors that are neither parameters nor buffers."""
    return SimpleNamespace(table=torch.linspace(1, 2, 4), one=torch.tensor(1.0))


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda _: nn.Linear(WIDTH, WIDTH),
    "no_bias": lambda _: nn.Linear(WIDTH, WIDTH, bias=False),
    "gelu": lambda _: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    "relu": lambda _: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Linear(4 * WIDTH, WIDTH)),
    "dropout": lambda _: nn.Dropout(0.3),
    "layer_norm": lambda _: nn.LayerNorm(WIDTH),
    "group_norm": lambda _: nn.GroupNorm(4, WIDTH),
    "batch_norm": lambda _: nn.BatchNorm1d(WIDTH),
    "cumulative_batch_norm": lambda _: nn.BatchNorm1d(WIDTH, momentum=None),
    "residual": lambda _: Function(lambda block, x: x + block.inner(x).tanh(), inner=nn.Linear(WIDTH, WIDTH)),
    "attention": lambda _: Function(_attention, inner=nn.Linear(WIDTH, 3 * WIDTH)),
    "convolution": lambda _: Function(_images, inner=nn.Conv2d(1, 1, 3, padding=1)),
    "convolution_norm": lambda _: Function(
        _images, inner=nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    ),
    "checkpoint": lambda _: Function(
        lambda block, x: checkpoint(block.inner, x, use_reentrant=False),  # pyright: ignore[reportReturnType]
        inner=nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)),
    ),
    "reentrant_checkpoint": lambda _: Function(
        lambda block, x: checkpoint(block.inner, x, use_reentrant=True),  # pyright: ignore[reportReturnType]
        inner=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    ),
    "temperature": lambda _: Function(lambda block, x: x / block.temperature, temperature=1.5),
    "settings": lambda _: Function(lambda block, x: x * block.settings["gain"], settings={"gain": 1.25}),
    "counter": lambda _: Function(_counted, calls=0),
    "moving_mean": lambda _: Function(_moving_mean, mean=torch.zeros(WIDTH)),
    "noise": lambda _: Function(lambda block, x: x + torch.randn_like(x) * 0.1 if block.training else x),
    "python_draw": lambda seed: Function(_drawn_by_python, generator=random.Random(seed)),
    "numpy_draw": lambda seed: Function(_drawn_by_numpy, generator=np.random.default_rng(seed)),
    "generator_draw": lambda seed: Function(_drawn_by_torch, generator=torch.Generator().manual_seed(seed)),
    "module_draw": lambda _: Function(lambda _block, x: x * (0.5 + random.random())),
    "custom": lambda _: Function(lambda _block, x: Tanh.apply(x)),  # pyright: ignore[reportReturnType]
    "recurrent": lambda _: Function(lambda block, x: block.inner(x[None])[0][0], inner=nn.GRU(WIDTH, WIDTH)),
    "tied": lambda _: Function(
        lambda block, x: functional.linear(block.inner(x).tanh(), block.inner.weight.t()), inner=nn.Linear(WIDTH, WIDTH)
    ),
    "frozen": lambda _: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "weight_norm": lambda _: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "half": lambda _: Function(_half),
    "spectrum": lambda _: Function(_spectrum),
    "sorted": lambda _: Function(_sorted),
    "in_place": lambda _: Function(_in_place),
    "bilinear": lambda _: Function(
        lambda block, x: block.inner(x.to(block.inner.weight), x.to(block.inner.weight)),
        inner=nn.Bilinear(WIDTH, WIDTH, WIDTH),
    ),
    "asks": lambda _: Function(_asks),
    "written_constant": lambda _: Function(_written_constant),
    "hessian": lambda _: Function(_curved, inner=nn.Linear(WIDTH, 2)),
    "value_read": lambda _: Function(_value_read, plain=_plain()),
    "values_listed": lambda _: Function(_values_listed, plain=_plain()),
    "value_asked": lambda _: Function(_value_asked, plain=_plain()),
    "sizes_numbered": lambda _: Function(_sizes_numbered, inner=nn.Embedding(4, WIDTH), sizes={}),
    "noted": lambda _: Function(_noted, largest=1),
    "draw_unused": lambda _: Function(_draw_unused),
    "draw_into_slice": lambda _: Function(_draw_into_slice),
    "part_unused": lambda _: Function(_part_unused, inner=nn.Linear(WIDTH, 2 * WIDTH), other=nn.Linear(WIDTH, WIDTH)),
    "copied_then_written": lambda _: Function(_copied_then_written),
    "statistics_read": lambda _: Function(_statistics_read, norm=nn.BatchNorm1d(WIDTH)),
    "cached": lambda _: Cached(),
    "by_value": lambda _: Function(lambda _block, x: x * 2 if bool(x.sum() > 0) else x * 3),
    "embedding": lambda _: Function(
        lambda block, x: block.inner(x.abs().mul(3).long().clamp(max=9)).sum(1), inner=nn.Embedding(10, WIDTH)
    ),
}
"""Makers of blocks from and to `[batch, WIDTH]`, by name; each is given a seed for generators of its own."""

NO_GRAPH = frozenset({"by_value", "counter", "python_draw", "numpy_draw", "module_draw", "own_backward"})
"""Blocks and losses whose steps are no graphs, and run under `memfit.checkpoint`."""
