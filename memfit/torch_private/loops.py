"""Loops that Dynamo divides at a graph break in them: it takes up the rest of the loop behind the break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch._guards
import torch._subclasses
import torch.utils.checkpoint

from memfit.torch_private.patching import replaced


def divide_loops(patches: ExitStack) -> None:
    """Let Dynamo compile the graphs around a break in a loop, over modules too.

    Dynamo cannot take up an iterator of a dict, of a generator or of `zip` behind a break, but one of a tuple.
    (`enumerate` it turns into a generator itself.) The integers that such an iterator gives are constants of the
    graphs. Where Dynamo has to leave a function to eager, it compiles the functions that are called there, but none of
    torch's own: so `Sequential` is not. Writing to the rows of a mask is a break, as reading them is.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import BuiltinVariable, PolyfilledFunctionVariable, TensorVariable, builder

    enter = patches.enter_context
    enter(replaced(InstructionTranslatorBase, "maybe_has_backedge", lambda _self: False))
    traced, name = PolyfilledFunctionVariable._get_polyfill_handlers()[enumerate], "__torch_dynamo_polyfill__"
    enter(replaced(traced, name, _enumerate_unchanging(getattr(traced, name))))
    enter(replaced(BuiltinVariable, "call_zip", _zip_unchanging(BuiltinVariable.call_zip)))
    enter(replaced(BuiltinVariable, "call_function_handler_cache", {}))  # it holds `call_zip`
    enter(replaced(builder, "is_int_specialization_case", _or_of_iterator(builder.is_int_specialization_case)))
    setter = "method___setitem__"
    enter(replaced(TensorVariable, setter, _set_items_without_mask(getattr(TensorVariable, setter))))
    for kind in (torch.nn.ModuleList, torch.nn.Sequential):
        enter(replaced(kind, "__iter__", _iterate_as_list))
    enter(replaced(torch.nn.Sequential, "forward", _forward_in_turn))
    enter(replaced(torch.nn.ModuleDict, "__iter__", lambda self: iter(tuple(self._modules))))
    enter(replaced(torch.nn.ModuleDict, "items", lambda self: tuple(self._modules.items())))
    enter(replaced(torch.nn.ModuleDict, "values", lambda self: tuple(self._modules.values())))
    enter(replaced(torch.nn.Module, "children", lambda self: iter([m for _, m in _named_children(self)])))
    enter(replaced(torch.nn.Module, "named_children", lambda self: iter(_named_children(self))))


_UNCHANGING = (tuple, range, torch.nn.ModuleList, torch.nn.Sequential)  # while a loop goes over them


def _enumerate_unchanging(others: Callable[[Iterable[Any], int], Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Let Dynamo trace a tuple's iterator for `enumerate`, and `others` where a loop goes over what may change."""

    def enumerates(iterable: Any, start: int = 0) -> Iterator[Any]:
        if type(iterable) in _UNCHANGING:
            return iter(tuple([(start + number, iterable[number]) for number in range(len(iterable))]))
        return others(iterable, start)

    return enumerates


def _zip(*sequences: Sequence[Any], strict: bool = False) -> Iterator[Any]:
    lengths = [len(each) for each in sequences]
    if strict and min(lengths) < max(lengths):
        return zip(*[iter(each) for each in sequences], strict=True)  # raises an error at the end of the shortest
    return iter(tuple([tuple([each[number] for each in sequences]) for number in range(min(lengths))]))


def _zip_unchanging(others: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo trace a tuple's iterator for `zip`, and what `others` makes where a loop goes over what may change."""
    from torch._dynamo.variables.base import VariableTracker

    def call_zip(own: Any, tracer: Any, *iterables: Any, **options: Any) -> Any:
        if not iterables or any(each.python_type() not in _UNCHANGING for each in iterables):
            return others(own, tracer, *iterables, **options)
        return tracer.inline_user_function_return(VariableTracker.build(tracer, _zip), list(iterables), options)

    return call_zip


def _or_of_iterator(is_constant: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Let Dynamo take an integer for a constant if `is_constant` says so, or if the iterator of a tuple gave it."""
    from torch._dynamo.source import TupleIteratorGetItemSource

    def answer(value: Any, source: Any) -> bool:
        origin = source
        while origin is not None and not isinstance(origin, TupleIteratorGetItemSource):
            origin = getattr(origin, "base", None)
        return origin is not None or is_constant(value, source)

    return answer


def _set_items_without_mask(set_items: Callable[..., Any]) -> Callable[..., Any]:
    """Break a graph where it sets the elements of a mask to those of a tensor: how many these are, its data decides.

    The gradient of such a call reads elements of a mask, which no graph of known sizes can hold.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables import TensorVariable, TupleVariable

    def method___setitem__(own: Any, tracer: Any, key: Any, value: Any) -> Any:
        key, value = key.realize(), value.realize()
        keys = [each.realize() for each in key.items] if isinstance(key, TupleVariable) else [key]
        by_mask = any(isinstance(each, TensorVariable) and each.dtype is torch.bool for each in keys)
        if by_mask and isinstance(value, TensorVariable) and value.requires_grad is not False and value.ndim != 0:
            unimplemented(
                gb_type="memfit: elements of a mask",
                context=f"{own}[{key}] = {value}",
                explanation="The data decides how many elements are set, and how many gradients there are.",
                hints=[],
            )
        return set_items(own, tracer, key, value)

    return method___setitem__


def _iterate_as_list(modules: Any) -> Iterator[torch.nn.Module]:
    return iter(list(modules._modules.values()))


def _named_children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    found: list[tuple[str, torch.nn.Module]] = []
    for name, child in module._modules.items():
        if child is not None and all(child is not other for _, other in found):
            found.append((name, child))
    return found


def _forward_in_turn(self: torch.nn.Sequential, input: Any) -> Any:
    for module in self:
        input = module(input)
    return input
