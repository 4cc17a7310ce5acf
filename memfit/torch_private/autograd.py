"""The running backward pass, its modes, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, Self, cast

import torch
import torch.utils.checkpoint
from torch.fx.experimental.proxy_tensor import _MakefxTracer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from memfit.torch_private.autocast import autocast_here
from memfit.torch_private.compiled_regions import CompiledRegions
from memfit.torch_private.patching import Inside, replaced

RUNS_BACKWARD = torch.autograd.graph._engine_run_backward
"""Through which all backward passes of this thread go."""


INSTEAD_OF_TRANSFORMS = "memfit.fit_function, which plans what torch.func saves inside of itself"
"""The door for a step whose gradients `torch.func.grad` takes."""


def in_backward() -> bool:
    """Return whether this thread is carrying out a backward pass."""
    return torch._C._current_graph_task_id() >= 0


def in_transform() -> bool:
    """Return whether this thread is inside of a transformation of torch.func: it allows no hooks of saved tensors."""
    is_disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None  # in modes, too
    return is_disabled or torch._C._functorch.peek_interpreter_stack() is not None


def instead_here() -> str:
    """Return what a refusal of this moment adds where a transformation of torch.func holds the memory."""
    return f", or {INSTEAD_OF_TRANSFORMS}" if in_transform() else ""


def no_modes() -> Any:
    """Return a context in which no dispatch mode sees what is called."""
    return torch._C._DisableTorchDispatch()


def is_on(mode: TorchDispatchMode) -> bool:
    """Return whether a mode is on in this thread; a thread of autograd's has the modes of the one that it works for."""
    return any(each is mode for each in _get_current_dispatch_mode_stack())


def is_innermost(mode: TorchDispatchMode) -> bool:
    """Return whether a mode is the first in this thread that sees a call."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode


@contextmanager
def switched_off(is_taken: Callable[[TorchDispatchMode], bool]) -> Iterator[list[TorchDispatchMode]]:
    """Take this thread's innermost modes off in the block, down to the first that is left on; give it those taken.

    Args:
        is_taken: says of a mode whether it is taken off.
    """
    modes: list[TorchDispatchMode] = []
    while has_modes() and is_taken(_get_current_dispatch_mode()):
        modes.append(_pop_mode())
    try:
        yield modes
    finally:
        for mode in reversed(modes):
            switch_on(mode)


@contextmanager
def switched_on(mode: TorchDispatchMode) -> Iterator[None]:
    """Put a mode that was taken off on again in the block, as the innermost one."""
    _push_mode(mode)
    try:
        yield
    finally:
        if is_innermost(mode):
            _pop_mode()


def switch_on(mode: TorchDispatchMode) -> None:
    """Put a mode that was taken off on again, unless it is on; in backward until its present node ends."""
    if not is_on(mode):
        _push_mode(mode)


def backward_through(around: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let all backward passes, and all gradients that are asked for, go through a function inside the block.

    Args:
        around: called with what runs the pass, and its arguments.
    """
    owner: Any = torch.autograd
    run = owner._engine_run_backward
    return replaced(owner, "_engine_run_backward", lambda *args, **kwargs: around(run, *args, **kwargs))


