"""The optimizer's part of a step, as ops whose targets run the optimizer's own code.

What changes between steps (learning rates, step counts, bias corrections) is thereby read where eager reads it, and
computed by eager's own arithmetic; nothing of it is baked into a graph. An optimizer of torch.optim treats its
parameters one by one, so each parameter is updated as soon as its gradient is complete. What reads several gradients
(clipping by the global norm, a GradScaler, an optimizer memfit does not know, one with step hooks) becomes one op at
the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.torch_private import (
    DATA_DEPENDENT_ERRORS,
    FakeTensorMode,
    TorchDispatchMode,
    real_tensors,
    storage_key,
    tree_flatten,
)
from memfit.capture.training_step import TrainingStep
from memfit.errors import UnsupportedStepError


class ParameterUpdate:
    """The update of one parameter: `ParameterUpdate(...)(gradient)` runs the optimizer's `step` on it alone."""

    measurable = False
    __name__ = "optimizer_update"

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, group: int, workspace_bytes: int
    ) -> None:
        self.optimizer = optimizer
        self.parameter = parameter
        self.group = group
        self.workspace_bytes = workspace_bytes
        self._alone = _alone(optimizer)

    def __call__(self, gradient: torch.Tensor) -> None:
        # The groups and the state are looked up anew: a scheduler writes to them, load_state_dict replaces them.
        optimizer, alone = self.optimizer, self._alone
        self.parameter.grad = gradient
        alone.state = optimizer.state
        alone.param_groups = [{**optimizer.param_groups[self.group], "params": [self.parameter]}]
        try:
            type(optimizer).step(alone)
        finally:
            self.parameter.grad = None


class WholeUpdate:
    """The update of all parameters at once: unscale, clip, step, as the eager loop would, with the gradients in
    `.grad`.
    """

    measurable = False
    __name__ = "optimizer_update"

    def __init__(self, step: TrainingStep, parameters: Sequence[torch.nn.Parameter], workspace_bytes: int) -> None:
        self.step = step
        self.parameters = tuple(parameters)
        self.workspace_bytes = workspace_bytes

    def __call__(self, *gradients: torch.Tensor) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            self.step.update()
        finally:
            for parameter in self.parameters:
                parameter.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """What a parameter's update needs: its state tensors by name (fakes), and the bytes it holds while it runs."""

    state: Mapping[str, torch.Tensor]
    workspace_bytes: int


def updates_one_by_one(step: TrainingStep) -> bool:
    """Return whether each parameter may be updated by itself, as soon as its gradient is complete, with the same
    bits.
    """
    optimizer = step.optimizer
    assert optimizer is not None
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    known = type(optimizer).__module__.startswith("torch.optim")
    return known and not hooks and step.clip_norm is None and step.scaler is None


def require_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedStepError for an optimizer that runs the step itself, several times."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedStepError(
            "LBFGS evaluates the loss several times in one step; memfit plans one evaluation: use another one, or "
            "fit(optimizer=None) and call LBFGS yourself"
        )


def update_cost(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    fake_parameter: torch.Tensor,
    group: Mapping[str, Any],
    mode: FakeTensorMode,
) -> UpdateCost:
    """Return what updating `parameter` takes, found by running the optimizer's code on fakes, which costs no memory.

    Where its code cannot run on fakes (it looks at values), two states of the parameter's size are assumed, as Adam
    has, and as much again for its workspace.
    """
    alone = _alone(optimizer)
    with mode:
        fake = torch.nn.Parameter(torch.empty_like(fake_parameter), requires_grad=True)
        fake.grad = torch.empty_like(fake)
        alone.state = {fake: _fake_state(optimizer.state.get(parameter, {}), mode)}
        alone.state = _DefaultState(alone.state)
        alone.param_groups = [{**group, "params": [fake]}]
        before = {storage_key(t) for t in tree_flatten(alone.state[fake])[0] if isinstance(t, torch.Tensor)}
        try:
            with LiveBytes() as live:
                type(optimizer).step(alone)
        except DATA_DEPENDENT_ERRORS:
            pair = {name: torch.empty_like(fake) for name in ("assumed_0", "assumed_1")}
            return UpdateCost(state=pair, workspace_bytes=2 * fake.untyped_storage().nbytes())
    state = {name: t for name, t in alone.state[fake].items() if isinstance(t, torch.Tensor)}
    created = sum(t.untyped_storage().nbytes() for t in state.values() if storage_key(t) not in before)
    return UpdateCost(state=state, workspace_bytes=max(0, live.peak_bytes - created))


class _DefaultState(dict[Any, Any]):
    def __missing__(self, key: Any) -> dict[str, Any]:
        self[key] = {}
        return self[key]


def _alone(optimizer: torch.optim.Optimizer) -> Any:
    """A second optimizer object of the same class and settings, without the instance's patched `step`."""
    alone = object.__new__(type(optimizer))
    alone.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    return alone


def _fake_state(state: Mapping[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
    def faked(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel() == 1 and value.device.type == "cpu":  # a step count: the optimizer reads its value
            with real_tensors():
                number = value.item()
            return torch.tensor(number, dtype=value.dtype)
        return mode.from_tensor(value)

    return {name: faked(value) for name, value in state.items()}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made under it that are alive: `peak_bytes` is the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {storage_key(leaf) for leaf in _tensors((args, kwargs))}
        returned = func(*args, **(kwargs or {}))
        for tensor in _tensors(returned):
            key = storage_key(tensor)
            if key in inputs and key not in self._holders:
                continue
            size = tensor.untyped_storage().nbytes()
            if key not in self._holders:
                self._holders[key] = 0
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._holders[key] += 1
            weakref.finalize(tensor, self._release, key, size)
        return returned

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.live_bytes -= size


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))
