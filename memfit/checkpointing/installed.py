"""The stand-ins for `forward` in a model's modules: put there once, and taken away without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch

from memfit.checkpointing.blocks import Named
from memfit.checkpointing.steering import Spot, Steered, SteeredFunction, Steering
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.torch_private.modules import own_call

_ABSENT = object()
_CALL = "_compiled_call_impl"
_LIBRARY_FLAG, _LIBRARY_FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_MOST_INSIDE = 60  # modules of a block whose calls are steered


class Installed:
    """The stand-ins in one model.

    Args:
        model: the whole.
        blocks: its blocks.
        rest: modules beside them.
        steering: decides what is done with each call.

    Raises:
        UnsupportedStepError: a block is wrapped in a reentrant checkpoint.
    """

    def __init__(
        self, model: torch.nn.Module, blocks: Sequence[Named], rest: Sequence[Named], steering: Steering
    ) -> None:
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._inside: dict[str, tuple[dict[str, Any], Steered, Any]] = {}
        self._shown: set[str] = set()
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
            self._install(whole, steering)
            self._spots.append(whole)
            for inner, module in _inside(block):
                spot = Spot(name=f"{name}.{inner}", module=module, is_block=False, block=whole)
                self._inside[spot.name] = (
                    vars(module),
                    Steered(steering, spot, module.forward),
                    vars(module).get("forward", _ABSENT),
                )
        for module in model.modules():  # transformers then makes no cache
            if _LIBRARY_FLAG not in vars(module) or isinstance(vars(module).get(_LIBRARY_FUNCTION), SteeredFunction):
                continue
            self._set(module, _LIBRARY_FLAG, not _is_layer(module))
            self._set(module, _LIBRARY_FUNCTION, _just_call)
        self.go_outside()

    def go_outside(self) -> None:
        """Steer the blocks that were compiled by themselves around their compiled code."""
        for spot in self._spots:
            compiled = own_call(spot.module)
            if compiled is not None and not isinstance(compiled, Steered) and not _is_layer(spot.module):
                spot.is_outside = True
                self._set(spot.module, _CALL, Steered(self._steering, spot, cast("Callable[..., Any]", compiled)))

    def _install(self, spot: Spot, steering: Steering) -> None:
        module: Any = spot.module
        if _is_layer(module):
            self._set(module, _LIBRARY_FUNCTION, SteeredFunction(steering, spot))
            self._set(module, _LIBRARY_FLAG, True)
        elif type(module).__name__ == "CheckpointWrapper":
            if getattr(getattr(module, "checkpoint_impl", None), "name", "") == "REENTRANT":
                raise UnsupportedStepError(
                    f"block {spot.name!r} is wrapped in a reentrant checkpoint; wrap it with "
                    "CheckpointImpl.NO_REENTRANT, or not at all: memfit.checkpoint decides what is computed again"
                )
            self._replace(spot, steering, partial(_call_wrapped, module))
        else:
            self._replace(spot, steering, module.forward)

    def _replace(self, spot: Spot, steering: Steering, forward: Callable[..., Any]) -> None:
        self._set(spot.module, "forward", Steered(steering, spot, forward))

    def _set(self, module: torch.nn.Module, name: str, value: Any) -> None:
        table = vars(module)
        self._before.append((table, name, table.get(name, _ABSENT)))
        table[name] = value

    def show_inside(self, names: Iterable[str] | None) -> None:
        """Let calls of these modules inside of blocks be steered, and those of no others.

        Args:
            names: None for all of them.
        """
        wanted = set(self._inside) if names is None else self._inside.keys() & set(names)
        compiled = {spot.name for spot in self._spots if spot.is_compiled}  # whose code would be compiled anew
        wanted = {name for name in wanted if self._inside[name][1].block_name not in compiled}
        for name in self._shown - wanted:
            table, _, own = self._inside[name]
            if own is _ABSENT:
                table.pop("forward")
            else:
                table["forward"] = own
        for name in wanted - self._shown:
            table, stand_in, _ = self._inside[name]
            table["forward"] = stand_in
        self._shown = wanted

    def remove(self) -> None:
        """Put everything back as it was."""
        self.show_inside(())
        for table, name, value in reversed(self._before):
            if value is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = value
        self._before.clear()


def _inside(block: torch.nn.Module) -> list[Named]:
    """Return the modules inside of a block that may be checkpointed by themselves: those that do not pass data on."""
    found = [(name, module) for name, module in block.named_modules() if name and not _is_transparent(module)]
    return found[:_MOST_INSIDE]


def _is_transparent(module: torch.nn.Module) -> bool:
    """Return whether a checkpoint of a module alone frees nothing, or its calls are not what they seem."""
    kept_input_only = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Identity, torch.nn.ModuleList, torch.nn.ModuleDict)
    return isinstance(module, (*kept_input_only, torch.jit.ScriptModule)) or _is_layer(module)


def _is_layer(module: torch.nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _just_call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _call_wrapped(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper._checkpoint_wrapped_module(*args, **kwargs)
