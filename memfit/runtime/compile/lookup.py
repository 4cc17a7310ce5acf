"""What `torch.compile(model, backend="memfit")` finds; importing this file is the first look-up of a process.

PyTorch calls a backend only for the frames that its compiler captures. Where it captures none, nothing but the look-up
tells that a budget was asked for. So the look-up does three things: it lets the compiler enter modules whose code is
torch's own (`nn.Sequential(...).compile(backend="memfit")`), it has the compiler notice hooks that come and go, and it
has the first step of an optimizer checked. A hook
on modules could see the same earlier, but the compiler would trace it into every graph of the process.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.errors import UnsupportedStepError
from memfit.runtime.compile.backend import PlannedGraph, memfit_backend
from memfit.torch_private.dynamo import compile_soundly

__all__ = ["memfit_backend"]


def _require_graph(*_: object) -> None:
    _hook.remove()
    if not PlannedGraph.called:
        raise UnsupportedStepError(
            'backend="memfit" was looked up, and no graph had reached it by the first step of an optimizer, so that no '
            "budget is enforced: PyTorch's compiler enters no model under DDP or FSDP, and none where "
            "torch.compiler.disable or TORCH_COMPILE_DISABLE forbids it. Compile the bare module, or use "
            "memfit.compile(model, budget=...), which checks each call; train models without a budget before or after"
        )


compile_soundly()
_hook: torch.utils.hooks.RemovableHandle = register_optimizer_step_pre_hook(_require_graph)
