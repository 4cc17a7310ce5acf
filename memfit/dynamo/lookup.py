"""What `torch.compile(model, backend="memfit")` finds; importing this file is the first look-up of a process.

PyTorch calls a backend only for the frames that its compiler captures. Where it captures none, nothing but the look-up
tells that a budget was asked for. So the look-up does two things. The compiler takes other settings for this backend:
it enters modules whose code is torch's own (`nn.Sequential(...).compile(backend="memfit")`), sees hooks that come and
go, and compiles code anew however often, where it would go on in eager. And the first update of each model that was
compiled with this backend is checked: a graph must have been called with parameters of the model. A hook on modules
could see the same earlier, but the compiler would trace it into every graph of the process.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.capture.optimizer import changes_parameters
from memfit.dynamo.backend import PlannedGraph, memfit_backend
from memfit.dynamo.optimizers import before_update
from memfit.errors import UnsupportedStepError
from memfit.memory.contract import Warnings
from memfit.torch_private.autograd import INSTEAD_OF_TRANSFORMS, has_modes, in_transform
from memfit.torch_private.dynamo import compile_soundly
from memfit.torch_private.sharding import is_of_fsdp

__all__ = ["memfit_backend"]

_log = logging.getLogger("memfit")
_NONE_SINCE = (
    'memfit: %s updates a model that was compiled with backend="memfit", and no graph was called since its last '
    "update, so that the budget is not enforced: the loop now calls a method or a part of the model, or PyTorch's "
    "compiler skips its code since a call under a dispatch mode (a counter of operations, say): call "
    "torch.compiler.reset() after that one"
)
_WHY = (
    "the loop calls a method or a part of what is compiled, PyTorch's compiler skips its code (TORCH_LOGS=graph_breaks "
    "says why) or enters no model whose code is all torch's inside of DDP, or torch.compiler.disable or "
    "TORCH_COMPILE_DISABLE forbids it"
)
_WHY_TRANSFORMED = f"it enters no transformation of torch.func from outside; use {INSTEAD_OF_TRANSFORMS}"
_NONE_IN_CALL = (
    'a call of {name}, which was compiled with backend="memfit", ran none of its graphs, so that no budget is enforced '
    "in it: {why}"
)
_WHY_RNN = "PyTorch's compiler leaves models that call torch.nn.LSTM, GRU or RNN as they are"
_CALLS = ("forward", "_call_impl", "_wrapped_call_impl", "__call__")  # methods that stand for their module
_unchecked: list[weakref.ref[torch.nn.Module]] = []  # models that were compiled, and not updated since
_functions: list[object] = []  # that were compiled since the last update
_calls_when_asked = 0
_calls: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # at its last update


def _asked(compiled: object) -> Callable[[], Callable[[], None]]:
    global _calls_when_asked
    _calls_when_asked = PlannedGraph.calls
    is_call = getattr(compiled, "__name__", "") in _CALLS
    owner = getattr(compiled, "__self__", None) if is_call else compiled
    seen = PlannedGraph.trained or set()
    if isinstance(owner, torch.nn.Module):
        _unchecked.append(weakref.ref(owner))
        seen = seen.difference(map(id, owner.parameters()))
    else:
        _functions.append(compiled)
    PlannedGraph.trained = seen
    return partial(_watched, type(owner).__name__ if isinstance(owner, torch.nn.Module) else "a function", Warnings())


def _watched(name: str, warnings: Warnings) -> Callable[[], None]:
    """Watch a call of what was compiled, and say at its end if it has reached no graph: no update may tell."""
    ran, is_transformed = PlannedGraph.calls, in_transform()
    may_tell = torch.is_grad_enabled() and not has_modes()

    def returned() -> None:
        if may_tell and PlannedGraph.calls == ran and sys.exc_info()[0] is None:
            why = _WHY_TRANSFORMED if is_transformed else _WHY
            warnings.warn(_NONE_IN_CALL.format(name=name, why=why), "no graph", most=1)

    return returned


def _require_graphs(optimizer: torch.optim.Optimizer) -> None:
    if not changes_parameters(optimizer):
        return
    calls = _calls.get(optimizer)
    if calls == PlannedGraph.calls:
        del _calls[optimizer]
        _log.warning(_NONE_SINCE, type(optimizer).__name__)
    elif calls is not None:
        _calls[optimizer] = PlannedGraph.calls
    functions, _functions[:] = list(_functions), []
    if functions and not _are_reached():
        raise _not_reached("a function")
    updated = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    left = [each for each in _unchecked if not _is_planned(each(), updated)]
    if len(left) < len(_unchecked):
        _calls[optimizer] = PlannedGraph.calls
    _unchecked[:] = left
    if not _unchecked:
        PlannedGraph.trained = None


def _are_reached() -> bool:
    return PlannedGraph.calls > _calls_when_asked


def _is_planned(model: torch.nn.Module | None, updated: dict[int, torch.nn.Parameter]) -> bool:
    """Return whether graphs train a model, or it is gone; False if it has no gradients yet, which would tell.

    Raises:
        UnsupportedStepError: it has gradients, and not from graphs.
    """
    if model is None:
        return True
    parameters = list(model.parameters())
    if not parameters or any(map(is_of_fsdp, parameters)):  # graphs are called with others in their place
        is_reached = _are_reached()
    else:
        is_reached = not (PlannedGraph.trained or set()).isdisjoint([None, *map(id, parameters)])
        if not is_reached and not any(_changes(updated[id(each)]) for each in parameters if id(each) in updated):
            return False
    if not is_reached:
        has_rnn = any(isinstance(each, torch.nn.RNNBase) for each in model.modules())
        raise _not_reached(f"a model ({type(model).__name__})", _WHY_RNN if has_rnn else _WHY)
    return True


def _changes(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has a gradient; DDP makes zeros for those that a rank has not used."""
    gradient = parameter.grad
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


def _not_reached(what: str, why: str = _WHY) -> UnsupportedStepError:
    return UnsupportedStepError(
        f'{what} was compiled with backend="memfit", and no graph of it has reached the backend by the first update, '
        f"so that no budget is enforced: {why}. Compile what the loop calls, or use memfit.compile(model, budget=...), "
        "which hands over what does not compile; train models without a budget before or after"
    )


def _before_step(optimizer: torch.optim.Optimizer, given: Any, named: Any) -> Any:
    if not (_unchecked or _functions or optimizer in _calls):
        return None
    return before_update(lambda: _require_graphs(optimizer), given, named)


compile_soundly(memfit_backend, _asked)
register_optimizer_step_pre_hook(_before_step)
