"""The state that a training step changes: taken, compared, put back. Verification and measurement leave no trace
by it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture import TrainingStep
from memfit.capture.generators import all_states, set_state


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """Copies of everything a step changes: parameters, buffers, gradients, optimizer, scaler, generators; the
    optimizer's by number.
    """

    tensors: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    optimizer: dict[int, dict[str, Any]]
    scaler: dict[str, Any] | None
    generators: dict[str, torch.Tensor]

    @staticmethod
    def take(step: TrainingStep) -> StepState:
        """Return copies of the step's state as it is now."""
        states = step.optimizer.state if step.optimizer is not None else {}
        return StepState(
            tensors={name: tensor.detach().clone() for name, tensor in _tensors(step).items()},
            gradients={
                name: None if parameter.grad is None else parameter.grad.detach().clone()
                for name, parameter in step.model.named_parameters()
            },
            optimizer={
                number: {key: _copied(value) for key, value in states[parameter].items()}
                for number, parameter in enumerate(_optimized(step))
                if parameter in states
            },
            scaler=copy.deepcopy(step.scaler.state_dict()) if step.scaler is not None else None,
            generators=all_states(),
        )

    def put_back(self, step: TrainingStep) -> None:
        """Write the copies back into the step's own tensors."""
        with torch.no_grad():
            for name, tensor in _tensors(step).items():
                tensor.copy_(self.tensors[name])
        for name, parameter in step.model.named_parameters():
            gradient = self.gradients[name]
            parameter.grad = None if gradient is None else gradient.clone()
        if step.optimizer is not None:
            step.optimizer.state.clear()
            optimized = _optimized(step)
            for number, state in self.optimizer.items():
                step.optimizer.state[optimized[number]] = {key: _copied(value) for key, value in state.items()}
        if step.scaler is not None and self.scaler is not None:
            step.scaler.load_state_dict(self.scaler)
        for device, state in self.generators.items():
            set_state(device, state)

    def first_difference(self, other: StepState) -> str | None:
        """Return the name of the first thing whose bits differ in `other`, or None."""
        for name, tensor in self.tensors.items():
            if not same_bits(tensor, other.tensors[name]):
                return name
        for name, gradient in self.gradients.items():
            theirs = other.gradients[name]
            both = gradient is not None and theirs is not None
            if (gradient is None) != (theirs is None) or (both and not same_bits(gradient, theirs)):
                return f"the gradient of {name}"
        for number, state in self.optimizer.items():
            theirs = other.optimizer.get(number, {})
            for key, value in state.items():
                if key not in theirs or not _same(value, theirs[key]):
                    return f"optimizer state {key!r} of parameter {number}"
        if self.scaler != other.scaler:
            return "the gradient scaler"
        for device in self.generators.keys() & other.generators.keys():
            if not torch.equal(self.generators[device], other.generators[device]):
                return f"the state of the random generator of {device}"
        return None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; NaNs of equal bits are the same."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return not _has_zeros_of_other_sign(left, right)
    left, right = left.detach().contiguous().view(-1), right.detach().contiguous().view(-1)
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _has_zeros_of_other_sign(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.is_floating_point() and bool((torch.signbit(left) != torch.signbit(right)).any())


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    return type(left) is type(right) and left == right


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _optimized(step: TrainingStep) -> list[torch.Tensor]:
    """The optimizer's parameters in the order of its groups, which number its states."""
    return [p for group in step.optimizer.param_groups for p in group["params"]] if step.optimizer is not None else []


def _tensors(step: TrainingStep) -> dict[str, torch.Tensor]:
    return {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
