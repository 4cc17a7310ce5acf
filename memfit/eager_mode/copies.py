"""Contents that eager mode copies to the host and back, where that takes less time than recomputing them."""

from __future__ import annotations

import time

import torch

from memfit.eager_mode.host import Host
from memfit.eager_mode.kept import Kept
from memfit.eager_mode.sources import Source
from memfit.errors import HostMemoryError
from memfit.system.recorder import taken_bytes
from memfit.torch_private.tensors import storage_users

NEVER_SECONDS = float("inf")


class Copies:
    """The copies of contents on a host, if there is one.

    Attributes:
        host: where contents are copied to; None if that is nowhere.
        to_host_bytes, to_device_bytes: copied so far.

    Args:
        host: see above.
    """

    def __init__(self, host: Host | None) -> None:
        self.host = host
        self.to_host_bytes = self.to_device_bytes = 0

    def seconds(self, kept: Kept) -> float:
        """Return the seconds of copies to the host and back; infinity without room, or if others hold the storage.

        Raises:
            HostMemoryError: a copy that has begun failed.
        """
        source, storage = kept.source, kept.source.live
        if self.host is None or storage is None or storage.device != self.host.device:
            return NEVER_SECONDS
        if source.call is None and not storage.resizable():  # memory of NumPy's, say, that others may write to
            return NEVER_SECONDS
        settle(source)  # until then the copy, too, holds the storage
        if storage_users(storage) > len(kept.alive()) + 1:  # and this function's own
            return NEVER_SECONDS
        if source.host is None:
            return self.host.seconds(source.bytes) if self.host.has_room(source.bytes) else NEVER_SECONDS
        return source.host.seconds_back

    def make(self, source: Source) -> float:
        """Copy contents to the host, which has them then, or room for them; return the seconds.

        Raises:
            HostMemoryError: the copy failed.
        """
        began = time.perf_counter()
        host, storage = self.host, source.live
        is_to_copy = host is not None and storage is not None and source.host is None and storage.device == host.device
        if is_to_copy and host.has_room(source.bytes):
            source.host = host.copy(storage)
            self.to_host_bytes += source.bytes
        settle(source)
        return time.perf_counter() - began

    def bytes_back(self, source: Source) -> int:
        """Return the bytes on the device that a copy back will take; 0 if there is none to be made."""
        if self.host is None or source.host is None:
            return 0
        return taken_bytes(source.bytes, self.host.device)

    def back(self, source: Source) -> torch.Tensor:
        """Return a tensor over a new storage with contents that are on the host.

        Raises:
            HostMemoryError: the copy failed.
        """
        assert source.host is not None
        self.to_device_bytes += source.bytes
        return source.host.back()

    def close(self) -> None:
        """Make no more copies to the host."""
        if self.host is not None:
            self.host.close()


def settle(source: Source) -> None:
    """Wait for a copy of contents to the host, if one has begun; one that failed is none.

    Raises:
        HostMemoryError: the copy failed.
    """
    if source.host is not None:
        try:
            source.host.wait()
        except HostMemoryError:
            source.host = None
            raise
