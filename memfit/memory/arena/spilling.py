"""Recording a step that does not fit its device: what autograd saves is spilled while the step is recorded.

A profile of a step takes the step's memory once. "We can obtain the profile even in such a case by utilizing an
out-of-core technique" (Sekiyama et al. 2018, section 3): a saved tensor goes to a file, or from CUDA to the host, and
comes back where backward reads it. The recording is the same as without: memory that comes back is entered as the
request that it was, and a request ends where eager would have freed it. So do the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.memory.arena.library import ArenaLibrary
from memfit.memory.host.slab import DiskSlab
from memfit.memory.host.store import HostCopy
from memfit.memory.place import Place, bytes_of
from memfit.system.spill_file import BLOCK_BYTES
from memfit.torch_private.autograd import require_unwritten, saved_with

_LEAST_BYTES = 1 << 16  # smaller storages stay
_FILE_BYTES = 1 << 28  # of one of several files; a larger storage has a file of its own


class Spilling:
    """The `with` block of a step that is recorded while what autograd saves is elsewhere.

    Args:
        library: of the arena that records.
        device: of the step.
        directory: of the files for a CPU's storages; None is the system's temporary one.
    """

    def __init__(self, library: ArenaLibrary, device: torch.device, directory: Path | None) -> None:
        self._library, self._device, self._directory = library, device, directory
        self._slab: DiskSlab | None = None  # the last one, of which so much is used
        self._used_bytes = 0
        self._spilled: dict[tuple[int, int], _Spilled] = {}  # by number of the request and version of the tensor
        self._hooks = saved_with(self._pack, self._unpack)
        self.is_over = False

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.is_over = True
        self._hooks.__exit__(*raised)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or storage.nbytes() < _LEAST_BYTES or tensor.is_conj() or tensor.is_neg():
            return _Kept(tensor)
        number = self._library.number(storage.data_ptr())
        if number < 0:  # the step did not request it
            return _Kept(tensor)
        key = number, tensor._version
        if key not in self._spilled:
            self._spilled[key] = _Spilled(number, self._copied(bytes_of(tensor)))
        return _Handle(self, key, tensor)

    def _copied(self, whole: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy the bytes of a storage away, and return what brings them back, on new memory."""
        if self._device.type == "cuda":
            return partial(whole.cpu().to, whole.device)
        size_bytes = -(-len(whole) // BLOCK_BYTES) * BLOCK_BYTES
        if self._slab is None or self._used_bytes + size_bytes > self._slab.size_bytes:
            self._slab, self._used_bytes = DiskSlab(max(size_bytes, _FILE_BYTES), self._directory), 0
        copy = HostCopy(self._slab, whole, self._used_bytes)
        copy.wait()
        self._used_bytes += size_bytes
        return copy.back

    def _unpack(self, saved: Any) -> torch.Tensor:
        return saved.tensor_now()

    def taken(self, key: tuple[int, int]) -> _Spilled:
        """Return a spilled storage, on which there is one more handle."""
        self._spilled[key].handles += 1
        return self._spilled[key]

    def bring_back(self, spilled: _Spilled) -> torch.Tensor:
        """Return the bytes of a spilled storage on new memory, entered as the request that it was."""
        if not self.is_over:
            self._library.again(spilled.number)
        return spilled.back()

    def let_go(self, key: tuple[int, int]) -> None:
        """Note that autograd has freed a handle: the last one ends the request."""
        spilled = self._spilled[key]
        spilled.handles -= 1
        if spilled.handles == 0:
            del self._spilled[key]
            if not self.is_over:
                self._library.ended(spilled.number)


@dataclass(slots=True)
class _Spilled:
    """A storage that was spilled: the request that it was, what brings it back, and how many handles are on it."""

    number: int
    back: Callable[[], torch.Tensor]
    handles: int = 0


class _Kept:
    """A saved tensor that stays, with the version that autograd looks at where there are no hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # detached, or a result that its own node saves would keep itself alive; the version is shared
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor_now(self) -> torch.Tensor:
        require_unwritten(self._tensor, self._version)
        return self._tensor


class _Handle:
    """What autograd holds in the place of a spilled tensor."""

    __slots__ = ("_key", "_owner", "_place", "_spilled")

    def __init__(self, owner: Spilling, key: tuple[int, int], tensor: torch.Tensor) -> None:
        self._owner, self._key, self._spilled = owner, key, owner.taken(key)
        self._place = Place.of(tensor)

    def tensor_now(self) -> torch.Tensor:
        return self._place.on(self._owner.bring_back(self._spilled))

    def __del__(self) -> None:
        self._owner.let_go(self._key)
