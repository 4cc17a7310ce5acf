"""What `torch.compile(model, backend="memfit")` finds; importing this file is the first look-up of a process.

PyTorch calls a backend only for the frames that its compiler captures. Where it captures none, nothing but the look-up
tells that a budget was asked for. So the look-up does two things. The compiler takes other settings for this backend:
it enters modules whose code is torch's own (`nn.Sequential(...).compile(backend="memfit")`), sees hooks that come and
go, and compiles code anew however often, where it would go on in eager. And the first step of an optimizer after each
`torch.compile` with this backend is checked. A hook on modules could see the same earlier, but the compiler would trace
it into every graph of the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.capture.optimizer import changes_parameters
from memfit.dynamo.backend import PlannedGraph, memfit_backend
from memfit.dynamo.optimizers import before_update
from memfit.errors import UnsupportedStepError
from memfit.torch_private.dynamo import compile_soundly

__all__ = ["memfit_backend"]


def _asked() -> None:
    global _is_checked
    _is_checked = PlannedGraph.called = False


def _require_graph(optimizer: torch.optim.Optimizer) -> None:
    global _is_checked
    if not changes_parameters(optimizer):
        return
    is_first, _is_checked = not _is_checked, True
    if is_first and not PlannedGraph.called:
        raise UnsupportedStepError(
            'a model was compiled with backend="memfit", and no graph has reached it by the next step of an optimizer, '
            "so that no budget is enforced: the loop calls a method or a part of what is compiled, PyTorch's compiler "
            "enters no model whose code is all torch's inside of DDP, or torch.compiler.disable or "
            "TORCH_COMPILE_DISABLE forbids it. Compile what the loop calls, or use memfit.compile(model, budget=...), "
            "which checks each call; train models without a budget before or after"
        )


def _before_step(optimizer: torch.optim.Optimizer, given: Any, named: Any) -> Any:
    return None if _is_checked else before_update(lambda: _require_graph(optimizer), given, named)


_is_checked = False
compile_soundly(memfit_backend, _asked)
register_optimizer_step_pre_hook(_before_step)
