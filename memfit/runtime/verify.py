"""Verification: a planned and an eager step from the same state, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from memfit.capture import TrainingStep
from memfit.errors import VerificationError
from memfit.runtime.state import StepState, same_bits


class RunsStep(Protocol):
    """What can be verified and measured: a step, and another way to run it."""

    step: TrainingStep

    def __call__(self, batch: Any) -> torch.Tensor: ...


def require_same(planned: RunsStep, batch: Any) -> None:
    """Raise VerificationError where the planned step's bits are not eager's, naming the first tensor that differs."""
    difference = first_difference(planned, batch)
    if difference is not None:
        raise VerificationError(
            f"the planned step differs from eager in {difference}; its kernels may not be deterministic: try "
            "torch.use_deterministic_algorithms(True), or compare with planner 'none'"
        )


def first_difference(planned: RunsStep, batch: Any) -> str | None:
    """Return the first thing that differs between the planned step and eager, or None.

    Compared are the loss, parameters, buffers, gradients, the optimizer's and the scaler's state, and the generators.
    Both steps start from the state at hand, which is put back at the end.
    """
    step = planned.step
    before = StepState.take(step)
    try:
        expected_loss, expected = _outcome(step.run_eager, planned, batch)
        before.put_back(step)
        loss, outcome = _outcome(planned, planned, batch)
    finally:
        before.put_back(step)
    if not same_bits(expected_loss, loss):
        return f"the loss ({expected_loss.item()!r} eager, {loss.item()!r} planned)"
    return expected.first_difference(outcome)


def _outcome(run: Callable[[Any], Any], planned: RunsStep, batch: Any) -> tuple[torch.Tensor, StepState]:
    loss = run(batch)
    return loss, StepState.take(planned.step)
