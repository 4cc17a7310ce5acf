"""Where eager mode is off on a CPU: in backward passes and in updates, which make nothing that could be let go.

The allocator asks for room there (`CpuLimit`), and autograd's hooks bring back what was let go.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.eager_mode.contents import Contents
from memfit.eager_mode.operators import is_dense
from memfit.step.hooks import WeakHook
from memfit.system.recorder import record
from memfit.torch_private.autograd import (
    TorchDispatchMode,
    backward_code_through,
    backward_through,
    creates_graph,
    is_innermost,
    is_on,
    switch_on,
    switched_off,
    switched_on,
)
from memfit.torch_private.modules import (
    Structure,
    global_module_hooks,
    leaf_hooks,
    module_hooks,
    module_tables,
)
from memfit.torch_private.patching import replaced

_CPU = torch.device("cpu")


class Aside:
    """Takes a dispatch mode off for backward passes and updates of its thread, where nothing is lost by that.

    It stays on in a backward pass of which a graph is made, or in which hooks may write to what contents are made of,
    and is on in the backward of custom functions. It stays on in an update while autograd holds contents, which may be
    made of what it writes to.

    Attributes:
        is_off: whether it is off now, or was switched on again inside.

    Args:
        mode: is taken off.
        contents: of the device.
        model: whose hooks, and whose parameters' gradients, code in backward may have to do with.
        ended: called after the mode was off, with the most bytes that were live, and whether backward ran.
    """

    def __init__(
        self,
        mode: TorchDispatchMode,
        contents: Contents,
        model: torch.nn.Module,
        ended: Callable[[int, bool], None],
    ) -> None:
        self.is_off = False
        self._mode, self._contents, self._ended = mode, contents, ended
        self._structure, self._optimizers = Structure(model), set[type]()
        self._scheduled: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
        self._has_hooks = False  # on tensors of a graph

    def __enter__(self) -> None:
        self._thread: threading.Thread | None = threading.current_thread()
        self._patches = ExitStack()
        self._patches.enter_context(backward_through(self._run_backward))
        self._patches.enter_context(backward_code_through(self._on, self._hooked))
        hook = register_optimizer_step_pre_hook(WeakHook(self._before_step))
        self._patches.callback(hook.remove)

    def __exit__(self, *raised: object) -> None:
        self._patches.close()
        for optimizer, step in self._scheduled.items():
            optimizer.step = step
        self._thread = None  # what a scheduler that was made in the block calls does nothing more

    def come_back(self) -> None:
        """Switch the mode on where code makes a graph inside: a closure, or a checkpoint that runs forward again."""
        self._contents.upper_bytes = self._contents.live_bytes()
        switch_on(self._mode)

    def _hooked(self) -> None:
        self._has_hooks = True

    @contextmanager
    def _on(self) -> Iterator[None]:
        """Switch the mode on in the block if it was taken off: code runs there that may write to anything."""
        if not self.is_off or threading.current_thread() is not self._thread or is_on(self._mode):
            yield
            return
        self._contents.upper_bytes = self._contents.live_bytes()
        with switched_on(self._mode):
            yield

    def _run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_innermost(self._mode):
            return run(*args, **kwargs)
        try:
            if self._has_hooks or creates_graph(*args) or self._may_lose():
                return run(*args, **kwargs)
            with self._off(is_backward=True):
                return run(*args, **kwargs)
        finally:
            self._has_hooks = self._has_hooks and self._contents.holds_saved()

    def _may_lose(self) -> bool:
        """Return whether code may write, in backward, to what contents are made of."""
        contents = self._contents
        self._structure.refresh()
        modules = self._structure.modules
        if any(global_module_hooks()[2:]) or any(any(module_hooks(each)[2:]) for each in modules):
            return True
        for parameter in chain.from_iterable(module_tables(each)[0].values() for each in modules):
            if parameter is None:
                continue
            if any(leaf_hooks(parameter)):
                return True
            gradient = parameter.grad
            if gradient is not None and is_dense(gradient):  # to which backward adds
                source = contents.sources.find(gradient.untyped_storage())
                if source is not None and source.readers:
                    return True
        return False

    @contextmanager
    def _off(self, *, is_backward: bool) -> Iterator[None]:
        contents, was_off = self._contents, self.is_off
        self.is_off, live_bytes = True, contents.live_bytes()
        usage = None
        try:
            with switched_off(lambda mode: mode is self._mode), nullcontext() if was_off else record(_CPU) as usage:
                yield
        except torch.OutOfMemoryError:
            raise_refusal(contents)
            raise
        finally:
            self.is_off = was_off
            contents.after_unseen()
            self._ended(live_bytes + (usage.peak_bytes if usage is not None else 0), is_backward)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.current_thread() is not self._thread:
            return
        kind, own = type(optimizer), vars(optimizer).get("step")
        if own is None and kind not in self._optimizers:
            self._optimizers.add(kind)
            self._patches.enter_context(replaced(kind, "step", self._around(kind.step)))
        elif own is not None and optimizer not in self._scheduled:  # a scheduler of learning rates has put it there
            self._scheduled[optimizer] = own
            optimizer.step = self._around(own)

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an optimizer's step with the mode off."""

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not self._thread:
                return step(*args, **kwargs)
            if self._contents.holds_saved():
                with self._on():
                    return step(*args, **kwargs)
            if not is_innermost(self._mode):
                return step(*args, **kwargs)
            with self._off(is_backward=False):
                return step(*args, **kwargs)

        return stepped


def raise_refusal(contents: Contents) -> None:
    """Raise the error in whose place the allocator has told torch that no memory is left, if there is one."""
    refusal, contents.refusal = contents.refusal, None
    if refusal is not None:
        raise refusal from None
