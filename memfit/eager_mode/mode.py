"""The mode of eager mode: before each call there is room for it, and it is noted how the call makes contents.

While memory is plentiful, the mode is *calm*: nothing is noted and autograd saves as ever; only the budget is watched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from memfit.capture.functionalize import as_cast
from memfit.capture.generators import STATE_BYTES
from memfit.eager_mode.again import generator_states
from memfit.eager_mode.aside import Aside, raise_refusal
from memfit.eager_mode.contents import Contents
from memfit.eager_mode.needs import Need, Needs
from memfit.eager_mode.operators import FOREIGN, ONCE, VIEW, WRITES, Operator, Unread
from memfit.eager_mode.pages import Pages
from memfit.eager_mode.passes import Way
from memfit.eager_mode.sources import Call, Sources
from memfit.errors import UnsupportedStepError
from memfit.memory.host.room import Host
from memfit.step.turns import Turn
from memfit.torch_private.autocast import autocast_watched
from memfit.torch_private.autograd import (
    UnwrappedMode,
    default_saved_hooks,
    hooks_aside_in_transforms,
    in_backward,
    is_on,
    saved_leaves_themselves,
)

_RESERVE_BYTES = {"cpu": 1 << 13, "cuda": 1 << 23}  # of the budget, for the mode's own numbers, and for checksums
_FORGET_EVERY = 4096  # calls
_CALM_SHARE = 4  # the mode is calm while less than one part in so many of the budget's free bytes is taken
_QUIET_PASSES = 2  # that stayed below it, one after the other, before the mode is calm


class BudgetMode(UnwrappedMode):
    """Keeps what a device holds within a budget while calls run.

    Args:
        budget_bytes: that all of the device's tensors may take together.
        live_bytes: returns what they take now.
        model_bytes: returns what parameters, buffers and gradients take of it.
        needs: of calls on the device.
        host: where contents are copied to; None if that is nowhere.
        may_grow: see `Pages`.
        model: if the mode may be off in backward passes and updates.
        restores: says whether a write to a tensor gives a gathered parameter the contents that it had.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        budget_bytes: int,
        live_bytes: Callable[[], int],
        model_bytes: Callable[[], int],
        needs: Needs,
        host: Host | None = None,
        *,
        may_grow: bool = True,
        model: torch.nn.Module | None = None,
        restores: Callable[[torch.Tensor], bool] = lambda _tensor: False,
    ) -> None:
        super().__init__()
        self.contents = Contents(budget_bytes, live_bytes, model_bytes, host, _RESERVE_BYTES[needs.device.type])
        self._is_limited = needs.device.type == "cpu"  # by `CpuLimit`
        self._pages = None if self._is_limited else Pages(budget_bytes, self.contents, needs, may_grow=may_grow)
        self.needs, self.passes = needs, self.contents.passes
        self._operators: dict[int, Operator] = {}
        self._was_backward = False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._outer_hooks: Any = None
        self._is_noting = True  # and the hooks are on
        self._unread = Unread()
        self._quiet_passes = 0
        self._watch_bytes = _calm_bytes(self.contents)
        self._restores = restores
        self._thread: threading.Thread | None = None  # that is in the block
        self._turn = Turn()  # to read what autograd saved
        self._aside = None if model is None else Aside(self, self.contents, model, self._was_off)

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass has run since the last one that was counted."""
        return self._was_backward

    def __enter__(self) -> BudgetMode:
        super().__enter__()
        self._thread = threading.current_thread()
        self._outer_hooks = default_saved_hooks()
        self._hooks.__enter__()
        self._patches = ExitStack()
        self._patches.enter_context(saved_leaves_themselves())
        self._patches.enter_context(hooks_aside_in_transforms())
        self.has_autocast = self._patches.enter_context(autocast_watched())
        if self._aside is not None:
            self._patches.enter_context(self._aside)
        self.passes.begin(is_noted=True)
        if self._pages is not None:
            self._pages.open()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._thread = None
        if self._was_backward:
            self._was_backward = False
            self.passes.end()
        if self._pages is not None:
            self._pages.close()
        if self._is_noting:
            self._hooks.__exit__(*raised)
        self._patches.close()
        self._aside = None  # which refers to this object
        super().__exit__(*raised)
        self.contents.close()
        del self._hooks  # which refer to this object
        if not any(raised):
            self._unread.require_read()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        contents = self.contents
        if contents.is_busy:
            return func(*args, **(kwargs or {}))
        operator = self._operators.get(id(func)) or self._operator(func)
        if operator.is_cast:
            operator = self._operator(as_cast(func, args, self.has_autocast))
        if operator.is_free:
            return func(*args, **kwargs) if kwargs else func(*args)
        outer, contents.running = contents.running, None
        try:
            self._unread.require_read()
            is_expected = operator.is_looked_at and self._unread.expect(func, args)
            returned = self._called(operator, args, kwargs)
            if is_expected:
                self._unread.note(func, returned)
            return returned
        except torch.OutOfMemoryError:
            raise_refusal(contents)
            raise
        finally:
            contents.running = outer

    def _operator(self, func: Any) -> Operator:
        return self._operators.get(id(func)) or self._operators.setdefault(id(func), Operator(func))

    def _called(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Make a call of the loop, and what comes before and after it."""
        contents, func = self.contents, operator.function
        if operator.kind == VIEW:
            returned = self._run(func, args, kwargs)
            contents.upper_bytes = contents.live_bytes()  # with what was taken where the mode does not look
            return returned
        contents.calls += 1
        is_forward = not in_backward()
        if not is_forward:
            self._was_backward = True
        elif self._was_backward:
            self._end_pass()
        if self._is_noting:
            return self._noted(operator, args, kwargs or {}, is_forward=is_forward)
        if self._is_limited:  # what the call takes need not be known before
            returned = self._run(func, args, kwargs)
            if contents.live_bytes() > self._watch_bytes:
                self._look(0, func)
            return returned
        need = operator.need(args, kwargs)
        if need is None:
            return self._first_call(operator, args, kwargs or {}, [])[0]
        if contents.upper_bytes + need.peak_bytes > self._watch_bytes:
            self._look(need.peak_bytes, func)
        returned = self._run(func, args, kwargs)
        contents.upper_bytes += need.result_bytes
        return returned

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, while which other contents than its arguments may be freed."""
        self.contents.running = func, args, kwargs
        returned = func(*args, **kwargs) if kwargs else func(*args)
        self.contents.running = None
        return returned

    def _noted(self, operator: Operator, args: Any, kwargs: Any, *, is_forward: bool) -> Any:
        """Make a call, and note how it makes contents."""
        contents, func, kind, number = self.contents, operator.function, operator.kind, self.contents.calls
        if number % _FORGET_EVERY == 0:
            contents.forget()
        is_remade = (is_forward or torch.is_grad_enabled()) and kind not in (FOREIGN, ONCE)
        state_bytes, generators = 0, None
        if is_remade and operator.draws:
            state_bytes = STATE_BYTES["cpu"]
            if self._is_limited or contents.upper_bytes + state_bytes > self._watch_bytes:
                self._look(state_bytes, func)
            generators = generator_states((*args, *kwargs.values()))
            contents.upper_bytes += state_bytes
        written = operator.written(args, kwargs) if operator.may_write else []
        if not any(contents.sources.find(tensor.untyped_storage()) for tensor in written):
            written = []  # nothing is known of what is lost
        written = [tensor for tensor in written if not self._restores(tensor)]
        if self._is_limited:  # what the call takes need not be known before
            if written:
                contents.before_writes(written, 0, func)
            began = time.perf_counter()
            returned = self._run(func, args, kwargs)
            seconds, need_bytes = time.perf_counter() - began, 0
            if self._watch_bytes < contents.budget_bytes and contents.live_bytes() > self._watch_bytes:
                self._look(0, func)
        else:
            returned, seconds, need_bytes = self._with_need(operator, args, kwargs, written)
        if is_remade or written:
            call = Call(number, func, seconds, need_bytes + state_bytes, generators)
            if written:
                contents.note_writes(call if is_remade and kind == WRITES else None, args, kwargs, written)
            if is_remade and kind != WRITES:
                contents.note(call, operator.read_again(args), kwargs, returned)
        return returned

    def _with_need(self, operator: Operator, args: Any, kwargs: Any, written: Any) -> tuple[Any, float, int]:
        """Make room for a call and make it; return its result, its seconds, and the bytes that it takes."""
        contents, func, need = self.contents, operator.function, operator.need(args, kwargs)
        if need is None:
            returned, need = self._first_call(operator, args, kwargs, written)
            return returned, need.seconds, need.peak_bytes
        if contents.upper_bytes + need.peak_bytes > self._watch_bytes:
            self._look(need.peak_bytes, func)
        if written:
            contents.before_writes(written, need.peak_bytes, func)
        contents.running = func, args, kwargs
        returned, seconds = self.needs.timed(func, args, kwargs, need)
        contents.running = None
        contents.upper_bytes += need.result_bytes
        return returned, seconds, need.peak_bytes

    def _first_call(self, operator: Operator, args: Any, kwargs: Any, written: list[torch.Tensor]) -> tuple[Any, Need]:
        """Make a call that is like none before."""
        contents, func = self.contents, operator.function
        contents.is_busy = True
        try:
            bound_bytes = self.needs.bound(func, args, kwargs)
            self._look(bound_bytes, func)
            if written:
                contents.before_writes(written, bound_bytes, func)
            contents.running = func, args, kwargs
            returned, need = self.needs.learn(func, args, kwargs, bound_bytes, contents)
        finally:
            contents.is_busy, contents.running = False, None
            contents.upper_bytes = contents.live_bytes()
        operator.learn(args, kwargs, need)
        return returned, need

    def _pack(self, tensor: torch.Tensor) -> Any:
        contents = self.contents
        if self._aside is not None and self._aside.is_off:  # a closure
            self._aside.come_back()
        outer, contents.running = contents.running, None
        try:
            return contents.pack(tensor)
        finally:
            contents.running = outer

    def _unpack(self, saved: Any) -> torch.Tensor:
        contents, thread = self.contents, threading.current_thread()
        outer, contents.running, self._was_backward = contents.running, None, True
        try:
            if self._is_limited and self._thread is thread:
                return contents.unpack(saved)
            self._require_its(thread)
            with self._turn.of(saved, "backward after memfit.eager's block", may_nest=True):
                return contents.unpack(saved)
        finally:
            contents.running = outer

    def _require_its(self, thread: threading.Thread) -> None:
        """Refuse a backward pass in another thread than the block's; autograd's own threads work for that one."""
        is_off = self._aside is not None and self._aside.is_off
        if self._thread not in (None, thread) and not is_on(self) and not is_off:
            raise UnsupportedStepError(
                f"backward runs in thread {thread.name!r}, and memfit.eager's block was entered in "
                f"thread {self._thread.name!r}, whose calls alone it keeps within the budget: call backward there, or "
                "enter the block in the thread that trains"
            )

    def _was_off(self, most_bytes: int, is_backward: bool) -> None:
        """Go on after the mode was off; a pass that took more than a quiet one is none."""
        self._was_backward |= is_backward
        if most_bytes > self._watch_bytes:
            self._quiet_passes, self._watch_bytes = 0, self.contents.budget_bytes

    def follow_stream(self, *_: Any) -> None:
        """Leave out of the budget what torch's allocator keeps for other streams than the current one."""
        if self._pages is not None:
            self._pages.follow_stream()
        self._watch_bytes = min(self._watch_bytes, self.contents.budget_bytes)

    def _end_pass(self) -> None:
        """Begin another pass: what autograd held of the last one is gone."""
        self._was_backward = False
        if self._pages is not None:
            self._pages.judge()
        self.passes.end()
        self.contents.forget()
        is_quiet = self._watch_bytes < self.contents.budget_bytes and not self.contents.kept
        self._quiet_passes = self._quiet_passes + 1 if is_quiet else 0
        self._watch_bytes = _calm_bytes(self.contents)
        self._set_noting(is_wanted=self._quiet_passes < _QUIET_PASSES)
        self.passes.begin(is_noted=self._is_noting)

    def _look(self, need_bytes: int, what: Any) -> None:
        """Look at what is live, before a call that may not fit; note calls from here on if they have to be noted.

        Raises:
            OverBudgetError: there is no room for what the call needs.
        """
        contents = self.contents
        contents.upper_bytes = contents.live_bytes()
        if contents.upper_bytes + need_bytes <= self._watch_bytes:
            return
        self._quiet_passes = 0
        if in_backward() or self._set_noting(is_wanted=True):
            self._watch_bytes = contents.budget_bytes  # a pass is quiet no more
        contents.make_room(need_bytes, what)

    def _set_noting(self, *, is_wanted: bool) -> bool:
        """Note calls and what autograd saves from here on, or no longer, and return whether it is now as wanted.

        Nothing changes inside of other hooks of saved tensors, which are on top of the mode's own, and where torch
        allows none.
        """
        if self._is_noting == is_wanted:
            return True
        if default_saved_hooks() != (
            self._outer_hooks if is_wanted else (self._hooks.pack_hook, self._hooks.unpack_hook)
        ):
            return False
        if is_wanted:
            try:
                self._hooks.__enter__()
            except RuntimeError:  # inside of torch.func
                return False
            self.passes.way = Way.POLICY
        else:
            self._hooks.__exit__()
            self.contents.sources = Sources()
        self._is_noting = is_wanted
        return True


def _calm_bytes(contents: Contents) -> int:
    """Return the bytes below which a pass stays quiet."""
    live_bytes, budget_bytes = contents.live_bytes(), contents.budget_bytes
    return min(budget_bytes, live_bytes + (budget_bytes - live_bytes) // _CALM_SHARE)
