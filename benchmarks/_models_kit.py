"""What a model that `models.py` tries consists of, and makers of those of transformers and pytorchcv."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module, Any], Tensor]
Batch = Callable[[int], Any]
TOKENS, LENGTH, ROWS, LIBRARY_ROWS = 96, 32, 32, 8
NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LANGUAGE = {**NARROW, "vocab_size": TOKENS, "max_position_embeddings": 64}
DECODER = {**LANGUAGE, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER_DECODER = {
    "vocab_size": TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
IMAGE = {**NARROW, "image_size": 32, "patch_size": 8}


def nothing_after(model: nn.Module) -> None:
    """What most loops do after the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A model, its loss and its batches.

    Args:
        model: whose parameters that need gradients are trained.
        loss: of the model and a batch.
        batch: makes a batch of so many rows.
        rows: of a big batch; a small one has half of them.
        after: what the loop does with the model after each update, such as an average of its weights.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    rows: int = ROWS
    after: Callable[[nn.Module], None] = nothing_after


Make = Callable[[], Tried]


def plain(make: Callable[[], nn.Module], loss: Loss, batch: Batch, **more: Any) -> Make:
    """Return a maker of a model that is written by hand."""
    return lambda: Tried(model=make(), loss=loss, batch=batch, **more)


def hugging(name: str, config: str, kind: str, rows: int = LIBRARY_ROWS, **settings: Any) -> Make:
    """Return a maker of a model of transformers: its class, its configuration's class, and the kind of its batch."""

    def make() -> Tried:
        library = importlib.import_module("transformers")
        model = getattr(library, name)(getattr(library, config)(**settings))
        batch, loss = BATCHES[kind]
        return Tried(model=model.train(), loss=loss, batch=batch, rows=rows)

    return make


def classic(module: str, name: str, **settings: Any) -> Make:
    """Return a maker of a model of pytorchcv."""

    def make() -> Tried:
        model = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)(num_classes=10, **settings)
        return Tried(
            model=model.train(), loss=cross_entropy, batch=lambda rows: (torch.randn(rows, 3, 224, 224), labels(rows)),
            rows=2,
        )  # fmt: skip

    return make


def ids(rows: int) -> Tensor:
    """Return random tokens."""
    return torch.randint(3, TOKENS, (rows, LENGTH))


def labels(rows: int, classes: int = 10) -> Tensor:
    """Return random classes."""
    return torch.randint(0, classes, (rows,))


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers computes."""
    return model(**batch).loss


def itself(model: nn.Module, batch: Any) -> Tensor:
    """Return what a module gives whose forward pass computes its loss."""
    return model(batch)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a classifier."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a regression."""
    return functional.mse_loss(model(batch[0]), batch[1])


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), activation()]
    return nn.Sequential(*layers[:-1])


def _tokens(rows: int) -> dict[str, Tensor]:
    return {"input_ids": (made := ids(rows)), "labels": made}


def _masked(rows: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[1:, LENGTH - 5 :] = 0
    return {**_tokens(rows), "attention_mask": mask}


def _images(rows: int, **more: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 32, 32), **more}


def _states_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).last_hidden_state.float().square().mean()


def _pairs_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, return_loss=True).loss


BATCHES: dict[str, tuple[Batch, Loss]] = {
    "tokens": (_tokens, own_loss),
    "masked": (_masked, own_loss),
    "translation": (lambda rows: {"input_ids": ids(rows), "labels": ids(rows)}, own_loss),
    "sentence": (lambda rows: {"input_ids": ids(rows), "labels": labels(rows, 2)}, own_loss),
    "token states": (lambda rows: {"input_ids": ids(rows)}, _states_loss),
    "class": (lambda rows: _images(rows, labels=labels(rows, 2)), own_loss),
    "image": (_images, own_loss),
    "states": (_images, _states_loss),
    "speech": (lambda rows: {"input_features": torch.randn(rows, 16, 64), "labels": ids(rows)[:, :8]}, own_loss),
    "spectrum": (lambda rows: {"input_values": torch.randn(rows, 64, 32), "labels": labels(rows, 2)}, own_loss),
    "wave": (
        lambda rows: {"input_values": torch.randn(rows, 1600), "labels": torch.randint(1, 20, (rows, 3))},
        own_loss,
    ),
    "pairs": (lambda rows: {"input_ids": ids(rows), "pixel_values": torch.randn(rows, 3, 32, 32)}, _pairs_loss),
    "segments": (lambda rows: _images(rows, labels=torch.randint(0, 2, (rows, 32, 32))), own_loss),
    "depth": (lambda rows: {"pixel_values": torch.randn(rows, 3, 64, 64)}, _states_loss),
    "series": (
        lambda rows: {"past_values": torch.randn(rows, 32, 3), "future_values": torch.randn(rows, 8, 3)},
        own_loss,
    ),
    "video": (
        lambda rows: {"pixel_values": torch.randn(rows, 4, 3, 32, 32), "labels": labels(rows, 2)},
        own_loss,
    ),
}
"""Makers of batches and losses of transformers' models, by kind."""
