"""What autograd saves, kept by eager mode in its place: all that may be freed to make room."""

from __future__ import annotations

import weakref

import torch

from memfit.eager_mode.sources import Source
from memfit.memory.place import Place, bytes_of
from memfit.torch_private.autograd import no_modes
from memfit.torch_private.tensors import has_own_dispatch

_FEW_WORDS = 512  # of 8 bytes: fewer are kept as they are
BOX_WORDS = 1 << 18  # of a checksum, at most
_SUMS_AT_ONCE = {"cpu": 3, "cuda": 3 << 10}  # of up to 64 words: the mode's reserve has room for them, and a GPU waits


class Kept:
    """Contents that autograd has saved, once or more often.

    Attributes:
        source: the contents.
        saved: what autograd holds in the place of tensors over them, as weak references.
        is_there: whether they hold the storage.
        checksum: of the contents when they were freed, as far as autograd reads them: a kernel may leave the rest of
            its result's storage unwritten (`mse_loss`, `_embedding_bag`).
    """

    __slots__ = ("_read_bytes", "checksum", "is_there", "saved", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.saved: list[weakref.ref[Saved]] = []
        self.is_there = True
        self.checksum: list[int] | None = None
        self._read_bytes = 0

    def alive(self) -> list[Saved]:
        """Return what autograd still holds."""
        return [saved for each in self.saved if (saved := each()) is not None]

    def is_alive(self) -> bool:
        """Return whether autograd still holds any of it."""
        return any(each() is not None for each in self.saved)

    def let_go(self) -> None:
        """Let go of the storage; its memory is free if nobody else holds it."""
        saved = self.alive()
        storage = saved[0].alias.untyped_storage() if saved else None
        self._read_bytes = max((each.let_go() for each in saved), default=0)
        self.checksum = None if storage is None else checksum(storage, self._read_bytes)
        self.is_there = False

    def take(self, storage: torch.UntypedStorage) -> None:
        """Hold a storage that has the contents."""
        for saved in self.alive():
            saved.take(storage)
        self.is_there = True

    def is_as_before(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage has the contents that were freed."""
        return self.checksum is None or self.checksum == checksum(storage, self._read_bytes)


class Saved:
    """What autograd holds in the place of a tensor.

    Attributes:
        kept: the contents; None for a tensor that is never freed.
        alias: a tensor like the one that was saved, with its version counter.
        version: of the tensor when it was saved.
    """

    __slots__ = ("__weakref__", "_place", "alias", "kept", "version")

    def __init__(self, kept: Kept | None, alias: torch.Tensor) -> None:
        self.kept, self.alias, self.version = kept, alias, alias._version
        self._place: Place | None = None

    def let_go(self) -> int:
        """Let go of the storage, remember the place in it, and return where that ends, in bytes."""
        alias = self.alias
        place = self._place = Place.of(alias)
        with no_modes():
            alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device)
        return place.reach_bytes

    def take(self, storage: torch.UntypedStorage) -> None:
        """Be the tensor again that was freed, on a storage with the same contents."""
        place, self._place = self._place, None
        assert place is not None
        with no_modes():
            self.alias.data = place.on(storage)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor over the same memory."""
    if has_own_dispatch(tensor):  # a nested one, say, of which only its own code makes a view
        return tensor.detach()
    with no_modes():
        return tensor.detach()


def checksum(storage: torch.UntypedStorage, size_bytes: int) -> list[int]:
    """Return numbers that tell contents apart, those in another order included.

    The words are placed in tables. The sums of a table's rows and of its columns change where a word changes or takes
    another place. It reads the storage twice, table by table: on CUDA sums take copies of a table.

    Args:
        storage: that has the contents.
        size_bytes: of them, from its start on.
    """
    with no_modes(), torch.no_grad():
        whole = bytes_of(storage)[:size_bytes]
        words = whole[: whole.numel() // 8 * 8].view(torch.int64)
        tail = whole[words.numel() * 8 :].tolist()
        found, sums = list[int](), list[torch.Tensor]()
        while words.numel() >= _FEW_WORDS:
            side = max(8, round(min(words.numel(), BOX_WORDS) ** (1 / 3)) // 8 * 8)
            height = min(words.numel() // side**2, side)
            box = words[: height * side**2].view(height, side, side)
            sums += [box.sum(others) for others in ((1, 2), (0, 2), (0, 1))]
            words = words[box.numel() :]
            if len(sums) >= _SUMS_AT_ONCE[storage.device.type] or words.numel() < _FEW_WORDS:
                found.append(hash(tuple(torch.cat(sums).tolist())))
                sums.clear()
        return found + words.tolist() + tail
