"""Compiled calls of modules with blocks inside: eager until plans settle, and compiled by the plan from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from memfit.checkpointing.blocks import Named
from memfit.dynamo.model import PlannedCalls
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.torch_private.dynamo import is_compiled_by_aot
from memfit.torch_private.modules import eager_call, own_call, set_call, uncompiled

_NO_AOT = (
    "the model is compiled as a whole by a backend that does not use AOTAutograd: PyTorch's checkpoints would draw "
    "other random numbers there where a block is recomputed, so that the model runs as it was written; compile its "
    "blocks by themselves, or use aot_eager or inductor"
)
_MOST_COMPILATIONS = 3  # of one model: the first, and two that correct the plan


class _CompiledCall:
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
        if self.around is None or torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        self.around[0](self.module, args, kwargs)
        output = self._compiled(*args, **kwargs)
        self.around[1](self.module, args, output)
        return output

    def remove(self) -> None:
        """Put the compiled call back."""
        set_call(self.module, cast("Callable[..., Any] | None", self._before))


class CompiledCalls:
    """The compiled calls of a model, outside of its blocks.

    Args:
        model: what the loop calls.
        blocks: of the model.

    Attributes:
        compilations: of the model so far.
        why_not: they must not run compiled; empty if they may.
        is_new: whether the next window compiles, which takes memory of the compiler's own.

    Raises:
        UnsupportedStepError: memfit runs them already.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[Named]) -> None:
        inside = {id(module) for _, block in blocks for module in block.modules()}
        self._model, self._calls = uncompiled(model), list[_CompiledCall]()
        self.compilations, self.is_new, self.why_not = 0, False, ""
        for name, module in model.named_modules():
            is_compiled = own_call(module) is not None or uncompiled(module) is not module
            if not is_compiled or id(module) in inside or not any(id(inner) in inside for inner in module.modules()):
                continue
            if isinstance(own_call(module), (PlannedCalls, _CompiledCall)):
                self.remove()
                if isinstance(own_call(module), PlannedCalls):
                    why = "memfit.compile runs {}; use one of memfit.compile and memfit.checkpoint"
                else:
                    why = "memfit.checkpoint runs {} already; call close() of that handle first"
                raise UnsupportedStepError(why.format(f"the calls of {name or 'the model'}"))
            self.why_not = self.why_not if is_compiled_by_aot(module) else _NO_AOT
            self._calls.append(_CompiledCall(module))

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def may_compile(self) -> bool:
        """Whether another plan may be compiled."""
        return self.compilations < _MOST_COMPILATIONS

    def refuse_host_budget(self) -> None:
        """Refuse copies to the host of a model whose compiled code makes none.

        Raises:
            InvalidOptionError: there are compiled calls, which are put back.
        """
        if self:
            self.remove()
            raise InvalidOptionError(
                "memfit.checkpoint: host_budget is given for a model that is compiled as a whole, whose code copies "
                "nothing to the host; compile its blocks by themselves, or leave host_budget out"
            )

    def note_compilation(self) -> None:
        """Count the compilation that the next window makes."""
        self.compilations += 1
        self.is_new = True

    def switch_on(self, begin: Callable[..., None], returned: Callable[..., None]) -> bool:
        """Run compiled from now on.

        Args:
            begin, returned: called before and after the model's own call, if that is compiled: in the place of hooks,
                which the compiler would take in.

        Returns:
            Whether it is.
        """
        for call in self._calls:
            call.is_on = True
            if uncompiled(call.module) is self._model:
                call.around = begin, returned
        return any(call.around is not None for call in self._calls)

    def freeze(self) -> None:
        """Run compiled, with nothing around."""
        for call in self._calls:
            call.is_on, call.around = not self.why_not, None

    def remove(self) -> None:
        """Put the compiled calls back."""
        for call in self._calls:
            call.remove()
