"""Parts of a workload: model, loss and batch, and the losses that several workloads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import InvalidOptionError

Options = Mapping[str, Any]
"""Option -> value, of the type of its default."""

_AUTOCAST_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A workload before it is moved to its device and given an optimizer."""

    model: torch.nn.Module
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """An iterative workload before it is moved to its device: `state = function(state, batch)`."""

    function: Callable[[Any, Any], Any]
    state: Any
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLoss:
    """`criterion(model(inputs), targets)` of a batch (inputs, targets), under autocast if a dtype is given."""

    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    autocast: torch.dtype | None

    def __call__(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        with autocast(inputs.device, self.autocast):
            return self.criterion(model(inputs), targets)


def cross_entropy(options: Options) -> SupervisedLoss:
    """Return cross entropy, under the autocast of the options."""
    return SupervisedLoss(criterion=torch.nn.functional.cross_entropy, autocast=autocast_dtype(options))


def autocast_dtype(options: Options) -> torch.dtype | None:
    """Return the dtype of option `autocast`; None computes in the dtype of the model."""
    return _AUTOCAST_DTYPES[options["autocast"]]


def head_count(name: str, options: Options) -> int:
    """Return the number of attention heads.

    Args:
        name: of the workload.
        options: `width` and `head_width`, in features.

    Raises:
        InvalidOptionError: the heads do not divide the width.
    """
    width, head_width = options["width"], options["head_width"]
    if width % head_width:
        raise InvalidOptionError(f"workload {name}: width {width} is not a multiple of head_width {head_width}")
    return width // head_width


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return torch.autocast to `dtype`, or a context that does nothing.

    Args:
        device: of the step.
        dtype: to compute in, or None.
    """
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
