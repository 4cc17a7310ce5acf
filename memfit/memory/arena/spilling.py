"""Recording a step that does not fit its device: what autograd saves is spilled while the step is recorded.

A profile of a step takes the step's memory once. "We can obtain the profile even in such a case by utilizing an
out-of-core technique" (Sekiyama et al. 2018, section 3): a saved tensor goes to a file, or from CUDA to the host, and
comes back where backward reads it. The recording is the same as without: memory that comes back is entered as the
request that it was, and a request ends where eager would have freed it. So do the results have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.memory.arena.library import ArenaLibrary
from memfit.system.spill_file import BLOCK_BYTES, SpillFile
from memfit.torch_private.autograd import saved_with

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
        self._library = library
        self._copies = _HostCopies() if device.type == "cuda" else _FileCopies(directory)
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
            self._spilled[key] = _Spilled(number, storage.nbytes(), self._copies.make(storage), tensor.device)
        return _Handle(self, key, tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        return saved.tensor_now()

    def taken(self, key: tuple[int, int]) -> _Spilled:
        """Return a spilled storage, on which there is one more handle."""
        self._spilled[key].handles += 1
        return self._spilled[key]

    def bring_back(self, spilled: _Spilled) -> torch.UntypedStorage:
        """Return new memory with the bits of a spilled storage, entered as the request that it was."""
        if not self.is_over:
            self._library.again(spilled.number)
        # torch.UntypedStorage would ask another allocator than the one that tensors ask
        storage = torch.empty(spilled.size_bytes, dtype=torch.uint8, device=spilled.device).untyped_storage()
        self._copies.read(spilled.copy, storage)
        return storage

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
    """A storage that was spilled: the request that it was, its copy, and how many handles there are on it."""

    number: int
    size_bytes: int
    copy: Any
    device: torch.device
    handles: int = 0


class _Kept:
    """A saved tensor that stays, with the version that autograd looks at where there are no hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # detached, or a result that its own node saves would keep itself alive; the version is shared
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor_now(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self._tensor.shape)} was saved at version {self._version}, and is at version "
                f"{self._tensor._version} now"
            )
        return self._tensor


class _Handle:
    """What autograd holds in the place of a spilled tensor."""

    __slots__ = ("_dtype", "_key", "_owner", "_place", "_spilled")

    def __init__(self, owner: Spilling, key: tuple[int, int], tensor: torch.Tensor) -> None:
        self._owner, self._key, self._spilled = owner, key, owner.taken(key)
        self._dtype = tensor.dtype
        self._place = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())

    def tensor_now(self) -> torch.Tensor:
        storage = self._owner.bring_back(self._spilled)
        empty = torch.empty(0, dtype=self._dtype, device=self._spilled.device)
        return empty.set_(storage, *self._place)

    def __del__(self) -> None:
        self._owner.let_go(self._key)


class _HostCopies:
    """Copies in the host's memory."""

    def make(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return storage.cpu()

    def read(self, copy: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        storage.copy_(copy)


class _FileCopies:
    """Copies in files without names, which go with the last reference to them."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file: SpillFile | None = None
        self._used_bytes = 0

    def make(self, storage: torch.UntypedStorage) -> tuple[SpillFile, int]:
        size_bytes = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if self._file is None or self._used_bytes + size_bytes > self._file.size_bytes:
            self._file, self._used_bytes = SpillFile(max(size_bytes, _FILE_BYTES), self._directory), 0
        copy = self._file, self._used_bytes
        self._file.write(storage.data_ptr(), storage.nbytes(), self._used_bytes, storage).result()
        self._used_bytes += size_bytes
        return copy

    def read(self, copy: tuple[SpillFile, int], storage: torch.UntypedStorage) -> None:
        file, offset = copy
        file.read(storage.data_ptr(), storage.nbytes(), offset, storage).result()
