"""Checks before an optimizer changes parameters, whether its step has a closure or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


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


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
