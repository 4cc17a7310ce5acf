"""Detection, routing, attention to sets and memories, and other layers that are seldom seen."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from _models_kit import TOKENS, Batch, Make, cross_entropy, ids, itself, labels, mlp, plain
from torch import Tensor, nn
from torch.nn import functional


class Dense(nn.Module):
    """FCOS: classes, boxes and centres at each place of two levels, focal and IoU losses (Tian et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 16, 3, 4, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.tower = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.out, self.scales = nn.Conv2d(16, 9, 3, padding=1), nn.Parameter(torch.ones(2))

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the loss of images `[batch, 3, 32, 32]`, boxes `[batch, 3, 4]` and their classes."""
        images, boxes, kinds = batch
        low = self.low(images)
        found, places = [], []
        for scale, level, stride in zip(self.scales, (low, self.high(low)), (4, 8), strict=True):
            kind, sides, centre = self.out(self.tower(level)).split([4, 4, 1], 1)
            found.append(torch.cat([kind, (scale * sides).exp() * stride, centre], 1).flatten(2).transpose(1, 2))
            line = torch.arange(level.shape[3]) * stride + stride // 2
            places.append(torch.cartesian_prod(line, line))
        kind, sides, centre = torch.cat(found, 1).split([4, 4, 1], 2)
        place = torch.cat(places).float()
        gaps = torch.cat(
            [place[None, :, None] - boxes[:, None, :, :2], boxes[:, None, :, 2:] - place[None, :, None]], 3
        )
        area = torch.where(gaps.amin(3) > 0, gaps.amax(3), 1e8)
        least, owner = area.min(2)
        inside = least < 1e8
        wanted = gaps.gather(2, owner[..., None, None].expand(-1, -1, 1, 4))[:, :, 0].clamp(min=0)
        classes = functional.one_hot(kinds.gather(1, owner), 4) * inside[..., None]
        chance = kind.sigmoid()
        sure = torch.where(classes > 0, chance, 1 - chance)
        focal = -((1 - sure).square() * (sure + 1e-6).log()).sum() / inside.sum().clamp(min=1)
        overlap = torch.minimum(sides, wanted)
        shared = (overlap[..., 0] + overlap[..., 2]) * (overlap[..., 1] + overlap[..., 3])
        areas = [(each[..., 0] + each[..., 2]) * (each[..., 1] + each[..., 3]) for each in (sides, wanted)]
        union = areas[0] + areas[1] - shared
        boxed = (1 - shared / union)[inside].mean() if bool(inside.any()) else sides.sum() * 0
        return focal + boxed + functional.binary_cross_entropy_with_logits(centre[..., 0], inside.float())


class Queries(nn.Module):
    """DETR: queries, a decoder, and a matching that is solved outside of torch (Carion et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.queries = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(6, 32))
        layer = nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.inner, self.kinds, self.boxes = nn.TransformerDecoder(layer, 2), nn.Linear(32, 5), nn.Linear(32, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of classes and boxes of images `[batch, 3, 32, 32]`."""
        memory = self.lift(images).flatten(2).transpose(1, 2)
        found = self.inner(self.queries.expand(len(images), -1, -1), memory)
        return self.kinds(found), self.boxes(found).sigmoid()


def _pairs(costs: list[list[float]]) -> tuple[list[int], list[int]]:
    """Return queries and the three objects that they are matched with, at the least cost."""
    ours = min(permutations(range(len(costs)), 3), key=lambda rows: sum(costs[row][n] for n, row in enumerate(rows)))
    return list(ours), [0, 1, 2]


def _matched(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    kinds, boxes = model(batch[0])
    with torch.no_grad():
        costs = torch.cdist(boxes, batch[1], 1) - kinds.softmax(2).gather(2, batch[2][:, None].expand(-1, 6, -1))
        pairs = [_pairs(cost.tolist()) for cost in costs]
    wanted, gaps = torch.full(kinds.shape[:2], 4), []
    for row, (ours, theirs) in enumerate(pairs):
        wanted[row, ours] = batch[2][row, theirs]
        gaps.append((boxes[row, ours] - batch[1][row, theirs]).abs().sum())
    return functional.cross_entropy(kinds.transpose(1, 2), wanted) + torch.stack(gaps).mean()


class Routed(nn.Module):
    """A mixture of experts: tokens go to their experts by lines that look at data (Shazeer et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.gate = nn.Embedding(TOKENS, 32), nn.Linear(32, TOKENS), nn.Linear(32, 4)
        self.experts = nn.ModuleList(mlp(32, 64, 32, activation=nn.GELU) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of tokens."""
        values = self.embed(tokens)
        flat = values.flatten(0, 1)
        chances = self.gate(flat).softmax(1)
        weights, chosen = chances.topk(2)
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, rows, weights[rows, which, None] * expert(flat[rows]))
        even = (chances.mean(0) * functional.one_hot(chosen[:, 0], 4).float().mean(0)).sum() * 4
        logits = self.out(values + total.view_as(values))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * even


class Capacity(nn.Module):
    """A mixture of experts of fixed capacity, by one-hot masks and einsum (Switch Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(32, 4), nn.Linear(32, 10)
        self.first, self.second = nn.Parameter(torch.randn(4, 32, 64) / 6), nn.Parameter(torch.randn(4, 64, 32) / 8)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of rows `[batch, 32]`."""
        room = len(rows) // 3
        chances = (self.gate(rows) + 0.1 * torch.randn(len(rows), 4)).softmax(1)
        weight, chosen = chances.max(1)
        hits = functional.one_hot(chosen, 4)
        place = ((hits.cumsum(0) - 1) * hits).sum(1)
        sent = (hits[..., None] * functional.one_hot(place.clamp(max=room), room + 1)[:, None, :room]).float()
        given = torch.einsum("bec,bd->ecd", sent, rows)
        made = torch.bmm(torch.bmm(given, self.first).relu(), self.second)
        return self.out(rows + weight[:, None] * torch.einsum("bec,ecd->bd", sent, made))


class Capsules(nn.Module):
    """Capsules with routing by agreement (Sabour et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 16, 3))
        self.votes = nn.Parameter(torch.randn(10, 32, 8, 8) / 8)

    def squash(self, vectors: Tensor) -> Tensor:
        """Return vectors shorter than one."""
        length = vectors.square().sum(-1, keepdim=True)
        return vectors * length / (1 + length) / (length + 1e-8).sqrt()

    def forward(self, images: Tensor) -> Tensor:
        """Return the lengths of the classes of images `[batch, 1, 16, 16]`."""
        low = self.squash(self.lift(images).view(len(images), 32, 8))
        votes = torch.einsum("bid,oide->boie", low, self.votes)
        logits = torch.zeros(votes.shape[:3])
        for turn in range(3):
            high = self.squash((logits.softmax(1)[..., None] * votes).sum(2))
            if turn < 2:
                logits = logits + (votes.detach() * high.detach()[:, :, None]).sum(3)
        return high.norm(dim=2)


class Latents(nn.Module):
    """Perceiver: latents that read an array by cross attention, with shared layers (Jaegle et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.lift = nn.Parameter(torch.randn(8, 32)), nn.Linear(3, 32)
        self.read = nn.MultiheadAttention(32, 4, batch_first=True)
        self.think = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.out = nn.Linear(32, 10)

    def forward(self, array: Tensor) -> Tensor:
        """Return logits of arrays `[batch, 64, 3]`."""
        values, latents = self.lift(array), self.latents.expand(len(array), -1, -1)
        for _ in range(3):
            latents = self.think(latents + self.read(latents, values, values, need_weights=False)[0])
        return self.out(latents.mean(1))


class Sets(nn.Module):
    """Set Transformer: inducing points and pooling by attention (Lee et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.points, self.seed = (
            nn.Linear(3, 32),
            nn.Parameter(torch.randn(6, 32)),
            nn.Parameter(torch.randn(1, 32)),
        )
        self.blocks = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3))
        self.out = nn.Linear(32, 10)

    def forward(self, members: Tensor) -> Tensor:
        """Return logits of sets `[batch, members, 3]`."""
        values = self.lift(members)
        short = self.blocks[0](self.points.expand(len(members), -1, -1), values, values)[0]
        values = values + self.blocks[1](values, short, short)[0]
        return self.out(self.blocks[2](self.seed.expand(len(members), -1, -1), values, values)[0][:, 0])


class Memories(nn.Module):
    """A Hopfield layer: states move towards stored patterns (Ramsauer et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns, self.heat, self.out = (
            nn.Parameter(torch.randn(64, 32)),
            nn.Parameter(torch.ones(())),
            nn.Linear(32, 10),
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of rows `[batch, 32]`."""
        for _ in range(4):
            rows = (self.heat * rows @ self.patterns.T).softmax(1) @ self.patterns
        return self.out(rows)


class Adapter(nn.Module):
    """LoRA on a frozen network, its adapters scaled and with dropout (Hu et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4)).requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(48, 4) / 7 for _ in range(4))
        self.up = nn.ParameterList(torch.zeros(4, 48) for _ in range(4))
        self.out = nn.Linear(48, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of rows `[batch, 48]`."""
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            added = functional.dropout(rows, 0.1, self.training) @ down @ up
            rows = functional.gelu(layer(rows) + 2 * added)
        return self.out(rows)


class Hyper(nn.Module):
    """A network whose weights another one makes, for each row by vmap (Ha et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = mlp(4, 32, 33 * 8)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return values `[batch, points, 8]` for tasks `[batch, 4]` at points `[batch, points, 32]`."""
        made = self.maker(batch[0]).view(-1, 33, 8)
        return torch.func.vmap(lambda weight, points: (points @ weight[:32] + weight[32]).tanh())(made, batch[1])


class Binary(nn.Module):
    """Weights and activations of plus and minus one, by straight-through functions (Courbariaux et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(inner, outer, bias=False) for inner, outer in ((64, 96), (96, 96), (96, 10))
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in (96, 96, 10))

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of rows `[batch, 64]`."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            rows = norm(functional.linear(_Sign.apply(rows), _Sign.apply(layer.weight)))
        return rows


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.sign()

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        return slopes * (inputs.abs() <= 1)


class Memory(nn.Module):
    """A neural Turing machine: reading and writing by content, step by step (Graves et al. 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.heads, self.out = nn.LSTMCell(16, 32), nn.Linear(32, 8 * 3 + 8), nn.Linear(40, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map sequences `[batch, time, 8]` to sequences."""
        memory, read = torch.full((len(inputs), 16, 8), 0.1), torch.zeros(len(inputs), 8)
        state, found = None, []
        for values in inputs.unbind(1):
            state = self.cell(torch.cat([values, read], 1), state)
            key, erase, add, query = self.heads(state[0]).chunk(4, 1)
            weights = functional.cosine_similarity(memory, key[:, None], 2).mul(5).softmax(1)[..., None]
            memory = memory * (1 - weights * erase.sigmoid()[:, None]) + weights * add[:, None]
            read = (torch.bmm(memory, query[..., None]).softmax(1) * memory).sum(1)
            found.append(self.out(torch.cat([state[0], read], 1)))
        return torch.stack(found, 1)


def _to_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    lengths, kinds = model(batch[0]), functional.one_hot(batch[1], 10)
    return (kinds * (0.9 - lengths).relu().square() + 0.5 * (1 - kinds) * (lengths - 0.1).relu().square()).sum(1).mean()


def _boxes(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    corners = torch.rand(rows, 3, 2) * 16
    return (
        torch.randn(rows, 3, 32, 32),
        torch.cat([corners, corners + 4 + 10 * torch.rand(rows, 3, 2)], 2),
        labels(3 * rows, 4).view(rows, 3),
    )


def _echo(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.mse_loss(model(batch), batch.flip(1))


def _arrays(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 64, 3), labels(rows)


def _wide(width: int) -> Batch:
    return lambda rows: (torch.randn(16 * rows, width), labels(16 * rows))


LAYERS: dict[str, Make] = {
    "fcos": plain(Dense, itself, _boxes),
    "detr, by hand": plain(
        Queries, _matched,
        lambda rows: (torch.randn(rows, 3, 32, 32), torch.rand(rows, 3, 4), labels(3 * rows, 4).view(rows, 3)),
    ),
    "experts by data": plain(Routed, itself, ids),
    "experts of one capacity": plain(Capacity, cross_entropy, _wide(32)),
    "capsules": plain(Capsules, _to_images, lambda rows: (torch.randn(rows, 1, 16, 16), labels(rows))),
    "perceiver": plain(Latents, cross_entropy, _arrays),
    "set transformer": plain(Sets, cross_entropy, _arrays),
    "hopfield": plain(Memories, cross_entropy, _wide(32)),
    "lora": plain(Adapter, cross_entropy, _wide(48)),
    "hypernetwork": plain(
        Hyper, lambda model, batch: functional.mse_loss(model(batch[:2]), batch[2]),
        lambda rows: (torch.randn(rows, 4), torch.randn(rows, 32, 32), torch.randn(rows, 32, 8)),
    ),
    "binary network": plain(Binary, cross_entropy, _wide(64)),
    "turing machine": plain(Memory, _echo, lambda rows: torch.randn(rows, 12, 8)),
}  # fmt: skip
"""Makers of models, by name."""
