"""Hooks on the model, which a copy of the model does not have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A hook on the model, which a copy of the model does not have.

    Args:
        call: what it calls.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    def __reduce__(self) -> Any:
        return getattr, (_Nothing, "nothing")


class WeakHook(Hook):
    """A hook on what outlives the object that it calls, such as all optimizers, and does not keep that object alive.

    Args:
        call: a method.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        reference = weakref.WeakMethod(call)

        def called(*given: Any) -> Any:
            method = reference()
            return None if method is None else method(*given)

        super().__init__(called)


class _EagerHook(Hook):
    """A hook on a model that PyTorch's compiler leaves out where it compiles the model's call."""

    def __call__(self, *given: Any) -> Any:
        return None if torch.compiler.is_compiling() else self.call(*given)


class _Nothing:
    @staticmethod
    def nothing(*_: Any) -> None:
        return None


def hooks_around(model: torch.nn.Module, begin: Callable[..., None], returned: Callable[..., None]) -> list[Any]:
    """Call functions around each call of what a loop calls, before all other hooks; return the hooks that do so.

    Calls that PyTorch's compiler compiles have none: it would compile the functions, too.

    Args:
        model: or the models, as a ModuleList.
        begin: called with the module, and the positional and the keyword arguments.
        returned: called with the module, the positional arguments, and what the call returns.
    """
    hooks: list[Any] = []
    for called in model if type(model) is torch.nn.ModuleList else [model]:
        hooks.append(called.register_forward_pre_hook(_EagerHook(begin), with_kwargs=True, prepend=True))
        hooks.append(called.register_forward_hook(_EagerHook(returned)))
    return hooks


def remove_all(*groups: list[Any]) -> None:
    """Remove hooks, and forget them.

    Args:
        groups: lists of what the registration of hooks has returned; they are empty then.
    """
    for hooks in groups:
        for hook in hooks:
            hook.remove()
        hooks.clear()


class Awaited:
    """A hook on what the model has returned: as long as it exists, a backward pass may begin there.

    Args:
        begins: called with it when one does.
    """

    __slots__ = ("__weakref__", "_begins")

    def __init__(self, begins: Callable[[Awaited], None]) -> None:
        self._begins = begins

    def __call__(self, _gradient: torch.Tensor) -> None:
        self._begins(self)
