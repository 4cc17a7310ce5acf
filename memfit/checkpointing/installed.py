"""The stand-ins for `forward` in a model's modules: put there once, and taken away without a trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from memfit.checkpointing.blocks import Named, Piece, is_layer, is_wrapper
from memfit.checkpointing.passes import Spot
from memfit.checkpointing.steering import OfClass, Steered, SteeredFunction, Steering
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.torch_private.modules import Structure, own_call, set_call, uncompiled

_ABSENT = object()
_LIBRARY_FLAG, _LIBRARY_FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_MOST_INSIDE = 60  # modules of a block whose calls are steered
_TAKEN_OVER = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop", "context_fn"}


class Installed:
    """The stand-ins in one model.

    Args:
        model: the whole.
        blocks: its blocks.
        rest: modules beside them.
        steering: decides what is done with each call.

    Raises:
        InvalidOptionError: a block is steered already.
    """

    def __init__(
        self, model: torch.nn.Module, blocks: Sequence[Named], rest: Sequence[Named], steering: Steering
    ) -> None:
        self._before: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}  # table, what was there, and is now
        self._inside: dict[str, tuple[dict[str, Any], Steered, Any]] = {}
        self._outside: list[tuple[torch.nn.Module, Any]] = []
        self._steering, self._spots = steering, list[Spot]()
        beside = {name for name, _ in rest}
        for name, block in (*blocks, *rest):
            if isinstance(vars(block).get("forward"), Steered) or isinstance(
                vars(block).get(_LIBRARY_FUNCTION), SteeredFunction
            ):
                self.remove()
                raise InvalidOptionError(
                    f"block {name!r} is steered by memfit.checkpoint already; call close() of that handle first"
                )
            whole = Spot(name=name, module=block, is_block=True, is_rest=name in beside)
            if is_wrapper(block) or not is_layer(block):
                called = partial(_call_wrapped, block) if is_wrapper(block) else block.forward
                self._set(block, "forward", Steered(steering, whole, called))
            self._spots.append(whole)
            for inner, module in _inside(block):
                spot = Spot(name=f"{name}.{inner}", module=module, is_block=False, block=whole)
                self._inside[spot.name] = (
                    vars(module),
                    Steered(steering, spot, module.forward),
                    vars(module).get("forward", _ABSENT),
                )
        wholes: dict[int, tuple[torch.nn.Module, list[Piece]]] = {}
        for _, block in blocks:
            if isinstance(block, Piece):
                (whole,) = vars(block)["whole"]
                wholes.setdefault(id(whole), (whole, []))[1].append(block)
        for whole, pieces in wholes.values():
            self._set(whole, "forward", _InPieces(steering, whole, pieces))
        own = {id(spot.module): SteeredFunction(steering, spot) for spot in self._spots if is_layer(spot.module)}
        self._model, self._structure = model, Structure(model)
        self._functions = [
            (module, own.get(id(module), _just_call)) for module in model.modules() if hasattr(module, _LIBRARY_FLAG)
        ]
        self.take_over()
        self.go_outside()

    @property
    def is_outdated(self) -> bool:
        """Whether modules were replaced, added or taken out since."""
        return self._structure.is_outdated

    def take_over(self) -> None:
        """Decide in the place of transformers' gradient checkpointing, which loops turn on and off between passes.

        Raises:
            UnsupportedStepError: it was turned on in a way that would be lost.
        """
        is_new = False
        for module, function in self._functions:
            table, is_steered = vars(module), function is not _just_call
            flag = is_steered or not is_layer(module)  # of a model: it then makes no cache
            is_own = table.get(_LIBRARY_FUNCTION) is function and table.get(_LIBRARY_FLAG) is flag
            if is_own or not (is_steered or _LIBRARY_FLAG in table):
                continue
            if not is_new:
                refuse_others(self._model)
                is_new = True
            self._set(module, _LIBRARY_FLAG, flag)
            self._set(module, _LIBRARY_FUNCTION, function)

    def go_outside(self) -> None:
        """Steer the blocks that were compiled by themselves around their compiled code."""
        outer = {id(uncompiled(each)): each for each in self._model.modules() if uncompiled(each) is not each}
        for spot in self._spots:
            compiled, around = own_call(spot.module), outer.get(id(uncompiled(spot.module)), spot.module)
            if spot.is_outside or (compiled is None and uncompiled(around) is around):
                continue
            self._put_back(vars(spot.module), "forward")
            spot.is_outside = True
            steered = Steered(self._steering, spot, cast("Callable[..., Any]", compiled or vars(around)["forward"]))
            if compiled is None:
                self._set(around, "forward", steered)
            else:
                self._outside.append((spot.module, compiled))
                set_call(spot.module, steered)

    def _set(self, module: torch.nn.Module, name: str, value: Any) -> None:
        table = vars(module)
        self._before[id(table), name] = table, table.get(name, _ABSENT), value
        table[name] = value

    def _put_back(self, table: dict[str, Any], name: str) -> None:
        """Put back what was in a table, unless the user has put something else there since."""
        table, before, own = self._before.pop((id(table), name), (table, _ABSENT, _ABSENT))
        present = table.get(name, _ABSENT)
        if present is own or self._is_earlier(present):
            _set_or_drop(table, name, before)

    def _is_earlier(self, value: Any) -> bool:
        """Return whether a value is a stand-in of the same loop's, which a state that is put back may hold."""
        return isinstance(value, (Steered, SteeredFunction, _InPieces)) and value.steering is self._steering

    def show_inside(self, names: Iterable[str] | None) -> None:
        """Let calls of these modules inside of blocks be steered, and those of no others.

        Args:
            names: None for all of them.
        """
        wanted = set(self._inside) if names is None else self._inside.keys() & set(names)
        if wanted:
            compiled = {spot.name for spot in self._spots if spot.is_compiled}  # whose code would be compiled anew
            wanted = {name for name in wanted if self._inside[name][1].block_name not in compiled}
        for name, (table, stand_in, own) in self._inside.items():  # a state that is put back has other ones
            is_shown = table.get("forward") is stand_in
            if is_shown and name not in wanted and own is _ABSENT:
                table.pop("forward")
            elif is_shown != (name in wanted):
                table["forward"] = stand_in if name in wanted else own

    def remove(self) -> None:
        """Put everything back as it was."""
        self.show_inside(())
        for table, _, own in self._inside.values():
            if self._is_earlier(table.get("forward")):
                _set_or_drop(table, "forward", own)
        for module, compiled in self._outside:
            set_call(module, compiled)
        self._outside.clear()
        for (_, name), (table, _, _) in tuple(self._before.items()):
            self._put_back(table, name)


