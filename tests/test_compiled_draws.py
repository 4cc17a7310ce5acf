"""Compiled graphs draw eager's random numbers, in eager's order and number, whatever is done with them.

PyTorch's own compiler draws others in about half of these models: it leaves out draws that nothing uses, moves some
into the backward pass, and draws into memory of other strides.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_planned_bits import COMPUTE_AGAIN
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit

Draws = Callable[["Drawing", Tensor], Tensor]
ROWS, WIDTH = 64, 48


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()  # what a later test counts as taken must not be freed in it


class Drawing(nn.Module):
    """Layers, and between them a function that draws; `noise` is a buffer that it may write to."""

    noise: Tensor

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws, self.generator = draws, torch.Generator().manual_seed(3)
        self.register_buffer("noise", torch.zeros(ROWS, WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.dropout(functional.gelu(self.first(inputs)), 0.1)
        return self.last(functional.dropout(self.draws(self, hidden), 0.1))


class InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.rand_like(x))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch.rand(5)
        return gradients[0] * ctx.saved_tensors[0]


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.sin()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        shift = torch.randn(gradients[0].shape)
        return gradients[0] * torch.rand_like(gradients[0]) + shift


class SavesOfABuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(buffer.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


def unused(_: Drawing, h: Tensor) -> Tensor:
    functional.dropout(h, 0.5)
    torch.rand(6).view(2, 3).t().expand(4, 3, 2)
    torch.randn(40, dtype=torch.float64).to(torch.bfloat16)
    return h


def without_gradients(_: Drawing, h: Tensor) -> Tensor:
    with torch.no_grad():
        functional.dropout(torch.rand(7), 0.5)
        torch.empty(4).normal_()
    return h


def branches(model: Drawing, h: Tensor) -> Tensor:
    if model.training:
        torch.rand(3)
    for size in range(3):
        h = h * torch.rand(1 + size).mean()
        torch.randperm(size + 2)
    return h


def dropouts(_: Drawing, h: Tensor) -> Tensor:
    for p in (0.0, 0.5, 1.0):
        functional.dropout(h, p)
        functional.alpha_dropout(h, p, True)
        functional.feature_alpha_dropout(h, p, True)
        functional.dropout1d(h, p)
    return h + functional.dropout(h, 1.0) + functional.alpha_dropout(h, 0.2, True) + functional.dropout1d(h, 0.2)


def dropout_of_itself(_: Drawing, h: Tensor) -> Tensor:
    z = h.sin()
    functional.dropout(z, 0.0).mul_(2)
    functional.dropout(z, 0.5, training=False).add_(1)
    return functional.dropout(z[:, :9], 0.5, inplace=True).sum() + z


def kinds_in_place(z: Tensor) -> None:
    width = z.shape[1] // 9
    parts = [z[:, width * number : width * (number + 1)] for number in range(9)]
    parts[0].normal_()
    parts[1].uniform_(-1, 1)
    parts[2].bernoulli_(0.3)
    parts[3].bernoulli_(torch.full_like(parts[3], 0.6))
    parts[4].exponential_()
    parts[5].geometric_(0.4)
    parts[6].log_normal_()
    parts[7].random_(0, 9)
    parts[8].cauchy_().clamp_(-1, 1)


def into_columns(_: Drawing, h: Tensor) -> Tensor:
    z = torch.zeros_like(h)
    kinds_in_place(z)
    return h + z


def into_a_buffer(model: Drawing, h: Tensor) -> Tensor:
    kinds_in_place(model.noise)
    model.noise[:3].normal_()
    return h + model.noise


def into_others(_: Drawing, h: Tensor) -> Tensor:
    z = torch.zeros(WIDTH, ROWS)
    z.t().normal_()
    torch.rand(h.shape, out=z.resize_(h.shape))
    left, right = z.chunk(2, 1)
    left.normal_()
    right.uniform_().normal_().zero_()
    return h + z + torch.empty_like(h).bernoulli_(0.4) * torch.bernoulli(torch.full_like(h, 0.5))


def turned(_: Drawing, h: Tensor) -> Tensor:
    z, image = torch.ones(WIDTH, ROWS).t(), h.reshape(ROWS, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    z.bernoulli_(0.3).add_(torch.bernoulli(z, 0.6))
    z[1:20].bernoulli_(0.5)
    return z * functional.alpha_dropout(h.t(), 0.2, True).t() + functional.alpha_dropout(image, 0.3, True).flatten(1)


def pools(_: Drawing, h: Tensor) -> Tensor:
    image = h.reshape(1, -1, 8, 8)
    functional.fractional_max_pool2d(image, 2, output_size=4)
    return h + functional.fractional_max_pool2d(image, 2, output_size=4).sum()


def rectified(_: Drawing, h: Tensor) -> Tensor:
    functional.rrelu(h, training=True)
    return functional.rrelu(h, training=True) + functional.rrelu_(h * 2, training=True)


def chosen(_: Drawing, h: Tensor) -> Tensor:
    torch.multinomial(torch.ones(5), 3)
    torch.randint(0, 5, (3,))
    rows = torch.multinomial(torch.ones(len(h)), 6)
    return h[torch.randperm(len(h))] + h[rows].sum(0) + torch.randint_like(h, 0, 5)


def distributions(_: Drawing, h: Tensor) -> Tensor:
    torch.distributions.Gamma(h.abs() + 1, 1.0).rsample()
    torch.poisson(h.detach().abs())
    torch.binomial(torch.full_like(h, 5.0), torch.full_like(h, 0.5))
    torch.normal(h.detach(), 1.0)
    gamma = torch.distributions.Gamma(h.abs() + 1, 1.0).rsample()
    return gamma + torch.distributions.Normal(h, 1.0).rsample() + functional.gumbel_softmax(h, hard=True)


def in_checkpoint(_: Drawing, h: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        torch.rand(3)
        functional.dropout(x, 0.2)
        return functional.dropout(x, 0.5) * torch.rand_like(x)

    return checkpoint(block, h, use_reentrant=False)


def attended(_: Drawing, h: Tensor) -> Tensor:
    heads = h.reshape(1, 4, -1, 12)
    functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
    return h + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(h.shape)


def own_generator(model: Drawing, h: Tensor) -> Tensor:
    torch.rand(3, generator=model.generator)
    return h + torch.rand(h.shape, generator=model.generator)


def kept_of_a_buffer(model: Drawing, h: Tensor) -> Tensor:
    result: Any = SavesOfABuffer.apply(h, model.noise)
    model.noise.add_(1)
    return result


def unsafe_chunk(_: Drawing, h: Tensor) -> Tensor:
    z = h.clone()
    left, right = z.unsafe_chunk(2, 1)
    left.mul_(right.sigmoid())
    return z.sin()


def unsafe_split(_: Drawing, h: Tensor) -> Tensor:
    z = h.clone()
    left, middle, right = torch.unsafe_split_with_sizes(z, [20, 20, WIDTH - 40], 1)
    right.normal_()
    z.mul_(2)
    return torch.cat([left.mul_(middle.sigmoid()), middle, right], 1) + z + torch.unsafe_split(z, 30)[1].sum()


DRAWS: dict[str, Draws] = {
    "broadcast": lambda _, h: h + torch.rand(1, WIDTH).expand_as(h) * torch.randn(ROWS, 1),
    "in a function's forward": lambda _, h: InForward.apply(h) + torch.rand_like(h),  # pyright: ignore
    "in a function's backward": lambda _, h: InBackward.apply(InForward.apply(h)) + torch.rand_like(h),  # pyright: ignore
    **{
        draws.__name__.replace("_", " "): draws
        for draws in (
            unused, without_gradients, branches, dropouts, dropout_of_itself, into_columns, into_a_buffer, into_others,
            turned, pools, rectified, chosen, distributions, in_checkpoint, attended, own_generator, kept_of_a_buffer,
            unsafe_chunk, unsafe_split,
        )
    },
}  # fmt: skip


def trained(draws: Draws, door: str | None, options: dict[str, Any]) -> list[Tensor]:
    """Return what two steps and a call without gradients leave, of eager if there is no door."""
    torch.manual_seed(0)
    model, given = Drawing(draws), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call: Any = model
    if door == "compile":
        memfit.compile(model, optimizer=optimizer, **options)
    elif door == "backend":
        call = torch.compile(model, backend="memfit", options={"reserve": 0, **options})
    step = memfit.fit(model, nn.MSELoss(), given, optimizer=optimizer, **options) if door == "fit" else None
    losses: list[Tensor] = []
    for _ in range(2):
        if step is None:
            losses.append(functional.mse_loss(call(given[0]), given[1]))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            losses.append(step(given))
    with torch.no_grad():
        losses.append(call(given[0]))
    return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    "door", ["backend", pytest.param("compile", marks=pytest.mark.slow), pytest.param("fit", marks=pytest.mark.slow)]
)
def test_a_door_draws_what_eager_draws(door: str, name: str) -> None:
    options: dict[str, Any] = {"budget": "1GiB", "planner": "drop_cheap", "options": COMPUTE_AGAIN}
    expected, found = (trained(DRAWS[name], each, options) for each in (None, door))
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
