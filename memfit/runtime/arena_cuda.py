"""The arena on CUDA: the library becomes torch's allocator, before torch has allocated anything there."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from memfit.errors import InvalidDeviceError
from memfit.runtime.arena_library import ArenaLibrary, ArenaUnavailableError, library_path, load_arena_library


class CudaArenaLibrary(ArenaLibrary):
    """The calls, with the current stream of one device. An arena belongs to the stream of its first step."""

    def __init__(self, library: ctypes.PyDLL, index: int) -> None:
        super().__init__(library, "cuda")
        self.index = index
        self._streams: dict[int, int] = {}

    def destroy(self, handle: int) -> None:
        """As on CPU."""
        self._streams.pop(handle, None)
        super().destroy(handle)

    def _begin(self, handle: int, plan: int) -> int:
        stream = torch.cuda.current_stream(self.index).cuda_stream
        # Memory that one stream lets go of must not be another's before the first has got so far.
        if self._streams.setdefault(handle, stream) != stream:
            raise ArenaUnavailableError(
                "this step runs on another CUDA stream than the arena's first step; make an arena for each stream"
            )
        self.library.memfit_arena_cuda_on_stream(stream)
        return self.library.memfit_arena_cuda_begin_step(handle, plan, self.index, stream)


def library_on(device: torch.device) -> CudaArenaLibrary:
    """Make the arena torch's allocator on CUDA, once a process, and return the calls for a device.

    Raises:
        InvalidDeviceError: there is no such device.
        ArenaUnavailableError: no compiler, torch has allocated already, or the driver has no stream-ordered allocator.
    """
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise InvalidDeviceError(f"there is no arena on device '{device}': expected cpu, or a CUDA device that is here")
    return _library_on(device.index if str(device) != "cuda" else torch.cuda.current_device())


@functools.cache
def _library_on(index: int) -> CudaArenaLibrary:
    library = load_arena_library("cuda").library
    _become_the_allocator(library)
    if library.memfit_arena_cuda_prepare(index):
        raise ArenaUnavailableError("no arena: this CUDA driver has no stream-ordered allocator (cudaMallocAsync)")
    return CudaArenaLibrary(library, index)


_installed: list[Any] = []  # torch keeps no reference of its own


def _become_the_allocator(library: ctypes.PyDLL) -> None:
    if _installed:
        return
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(library_path("cuda")), "memfit_arena_cuda_malloc", "memfit_arena_cuda_free"
    )
    on_record = ctypes.cast(library.memfit_arena_cuda_record_stream, ctypes.c_void_p).value
    inner: Any = allocator.allocator()
    inner.set_record_stream_fn(on_record)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise ArenaUnavailableError(
            "no arena: torch has allocated on CUDA already, and its allocator can only be changed before; call "
            "memfit.arena(device='cuda') before anything is put on the device"
        ) from error
    _installed.append(allocator)
