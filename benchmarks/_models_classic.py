"""Models of pytorchcv, and some that are written by hand."""

from __future__ import annotations

from typing import Any

import torch
from _models_kit import LENGTH, TOKENS, Make, Tried, classic, cross_entropy, itself, labels, plain, square
from torch import Tensor, nn
from torch.nn import functional


class Graphs(nn.Module):
    """A graph network: messages along edges, added up at nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of nodes `[64, 32]` with edges `[2, 256]`."""
        nodes, (sources, targets) = batch
        for layer in self.messages:
            nodes = nodes + torch.zeros_like(nodes).index_add_(0, targets, layer(nodes[sources]).relu())
        return self.out(nodes)


class Autoencoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decode = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the loss of inputs `[batch, 64]`."""
        mean, log_variance = self.encode(inputs).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return functional.mse_loss(self.decode(code), inputs) + 0.1 * divergence


class Spectral(nn.Module):
    """A Fourier neural operator in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16, 9, dtype=torch.cfloat) / 16 for _ in range(2))
        self.lift, self.out = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map functions `[batch, 1, 64]` to functions."""
        values = self.lift(inputs)
        for weight in self.weights:
            modes = torch.einsum("bix,iox->box", torch.fft.rfft(values)[..., :9], weight)
            values = functional.gelu(values + torch.fft.irfft(modes, n=inputs.shape[-1]))
        return self.out(values)


class Mixer(nn.Module):
    """An MLP-Mixer over 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.out = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of images `[batch, 3, 32, 32]`."""
        values = self.patches(images).flatten(2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            values = values + tokens(values)
            values = values + channels(values.transpose(1, 2)).transpose(1, 2)
        return self.out(values.mean(2))


class Waves(nn.Module):
    """A WaveNet: gated dilated convolutions with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=1 << depth) for depth in range(4))
        self.out = nn.Conv1d(16, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map signals `[batch, 1, time]` to signals."""
        values, skips = self.lift(inputs), torch.zeros(())
        for depth, gate in enumerate(self.gates):
            left, right = gate(functional.pad(values, (1 << depth, 0))).chunk(2, 1)
            values = values + left.tanh() * right.sigmoid()
            skips = skips + values
        return self.out(skips.relu())


class Factors(nn.Module):
    """A recommender: embeddings of categories, their products, and a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(4))
        self.tower = nn.Sequential(nn.Linear(8 * 4 + 6, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of categories `[batch, 4, 3]`."""
        vectors = torch.stack([table(ids[:, number]) for number, table in enumerate(self.tables)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.triu_indices(4, 4, 1)
        return self.tower(torch.cat([vectors.flatten(1), products[:, rows, columns]], 1))


def _decoder() -> Tried:
    layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerDecoder(layer, 2)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0], batch[1], tgt_mask=mask).square().mean()

    return Tried(model=model, loss=loss, batch=lambda rows: (torch.randn(rows, LENGTH, 32), torch.randn(rows, 8, 32)))


def _recurrent(kind: type[nn.RNNBase]) -> Make:
    def make() -> Tried:
        model = nn.ModuleDict(
            {"embed": nn.Embedding(TOKENS, 32), "inner": kind(32, 32, 2), "out": nn.Linear(32, TOKENS)}
        )

        def loss(model: Any, ids: Tensor) -> Tensor:
            states, _ = model["inner"](model["embed"](ids))
            return functional.cross_entropy(model["out"](states[:-1]).flatten(0, 1), ids[1:].flatten())

        return Tried(model=model, loss=loss, batch=lambda rows: torch.randint(0, TOKENS, (LENGTH, rows)))

    return make


def _physics() -> Tried:
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(model: nn.Module, points: Tensor) -> Tensor:
        inputs = points.detach().requires_grad_()
        values = model(inputs)
        (slopes,) = torch.autograd.grad(values.sum(), inputs, create_graph=True)
        (curvatures,) = torch.autograd.grad(slopes.sum(), inputs, create_graph=True)
        return (curvatures + values).square().mean()

    return Tried(model=model, loss=loss, batch=lambda rows: torch.rand(16 * rows, 1))


CLASSIC: dict[str, Make] = {
    "resnet": classic("resnet", "resnet18"),
    "pre-activation resnet": classic("preresnet", "preresnet18"),
    "mobilenet v2": classic("mobilenetv2", "mobilenetv2_wd4"),
    "shufflenet v2": classic("shufflenetv2", "shufflenetv2_wd2"),
    "densenet": classic("densenet", "densenet121"),
    "squeezenet": classic("squeezenet", "squeezenet_v1_0"),
    "senet": classic("seresnet", "seresnet18"),
    "efficientnet": classic("efficientnet", "efficientnet_b0"),
    "transformer decoder": _decoder,
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
    "graph network": plain(
        Graphs,
        lambda model, batch: functional.cross_entropy(model(batch[:2]), batch[2]),
        lambda rows: (torch.randn(16 * rows, 32), torch.randint(0, 16 * rows, (2, 64 * rows)), labels(16 * rows)),
    ),
    "variational autoencoder": plain(Autoencoder, itself, lambda rows: torch.rand(8 * rows, 64)),
    "fourier operator": plain(Spectral, square, lambda rows: (torch.randn(rows, 1, 64), torch.randn(rows, 1, 64))),
    "mlp-mixer": plain(Mixer, cross_entropy, lambda rows: (torch.randn(rows, 3, 32, 32), labels(rows))),
    "wavenet": plain(Waves, square, lambda rows: (torch.randn(rows, 1, 64), torch.randn(rows, 1, 64))),
    "recommender": plain(Factors, cross_entropy, lambda rows: (torch.randint(0, 50, (rows, 4, 3)), labels(rows))),
    "physics-informed": _physics,
}
"""Makers of models, by name."""
