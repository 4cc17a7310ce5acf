"""The mode of eager mode: before each call there is room for it, and what autograd saves may be let go to make room."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.capture.functionalize import BATCH_NORMS
from memfit.capture.generators import STATE_BYTES
from memfit.capture.trace import mutated_tensors
from memfit.capture.under_modes import UnderModes, is_looked_at
from memfit.capture.whole_step import calling_line
from memfit.errors import OverBudgetError, UnsupportedStepError
from memfit.runtime.eager.kept import Kept, Saved
from memfit.runtime.eager.needs import Need, Needs, key_of
from memfit.runtime.eager.sources import (
    Call,
    LostContentsError,
    Source,
    Sources,
    flat,
    generator_states,
    inputs_of,
    make_again,
    needed_by,
    seconds_to_make,
    template,
)
from memfit.system.budget import format_bytes
from memfit.torch_private import TorchDispatchMode, in_backward, no_modes, tensors_in, without_autocast

LEAST_BYTES = 1 << 12  # smaller contents are never let go
_RESERVE_BYTES = 1 << 12  # of the budget, for the mode's own numbers
_FORGET_EVERY = 4096  # calls
_VIEW, _PLAIN, _WRITES, _DATA_DECIDES, _FOREIGN = range(5)  # kinds of operators
_aten = torch.ops.aten
_LIFTED = _aten.lift_fresh.default
_HIDDEN_STATE = (
    _aten._cudnn_rnn,
    _aten.miopen_rnn,
    _aten.batch_norm_gather_stats,
    _aten.batch_norm_gather_stats_with_counts,
)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Counts:
    """What happened so far; see `Report`."""

    def __init__(self) -> None:
        self.calls = self.let_go = self.made_again = self.passes = 0
        self.again_seconds = 0.0


class BudgetMode(TorchDispatchMode):
    """Keeps what a device holds within a budget while calls run.

    Args:
        budget_bytes: that all of the device's tensors may take together.
        live_bytes: returns what they take now.
        model_bytes: returns what parameters, buffers and gradients take of it.
        needs: of calls.
    """

    def __init__(
        self, budget_bytes: int, live_bytes: Callable[[], int], model_bytes: Callable[[], int], needs: Needs
    ) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes - _RESERVE_BYTES
        self.live_bytes, self.needs = live_bytes, needs
        self._model_bytes = model_bytes
        self.sources = Sources()
        self.kept: dict[Source, Kept] = {}
        self.counts = Counts()
        self._gone: dict[Call, list[Kept]] = {}
        self._kinds: dict[int, int] = {}
        self._drawing: set[int] = set()
        self._looked_at: set[int] = set()
        self._unseen: set[int] = set()
        self._upper_bytes = budget_bytes  # at least what is live; read anew where it is too high
        self._pinned: set[Source] = set()
        self._held_back: frozenset[Source] = frozenset()  # until a call has written to what they are made of
        self._target: Source | None = None  # what is being made again
        self._is_busy = self._was_backward = False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass has run since the last one that was counted."""
        return self._was_backward

    def __enter__(self) -> BudgetMode:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        super().__exit__(*raised)
        self._forget()
        self.sources = Sources()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_busy:
            return func(*args, **kwargs)
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _kind(func)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._drawing.add(id(func))
            if is_looked_at(func):
                self._looked_at.add(id(func))
            if func is _LIFTED or torch.Tag.inplace_view in func.tags:
                self._unseen.add(id(func))
        if kind == _VIEW:
            returned = func(*args, **kwargs)
            if id(func) in self._unseen:  # memory that was taken where the mode does not look
                self._upper_bytes = self.live_bytes()
            return returned
        if id(func) in self._looked_at:
            require_as_bare(func, args)
        self.counts.calls += 1
        is_forward = not in_backward()
        records = (is_forward or torch.is_grad_enabled()) and kind != _FOREIGN
        if is_forward and self._was_backward:
            self._end_pass()
        elif self.counts.calls % _FORGET_EVERY == 0:
            self._forget()
        state_bytes = STATE_BYTES["cpu"] if records and id(func) in self._drawing else 0
        generators = None
        need = key = None
        if kind != _DATA_DECIDES:
            try:
                key = key_of(func, args, kwargs)
                need = self.needs.known.get(key)
            except (TypeError, RuntimeError):  # an argument that has no hash, or a tensor that has no shape
                pass
        if state_bytes:
            if self._upper_bytes + state_bytes > self.budget_bytes:
                self._make_room(state_bytes, str(func))
            generators = generator_states((*args, *kwargs.values()))
            self._upper_bytes += state_bytes
        written = self._written(kind, func, args, kwargs)
        if need is None:
            returned, need = self._first_call(key, func, args, kwargs, written)
            seconds = need.seconds
        else:
            if self._upper_bytes + need.peak_bytes > self.budget_bytes:
                self._make_room(need.peak_bytes, str(func))
            if written:
                self._before_writes(written, need.peak_bytes, str(func))
            began = time.perf_counter()
            returned = func(*args, **kwargs)
            seconds = time.perf_counter() - began
            self._upper_bytes += need.result_bytes
        self._held_back = frozenset()
        if records or written:
            call = Call(self.counts.calls, func, seconds, need.peak_bytes + state_bytes, generators)
            if written:
                self._note_writes(call if records and kind == _WRITES else None, args, kwargs, written)
            if records and kind != _WRITES:
                self._note(call, args, kwargs, returned)
        return returned

    def _written(self, kind: int, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the tensors that a call writes to, those included that its schema hides."""
        if kind == _WRITES:
            found = mutated_tensors(func, args, kwargs)
        elif kind == _FOREIGN:
            found = tensors_in((args, kwargs))
        elif func._overloadpacket in BATCH_NORMS:
            mean, variance, training = BATCH_NORMS[func._overloadpacket]
            if training is not None and not args[training]:
                return []
            found = [arg for arg in args[mean : variance + 1] if isinstance(arg, torch.Tensor)]
        else:
            return []
        return [tensor for tensor in found if is_dense(tensor)]

    def _first_call(self, key: Any, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> tuple[Any, Need]:
        """Make a call that is like none before."""
        self._is_busy = True
        try:
            bound_bytes = self.needs.bound(func, args, kwargs)
            self._make_room(bound_bytes, str(func))
            if written:
                self._before_writes(written, bound_bytes, str(func))
            return self.needs.learn(key, func, args, kwargs, bound_bytes)
        finally:
            self._is_busy = False
            self._upper_bytes = self.live_bytes()

    def _note(self, call: Call, args: Any, kwargs: Any, returned: Any) -> None:
        """Note how new contents were made."""
        made = [(place, each) for place, each in enumerate(flat(returned)) if isinstance(each, torch.Tensor)]
        storages = [(place, each.untyped_storage()) for place, each in made if is_dense(each)]
        new = [(place, storage) for place, storage in storages if self.sources.find(storage) is None]
        if not new:
            return
        try:
            call.args = template(self.sources, args, self.counts.calls)
            if kwargs:
                call.kwargs = template(self.sources, kwargs, self.counts.calls)
        except (NotImplementedError, RuntimeError):  # a tensor without a storage, or without a shape, of its own
            return
        for place, storage in new:
            self.sources.made(storage, call, place).used_at = self.counts.calls

    def _before_writes(self, written: list[torch.Tensor], need_bytes: int, what: str) -> None:
        """Make again what could not be made again after these tensors are written to, and keep it until they are."""
        lost: set[Source] = set()
        for tensor in written:
            storage = tensor.untyped_storage()
            source = self.sources.find(storage)
            if source is None:
                continue
            kept = self.kept.get(source)
            if kept is not None and not kept.is_there:  # what autograd saved is what is written to
                self._give(kept, storage)
            if source.call is None and source.readers:
                lost.add(source)
        if not lost:
            return
        self._forget_dead()
        back = [
            kept for kept in self.kept.values() if not kept.is_there and not lost.isdisjoint(needed_by([kept.source]))
        ]
        self._held_back = frozenset(kept.source for kept in back)
        for kept in back:
            if not kept.is_there:
                self._bring_back(kept)
        if back and self.live_bytes() + need_bytes > self.budget_bytes:
            self._make_room(need_bytes, what)

    def _note_writes(self, call: Call | None, args: Any, kwargs: Any, written: list[torch.Tensor]) -> None:
        """Note that a call has written to tensors, and how, if it was one whose contents could be made again."""
        everything = tensors_in((args, kwargs))
        for tensor in written:
            storage = tensor.untyped_storage()
            before = self.sources.find(storage)
            if len(written) > 1 or before is None or before.call is None:
                call = None
            if call is not None:
                call.args = template(self.sources, args, self.counts.calls)
                call.kwargs = template(self.sources, kwargs, self.counts.calls)
            place = next(number for number, each in enumerate(everything) if each is tensor)
            after = self.sources.written(storage, call, place)
            kept = self.kept.pop(before, None) if before is not None else None
            if kept is not None:
                kept.source, self.kept[after] = after, kept

    def _pack(self, tensor: torch.Tensor) -> Any:
        with no_modes():
            alias = tensor.detach()  # a result that its own node saves would keep itself alive; the version is shared
        if not is_dense(alias) or alias.is_conj() or alias.is_neg():
            return Saved(None, alias)
        source = self.sources.find(alias.untyped_storage())
        if source is None or source.call is None:
            return Saved(None, alias)
        kept = self.kept.get(source)
        if kept is None:
            kept = self.kept[source] = Kept(source)
        elif not kept.is_there:  # let go, and still held by somebody
            self._give(kept, alias.untyped_storage())
        saved = Saved(kept, alias)
        kept.saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        self._was_backward = True
        saved.require_unwritten()
        if saved.kept is not None:
            saved.kept.source.used_at = self.counts.calls
            if not saved.kept.is_there:
                self._bring_back(saved.kept)
        with no_modes():
            return saved.alias.detach()  # one of its own: the alias may be let go while this one is in use

    def _bring_back(self, kept: Kept) -> None:
        """Hold contents again that were let go: their storage, if somebody else still has it, or made again."""
        live = kept.source.live
        if live is not None:
            self._give(kept, live)
            return
        began = time.perf_counter()
        was_busy, self._is_busy = self._is_busy, True
        target, self._target = self._target, kept.source
        try:
            with torch.no_grad(), without_autocast():
                made = make_again(self.sources, kept.source, self._before_again, self._done_again)
            if made is None:
                raise _lost()
            if not kept.is_there:
                self._give(kept, made.untyped_storage())
        except LostContentsError:
            raise _lost() from None
        finally:
            self._is_busy, self._target = was_busy, target
            self._pinned.clear()
        self.counts.again_seconds += time.perf_counter() - began

    def _give(self, kept: Kept, storage: torch.UntypedStorage) -> None:
        """Let autograd hold contents again.

        Raises:
            UnsupportedStepError: they are not those that were let go.
        """
        if storage.nbytes() != kept.source.bytes or not kept.is_as_before(storage):
            raise _lost()
        kept.take(storage)
        self.sources.enter(storage, kept.source)

    def _before_again(self, call: Call) -> None:
        self.counts.made_again += 1
        self._pinned = {*inputs_of(call), *([] if self._target is None else [self._target])}
        if self._upper_bytes + call.need_bytes > self.budget_bytes:
            self._make_room(call.need_bytes, str(call.function))
        self._upper_bytes += call.need_bytes

    def _done_again(self, call: Call, found: dict[int, torch.Tensor]) -> None:
        """Let autograd have contents that were made again on the way, as long as there is room for them."""
        for kept in self._gone.pop(call, []):
            tensor = found.get(kept.source.place)
            is_its = kept.source.call is call and not kept.is_there and kept.alive()
            if is_its and isinstance(tensor, torch.Tensor):
                self._give(kept, tensor.untyped_storage())
                self.kept[kept.source] = kept

    def _make_room(self, need_bytes: int, what: str) -> None:
        """Let contents go until there is room for a call.

        Raises:
            OverBudgetError: not enough can be let go.
        """
        self._upper_bytes = self.live_bytes()
        if self._upper_bytes + need_bytes <= self.budget_bytes:
            return
        self._forget_dead()
        for kept in self._candidates():
            self._let_go(kept)
            self._upper_bytes = self.live_bytes()
            if self._upper_bytes + need_bytes <= self.budget_bytes:
                return
        self._forget()
        gc.collect()
        self._upper_bytes = self.live_bytes()
        if self._upper_bytes + need_bytes <= self.budget_bytes:
            return
        raise OverBudgetError(
            f"{calling_line()}: {what} takes up to {format_bytes(need_bytes)}, and {format_bytes(self._upper_bytes)} "
            f"of the budget of {format_bytes(self.budget_bytes)} are taken by what cannot be let go: "
            f"{self._holding()}; give more, or a smaller batch"
        )

    def _candidates(self) -> list[Kept]:
        """Return what may be let go, the best first: the lowest cost over bytes and staleness.

        That is h of "Dynamic tensor rematerialization" (Kirisame et al. 2021), with measured costs; what a contents'
        call lacks itself counts with them.
        """
        now = self.counts.calls + 1
        scored: list[tuple[float, int, Kept]] = []
        for number, (source, kept) in enumerate(self.kept.items()):
            is_free = source not in self._pinned and source not in self._held_back and not source.is_blank
            if kept.is_there and source.call is not None and source.bytes >= LEAST_BYTES and is_free:
                seconds = seconds_to_make(source)
                if seconds < float("inf"):
                    scored.append((seconds / (source.bytes * (now - source.used_at)), number, kept))
        return [kept for _, _, kept in sorted(scored, key=lambda each: each[:2])]

    def _let_go(self, kept: Kept) -> None:
        source = kept.source
        assert source.call is not None
        kept.let_go()
        self.counts.let_go += 1
        self._gone.setdefault(source.call, []).append(kept)

    def _forget_dead(self) -> None:
        self.kept = {source: kept for source, kept in self.kept.items() if kept.alive()}

    def _end_pass(self) -> None:
        """Begin another pass: what autograd held of the last one is gone."""
        self._was_backward = False
        self.counts.passes += 1
        self._forget()

    def _forget(self) -> None:
        """Forget how what nobody saved was made, or a loop's calls would all be remembered."""
        self._forget_dead()
        self.sources.forget(needed_by(self.kept))
        self._gone = {call: alive for call, group in self._gone.items() if (alive := [k for k in group if k.alive()])}

    def _holding(self) -> str:
        """Say what holds the memory."""
        saved_bytes = sum(source.bytes for source, kept in self.kept.items() if kept.is_there and kept.alive())
        model_bytes = self._model_bytes()
        rest_bytes = max(0, self._upper_bytes - saved_bytes - model_bytes)
        return (
            f"{format_bytes(model_bytes)} by parameters, buffers and gradients, {format_bytes(saved_bytes)} by what "
            f"autograd saved and cannot be made again now, {format_bytes(rest_bytes)} by what code holds"
        )


def _lost() -> UnsupportedStepError:
    return UnsupportedStepError(
        f"{calling_line()}: what autograd saved cannot be made again with the same contents: something that it is made "
        "of was written to where torch's operators do not show it (NumPy, another thread, a kernel of another "
        "library), or its kernels do not give the same bits twice; give a budget in which it stays"
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own that can be let go and made again."""
    return tensor.layout is torch.strided and not tensor.is_nested and type(tensor) in _PLAIN_TYPES


def require_as_bare(func: Any, args: Any) -> None:
    """Refuse a call that PyTorch makes otherwise under a dispatch mode than in the bare loop.

    Raises:
        UnsupportedStepError: names the line.
    """
    found = UnderModes()
    found.look_at(func, args, 0, calling_line())
    if found.decomposed:
        raise UnsupportedStepError(
            f"{calling_line()}: PyTorch computes singular values and eigenvalues of a tensor without gradient "
            "otherwise in eager mode (svdvals, eigvalsh, cond, matrix norms): compute them outside of the block"
        )


def _kind(func: Any) -> int:
    schema = func._schema
    if func.namespace not in ("aten", "prims") or func.overloadpacket in _HIDDEN_STATE:
        return _FOREIGN
    if torch.Tag.inplace_view in func.tags:
        return _VIEW
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return _WRITES
    if schema.returns and all(returned.alias_info is not None for returned in schema.returns):
        return _VIEW
    if torch.Tag.dynamic_output_shape in func.tags:
        return _DATA_DECIDES
    return _PLAIN
