"""What `torch.compile(model, backend="memfit")` finds; importing this file is the first look-up of a process.

PyTorch calls a backend only for the frames that its compiler captures. Where it captures none, nothing but the look-up
tells that a budget was asked for. So the look-up does two things. The compiler takes other settings for this backend:
it enters modules whose code is torch's own (`nn.Sequential(...).compile(backend="memfit")`), sees hooks that come and
go, and compiles code anew however often, where it would go on in eager. And the first update of each model that was
compiled with this backend is checked: a graph must have been called with parameters of the model. A hook on modules
could see the same earlier, but the compiler would trace it into every graph of the process.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.capture.optimizer import changes_parameters
from memfit.dynamo.backend import PlannedGraph, memfit_backend
from memfit.dynamo.optimizers import before_update
from memfit.errors import UnsupportedStepError
from memfit.torch_private.dynamo import compile_soundly
from memfit.torch_private.sharding import is_of_fsdp

__all__ = ["memfit_backend"]

_CALLS = ("forward", "_call_impl", "_wrapped_call_impl", "__call__")  # methods that stand for their module
_unchecked: list[weakref.ref[torch.nn.Module]] = []  # models that were compiled, and not updated since
_functions: list[object] = []  # that were compiled since the last update


def _asked(compiled: object) -> None:
    is_call = getattr(compiled, "__name__", "") in _CALLS
    owner = getattr(compiled, "__self__", None) if is_call else compiled
    PlannedGraph.called, seen = False, PlannedGraph.trained or set()
    if isinstance(owner, torch.nn.Module):
        _unchecked.append(weakref.ref(owner))
        seen = seen.difference(map(id, owner.parameters()))
    else:
        _functions.append(compiled)
    PlannedGraph.trained = seen


def _require_graphs(optimizer: torch.optim.Optimizer) -> None:
    if not changes_parameters(optimizer):
        return
    functions, _functions[:] = list(_functions), []
    if functions and not PlannedGraph.called:
        raise _not_reached("a function")
    updated = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    _unchecked[:] = [each for each in _unchecked if not _is_planned(each(), updated)]
    if not _unchecked:
        PlannedGraph.trained = None


def _is_planned(model: torch.nn.Module | None, updated: dict[int, torch.nn.Parameter]) -> bool:
    """Return whether graphs train a model, or it is gone; False if it has no gradients yet, which would tell.

    Raises:
        UnsupportedStepError: it has gradients, and not from graphs.
    """
    if model is None:
        return True
    parameters = list(model.parameters())
    if not parameters or any(map(is_of_fsdp, parameters)):  # graphs are called with others in their place
        is_reached = PlannedGraph.called
    else:
        is_reached = not (PlannedGraph.trained or set()).isdisjoint([None, *map(id, parameters)])
        if not is_reached and not any(_changes(updated[id(each)]) for each in parameters if id(each) in updated):
            return False
    if not is_reached:
        raise _not_reached(f"a model ({type(model).__name__})")
    return True


def _changes(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has a gradient; DDP makes zeros for those that a rank has not used."""
    gradient = parameter.grad
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


def _not_reached(what: str) -> UnsupportedStepError:
    return UnsupportedStepError(
        f'{what} was compiled with backend="memfit", and no graph of it has reached the backend by the first update, '
        "so that no budget is enforced: the loop calls a method or a part of what is compiled, PyTorch's compiler "
        "enters no model whose code is all torch's inside of DDP, or torch.compiler.disable or "
        "TORCH_COMPILE_DISABLE forbids it. Compile what the loop calls, or use memfit.compile(model, budget=...), "
        "which checks each call; train models without a budget before or after"
    )


def _before_step(optimizer: torch.optim.Optimizer, given: Any, named: Any) -> Any:
    return before_update(lambda: _require_graphs(optimizer), given, named) if _unchecked or _functions else None


compile_soundly(memfit_backend, _asked)
register_optimizer_step_pre_hook(_before_step)
