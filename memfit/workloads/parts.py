"""What every workload is made of: a model, a loss and a batch, and the losses that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Options = Mapping[str, Any]

AUTOCAST_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A workload before it is moved to its device and given an optimizer."""

    model: torch.nn.Module
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLoss:
    """`criterion(model(inputs), targets)` of a batch (inputs, targets), under autocast where a dtype is given."""

    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    autocast: torch.dtype | None

    def __call__(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        with autocast(inputs.device, self.autocast):
            return self.criterion(model(inputs), targets)


def cross_entropy(options: Options) -> SupervisedLoss:
    """Return cross entropy under the autocast that the options ask for."""
    return SupervisedLoss(
        criterion=torch.nn.functional.cross_entropy, autocast=AUTOCAST_DTYPES[str(options["autocast"])]
    )


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return torch.autocast to `dtype`, or a context that does nothing."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
