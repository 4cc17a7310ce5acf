"""The arena on CUDA: its library replaces torch's allocator, which is possible until torch uses the device.

After that torch's memory statistics raise errors, and memfit's records read the library's own counters.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import InvalidDeviceError
from memfit.runtime.arena.library import LIBRARIES, ArenaLibrary, ArenaUnavailableError, load_arena_library
from memfit.system.recorder import Segmented, count_with


class CudaArenaLibrary(ArenaLibrary):
    """The calls on the current stream of one device. An arena belongs to the stream of its first step."""

    def __init__(self, library: ctypes.PyDLL, index: int) -> None:
        super().__init__(library, "cuda")
        self.index = index
        self._streams: dict[int, int] = {}

    def destroy(self, handle: int) -> None:
        """Free the arena's memory, as soon as no tensor lies in it."""
        self._streams.pop(handle, None)
        super().destroy(handle)

    def _begin(self, handle: int, plan: int) -> int:
        require_no_autotuning()
        stream = torch.cuda.current_stream(self.index).cuda_stream
        # Memory that one stream has freed must not be used by another before the first has finished with it.
        if self._streams.setdefault(handle, stream) != stream:
            raise ArenaUnavailableError(
                "this step runs on another CUDA stream than the arena's first step; make an arena for each stream"
            )
        self.library.memfit_arena_cuda_place_slabs(self.index, stream)
        return self.library.memfit_arena_cuda_begin_step(handle, plan, self.index, stream)


def require_no_autotuning() -> None:
    """Refuse cuDNN's autotuning beside an arena: it asks torch's own allocator for free memory, whose place it takes.

    Raises:
        ArenaUnavailableError: `torch.backends.cudnn.benchmark` is on.
    """
    if torch.backends.cudnn.benchmark:
        raise ArenaUnavailableError(
            "no arena beside torch.backends.cudnn.benchmark, which asks for what only torch's own allocator has; set "
            "it to False, or leave the arena out"
        )


@dataclass(slots=True, kw_only=True)
class ArenaCounters(Segmented):
    """The library's counters of a device: bytes of ordinary blocks and of arenas, and the bytes that the driver holds.

    An arena counts in full for as long as it has memory; requests that are served from it change nothing.
    """

    library: ctypes.PyDLL
    index: int
    source: str = "the arena's counters"

    def begin(self) -> None:
        """Begin a segment."""
        self.library.memfit_arena_cuda_reset_peaks(self.index)

    def cut(self) -> tuple[int, int, int | None]:
        """End the segment: (bytes live now, the most in the segment, the most that the driver held in it)."""
        live, peak, _, most_reserved = self._read()
        return live, peak, most_reserved

    def live_bytes(self) -> int:
        """Return the bytes that are live now."""
        return self._read()[0]

    def held_bytes(self) -> int:
        """Return the bytes that the driver holds, unused ones included."""
        return self._read()[2]

    def empty_cache(self) -> None:
        """Return unused memory to the driver, on all devices."""
        self.library.memfit_arena_cuda_empty_cache()

    def _read(self) -> list[int]:
        usage = (ctypes.c_int64 * 4)()
        self.library.memfit_arena_cuda_usage(self.index, usage)
        return list(usage)


def library_on(device: torch.device) -> CudaArenaLibrary:
    """Replace torch's allocator on CUDA, once in a process, and return the calls for a device.

    Raises:
        InvalidDeviceError: there is no such device.
        ArenaUnavailableError: no compiler, torch uses CUDA already, cuDNN's autotuning is on, or the driver has no
            stream-ordered allocator.
    """
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise InvalidDeviceError(f"there is no arena on device '{device}': expected cpu, or a CUDA device that is here")
    require_no_autotuning()
    library = load_arena_library("cuda").library
    _become_the_allocator(library)
    # after the replacement: `current_device` initializes CUDA, and then the allocator is fixed
    return _library_on(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _library_on(index: int) -> CudaArenaLibrary:
    library = load_arena_library("cuda").library
    if library.memfit_arena_cuda_prepare(index):
        raise ArenaUnavailableError("no arena: this CUDA driver has no stream-ordered allocator (cudaMallocAsync)")
    return CudaArenaLibrary(library, index)


_installed: list[Any] = []  # keeps the allocator alive: torch has no reference to it


def _become_the_allocator(library: ctypes.PyDLL) -> None:
    if _installed:
        return
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(LIBRARIES["cuda"].file()), "memfit_arena_cuda_malloc", "memfit_arena_cuda_free"
    )
    inner: Any = allocator.allocator()
    inner.set_record_stream_fn(ctypes.cast(library.memfit_arena_cuda_record_stream, ctypes.c_void_p).value)
    inner.set_reset_fn(ctypes.cast(library.memfit_arena_cuda_empty_cache, ctypes.c_void_p).value)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise ArenaUnavailableError(
            "no arena: torch uses CUDA already, and its allocator can only be changed before; call "
            "memfit.arena(device='cuda') at the beginning of the program, before anything is put on the device"
        ) from error
    _installed.append(allocator)
    for index in range(torch.cuda.device_count()):
        count_with(ArenaCounters(library=library, index=index), torch.device("cuda", index))
