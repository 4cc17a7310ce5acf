"""Offloading in a lean pass: what autograd saves beside the checkpoints goes to the host where the budget is short.

A lean pass recomputes each block, and keeps the inputs of the blocks and all that is saved between them. Nothing is
known by then of what else could be recomputed, and a copy has the same bits whatever it is of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.checkpointing.seen import CallSeen
from memfit.eager_mode.kept import Saved, alias_of
from memfit.errors import HostMemoryError
from memfit.memory.contract import Contract
from memfit.memory.host.slab import make_slab
from memfit.memory.host.store import HostCopy
from memfit.memory.place import bytes_of
from memfit.step.hooks import Hook
from memfit.torch_private.autograd import (
    changing_hooks,
    default_saved_hooks,
    in_transform,
    no_modes,
    require_unwritten,
    saved_with,
)
from memfit.torch_private.sharding import key_of, modules_that_gather
from memfit.torch_private.tensors import StorageWeakRef, storage_users

_LEAST_BYTES = 1 << 12  # smaller storages stay
_MOST_COPIES = 256  # in one pass: on a CPU each has a file of its own
_CALLS_FREE = 2  # room is made for what so many calls like the largest one so far make: its tensors, and gradients


class _Contents:
    """A storage that autograd has saved, once or more often.

    Attributes:
        saved: what autograd holds in the place of tensors over it, as weak references.
        on_host: a copy, where there is no other one.
        size_bytes: of the storage, while it is on the host alone.

    Args:
        left: see `LeanOffload`.
    """

    __slots__ = ("_left", "on_host", "saved", "size_bytes")

    def __init__(self, left: Callable[..., None]) -> None:
        self.saved: list[weakref.ref[_Saved]] = []
        self.on_host: HostCopy | None = None
        self.size_bytes, self._left = 0, left

    def alive(self) -> list[_Saved]:
        """Return what autograd still holds."""
        return [saved for each in self.saved if (saved := each()) is not None]

    def expired(self) -> bool:
        """Return whether autograd holds nothing of it any more."""
        return not self.alive()

    def leave(self) -> None:
        """Copy the storage to the host, unless code holds it, too.

        Raises:
            HostMemoryError: the host has no room for it.
        """
        alive = self.alive()
        storage = alive[0].alias.untyped_storage()
        if storage_users(storage) > len(alive) + 1:  # and this function's own
            return
        with no_modes(), torch.no_grad():
            whole = bytes_of(storage)
            on_host = HostCopy(make_slab(storage.device, len(whole), None), whole, 0)
            on_host.wait()
        self.on_host, self.size_bytes, was = on_host, len(whole), StorageWeakRef(storage)
        for saved in alive:
            saved.let_go()
        del whole, storage
        self._left(self.size_bytes, was, self)

    def come_back(self) -> None:
        """Let autograd have the storage again, if it is on the host alone."""
        if self.on_host is None:
            return
        on_host, self.on_host = self.on_host, None
        self._left(-self.size_bytes)
        with no_modes(), torch.no_grad():
            storage = on_host.back().untyped_storage()
        for saved in self.alive():
            saved.take(storage)

    def __del__(self) -> None:
        if self.on_host is not None:  # nobody has read it
            self._left(-self.size_bytes)


class _Saved(Saved):
    __slots__ = ("contents",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(None, alias_of(tensor))
        self.contents: _Contents | None = None


class LeanOffload:
    """Offloads what autograd saves in calls of the model, the oldest first, where the budget leaves too little room.

    Room is made where a call of a module begins, when no kernel runs that may write to what was saved before it. What
    code holds, too, stays.

    Args:
        device: of the model.
        budget_bytes: that all of the device's tensors may take.
        live_bytes: returns what they take.
        calls: of blocks, and of modules beside them, as they are seen.
        own: keys of the model's own storages, which stay.
        left: called with the bytes that have left the device, or come back if negative; and of what has left with the
            storage that it was, and what says when autograd holds it no more.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        live_bytes: Callable[[], int],
        calls: Sequence[CallSeen],
        own: Container[int],
        left: Callable[..., None],
    ) -> None:
        self._device, self._live_bytes, self._own, self._left = device, live_bytes, own, left
        self._budget_bytes, self._calls = budget_bytes, calls
        self._seen = self._largest_bytes = self._copies = 0
        self._there: dict[int, _Contents] = {}  # on the device, by the key of the storage, the oldest first
        self._inside: AbstractContextManager[None] | None = None
        self._packs: Any = None

    def enter(self, called: torch.nn.Module) -> None:
        """Take what is saved from here on to the end of a call that begins.

        Args:
            called: the module.
        """
        if self._inside is not None or not torch.is_grad_enabled() or in_transform() or changing_hooks():
            return
        own = weakref.ref(self)

        def pack(tensor: torch.Tensor) -> _Saved:
            offload = own()
            return _Saved(tensor) if offload is None else offload._pack(tensor)

        inside = self._inside = saved_with(pack, _unpack)
        inside.__enter__()
        self._packs = pack

        def leave(*_: Any) -> None:
            hook.remove()
            offload = own()
            if offload is not None and offload._inside is inside:
                offload._leave()

        hook = called.register_forward_hook(Hook(leave), always_call=True)

    def _leave(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def __del__(self) -> None:
        hooks = default_saved_hooks()
        if hooks is not None and hooks[0] is self._packs:  # the call was interrupted, which hooks on modules don't see
            self._leave()

    def make_room(self) -> None:
        """Copy to the host what would leave too little of the budget free, the oldest first."""
        for call in self._calls[max(0, self._seen - 1) :]:  # the last one had not ended
            self._largest_bytes = max(self._largest_bytes, sum(storage.size_bytes for storage in call.storages))
        self._seen, limit_bytes = len(self._calls), self._budget_bytes - _CALLS_FREE * self._largest_bytes
        for key, contents in list(self._there.items()):
            if self._live_bytes() <= limit_bytes or self._copies >= _MOST_COPIES:
                return
            if contents.alive():
                try:
                    contents.leave()
                except HostMemoryError:  # all stays from here on
                    self._there.clear()
                    return
            self._copies += contents.on_host is not None
            if contents.on_host is not None or not contents.alive():
                del self._there[key]

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved, key = _Saved(tensor), key_of(tensor)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device == self._device
        if not is_plain or tensor.is_conj() or tensor.is_neg() or not key or key in self._own:
            return saved
        if tensor.untyped_storage().nbytes() < _LEAST_BYTES:
            return saved
        contents = self._there.get(key)
        if contents is None or not contents.alive():  # or another storage had this key
            contents = self._there[key] = _Contents(self._left)
        saved.contents = contents
        contents.saved.append(weakref.ref(saved))
        return saved


def lean_offload(
    contract: Contract | None,
    model: torch.nn.Module,
    device: torch.device,
    live_bytes: Callable[[], int],
    calls: Sequence[CallSeen],
    left: Callable[..., None] = lambda *_: None,
) -> LeanOffload | None:
    """Return the offloading of a pass without a plan; None where no budget is to be held, or parameters are gathered.

    Args:
        contract: the budget.
        model: whose parameters and buffers stay.
        device: of it.
        live_bytes, calls, left: see `LeanOffload`.
    """
    if contract is None or not contract.is_resolved or modules_that_gather(model):
        return None
    own = {key_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return LeanOffload(device, contract.budget_bytes, live_bytes, calls, own, left)


def _unpack(saved: _Saved) -> torch.Tensor:
    require_unwritten(saved.alias, saved.version)
    if saved.contents is not None:
        saved.contents.come_back()
    return alias_of(saved.alias)
