"""TrainingStep: what a user gives memfit, in place of the loop body they would have written."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import InvalidOptionError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One training step: forward, loss, backward, and the optimizer's update where there is one.

        >>> import torch
        >>> from memfit import TrainingStep
        >>> def loss(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> step = TrainingStep(
        ...     model=torch.nn.Linear(8, 2), loss=loss, batch=(torch.randn(4, 8), torch.tensor([0, 1, 1, 0]))
        ... )

    Args:
        model: any module; parameters, buffers and train/eval modes are read from it at every step.
        loss: `loss(model, batch)` returns a scalar; autocast belongs in it. A loss module (`nn.CrossEntropyLoss()`), or
            a function of torch.nn.functional (a partial one, too), is called as `loss(model(inputs), target)` with
            `inputs, target = batch`.
        batch: any nesting of tuples, lists and dicts of tensors, numbers and texts; an example of what later steps
            will be given.
        optimizer: updates the model's parameters; None leaves the gradients in `.grad`.
        clip_norm: the largest global gradient norm, as `torch.nn.utils.clip_grad_norm_` takes it; None clips nothing.
        scaler: a `torch.amp.GradScaler` that scales the loss and guards the update.
        name: shown in reports; the model's class name where it is empty.
    """

    model: torch.nn.Module
    loss: Callable[..., torch.Tensor]
    batch: Any
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    name: str = ""

    def compute_loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of `model` on `batch`, by whichever convention `loss` follows."""
        if _takes_outputs(self.loss):
            inputs, target = batch
            return self.loss(model(inputs), target)
        return self.loss(model, batch)

    def run_eager(self, batch: Any, *, model: torch.nn.Module | None = None) -> torch.Tensor:
        """Run the step as plain PyTorch would, the reference of every comparison; return the loss, detached.

        With an optimizer the gradients are None afterwards; without one they are added to `.grad`. `model` is called
        in place of the step's own: a compiled form of it.
        """
        loss = self.compute_loss(self.model if model is None else model, batch)
        self.scaled(loss).backward()
        if self.optimizer is not None:
            self.update()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what backward starts from: the loss, times the scaler's factor where there is one."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """Clip and update from the gradients in `.grad`, with or without a scaler."""
        assert self.optimizer is not None
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def plain(leaf: Any) -> Any:
    """Return a leaf of a batch that is no tensor, and is the same thing where it looks the same.

    Raises:
        InvalidOptionError: it may hold numbers that a plan would take for the same in every step.
    """
    if isinstance(leaf, _PLAIN):
        return leaf
    raise InvalidOptionError(
        f"the batch holds a {type(leaf).__module__}.{type(leaf).__qualname__}, expected tensors, numbers and texts in "
        "tuples, lists and dicts; hand in its tensors: torch.from_numpy(array), dict(encoding), vars(record)"
    )


def _takes_outputs(loss: Callable[..., torch.Tensor]) -> bool:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return isinstance(loss, torch.nn.Module) or getattr(loss, "__module__", None) == "torch.nn.functional"
