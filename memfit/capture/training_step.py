"""TrainingStep: the user's training step as an object, in place of the body of a training loop."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from memfit.capture.across import Across
from memfit.chunked_loss.heads import ChunkedHead
from memfit.errors import InvalidOptionError
from memfit.memory.kept_on_host import on_its_device

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
            a function of torch.nn.functional (also a partial one), is called as `loss(model(inputs), target)` with
            `inputs, target = batch`.
        batch: tensors, numbers and texts in nested tuples, lists and dicts; an example of the later batches.
        optimizer: updates the model's parameters; None leaves the gradients in `.grad`.
        clip_norm: the largest global gradient norm, as `torch.nn.utils.clip_grad_norm_` takes it; None clips nothing.
        scaler: a `torch.amp.GradScaler` that scales the loss and guards the update.
        across: how gradients are averaged over ranks; None for a step of this process alone. It is never given by hand:
            `memfit.fit` and the commands take it from their options, and from a model in `DistributedDataParallel` or
            one that `fully_shard` was applied to.
        chunk_loss: compute the logits of the model's head, and what the loss makes of them, some rows at a time; True,
            or the name of the head. Last bits differ: see `memfit.chunked_loss`.
        name: shown in reports; the model's class name where it is empty.

    Attributes:
        has_backward: whether it computes gradients; see `memfit.capture.function_step`.
    """

    has_backward: ClassVar[bool] = True

    model: torch.nn.Module
    loss: Callable[..., torch.Tensor]
    batch: Any
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    across: Across | None = None
    chunk_loss: bool | str = False
    name: str = ""

    def __repr__(self) -> str:
        optimizer = "no optimizer" if self.optimizer is None else type(self.optimizer).__name__
        return f"TrainingStep({self.name or type(self.model).__name__}, {optimizer})"

    def compute_loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of `model` on `batch`: `loss(model, batch)`, or `loss(model(inputs), target)`.

        Args:
            model: the step's own, or a compiled form of it.
            batch: nested like the step's own.
        """
        if not self.chunk_loss:
            return self._loss_of(model, batch)
        with ChunkedHead(self.model, self.chunk_loss) as head:
            loss = self._loss_of(model, batch)
        if torch.is_grad_enabled():
            head.require_used()
        return loss

    def _loss_of(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if _takes_outputs(self.loss):
            inputs, target = batch
            return self.loss(model(inputs), target)
        return self.loss(model, batch)

    def run_eager(self, batch: Any, *, model: torch.nn.Module | None = None) -> torch.Tensor:
        """Run the step as plain PyTorch does, and return the loss, detached. All comparisons refer to this run.

        With an optimizer the gradients are None afterwards; without one they are added to `.grad`.

        Args:
            batch: nested like the step's own.
            model: called in place of the step's own: a compiled form of it.
        """
        with on_its_device(self.optimizer):
            if self.across is not None:
                self.across.share_buffers(self.model)
            loss = self.compute_loss(self.model if model is None else model, batch)
            self.scaled(loss).backward()
            if self.across is not None:
                self.across.average(dict(self.model.named_parameters()))
            if self.optimizer is not None:
                self.update()
                self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the tensor that backward starts from: the loss, times the scaler's factor if there is a scaler."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """Clip the gradients in `.grad` and update the parameters, with or without a scaler."""
        assert self.optimizer is not None
        clip_and_step(self.optimizer, self.clip_norm, self.scaler, self.clipped())

    def clipped(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's parameters as a loop clips them: in the order of `model.parameters()`, then others.

        The order of an optimizer's groups would give other last bits of the norm.
        """
        optimized = dict.fromkeys(parameters_of(self.optimizer))
        own = [parameter for parameter in self.model.parameters() if parameter in optimized]
        return list(dict.fromkeys([*own, *optimized]))


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[torch.nn.Parameter]:
    """Return an optimizer's parameters in the order of its groups; none if it is none, or not made yet."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def with_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.nn.Parameter]]:
    """Yield an optimizer's parameters in the order of its groups, each with its group's number."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter


def states_of(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """Return what an optimizer keeps for its parameters: tensors and numbers; none if there is no optimizer."""
    return [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    clipped: Sequence[torch.nn.Parameter] | None = None,
) -> None:
    """Clip the gradients of an optimizer's parameters, and update the parameters.

    Args:
        optimizer: with its parameters' gradients in `.grad`.
        clip_norm: the largest global gradient norm; None clips nothing.
        scaler: guards the update, if there is one.
        clipped: its parameters in the order in which they are clipped; None for that of its groups.
    """
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters_of(optimizer) if clipped is None else clipped, clip_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


def same_objects(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for each tensor among leaves the first place of this very object, and -1 for other leaves."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), place) if isinstance(leaf, torch.Tensor) else -1 for place, leaf in enumerate(leaves)
    )


def plain(leaf: Any) -> Any:
    """Return a leaf of a batch that is not a tensor, if its text says all about it.

    Raises:
        InvalidOptionError: it may hold numbers that change between steps unnoticed.
    """
    if isinstance(leaf, _PLAIN):
        return leaf
    raise InvalidOptionError(
        f"the batch holds a {type(leaf).__module__}.{type(leaf).__qualname__}, expected tensors, numbers and texts in "
        "tuples, lists and dicts; pass its tensors: torch.from_numpy(array), dict(encoding), vars(record)"
    )


def _takes_outputs(loss: Callable[..., torch.Tensor]) -> bool:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return isinstance(loss, torch.nn.Module) or getattr(loss, "__module__", None) == "torch.nn.functional"
