"""The optimizers of a compiled model: the state that they have yet to make, and checks before and after updates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.capture.optimizer import (
    alive_optimizers,
    changes_parameters,
    innermost,
    require_supported,
    update_cost,
)
from memfit.capture.training_step import with_groups
from memfit.errors import InvalidTargetError, UnsupportedStepError
from memfit.memory.footprint import footprint
from memfit.step.divided_updates import Parts
from memfit.step.hooks import remove_all
from memfit.system.recorder import taken_bytes
from memfit.torch_private.tensors import FakeTensorMode

_ADAM_STATES = 2  # per parameter: exp_avg and exp_avg_sq


class Optimizers:
    """Follows the updates by optimizers.

    Args:
        device: of the model.
        ran: returns how many calls of graphs there were so far.
        updated: called after each update.

    Attributes:
        may_step_alone: whether updates may follow calls that ran no graph.
    """

    def __init__(self, device: torch.device, ran: Callable[[], int], updated: Callable[[], None]) -> None:
        self._device, self._ran, self._updated = device, ran, updated
        self._followed: list[weakref.ref[torch.optim.Optimizer]] = []
        self.may_step_alone = False
        self._hooks: list[Any] = []
        self._ran_before: dict[int, int] = {}  # by the optimizer: calls of graphs before its last step

    @property
    def followed(self) -> tuple[torch.optim.Optimizer, ...]:
        """These optimizers. One that the loop has replaced by another goes, with its states."""
        return tuple(each for each in (follow() for follow in self._followed) if each is not None)

    def follow(self, *optimizers: object) -> None:
        """Count what the state of these optimizers will take, and measure their updates.

        Args:
            optimizers: in place of those before, which are followed no more. Of one that is wrapped (by Accelerate, by
                Lightning) the innermost is followed.

        Raises:
            InvalidTargetError: one is no optimizer.
            UnsupportedStepError: one evaluates the loss several times in a step.
        """
        remove_all(self._hooks)
        self._followed, self._ran_before = [], {}
        for optimizer in map(innermost, optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InvalidTargetError(
                    f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer, or one wrapped"
                )
            require_supported(optimizer)
            self._followed.append(weakref.ref(optimizer))
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._ran_before[id(optimizer)] = self._ran()
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def bytes_to_come(self) -> int:
        """Return the bytes of the state that the optimizers have yet to make."""
        return sum(sum(_bytes_to_come(optimizer, self._device).values()) for optimizer in self.followed)

    def all_bytes_to_come(self) -> int:
        """Return the same of these optimizers and of all others of the process."""
        return sum(sum(_bytes_to_come(optimizer, self._device).values()) for optimizer in alive_optimizers())

    def _before_step(self, optimizer: torch.optim.Optimizer, given: Any, named: Any) -> Any:
        return before_update(lambda: self._require_calls(optimizer), given, named)

    def _require_calls(self, optimizer: torch.optim.Optimizer) -> None:
        is_alone = self._ran() == self._ran_before[id(optimizer)]
        if is_alone and not self.may_step_alone and changes_parameters(optimizer):
            raise UnsupportedStepError(
                "the optimizer is about to step, and no call of the model was planned since its last step: the loop "
                "calls a part of the model, or `model.forward`, in the place of `model(...)`; plan the module that the "
                "loop calls, or train under memfit.checkpoint, whose loops may call parts"
            )

    def _stepped(self, optimizer: torch.optim.Optimizer, _given: Any, _named: Any) -> None:
        """Note an update; the `step` of a class that calls that of its base class is hooked twice, and is one."""
        self._ran_before[id(optimizer)] = self._ran()
        self._updated()


def state_to_come(parameters: Sequence[torch.nn.Parameter], device: torch.device) -> tuple[int, int]:
    """Return the bytes of the state that optimizers have yet to make for parameters, and which of them are assumed.

    Optimizers are found among the objects of the process. For a parameter that none has, two states of its size are
    assumed, as Adam has.

    Args:
        parameters: that are trained.
        device: of the state that counts.
    """
    found: dict[torch.nn.Parameter, int] = {}
    for optimizer in alive_optimizers():
        for parameter, size_bytes in _bytes_to_come(optimizer, device).items():
            found[parameter] = found.get(parameter, 0) + size_bytes
    assumed_bytes = _ADAM_STATES * sum(footprint([each for each in parameters if each not in found], device).values())
    return assumed_bytes + sum(found.get(each, 0) for each in parameters), assumed_bytes


def have_state(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether an optimizer of the process has made its state for some of these parameters."""
    return any(each in optimizer.state for optimizer in alive_optimizers() for each in parameters)


def _bytes_to_come(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[torch.nn.Parameter, int]:
    """Return the bytes of the state that an optimizer has yet to make, by parameter that it trains."""
    found: dict[torch.nn.Parameter, int] = {}
    known: dict[Any, int] = {}
    for number, parameter in with_groups(optimizer):
        if not parameter.requires_grad or optimizer.state.get(parameter):
            found[parameter] = 0
            continue
        key = number, tuple(parameter.shape), parameter.stride(), parameter.dtype
        if key not in known:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            fake = mode.from_tensor(parameter.detach())
            cost = update_cost(optimizer, parameter, fake, optimizer.param_groups[number], mode)
            made = [each for each in cost.state.values() if each.device.type == device.type]
            known[key] = sum(taken_bytes(each.untyped_storage().nbytes(), device) for each in made)
        found[parameter] = known[key]
    return found


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
    parts = closure if isinstance(closure, Parts) else None
    closure = closure if parts is None else parts.own
    if closure is None:
        check()
        return given, named

    def checked(*arguments: Any, **options: Any) -> Any:  # a line search calls closure(backward=False)
        value = closure(*arguments, **options)
        check()
        return value

    if parts is not None:
        parts.own = checked
        return given, named
    if is_named:
        return given, {**named, "closure": checked}
    return (optimizer, checked, *others[1:]), named
