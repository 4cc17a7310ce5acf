"""A model in training as the fuzzer makes it, and its losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _fuzz_blocks import WIDTH
from torch import Tensor, distributions, nn
from torch.nn import functional

CLASSES = 5
SCALES = {"loss": 1.0}  # a global of the loss, by name


@dataclass(slots=True)
class World:
    """A model in training, and what its step takes from Python. Two worlds of one case are the same to the bit."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None
    clip_norm: float | None
    draws: torch.Generator
    size: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    autocast: bool = False
    dtype: torch.dtype = torch.float32

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch: inputs and labels."""
        inputs = torch.randn(self.size, WIDTH, generator=self.draws).to(self.dtype)
        return inputs, torch.randint(0, CLASSES, (self.size,), generator=self.draws)


def _with_weights(tensors: dict[str, Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: functional.cross_entropy(model(batch[0]).float(), batch[1], weight=tensors["weights"])


def _with_teacher(tensors: dict[str, Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: functional.mse_loss(model(batch[0]).float(), batch[0].float() @ tensors["teacher"])


def _in_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0])
    return functional.cross_entropy(outputs.float(), batch[1])


def _likelihood(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0]).float()
    chosen = distributions.Categorical(logits=outputs)
    spread = distributions.Normal(outputs.mean(1), functional.softplus(outputs[:, 0]) + 0.1)
    return -chosen.log_prob(batch[1]).mean() - 0.01 * spread.rsample().mean()


def _own_backward(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0]).float()
    outputs.square().mean().backward(retain_graph=True)
    return functional.cross_entropy(outputs, batch[1])


LOSSES: dict[str, Callable[[dict[str, Tensor]], Callable[[nn.Module, Any], Tensor]]] = {
    "cross_entropy": lambda _: lambda model, batch: functional.cross_entropy(model(batch[0]).float(), batch[1]),
    "scaled": lambda _: (
        lambda model, batch: SCALES["loss"] * functional.cross_entropy(model(batch[0]).float(), batch[1])
    ),
    "weights": _with_weights,
    "teacher": _with_teacher,
    "autocast": lambda _: _in_autocast,
    "distribution": lambda _: _likelihood,
    "own_backward": lambda _: _own_backward,
    "penalty": lambda _: (
        lambda model, batch: (
            functional.cross_entropy(model(batch[0]).float(), batch[1])
            + 0.01 * sum(parameter.float().square().sum() for parameter in model.parameters())
        )
    ),
}
"""Makers of losses, by name; each is given the world's tensors."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "foreach_adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused_adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "two_groups": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.002}], lr=0.01
    ),
    "all_but_one": lambda parameters: torch.optim.SGD(parameters[:-1] or parameters, lr=0.05),
}
"""Makers of optimizers of parameters, by name; `none` leaves the gradients to the user."""
