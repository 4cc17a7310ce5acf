"""An op that takes more memory in a step than when it was measured, as a library's workspace may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from steps import cross_entropy, make_pair

from memfit import TrainingStep


class Workspace:
    """Bytes on the host that are live from the beginning of a forward pass to its update.

    Attributes:
        bytes: of the next steps; 0 while a step is captured and measured.
        runs: how often the op was run.
    """

    def __init__(self) -> None:
        self.bytes = self.runs = 0
        self._held: torch.Tensor | None = None

    def open(self) -> None:
        self.runs += 1
        self._held = torch.empty(self.bytes, dtype=torch.uint8) if self.bytes else None

    def close(self, *_hooked: object) -> None:
        self._held = None


WORKSPACE = Workspace()


@torch.library.custom_op("memfit_tests::open_workspace", mutates_args=())
def open_workspace(inputs: torch.Tensor) -> torch.Tensor:
    WORKSPACE.open()
    return inputs.clone()


open_workspace.register_fake(torch.empty_like)


def hungry_cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return cross_entropy(model, (open_workspace(inputs), labels))


def hungry_pair(
    name: str, make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
) -> tuple[TrainingStep, TrainingStep]:
    """Return two equal steps that open the workspace; it is closed by their updates, or else by the test."""
    pair = make_pair(name, make_optimizer, loss=hungry_cross_entropy)
    for step in pair:
        if step.optimizer is not None:
            step.optimizer.register_step_pre_hook(WORKSPACE.close)
    return pair
