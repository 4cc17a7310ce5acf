"""Models that no library of the benchmarks has: diffusion, graphs, detection, and steps that data choose."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Looks(nn.Module):
    """A block after which the value of a tensor is looked at.

    Args:
        block: any module.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and look."""
        result = self.block(*args, **kwargs)
        seen = result[0] if isinstance(result, tuple) else result
        if seen.sum().item() > 1e30:
            raise ValueError("the values explode")
        return result


class Residual(nn.Module):
    """Two convolutions with group normalization, and what is added between them: of a time, in diffusion."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.before, self.after = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.time, self.skip = nn.Linear(times, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Return what follows from images `[batch, inputs, size, size]` at times `[batch, times]`."""
        hidden = self.first(functional.silu(self.before(images)))
        hidden = hidden + self.time(functional.silu(times))[:, :, None, None]
        return self.skip(images) + self.second(functional.silu(self.after(hidden)))


class Denoiser(nn.Module):
    """A U-Net of diffusion: noise from noisy images and times (Ho et al. 2020, arXiv:2006.11239)."""

    def __init__(self, width: int = 32, times: int = 64) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, times), nn.SiLU(), nn.Linear(times, times))
        self.lift = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(Residual(width << level, width << (level + 1), times) for level in range(3))
        self.middle = nn.ModuleList(Residual(width << 3, width << 3, times) for _ in range(2))
        self.attention = nn.MultiheadAttention(width << 3, 4, batch_first=True)
        self.up = nn.ModuleList(Residual(width << (level + 2), width << level, times) for level in (2, 1, 0))
        self.out = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Return the noise in images `[batch, 3, size, size]` at times `[batch]`."""
        embedded = self.embed(times[:, None])
        hidden, skips = self.lift(images), []
        for block in self.down:
            hidden = block(hidden, embedded)
            skips.append(hidden)
            hidden = functional.avg_pool2d(hidden, 2)
        hidden = self.middle[0](hidden, embedded)
        tokens = hidden.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        hidden = self.middle[1](tokens.transpose(1, 2).view_as(hidden), embedded)
        for block in self.up:
            hidden = block(torch.cat([functional.interpolate(hidden, scale_factor=2), skips.pop()], 1), embedded)
        return self.out(hidden)


def noise_loss(model: nn.Module, images: Tensor) -> Tensor:
    """Return the loss of a denoiser on images, with noise and times that are drawn here."""
    noise, times = torch.randn_like(images), torch.rand(len(images))
    share = times[:, None, None, None]
    return functional.mse_loss(model(images * (1 - share).sqrt() + noise * share.sqrt(), times), noise)


class Messages(nn.Module):
    """Messages along edges, added up at nodes, which an MLP with batch normalization takes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.send = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.take = nn.Sequential(nn.Linear(2 * width, width), nn.BatchNorm1d(width), nn.ReLU())

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return nodes `[nodes, width]` after messages along edges `[2, edges]`."""
        sources, targets = edges
        sent = self.send(torch.cat([nodes[sources], nodes[targets]], 1))
        return nodes + self.take(torch.cat([nodes, torch.zeros_like(nodes).index_add_(0, targets, sent)], 1))


class GraphNetwork(nn.Module):
    """A graph network: a class for each node.

    Args:
        width, layers, classes: of it.
        radius: where no edges are given, they are between all nodes whose first three features are that near.
    """

    def __init__(self, width: int = 64, layers: int = 6, classes: int = 10, radius: float = 0.0) -> None:
        super().__init__()
        self.lift, self.out, self.radius = nn.Linear(16, width), nn.Linear(width, classes), radius
        self.layers = nn.ModuleList(Messages(width) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor | None = None) -> Tensor:
        """Return logits of nodes `[nodes, 16]` with edges `[2, edges]`."""
        if edges is None:
            edges = (torch.cdist(nodes[:, :3], nodes[:, :3]) < self.radius).nonzero().T
        hidden = self.lift(nodes)
        for layer in self.layers:
            hidden = layer(hidden, edges)
        return self.out(hidden)


class Detector(nn.Module):
    """A dense detector: a backbone with batch normalization, a pyramid, and one head for all of its levels.

    Args:
        width: of the pyramid.
        proposals: whether a second head looks again at the places that the first finds likely: as many as there are.
    """

    def __init__(self, width: int = 32, *, proposals: bool = False) -> None:
        super().__init__()
        widths = (3, width // 2, width, 2 * width, 4 * width)
        self.stages = nn.ModuleList(_stage(*pair) for pair in itertools.pairwise(widths))
        self.lateral = nn.ModuleList(nn.Conv2d(each, width, 1) for each in widths[2:])
        self.head = nn.Sequential(*[_unit(width, width) for _ in range(3)], nn.Conv2d(width, 5, 3, 1, 1))
        self.again = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 5)) if proposals else None
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return a score and four sides for each level, `[batch, 5, places]`; of the second head, `[1, 5, likely]`."""
        levels: list[Tensor] = []
        hidden = images
        for number, stage in enumerate(self.stages):
            hidden = stage(hidden)
            if number:
                levels.append(self.lateral[number - 1](hidden))
        for number in reversed(range(len(levels) - 1)):
            levels[number] = levels[number] + functional.interpolate(levels[number + 1], scale_factor=2)
        found = [self.head(level).flatten(2) for level in levels]
        if self.again is None:
            return found
        features = torch.cat([level.flatten(2) for level in levels], 2)
        scores = torch.cat([each[:, 0] for each in found], 1)
        image, place = (scores > scores.mean()).nonzero(as_tuple=True)
        return [*found, self.again(features[image, :, place]).T[None]]


