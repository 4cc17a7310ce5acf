"""Which module of a model makes a call, in forward and in backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.graph import Phase
from memfit.torch_private.autograd import backward_node, next_sequence_number


class ModuleScopes:
    """The modules of a model that run, while a step is captured.

    Attributes:
        cumulative: counts of batches, by the module's name, of modules whose running statistics average all of them.
        raised_in: the innermost module that raised an error.

    Args:
        model: its modules are named.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.cumulative: dict[str, torch.Tensor] = {}
        self.raised_in = ""
        self._modules = {module: name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._of_node: dict[int, str] = {}

    def scope(self) -> tuple[Phase, str]:
        """Return the phase and the module of the call that is made now."""
        node = backward_node()
        if node is not None:
            return Phase.BACKWARD, self._of_node.get(node[1], "")
        module = self._stack[-1] if self._stack else ""
        # Autograd makes an op's node just before it dispatches the op here.
        self._of_node.setdefault(next_sequence_number() - 1, module)
        return Phase.FORWARD, module

    def step_count(self) -> torch.Tensor | None:
        """Return the count of batches of the innermost module, if its running statistics average all of them."""
        return self.cumulative.get(self._stack[-1]) if self._stack else None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note, inside the block, which module of the model runs."""

        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            outer = self._stack[-1] if self._stack else ""
            self._stack.append(self._modules.get(module, outer))

        def leave(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            name = self._stack.pop()
            raised = output is None and sys.exc_info()[0] is not None
            if raised and name and not self.raised_in:  # the hook of the innermost module runs first
                self.raised_in = f"{name!r} ({type(module).__name__})"

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
