"""Direct calls: the function of torch's Python interface that calls an operator in less time than its overload does.

`torch.ops.aten.mul.Tensor(a, b)` matches its arguments against a schema that it reads at each call. `torch.mul(a, b)`
has code made for its signatures, but which operator that code chooses depends on the arguments. A function is used only
for forms of calls of which it was seen that they arrive at torch's dispatcher as the overload's do: the same operator,
the same arguments. For that, both are called on stand-ins without data, and stopped there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memfit.binding import Value, map_values
from memfit.torch_private.autograd import UnwrappedMode, no_modes, only_mode
from memfit.torch_private.tensors import bare_overload

INTERFACE = (torch, torch.nn.functional, torch.Tensor)
_COMPILED = (types.BuiltinFunctionType, types.MethodDescriptorType)  # functions that are Python may do anything


class DirectCalls:
    """Finds the fastest function for calls, and remembers what it was for each form of a call.

    Args:
        interface: objects whose functions are tried, by the names of operators.
    """

    def __init__(self, interface: Sequence[Any] = INTERFACE) -> None:
        self._interface = interface
        self._found: dict[tuple[Any, str], Callable[..., Any]] = {}

    def find(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """Return a function that does with these arguments what `target` does.

        Args:
            target: returned itself if it is no operator's overload.
            args, kwargs: its arguments, with Values in the places of tensors.
        """
        bare = bare_overload(target)
        if bare is None:
            return target
        form = (target, repr(map_values((args, dict(kwargs)), _kind)))
        if form not in self._found:
            self._found[form] = _direct(self._interface, target, args, kwargs) or bare
        return self._found[form]


class _ArrivedError(Exception):
    """A call has arrived at the dispatcher; it is not carried out."""


class _Stopping(UnwrappedMode):
    """Keeps the calls that arrive, and carries out none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        raise _ArrivedError


def _direct(
    interface: Sequence[Any], target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    with no_modes():
        stand_ins: dict[Value, torch.Tensor] = {}
        try:
            given = map_values((tuple(args), dict(kwargs)), lambda value: _stand_in(value, stand_ins))
        except ValueError:
            return None
    expected = _arriving(target, *given)
    if not stand_ins or expected is None or expected[0] is not target:
        return None
    functions = _functions(interface, target)
    return next((each for each in functions if are_same_arguments(_arriving(each, *given), expected)), None)


def _functions(interface: Sequence[Any], target: Any) -> Iterator[Callable[..., Any]]:
    name = target.name().partition("::")[2].partition(".")[0]
    for holder in interface if target.namespace == "aten" else ():
        function = getattr(holder, name, None)
        if isinstance(function, _COMPILED):
            yield function


def _stand_in(value: Value, stand_ins: dict[Value, torch.Tensor]) -> torch.Tensor:
    if value.conjugated or value.negated:
        raise ValueError("a lazy view is carried out before a call arrives")
    shape = (1,) * len(value.shape)
    return stand_ins.setdefault(value, torch.empty(shape, dtype=value.dtype, device="meta"))


def _kind(value: Value) -> tuple[Any, ...]:
    """Return what the choice among an operator's signatures may depend on."""
    return value.dtype, len(value.shape), value.conjugated or value.negated


def _arriving(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the operator and the arguments that arrive when `function` is called; None if it raises or calls none."""
    mode = _Stopping()
    try:
        with torch.no_grad(), only_mode(mode):
            function(*args, **kwargs)
    except (_ArrivedError, TypeError, ValueError, RuntimeError):
        return mode.calls[0] if mode.calls else None
    return None


def are_same_arguments(one: Any, other: Any) -> bool:
    """Return whether arguments are of the same types and values; tensors have to be the same objects."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_same_arguments, one, other))
    if isinstance(one, dict):
        return are_same_arguments(sorted(one.items()), sorted(other.items()))
    return one is other or repr(one) == repr(other)  # repr tells -0.0 from 0.0
