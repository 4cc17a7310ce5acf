"""Verification: a planned and an eager step from the same state, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memfit.runtime.state import StepState, same_bits

if TYPE_CHECKING:
    from memfit.runtime.fit import PlannedStep


def first_difference(planned: PlannedStep, batch: Any, *, reference: Callable[[Any], Any] | None = None) -> str | None:
    """Return the first thing that differs between the planned step and `reference` (eager), or None.

    Compared are the loss, parameters, buffers, gradients, the optimizer's and the scaler's state, and the generators.
    Both steps start from the state at hand, which is put back at the end.
    """
    step = planned.step
    before = StepState.take(step)
    try:
        expected_loss, expected = _outcome(reference or step.run_eager, planned, batch)
        before.put_back(step)
        loss, outcome = _outcome(planned, planned, batch)
    finally:
        before.put_back(step)
    if not same_bits(expected_loss, loss):
        return f"the loss ({expected_loss.item()!r} eager, {loss.item()!r} planned)"
    return expected.first_difference(outcome)


def _outcome(run: Callable[[Any], Any], planned: PlannedStep, batch: Any) -> tuple[torch.Tensor, StepState]:
    loss = run(batch)
    return loss, StepState.take(planned.step)