def _unit(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(_unit(inputs, outputs, 2), _unit(outputs, outputs))


def detection_loss(model: nn.Module, images: Tensor) -> Tensor:
    """Return a loss of what a detector finds: of scores, against each seventh place, and of sides."""
    losses: list[Tensor] = []
    for found in model(images):
        scores, sides = found[:, 0], found[:, 1:]
        wanted = (torch.arange(scores.shape[-1]) % 7 == 0).float().expand_as(scores)
        losses.append(functional.binary_cross_entropy_with_logits(scores, wanted))
        losses.append(functional.smooth_l1_loss(sides, torch.ones_like(sides)))
    return torch.stack(losses).sum()


class Pondering(nn.Module):
    """A transformer that ends where it is sure (Graves 2016, arXiv:1603.08983), and may drop tokens on the way.

    Args:
        width, layers: of it.
        drops: whether tokens of low scores are dropped after each second layer, in place of an early end.
    """

    def __init__(self, width: int = 128, layers: int = 6, *, drops: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.gate, self.out, self.drops = nn.Linear(width, 1), nn.Linear(width, 10), drops

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of tokens `[batch, length, width]`."""
        sure, hidden = 0.0, tokens
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            scores = self.gate(hidden)
            if self.drops and number % 2:
                likely = scores.mean((0, 2))
                hidden = (hidden * scores.sigmoid())[:, likely > likely.mean() - likely.std()]
            sure += scores.detach().sigmoid().mean().item() / 2.5
            if sure > 1.0 and not self.drops:
                break
        return self.out(hidden.mean(1))


class Equilibrium(nn.Module):
    """A fixed point of a cell, which is called until little changes (Bai et al. 2019, arXiv:1909.01377, unrolled)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(width, width), nn.Linear(width, 10)
        self.cell = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of inputs `[batch, width]`."""
        given = self.lift(inputs)
        point = torch.zeros_like(given)
        for _ in range(16):
            after = self.cell(point + given)
            change = (after - point).detach().abs().max().item()
            point = after
            if change < 2e-2:
                break
        return self.out(point)


class Packed(nn.Module):
    """A tagger of sentences of several lengths, packed."""

    def __init__(self, tokens: int = 500, width: int = 128) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))

    def forward(self, sentences: Tensor, lengths: Tensor) -> Tensor:
        """Return logits of all tokens of sentences `[batch, length]`, one after the other."""
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(sentences), lengths, batch_first=True, enforce_sorted=False
        )
        for layer in self.layers:
            packed, _ = layer(packed)
        hidden, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        return self.out(torch.cat([row[:length] for row, length in zip(hidden, lengths.tolist(), strict=True)]))


def tagging_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a tagger that says each token again."""
    sentences, lengths = batch
    wanted = torch.cat([row[:length] for row, length in zip(sentences, lengths.tolist(), strict=True)])
    return functional.cross_entropy(model(sentences, lengths), wanted)
