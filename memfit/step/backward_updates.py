"""A step that runs as eager does, but for its updates: each parameter is updated as soon as its gradient is there.

Its gradient is freed at once, so that gradients do not wait for each other until the end of backward. What user code
reads of a parameter without a gradient (`weight.detach()`) is not known: autograd raises if that was saved for
backward, and what is checkpointed (`torch.utils.checkpoint`) is recomputed from the updated parameter; the first
step is compared with eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.capture import TrainingStep
from memfit.capture.optimizer import ParameterUpdate, overlap, updates_one_by_one
from memfit.capture.training_step import parameters_of, with_groups
from memfit.torch_private.modules import leaf_hooks


def run_updating(step: TrainingStep, batch: Any, is_awaited: Callable[[torch.Tensor], bool]) -> torch.Tensor:
    """Run a step with the updates in backward where that gives eager's bits, else as `step.run_eager`; return the loss.

    Args:
        step: the training step.
        batch: nested like the step's own.
        is_awaited: whether a parameter has to stay as it is, since what reads it is recomputed later.
    """
    if not updates_in_backward(step):
        return step.run_eager(batch)
    updates = _updates(step)
    loss = step.compute_loss(step.model, batch)

    waiting: list[torch.Tensor] = []

    def update(parameter: torch.Tensor) -> None:
        waiting.append(parameter)
        for each in [each for each in waiting if not is_awaited(each)]:
            _update(updates[each], each)
        waiting[:] = [each for each in waiting if is_awaited(each)]

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in updates if parameter.requires_grad]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    for parameter, each in updates.items():
        _update(each, parameter)  # one that had a gradient before and was not reached
    _as_after_step(step)
    return loss.detach()


def updates_in_backward(step: TrainingStep) -> bool:
    """Return whether each parameter may be updated as soon as its gradient is there, with eager's bits.

    An optimizer of torch treats its parameters one by one. Not so with clipping by the global norm, with a scaler, with
    hooks that read gradients, or where parameters share memory.
    """
    if step.optimizer is None or not updates_one_by_one(step):
        return False
    parameters = parameters_of(step.optimizer)
    return not any(any(leaf_hooks(parameter)) for parameter in parameters) and not overlap(parameters)


def _updates(step: TrainingStep) -> dict[torch.Tensor, ParameterUpdate]:
    assert step.optimizer is not None
    own = with_groups(step.optimizer)
    return {parameter: ParameterUpdate(step.optimizer, [parameter], group, 0) for group, parameter in own}


def _update(update: ParameterUpdate, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        update(parameter.grad)


def _as_after_step(step: TrainingStep) -> None:
    """Leave what the optimizer's own `step` and `zero_grad` would: a scheduler warns if it was not called."""
    assert step.optimizer is not None
    step.optimizer.zero_grad(set_to_none=True)
    step.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
