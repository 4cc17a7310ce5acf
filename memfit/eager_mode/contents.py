"""All contents that eager mode knows: what autograd saved of them is freed to make room, and recomputed."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from memfit.capture.lines import calling_line
from memfit.eager_mode.again import Again, give_back
from memfit.eager_mode.kept import Kept, Saved, alias_of
from memfit.eager_mode.operators import is_dense
from memfit.eager_mode.passes import Passes
from memfit.eager_mode.releasing import Releasing, settle
from memfit.eager_mode.sources import Call, Source, Sources, flat, needed_by, tensors_given
from memfit.errors import OverBudgetError
from memfit.memory.host.room import Host
from memfit.system.budget import format_bytes
from memfit.torch_private.autograd import instead_here, require_unwritten

NO_CALL: tuple[Any, Any, Any] = (None, (), {})
_RECENT_CALLS = 32  # whose results the loop may be about to use


class Contents:
    """What is on a device, as far as calls and autograd show it, and room for what comes.

    Attributes:
        budget_bytes: that all of the device's tensors may take together, but for the reserve; on CUDA less, for what is
            unused in pages.
        live_bytes: returns what they take now.
        upper_bytes: at least what is live; read anew where it is too high.
        sources: how contents were made.
        kept: what autograd saved, by its contents.
        passes: those of the loop.
        calls, made_again: how many calls the loop made, and how many were recomputed.
        freed_within_bytes: while calls ran.
        on_freed: called with the bytes that were freed each time while a call ran.
        return_unused: called with the bytes that a call needs for which nothing more can be freed.
        releasing: what of them goes first, and how.
        reserve_bytes: of the budget, for the mode's own numbers.
        stranded_bytes: of the budget, that no call can use.
        is_busy: whether calls are made that are none of the loop's.
        running: the call (operator, args, kwargs) that runs now, or `NO_CALL` outside of all calls; None while this
            object and the mode work, when nothing else may let contents go.
        refusal: why a call that ran was refused memory.
        target: what is being brought back for autograd, if anything is.

    Args:
        given_bytes: the budget, with the reserve.
        live_bytes: see above.
        model_bytes: returns what parameters, buffers and gradients take of it.
        host: where contents are copied to; None if that is nowhere.
        reserve_bytes: see above.
    """

    def __init__(
        self,
        given_bytes: int,
        live_bytes: Callable[[], int],
        model_bytes: Callable[[], int],
        host: Host | None,
        reserve_bytes: int,
    ) -> None:
        self._given_bytes, self.reserve_bytes, self.stranded_bytes = given_bytes, reserve_bytes, 0
        self.budget_bytes = self.upper_bytes = given_bytes - reserve_bytes
        self.live_bytes = live_bytes
        self._model_bytes = model_bytes
        self.sources = Sources()
        self.kept: dict[Source, Kept] = {}
        self.releasing = Releasing(host)
        self.passes = Passes()
        self.calls = self.made_again = self.freed_within_bytes = 0
        self._is_forgotten = True
        self.on_freed: Callable[[int], None] = lambda _bytes: None
        self.return_unused: Callable[[int], None] = lambda _need_bytes: None
        self.is_busy = False
        self.running: tuple[Any, Any, Any] | None = NO_CALL
        self.refusal: BaseException | None = None
        self.target: Source | None = None

    def note(self, call: Call, args: Any, kwargs: Any, returned: Any) -> None:
        """Note how a call made new contents.

        Args:
            call: not read yet.
            args, kwargs: that make the same results when it is run again.
            returned: by the operator; only tensors on storages that are not known yet are new.
        """
        new: list[tuple[int, torch.UntypedStorage]] = []
        for place, each in enumerate(flat(returned)):
            if isinstance(each, torch.Tensor) and is_dense(each):
                storage = each.untyped_storage()
                if self.sources.find(storage) is None:
                    new.append((place, storage))
        if not new:
            return
        try:
            call.read(self.sources, args, kwargs)
        except (NotImplementedError, RuntimeError):  # a tensor without a storage, or without a shape, of its own
            return
        self._is_forgotten = False
        for place, storage in new:
            self.sources.made(storage, call, place).used_at = call.number

    def before_writes(self, written: list[torch.Tensor], need_bytes: int, what: Any) -> None:
        """Make again what could not be recomputed after these tensors are written to, and keep it until they are.

        Args:
            written: what the next call writes to.
            need_bytes: that this call takes, for which there is room at the end.
            what: is called, for the error.

        Raises:
            OverBudgetError: the call does not fit beside what is kept.
            UnsupportedStepError: something could not be recomputed.
        """
        lost: set[Source] = set()
        for tensor in written:
            storage = tensor.untyped_storage()
            source = self.sources.find(storage)
            if source is None:
                continue
            settle(source)
            kept = self.kept.get(source)
            if kept is not None and not kept.is_there:  # the call writes to a tensor that autograd saved
                give_back(self.sources, kept, storage)
            if source.call is None and source.host is None and source.readers:
                lost.add(source)
        if not lost:
            return
        self._forget_dead()
        staying = self._to_stay_without(lost)
        self.releasing.held_back = frozenset(kept.source for kept in staying)
        back = [kept for kept in staying if not kept.is_there]
        for kept in back:
            if not kept.is_there:
                Again(self).bring_back(kept)
        if back and self.live_bytes() + need_bytes > self.budget_bytes:
            self.make_room(need_bytes, what)
        if self.kept:
            self.sources.hold_without(lost)
        elif not self._is_forgotten:
            self.forget(recent_calls=0)  # they may read what is lost

    def _to_stay_without(self, lost: set[Source]) -> list[Kept]:
        """Return the contents of which all others can be recomputed that are made of what is about to be lost."""
        staying: dict[Source, Kept] = {}
        for kept in sorted(self.kept.values(), key=lambda kept: kept.source.call.number if kept.source.call else 0):
            if not lost.isdisjoint(needed_by([kept.source], staying)):
                staying[kept.source] = kept
        return list(staying.values())

    def note_writes(self, call: Call | None, args: Any, kwargs: Any, written: list[torch.Tensor]) -> None:
        """Note that a call has written to tensors, and how, if it was one whose contents could be recomputed.

        Args:
            call: not read yet; None if it is not to be run again.
            args, kwargs: that it was given.
            written: the tensors among these that it wrote to.
        """
        self.releasing.held_back = frozenset()
        everything = tensors_given((args, kwargs))
        for tensor in written:
            storage = tensor.untyped_storage()
            before = self.sources.find(storage)
            if len(written) > 1 or before is None or before.call is None:
                call = None
            if call is not None:
                try:
                    call.read(self.sources, args, kwargs)
                except (NotImplementedError, RuntimeError):  # a sparse gradient, say, which has no storage of its own
                    call = None
            place = next(number for number, each in enumerate(everything) if each is tensor)
            after = self.sources.written(storage, call, place)
            kept = self.kept.pop(before, None) if before is not None else None
            if kept is not None:
                kept.source, self.kept[after] = after, kept

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark contents as not recomputable: the tensors that they are made of will be gone by then."""
        for tensor in tensors:
            source = self.sources.find(tensor.untyped_storage()) if is_dense(tensor) else None
            if source is not None:
                source.call = None

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Return what autograd holds in the place of a tensor that it saves."""
        is_plain = is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()
        source = self.sources.find(tensor.untyped_storage()) if is_plain else None
        if (source is None or source.call is None) and (not is_plain or self.releasing.host is None):
            return Saved(None, tensor if tensor.is_leaf else alias_of(tensor))
        alias = alias_of(tensor)  # a result that its own node saves would keep itself alive; the version is shared
        if source is None or source.call is None:
            source = self.sources.of(alias.untyped_storage())
            source.used_at = self.calls
        kept = self.kept.get(source)
        if kept is None:
            kept = self.kept[source] = Kept(source)
        elif not kept.is_there:  # freed, and still held by somebody
            give_back(self.sources, kept, alias.untyped_storage())
        saved = Saved(kept, alias)
        kept.saved.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Return the tensor that autograd saved."""
        require_unwritten(saved.alias, saved.version)
        if saved.kept is None:
            return saved.alias
        saved.kept.source.used_at = self.calls
        if not saved.kept.is_there:
            Again(self).bring_back(saved.kept)
        return alias_of(saved.alias)  # one of its own: the alias may be freed while this one is in use

    def make_room(self, need_bytes: int, what: Any) -> None:
        """Let contents go until there is room for a call.

        Args:
            need_bytes: that it takes.
            what: is called, for the error.

        Raises:
            OverBudgetError: not enough can be freed.
        """
        self.upper_bytes = self.live_bytes()
        if self.upper_bytes + need_bytes <= self.budget_bytes:
            return
        if self._let_go_for(need_bytes):
            return
        for recent_calls in (_RECENT_CALLS, 0):  # what is known of calls holds contents, too
            self.forget(recent_calls)
            gc.collect()
            self.upper_bytes = self.live_bytes()
            if self.upper_bytes + need_bytes <= self.budget_bytes or self._let_go_for(need_bytes):
                return
        used_bytes = self.upper_bytes + self.reserve_bytes
        if used_bytes + need_bytes <= self._given_bytes - self.stranded_bytes:  # what else is unused may be of use
            self.return_unused(need_bytes)
            return
        least_bytes = used_bytes + need_bytes + self.stranded_bytes
        raise OverBudgetError(
            f"{calling_line()}: {what} takes up to {format_bytes(need_bytes)}, and {format_bytes(used_bytes)} of the "
            f"budget of {format_bytes(self._given_bytes)} are taken by what cannot be freed: {self._holding()}; give "
            f"more (this call needs a budget of {least_bytes} bytes), or a smaller batch{instead_here()}"
        )

    def make_room_within(self, need_bytes: int) -> str | None:
        """Let contents go while a call runs, before it takes memory that does not fit: none that it is given.

        Args:
            need_bytes: that it is about to take.

        Returns:
            why there is no room, as `refusal` has it; None if there is, and for what this object and the mode take.
        """
        if (running := self.running) is None:
            return None
        self.running, pinned, before_bytes = None, self.releasing.pinned, self.live_bytes()
        function, args, kwargs = running
        try:
            self.releasing.pinned = pinned | _given(self.sources, args, kwargs)
            self.make_room(need_bytes, "this line" if function is None else function)
        except BaseException as refusal:  # noqa: BLE001 (it passes through a kernel, which raises another error)
            self.refusal = refusal
            return str(refusal)
        finally:
            freed_bytes = max(0, before_bytes - self.live_bytes())
            self.freed_within_bytes += freed_bytes
            self.on_freed(freed_bytes)
            self.running, self.releasing.pinned = running, pinned
        return None

    def _let_go_for(self, need_bytes: int) -> bool:
        """Let contents go, in the policy's order, until there is room for a call; return whether there is."""
        for kept in self.releasing.best_first(self._living, self.calls + 1):
            seconds = self.releasing.let_go(kept)
            if self.target is None:  # or the seconds are those of what is recomputed
                self.passes.again_seconds += seconds
            self.upper_bytes = self.live_bytes()
            if self.upper_bytes + need_bytes <= self.budget_bytes:
                return True
        return False

    def holds_saved(self) -> bool:
        """Return whether autograd holds anything that it saved."""
        self._forget_dead()
        return bool(self.kept)

    def after_unseen(self) -> None:
        """Go on after calls that were not seen: all that they may have written to is marked as not recomputable."""
        if not self.holds_saved():
            self.sources = Sources()
        self.upper_bytes = self.live_bytes()

    def _living(self) -> Collection[Kept]:
        self._forget_dead()
        return self.kept.values()

    def _forget_dead(self) -> None:
        self.kept = {source: kept for source, kept in self.kept.items() if kept.is_alive()}

    def forget(self, recent_calls: int = _RECENT_CALLS) -> None:
        """Forget how what nobody saved was made, or a loop's calls would all be remembered.

        Args:
            recent_calls: of what so many latest calls made it is not forgotten.
        """
        self._forget_dead()
        self.sources.forget(needed_by(self.kept), self.calls - recent_calls if recent_calls else math.inf)
        self.releasing.forget_dead()
        self._is_forgotten = not self.kept and not recent_calls

    def close(self) -> None:
        """Copy nothing to the host any more; what autograd holds after the block can still be read."""
        self.forget(recent_calls=0)
        self.sources = Sources()
        self.releasing.close()

    def _holding(self) -> str:
        """Say what holds the memory."""
        saved_bytes = sum(source.bytes for source, kept in self.kept.items() if kept.is_there and kept.alive())
        model_bytes = self._model_bytes()
        rest_bytes = max(0, self.upper_bytes - saved_bytes - model_bytes)
        return (
            f"{format_bytes(model_bytes)} by parameters, buffers and gradients, {format_bytes(saved_bytes)} by what "
            f"autograd saved and cannot be recomputed now, {format_bytes(rest_bytes)} by what code holds, "
            f"{format_bytes(self.reserve_bytes)} by memfit"
        )


def _given(sources: Sources, args: Any, kwargs: Any) -> set[Source]:
    """Return the contents that a call is given."""
    dense = [tensor for tensor in tensors_given((args, kwargs)) if is_dense(tensor)]
    found = (sources.find(tensor.untyped_storage()) for tensor in dense)
    return {source for source in found if source is not None}