@contextmanager
def backward_code_through(
    around: Callable[[], AbstractContextManager[None]], hooked: Callable[[], None]
) -> Iterator[None]:
    """Let the backward of custom functions run in a context, and tell of hooks on tensors, inside the block.

    Args:
        around: returns the context.
        hooked: called when a hook is put on a tensor.
    """
    function: Any = torch.autograd.function.BackwardCFunction
    apply, register = function.apply, torch.Tensor.register_hook
    accumulated = torch.Tensor.register_post_accumulate_grad_hook

    def applied(*args: Any) -> Any:
        with around():
            return apply(*args)

    def telling(registering: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(registering)
        def registered(*args: Any, **kwargs: Any) -> Any:
            hooked()
            return registering(*args, **kwargs)

        return registered

    with (
        replaced(function, "apply", applied),
        replaced(torch.Tensor, "register_hook", telling(register)),
        replaced(torch.Tensor, "register_post_accumulate_grad_hook", telling(accumulated)),
    ):
        yield


def creates_graph(*args: Any) -> bool:
    """Return whether a backward pass with these arguments makes a graph of itself."""
    _outputs, _gradients, _keeps_graph, does_create = args[:4]
    return bool(does_create)


def has_modes() -> bool:
    """Return whether any dispatch mode is on in this thread: one that counts operators, say, or makes fakes."""
    return torch._C._len_torch_dispatch_stack() > 0


class UnwrappedMode(TorchDispatchMode):
    """A dispatch mode whose calls cost less: torch wraps those of others, so that Dynamo does not compile them.

    Dynamo is set once to skip the code of `__torch_dispatch__`, and all that it calls. The mode is off while code runs
    that `torch.compile` has compiled.

    Attributes:
        has_autocast: says while a call is handled whether it came from inside of autocast for a device type.
    """

    has_autocast: Callable[[str], bool]

    def __enter__(self) -> Self:
        self.has_autocast = autocast_here()
        self._regions = CompiledRegions(_modes_aside)
        self._regions.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._regions.__exit__()
        super().__exit__(*raised)

    def compiled_code_begins(self) -> None:
        """Take note that compiled code is entered, whose operators are not seen."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(cls.__torch_dispatch__.__code__, dynamo._FrameExecStrategy(skip, skip))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def default_saved_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost hooks of saved tensors (pack, unpack) that are on in this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def changing_hooks() -> str:
    """Return the name of the innermost hook of saved tensors that is on, if it may change values; else an empty text.

    Those of memfit, of torch's checkpoints and ranks, and `save_on_cpu` keep them; of all others nothing is known.
    """
    hooks = default_saved_hooks()
    if hooks is None:
        return ""
    pack: Any = hooks[0]
    if isinstance(pack, FunctionType | MethodType) and (pack.__module__ or "").startswith(_KEEPING):
        return ""
    return getattr(pack, "__qualname__", None) or repr(pack)


_KEEPING = ("memfit.", torch.autograd.graph.__name__, torch.utils.checkpoint.__name__, "torch.distributed.")


def require_unwritten(saved: torch.Tensor, version: int) -> None:
    """Raise the error that autograd raises where there are no hooks, if a tensor was written to since it was saved.

    Args:
        saved: shares the counter of versions with the tensor.
        version: when it was saved.
    """
    if saved._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {list(saved.shape)} was saved at version {version}, and is at version {saved._version} "
            "now"
        )


@contextmanager
def saved_with(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """Let autograd save tensors inside the block through hooks, but for transformations of torch.func.

    Args:
        pack: called with each tensor that is saved.
        unpack: called with what `pack` returned.
    """
    with hooks_aside_in_transforms(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def hooks_aside_in_transforms() -> AbstractContextManager[None]:
    """Take the hooks of saved tensors of memfit and of checkpoints off inside of each transformation of torch.func.

    Most of them allow no such hooks: with the user's own ones they still raise. What is saved there stays as it is.
    While a graph is traced, no hooks are called, as in AOTAutograd: what an operator with code inside (flex attention)
    traces of its backward pass would read what a checkpoint recomputes, as constants.
    """
    return _hooks_aside


def _take_hooks_off(patches: ExitStack) -> None:
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled_without_ours(error_message: str) -> Iterator[None]:
        taken: list[tuple[Any, Any]] = []
        while (hooks := default_saved_hooks()) is not None and _is_ours(hooks[0]):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            taken.append(hooks)
        try:
            with disable(error_message):
                yield
        finally:
            for hooks in reversed(taken):
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    traced = _MakefxTracer._trace_inner

    def traced_without(*args: Any) -> Any:
        before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
        try:
            return traced(*args)
        finally:
            torch._C._autograd._saved_tensors_hooks_set_tracing(before)

    patches.enter_context(replaced(torch.autograd.graph, "disable_saved_tensors_hooks", disabled_without_ours))
    patches.enter_context(replaced(_MakefxTracer, "_trace_inner", traced_without))


_hooks_aside = Inside(_take_hooks_off)


def _is_ours(pack: Any) -> bool:
    return (getattr(pack, "__module__", None) or "").startswith(("memfit.", torch.utils.checkpoint.__name__))


@contextmanager
def saved_leaves_themselves() -> Iterator[None]:
    """Let custom autograd functions get the very leaves that they saved, as they do without hooks of saved tensors.

    Inside of such hooks torch makes a new tensor of what is unpacked, without the leaf's attributes and its `.grad`.
    """
    function: Any = torch.autograd.function.BackwardCFunction
    original = function.saved_tensors

    def saved_tensors(context: Any) -> tuple[Any, ...]:
        return tuple(map(_leaf_itself, original.__get__(context)))

    with replaced(function, "saved_tensors", property(saved_tensors)):
        yield


def _leaf_itself(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    with no_modes():
        return getattr(torch.autograd.graph.get_gradient_edge(tensor).node, "variable", tensor)


def next_sequence_number() -> int:
    """Return the sequence number of the next node that autograd makes on this thread."""
    return torch.autograd._get_sequence_nr()


def backward_node() -> tuple[str, int] | None:
    """Return (name, sequence number) of the autograd node that runs now, or None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def backward_keeps_graph() -> bool:
    """Return whether the backward pass that runs now was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _modes_aside() -> Callable[[], None]:
    with ExitStack() as off:
        for mode in off.enter_context(switched_off(lambda mode: isinstance(mode, UnwrappedMode))):
            cast(UnwrappedMode, mode).compiled_code_begins()
        return off.pop_all().close


@contextmanager
def only_mode(mode: TorchDispatchMode) -> Iterator[None]:
    """Disable all other modes inside the block: only `mode` sees what is called."""
    with _disable_current_modes(), mode:
        yield


def views_replayed() -> AbstractContextManager[None]:
    """Let autograd replay the views that a write in place goes through, as it does for fakes.

    Elsewhere it reads them by their strides, in backward too: other ops, which copy the same numbers.
    """
    return torch.autograd.grad_mode._force_original_view_tracking(True)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that runs now."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
