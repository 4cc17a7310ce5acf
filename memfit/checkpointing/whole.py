"""Compiled calls of a whole model: steps settle in eager mode, and run compiled by the plan from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from memfit.checkpointing.blocks import Named
from memfit.errors import UnsupportedStepError
from memfit.torch_private.modules import eager_call, own_call, set_call, uncompiled

MOST_COMPILATIONS = 3  # of one model: the first, and two that correct the plan


class CompiledCall:
    """Stands in the place of a module's compiled call, with blocks inside.

    Args:
        module: that `torch.compile` made, or whose `compile()` was called.

    Attributes:
        is_on: whether calls run compiled.
        around: calls (begin, returned) of the loop around a compiled call, if the module is what the loop calls.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self._before = module, own_call(module)
        inner = uncompiled(module)
        self._eager = eager_call(inner)
        self._compiled = cast("Callable[..., Any]", self._before or vars(module)["forward"])
        self.is_on = False
        self.around: tuple[Callable[..., None], Callable[..., None]] | None = None
        set_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self._eager(*args, **kwargs)
        if self.around is None:
            return self._compiled(*args, **kwargs)
        self.around[0](self.module, args, kwargs)
        output = self._compiled(*args, **kwargs)
        self.around[1](self.module, args, output)
        return output

    def remove(self) -> None:
        """Put the compiled call back."""
        set_call(self.module, cast("Callable[..., Any] | None", self._before))


def compiled_calls_in(model: torch.nn.Module, blocks: Sequence[Named]) -> list[CompiledCall]:
    """Return stand-ins for the compiled calls of modules that have blocks inside, the model itself among them.

    Raises:
        UnsupportedStepError: memfit.compile runs them.
    """
    inside = {id(block) for _, block in blocks}
    found: list[CompiledCall] = []
    for name, module in model.named_modules():
        is_compiled = own_call(module) is not None or uncompiled(module) is not module
        if not is_compiled or id(module) in inside or not any(id(inner) in inside for inner in module.modules()):
            continue
        if type(own_call(module)).__name__ in ("PlannedCalls", "CompiledCall"):
            raise UnsupportedStepError(
                f"memfit.checkpoint: the calls of {name or 'the model'} run by {type(own_call(module)).__name__} of "
                "memfit already; use one of memfit.compile and memfit.checkpoint"
            )
        found.append(CompiledCall(module))
    return found
