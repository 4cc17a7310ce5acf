"""The arena on CUDA: a library whose allocator stands in front of torch's own while a step runs.

torch's allocator stays in place for all else, and gives the arena its memory: statistics, caps and CUDA graphs work.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from memfit.errors import InvalidDeviceError
from memfit.memory.arena.library import ArenaLibrary, ArenaUnavailableError, load_arena_library


class CudaArenaLibrary(ArenaLibrary):
    """The calls on the current stream of one device. A step on another stream than the last one waits for that one."""

    def __init__(self, library: ctypes.PyDLL, index: int) -> None:
        super().__init__(library, "cuda")
        self.index = index

    def resize(self, handle: int, bytes_: int) -> bool:
        """Replace the arena's memory, on the current stream of its device; return whether there was enough."""
        self.library.memfit_arena_cuda_place_slabs(self.index, self._stream())
        return super().resize(handle, bytes_)

    def _begin(self, handle: int, plan: int, *, of_this_thread: bool) -> int:
        return self.library.memfit_arena_cuda_begin_step(handle, plan, self.index, self._stream(), of_this_thread)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.index).cuda_stream


def library_on(device: torch.device) -> CudaArenaLibrary:
    """Return the calls for a device.

    Raises:
        InvalidDeviceError: there is no such device.
        ArenaUnavailableError: no compiler, or this torch's allocator cannot be stood in front of.
    """
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise InvalidDeviceError(f"there is no arena on device '{device}': expected cpu, or a CUDA device that is here")
    if torch.version.hip:
        raise ArenaUnavailableError("no arena: this torch is built for ROCm, whose allocator has other names")
    return _library_on(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _library_on(index: int) -> CudaArenaLibrary:
    return CudaArenaLibrary(load_arena_library("cuda").library, index)
