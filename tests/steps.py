"""Small training steps that between them hold everything capture must keep the meaning of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memfit import TrainingStep


class ConvNet(nn.Module):
    """Convolutions, batch normalization, in-place relu, a residual add, pooling, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        features = functional.relu_(features + self.branch(features))
        features = functional.max_pool2d(features, 2)
        return self.head(self.drop(features.flatten(1)))


class TiedLanguageModel(nn.Module):
    """Embedding tied to the output layer, attention, dropout, layer normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.output = nn.Linear(16, 40, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.encoder(self.embedding(tokens)))


class Square(torch.autograd.Function):
    """A user's own function, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        return 2 * value * gradients[0]


class Unusual(nn.Module):
    """A checkpointed region, an autograd.Function, a shared layer, a frozen one, writes to a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.shared = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.last = nn.Linear(12, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = torch.full((12,), 0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        values = checkpoint(self._region, values, use_reentrant=False)
        values = self.shared(torch.tanh(self.shared(values)))
        shifted = torch.zeros_like(values)
        shifted[:, 1:] = values[:, :-1]
        return self.last(Square.apply(self.frozen(shifted)) * self.scale)

    def _region(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.sigmoid(self.first(values)), 0.25, self.training)


class Recurrent(nn.Module):
    """An LSTM cell unrolled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 10)
        self.head = nn.Linear(10, 4)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        hidden = cell = series.new_zeros(series.shape[0], 10)
        for moment in series.unbind(1):
            hidden, cell = self.cell(moment, (hidden, cell))
        return self.head(hidden)


class Spectral(nn.Module):
    """A filter in the frequency domain: complex weights, conjugates and negatives that are lazy views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.filter = nn.Parameter(torch.randn(7, dtype=torch.cfloat))
        self.last = nn.Linear(7, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(torch.relu(self.first(values))) * self.filter
        smooth = torch.fft.irfft(spectrum, n=12)
        return self.last(torch.fft.rfft(smooth).conj().imag.tanh() + spectrum.mH.mT.abs())


class Stacked(nn.Module):
    """torch's own LSTM of two layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(10, 4)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(series)[0].mean(1))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Classification of `batch = (inputs, labels)`, over the last dimension."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def autocast_cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """The same under autocast to bfloat16."""
    with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
        return cross_entropy(model, batch)


def hungry(run: Callable[..., torch.Tensor], more_bytes: int) -> Callable[..., torch.Tensor]:
    """Return `run` with so many more bytes held while it runs, as a library's workspace may be."""

    def run_hungry(*args: Any) -> torch.Tensor:
        workspace = torch.empty(more_bytes, dtype=torch.uint8)
        loss = run(*args)
        del workspace
        return loss

    return run_hungry


def conv_batch(size: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 8, 8), torch.randint(0, 5, (size,))


def language_batch(size: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 40, (size, 7)), torch.randint(0, 40, (size, 7))


def unusual_batch(size: int = 2000) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 12), torch.randint(0, 3, (size,))


def recurrent_batch(size: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 9, 6), torch.randint(0, 4, (size,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "conv": (ConvNet, conv_batch),
    "language": (TiedLanguageModel, language_batch),
    "unusual": (Unusual, unusual_batch),
    "recurrent": (Recurrent, recurrent_batch),
    "spectral": (Spectral, unusual_batch),
    "stacked": (Stacked, recurrent_batch),
}


def make_pair(
    name: str, make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, **fields: Any
) -> tuple[TrainingStep, TrainingStep]:
    """Return two equal steps with weights of their own: one to plan, one to run eagerly."""
    torch.manual_seed(0)
    kind, batch = MODELS[name]
    model = kind()
    fields = {"loss": cross_entropy, "batch": batch(), **fields}
    pair = []
    for own in (model, copy.deepcopy(model)):
        optimizer = make_optimizer(own.parameters()) if make_optimizer else None
        pair.append(TrainingStep(model=own, optimizer=optimizer, **fields))
    return pair[0], pair[1]
