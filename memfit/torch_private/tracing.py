"""Steps that are recorded on tensors without data."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch._guards
import torch._subclasses
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _pop_mode_temporarily

from memfit.torch_private.patching import replaced
from memfit.torch_private.tensors import tree_flatten


class Regions:
    """The regions of `torch.utils.checkpoint` that have run inline.

    Attributes:
        count: so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._uses: list[Counter[torch.Tensor]] = []  # of leaves, by the reentrant regions

    def add_reentrant(self, results: Any, args: Sequence[Any]) -> None:
        """Note what a region with use_reentrant=True uses: its backward pass adds to gradients by itself.

        Args:
            results: of the region, nested as it returned them.
            args: of the region; the graph of autograd that led to them is no part of it.
        """
        before = {each.grad_fn for each in args if isinstance(each, torch.Tensor) and each.grad_fn is not None}
        self._uses.append(_uses_of_leaves(results, before))

    def summed_otherwise(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the leaves whose gradients eager sums in another order: used in a reentrant region and elsewhere.

        Args:
            loss: of the step.
        """
        if not self._uses:
            return []
        total = _uses_of_leaves(loss, set())
        return [leaf for leaf, uses in total.items() if any(0 < each[leaf] < uses for each in self._uses)]


def _uses_of_leaves(results: Any, before: set[Any]) -> Counter[torch.Tensor]:
    """Return how often leaves are used by what leads to results, of a region or of a step.

    Args:
        results: nested tensors.
        before: nodes of autograd that are not part of it.
    """
    leaves = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, torch.Tensor)]
    waiting = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None and leaf.grad_fn not in before]
    seen, uses = {*before, *waiting}, Counter[torch.Tensor]()
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if hasattr(node, "variable"):
                uses[node.variable] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return uses


@contextmanager
def checkpoints_inlined() -> Iterator[Regions]:
    """Run the regions of `torch.utils.checkpoint` inline: the plan decides what is rematerialized."""
    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name  # from torch 2.15 on
    regions = Regions()

    def region(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        regions.count += 1
        yield

    class Inlined:
        """Takes the place of `CheckpointFunction`: calls the region, checkpoints nothing.

        As there, the results have no gradient if none of the arguments has one, whatever parameters the region uses.
        """

        @staticmethod
        def apply(function: Any, _preserve: bool, *args: Any) -> Any:
            regions.count += 1
            trained = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
                results = function(*args)
            regions.add_reentrant(results, args)
            return results

    with replaced(module, name, region), replaced(module, "CheckpointFunction", Inlined):
        yield regions


def _asked_by_torch() -> bool:
    """Return whether the code that called the caller of this function is torch's or memfit's own."""
    room = str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
    return room in ("torch", "memfit")


class _NobodysType(type):
    """Metaclass of the class that stands for FakeTensor: of its questions, only torch's own get the true answer."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return _asked_by_torch() and isinstance(instance, FakeTensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _asked_by_torch() and issubclass(subclass, FakeTensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return FakeTensor(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)


_STANDS_FOR = "_memfit_stands_for"  # key of a stand-in's function


class _NobodysTensor(metaclass=_NobodysType):
    pass


def _eager_answer(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _asked_by_torch() else answer

    ask.__dict__[_STANDS_FOR] = function
    return ask


def _in_place_of(function: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return stand_in(function, *args, **kwargs)

    called.__dict__[_STANDS_FOR] = function
    return called


_ASKS_FOR_FUNCTIONS = (
    torch.overrides.has_torch_function,
    torch.overrides.has_torch_function_unary,
    torch.overrides.has_torch_function_variadic,
)


def _without_function_mode(asks: Callable[..., bool], *args: Any) -> bool:
    """Return what is answered where the innermost function mode is off: the one of a capture."""
    with _pop_mode_temporarily() if torch._C._len_torch_function_stack() else nullcontext():
        return asks(*args)


def stood_for(value: Any) -> Any:
    """Return what a stand-in of `answered_as_eager` stands for, and any other value as it is."""
    if value is _NobodysTensor:
        return FakeTensor
    if type(value) is _Facade:
        return value.__dict__["_module"]
    return value.__dict__.get(_STANDS_FOR, value) if type(value) is FunctionType else value


@contextmanager
def answered_as_eager(one_hot: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Answer code outside of torch, inside the block, that no tensor is fake and that no fake mode runs.

    Libraries ask this to leave out what a tracer cannot follow; a captured step must not leave it out. Where a module
    outside of torch has FakeTensor, `is_fake`, `detect_fake_mode` or `active_fake_mode` under a global name, a stand-in
    takes its place. `torch.compiler.is_compiling` and `torch.jit.is_tracing` are False during a capture anyway.

    Args:
        one_hot: takes the place of `torch.nn.functional.one_hot`, which asks the same inside of torch; it is called
            with the original, and with the arguments.
    """
    fake_tensor, guards = torch._subclasses.fake_tensor, torch._guards
    stand_ins = {
        id(FakeTensor): _NobodysTensor,
        id(fake_tensor.is_fake): _eager_answer(fake_tensor.is_fake, False),
        id(guards.detect_fake_mode): _eager_answer(guards.detect_fake_mode, None),
        id(guards.active_fake_mode): _eager_answer(guards.active_fake_mode, None),
        id(torch.nn.functional.one_hot): _in_place_of(torch.nn.functional.one_hot, one_hot),
        **{id(asks): _in_place_of(asks, _without_function_mode) for asks in _ASKS_FOR_FUNCTIONS},
    }
    of_torch = torch._subclasses, torch.nn.functional, torch.overrides, torch.autograd
    tables: list[dict[str, Any]] = [vars(module) for module in of_torch]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "memfit") and isinstance(module, ModuleType):
            tables.append(vars(module))
    stood_in = [(t, name, value) for t in tables for name, value in list(t.items()) if id(value) in stand_ins]
    stood_in += [(vars(torch._subclasses), "fake_tensor", fake_tensor), (vars(torch), "_guards", guards)]
    stood_in += [(sys.modules, module.__name__, module) for module in (fake_tensor, guards)]  # imports in functions
    for table, name, value in stood_in:
        table[name] = stand_ins.get(id(value)) or _Facade(value, stand_ins)
    try:
        yield
    finally:
        for table, name, value in stood_in:
            table[name] = value


class _Facade:
    """A module of torch's as other code sees it: some of its names are replaced, and torch's own modules keep them."""

    def __init__(self, module: Any, stand_ins: dict[int, Any]) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_stand_ins"] = stand_ins

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._stand_ins.get(id(value), value)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)