def _set_or_drop(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def refuse_others(model: torch.nn.Module) -> None:
    """Refuse checkpoints whose place memfit cannot take without a loss.

    Which modules are checkpointed, with `use_reentrant` or without, and which results a selective checkpoint keeps, is
    decided by plans.

    Raises:
        UnsupportedStepError: a context or function of the user's, or an argument that is not torch's.
    """
    for name, module in model.named_modules():
        table = vars(module)
        is_on = table.get(_LIBRARY_FLAG) and _LIBRARY_FUNCTION in table
        function = table[_LIBRARY_FUNCTION] if is_on else table.get("checkpoint_fn")
        why = "" if function is None or not (is_on or is_wrapper(module)) else _what_is_lost(function)
        if why:
            raise UnsupportedStepError(
                f"module {name!r} is checkpointed with {why}, which would be lost: memfit.checkpoint decides what is "
                "recomputed; leave it out of gradient_checkpointing_kwargs or of the wrapper, or switch that "
                "checkpointing off"
            )


def _what_is_lost(function: Any) -> str:
    """Return what of a checkpointing function plans do not decide; empty if nothing."""
    if isinstance(function, SteeredFunction) or function is _just_call:
        return ""
    called, given = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    if called is not checkpoint:
        return f"a function of its own ({_name_of(called)}; transformers' offload=True is one)"
    if given.keys() - _TAKEN_OVER:
        return f"{min(given.keys() - _TAKEN_OVER)}=..., no argument of torch.utils.checkpoint"
    context = given.get("context_fn", noop_context_fn)
    makes = context.func if isinstance(context, partial) else context
    if makes in (noop_context_fn, create_selective_checkpoint_contexts):
        return ""
    return f"a context_fn of its own ({_name_of(context)})"


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _inside(block: torch.nn.Module) -> list[Named]:
    """Return the modules inside of a block that may be checkpointed by themselves: those that do not pass data on."""
    found = [(name, module) for name, module in block.named_modules() if name and not _is_transparent(module)]
    return found[:_MOST_INSIDE]


def _is_transparent(module: torch.nn.Module) -> bool:
    """Return whether a checkpoint of a module alone frees nothing, or its calls are not what they seem."""
    kept_input_only = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Identity, torch.nn.ModuleList, torch.nn.ModuleDict)
    return isinstance(module, (*kept_input_only, torch.jit.ScriptModule)) or is_layer(module)


class _InPieces:
    """Stands in the place of a sequence's `forward`: runs its pieces, as long as they are all of its members.

    A call that has begun may have taken it up before it was replaced. A copy of the sequence has its own `forward`.

    Args:
        steering: of the model.
        whole: the sequence.
        pieces: of it.
    """

    def __init__(self, steering: Steering, whole: torch.nn.Module, pieces: Sequence[Piece]) -> None:
        self.steering, self._whole, self._pieces = steering, whole, pieces
        self._members = [member for piece in pieces for member in piece]

    def __call__(self, value: Any) -> Any:
        stand_in, members = vars(self._whole).get("forward"), list(self._whole.children())
        if stand_in is not self and isinstance(stand_in, _InPieces):
            return stand_in(value)
        if len(members) != len(self._members) or any(map(operator.is_not, members, self._members)):
            return cast("Any", type(self._whole)).forward(self._whole, value)
        for piece in self._pieces:
            value = piece(value)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return OfClass(memo[id(self._whole)])

    def __reduce__(self) -> Any:
        return getattr, (self._whole, "forward")


def _just_call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _call_wrapped(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper._checkpoint_wrapped_module(*args, **kwargs)
