"""Hooks, tables and compiled calls of modules and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.optim.optimizer as torch_optimizer
from torch._C._dynamo import eval_frame

from memfit.torch_private.patching import replaced


def module_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's dictionaries of parameters and buffers, whose values may be None."""
    return module._parameters, module._buffers


def submodules_table(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's dictionary of the modules in it, whose values may be None."""
    return module._modules


def tables_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries that a module's forward pass reads: attributes, parameters, buffers, modules, hooks."""
    tables: tuple[Any, ...] = (
        vars(module),
        module._parameters,
        module._buffers,
        module._modules,
        module._forward_pre_hooks,
        module._forward_hooks,
    )
    return [table for table in tables if isinstance(table, dict)]  # TorchScript's modules have others


def own_tensors(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Return a model's parameters and buffers, each once, as `parameters()` and `buffers()` give them.

    Six times faster than those, which put together all names: it is called in each step.
    """
    parameters: dict[torch.nn.Parameter, None] = {}
    buffers: dict[torch.Tensor, None] = {}
    seen: set[torch.nn.Module] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            parameters.update([(own, None) for own in module._parameters.values() if own is not None])
            buffers.update([(own, None) for own in module._buffers.values() if own is not None])
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(parameters), list(buffers)


class Structure:
    """A model's modules under their names, to see later whether one was replaced, added or taken out.

    Args:
        model: whose modules are looked at now.

    Attributes:
        modules: these, the model first.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = list(model.modules())
        self._children = [dict(_children_of(module)) for module in self.modules]

    def refresh(self) -> None:
        """Look again if the model has other modules now."""
        if self.is_outdated:
            self.__init__(self.modules[0])

    @property
    def parameters(self) -> list[dict[str, torch.nn.Parameter | None]]:
        """The tables of parameters, one for each module."""
        return [module._parameters for module in self.modules if isinstance(module._parameters, dict)]

    @property
    def is_outdated(self) -> bool:
        """Whether the model has other modules now; asked in each step."""
        return self._children != list(map(_children_of, self.modules))


def _children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    table = module._modules
    return table if isinstance(table, dict) else dict(table.items())  # TorchScript's are of another class


def has_lazy_parameters(model: torch.nn.Module) -> bool:
    """Return whether a parameter or buffer has no shape before the first call of its module."""
    return any(map(torch.nn.parameter.is_lazy, (*model.parameters(), *model.buffers())))


def module_hooks(module: torch.nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return a module's dictionaries of hooks: before and after forward, before and after backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def global_module_hooks() -> tuple[dict[Any, Any], ...]:
    """Return the dictionaries of hooks on all modules: before and after forward, before and after backward."""
    own = torch.nn.modules.module
    return (
        own._global_forward_pre_hooks,
        own._global_forward_hooks,
        own._global_backward_pre_hooks,
        own._global_backward_hooks,
    )


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return an optimizer's dictionaries of hooks before and after its step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """Return the function that updates the parameters in an optimizer's `step`, without the wrappers of torch.

    That is a range for the profiler, hooks, and gradients that are switched off, which takes as long as some updates
    do. Where there are hooks, and where gradients are recorded, it is `step` itself.

    Args:
        optimizer: one of torch's.
    """
    step = type(optimizer).step
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        *optimizer_hooks(optimizer),
    )
    if any(hooks) or torch.is_grad_enabled() or optimizer.defaults.get("differentiable"):
        return step
    while step.__code__.co_filename == torch_optimizer.__file__ and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


@contextmanager
def no_hooks_on_all_optimizers() -> Iterator[None]:
    """Let steps in the block run no hooks that are registered for all optimizers: a trial is no step of the user's."""
    with (
        replaced(torch_optimizer, "_global_optimizer_pre_hooks", {}),
        replaced(torch_optimizer, "_global_optimizer_post_hooks", {}),
    ):
        yield


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """Return the dictionary of hooks that `register_hook` has added to a leaf, in order."""
    return tensor._backward_hooks or {}


def leaf_hooks(tensor: torch.Tensor) -> tuple[dict[Any, Any] | None, dict[Any, Any] | None]:
    """Return a leaf's dictionaries of hooks on its gradient and on its accumulation; None before the first hook."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def eager_call(model: torch.nn.Module) -> Callable[..., Any]:
    """Return what `model(...)` runs if nothing is compiled: hooks and `forward`."""
    return model._call_impl


def set_call(model: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let `model(...)` run `call`, as `model.compile()` does, which copies and pickles leave out; None undoes that."""
    model._compiled_call_impl = call


def own_call(model: object) -> object:
    """Return what `set_call` or `model.compile()` has `model(...)` run; None if nothing."""
    return getattr(model, "_compiled_call_impl", None)


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether `torch.compile` or `model.compile()` made the calls of `model`, or `set_call`."""
    from torch._dynamo import OptimizedModule

    return isinstance(model, OptimizedModule) or model._compiled_call_impl is not None


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of what `torch.compile` made of it; a module that it did not make is returned."""
    from torch._dynamo import OptimizedModule

    return cast("torch.nn.Module", model._orig_mod) if isinstance(model, OptimizedModule) else model


def hooks_on_all_modules() -> list[Any]:
    """Return the hooks that run with every module of the process."""
    return [hook for hooks in global_module_hooks() for hook in hooks.values()]


class CallsSeen:
    """Shows each call of any module, before all hooks of it, and before what is compiled of it.

    PyTorch's compiler would trace a hook on all modules into whatever it compiles.

    Args:
        look: called with the module of a call that begins, but not for what PyTorch's compiler traces; it returns what
            is called at the end, or None.
    """

    def __init__(self, look: Callable[[torch.nn.Module], Callable[[], None] | None]) -> None:
        from torch._dynamo.variables import nn_module  # takes seconds to import

        called, self._is_removed = torch.nn.Module.__call__, False

        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_removed or torch.compiler.is_compiling():  # what torch.compile returned keeps this function
                return called(module, *args, **kwargs)
            returned = look(module)
            if returned is None:
                return called(module, *args, **kwargs)
            try:
                return called(module, *args, **kwargs)
            finally:
                returned()

        skip, strategy = eval_frame._FrameAction.SKIP, eval_frame._FrameExecStrategy
        # like the function of torch's in whose place it is, it is not compiled, but what it calls is
        eval_frame.set_code_exec_strategy(call.__code__, strategy(skip, eval_frame._FrameAction.DEFAULT))
        eval_frame.set_code_exec_strategy(cast("Any", look).__code__, strategy(skip, skip))
        self._patches = ExitStack()
        self._patches.enter_context(replaced(torch.nn.Module, "__call__", call))
        # where a module has this one and no hooks, the compiler goes on at its `forward`
        self._patches.enter_context(replaced(nn_module, "unpatched_nn_module_call", call))

    def remove(self) -> None:
        """Show no more calls."""
        self._is_removed = True
        self._patches.close()
