"""The optimizers of a compiled model: the state that they have yet to make, and checks before and after updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.capture.optimizer import innermost, require_supported, update_cost, without_hooks
from memfit.capture.training_step import parameters_of
from memfit.errors import InvalidTargetError, UnsupportedStepError
from memfit.system.recorder import taken_bytes
from memfit.torch_private.tensors import FakeTensorMode


class Optimizers:
    """Follows the updates by optimizers.

    Args:
        device: of the model.
        ran: returns how many calls of graphs there were so far.
        updated: called after each update.

    Attributes:
        followed: these optimizers.
        may_step_alone: whether updates may follow calls that ran no graph.
    """

    def __init__(self, device: torch.device, ran: Callable[[], int], updated: Callable[[], None]) -> None:
        self._device, self._ran, self._updated = device, ran, updated
        self.followed: tuple[torch.optim.Optimizer, ...] = ()
        self.may_step_alone = False
        self._hooks: list[Any] = []
        self._ran_before: dict[int, int] = {}  # by the optimizer: calls of graphs before its last step

    def follow(self, *optimizers: object) -> None:
        """Count what the state of these optimizers will take, and measure their updates.

        Args:
            optimizers: in place of those before, which are followed no more. Of one that is wrapped (by Accelerate, by
                Lightning) the innermost is followed.

        Raises:
            InvalidTargetError: one is no optimizer.
            UnsupportedStepError: one evaluates the loss several times in a step.
        """
        for hook in self._hooks:
            hook.remove()
        self.followed, self._hooks, self._ran_before = (), [], {}
        for optimizer in map(innermost, optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InvalidTargetError(
                    f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer, or one wrapped"
                )
            require_supported(optimizer)
            self.followed += (optimizer,)
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._ran_before[id(optimizer)] = self._ran()
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def bytes_to_come(self) -> int:
        """Return the bytes of the state that the optimizers have yet to make."""
        total = 0
        for optimizer in self.followed:
            known: dict[Any, int] = {}
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if not parameter.requires_grad or optimizer.state.get(parameter):
                        continue
                    key = number, tuple(parameter.shape), parameter.stride(), parameter.dtype
                    if key not in known:
                        known[key] = self._state_bytes(optimizer, parameter, group)
                    total += known[key]
        return total

    def _state_bytes(
        self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, group: dict[str, Any]
    ) -> int:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        cost = update_cost(without_hooks(optimizer), parameter, mode.from_tensor(parameter.detach()), group, mode)
        return sum(
            taken_bytes(made.untyped_storage().nbytes(), self._device)
            for made in cost.state.values()
            if made.device.type == self._device.type
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, given: Any, named: Any) -> Any:
        return before_update(lambda: self._require_calls(optimizer), given, named)

    def _require_calls(self, optimizer: torch.optim.Optimizer) -> None:
        is_alone = self._ran() == self._ran_before[id(optimizer)]
        if is_alone and not self.may_step_alone and _changes_parameters(optimizer):
            raise UnsupportedStepError(
                "the optimizer is about to step, and no call of the model was planned since its last step: the loop "
                "calls a part of the model, or `model.forward`, in the place of `model(...)`; plan the module that the "
                "loop calls"
            )

    def _stepped(self, optimizer: torch.optim.Optimizer, _given: Any, _named: Any) -> None:
        """Note an update; the `step` of a class that calls that of its base class is hooked twice, and is one."""
        self._ran_before[id(optimizer)] = self._ran()
        self._updated()


def _changes_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next update does: not without gradients, nor at a rate of 0, by which states are made."""
    is_moving = any(group.get("lr", 1.0) != 0 for group in optimizer.param_groups)
    return is_moving and any(parameter.grad is not None for parameter in parameters_of(optimizer))


def before_update(
    check: Callable[[], None], given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run `check` before the update: at once, or, if the step has a closure that computes the gradients, after that.

    It is for hooks that run before a step, and returns what these do.

    Args:
        check: raises if the update must not take place.
        given: the arguments of `Optimizer.step`, the optimizer first.
        named: its named arguments.
    """
    optimizer, *others = given
    is_named = "closure" in named
    closure = named["closure"] if is_named else (others[0] if others else None)
    if closure is None:
        check()
        return given, named

    def checked() -> Any:
        value = closure()
        check()
        return value

    if is_named:
        return given, {**named, "closure": checked}
    return (optimizer, checked, *others[1:]), named
