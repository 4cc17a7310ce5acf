"""Verification: planned and eager steps from the same states, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from memfit.capture import TrainingStep, capture
from memfit.capture.compare import require_as_eager
from memfit.errors import VerificationError
from memfit.runtime.agreement import agreed_difference
from memfit.runtime.bits import same_bits
from memfit.runtime.state import StepState, left_as_it_was
from memfit.torch_private import tree_flatten

# Added to each parameter after it is scaled: the second state differs in all values, and in no sign of a large one.
_SCALE, _SHIFT = 1.0625, 2.0**-10


class RunsStep(Protocol):
    """A step, and another way to run it that can be verified."""

    step: TrainingStep

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The generators that the step's code hands to torch, beside the default ones."""
        ...

    def __call__(self, batch: Any) -> Any: ...


def require_same(planned: RunsStep, batch: Any, *, is_recorded: bool = True) -> None:
    """Compare the bits of planned and eager steps on `batch`, from the present state and from perturbed parameters.

    A value that was frozen at capture shows only in the second pair. The state is put back at the end.

    Args:
        planned: the planned step.
        batch: the batch of all steps.
        is_recorded: whether the planned step runs what was recorded once. If the user's Python code runs in each step,
            nothing can be frozen, and one pair is enough.

    Raises:
        VerificationError: the bits differ; the message names the first tensor that does. It blames kernels that are not
            deterministic only if two eager steps differ too.
        CaptureError, UnsupportedStepError: the bits differ because the captured step dispatches other calls than eager;
            names the line.
    """
    difference, where = first_difference(planned, batch), ""
    before = StepState.take(planned.step, planned.generators)
    try:
        if difference is None and is_recorded:
            later, changed = _later(planned.step, batch)
            difference, where = first_difference(planned, later), f", {changed}"
        if difference is None:
            return
        eager_difference = difference_of_eager(planned, batch)
        if eager_difference is not None:
            raise VerificationError(
                f"two eager steps from the same state differ in {eager_difference}, so the kernels are not "
                "deterministic and nothing can be compared: try torch.use_deterministic_algorithms(True)"
            )
        if is_recorded:
            _require_same_calls(planned.step, batch)
    finally:
        before.put_back(planned.step)
    raise VerificationError(
        f"the planned step differs from eager in {difference}{where}; two eager steps from the same state are equal: "
        "report this, with the step"
    )


def first_difference(planned: RunsStep, batch: Any) -> str | None:
    """Return the name of the first value that differs between the planned step and eager, or None.

    Loss, parameters, buffers, gradients, the states of the optimizer and the scaler, and the random generators are
    compared. Both steps start from the present state, which is put back at the end.

    Args:
        planned: the planned step.
        batch: the batch of both steps.
    """
    return _difference(planned, batch, planned)


def difference_of_eager(planned: RunsStep, batch: Any) -> str | None:
    """Return the name of the first value that differs between two eager steps from the present state, or None.

    Args:
        planned: its step is run as eager does.
        batch: the batch of both steps.
    """
    return _difference(planned, batch, planned.step.run_eager)


def _later(step: TrainingStep, batch: Any) -> tuple[Any, str]:
    """Change what a step computes from: its parameters, or the state of a function; return a batch, and say so."""
    if not step.has_backward:
        return (step.run_eager(batch), batch[1]), "from the state after one call"
    perturb(step)
    return batch, "after the parameters were changed"


def perturb(step: TrainingStep) -> None:
    """Change all values of all parameters that are trained."""
    with torch.no_grad():
        for parameter in step.model.parameters():
            if parameter.requires_grad:
                parameter.mul_(_SCALE).add_(_SHIFT)


def _difference(planned: RunsStep, batch: Any, run: Callable[[Any], Any]) -> str | None:
    """Return the first difference between an eager step and `run`."""
    step = planned.step
    with left_as_it_was(step, planned.generators) as put_back:
        expected_loss, expected = _outcome(step.run_eager, planned, batch)
        put_back()
        loss, outcome = _outcome(run, planned, batch)
    difference = _difference_of_losses(step, expected_loss, loss) or expected.first_difference(outcome)
    return agreed_difference(step.across, difference)


def _difference_of_losses(step: TrainingStep, expected: Any, found: Any) -> str | None:
    if step.has_backward:
        return None if same_bits(expected, found) else f"the loss ({expected.item()!r} and {found.item()!r})"
    for number, (mine, theirs) in enumerate(zip(tree_flatten(expected)[0], tree_flatten(found)[0], strict=True)):
        if not same_bits(mine, theirs):
            return f"leaf {number} of the next state"
    return None


def _outcome(run: Callable[[Any], Any], planned: RunsStep, batch: Any) -> tuple[Any, StepState]:
    loss = run(batch)
    return loss, StepState.take(planned.step, planned.generators)


def _require_same_calls(step: TrainingStep, batch: Any) -> None:
    require_as_eager(step, batch, capture(step, batch).stream)
