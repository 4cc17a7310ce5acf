"""A limit on what a thread takes on the CPU: before it takes memory that passes the limit, room is made for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from memfit.errors import MemfitError
from memfit.system.instruments import MAKE_ROOM, CpuAllocator, instrument_of


class CpuLimit:
    """The `with` block in which this thread is asked for room before it takes memory on the CPU that passes a limit.

        >>> from memfit.system.cpu_limit import CpuLimit
        >>> from memfit.system.recorder import allocated_bytes
        >>> asked = []
        >>> with CpuLimit(allocated_bytes("cpu") + 4096, asked.append):
        ...     small, large = torch.empty(512), torch.empty(1024)
        >>> asked
        [4096]

    It may be asked inside of a kernel: the kernel's live buffers may not change. Memory that is taken meanwhile
    is not asked for. Operators are called as outside of any mode or transformation. Threads without Python that kernels
    use are not asked. Of blocks in blocks the innermost counts.

    Args:
        limit_bytes: of all live bytes, as `allocated_bytes` counts them.
        make_room: called with the bytes that are about to be taken. If it returns a text, they are not taken, and
            torch raises `torch.OutOfMemoryError` with it. It raises nothing.

    Raises:
        MemfitError: at the block's entry, the recorder cannot be built.
    """

    __slots__ = ("_before", "_library", "_limit_bytes", "_make_room")

    def __init__(self, limit_bytes: int, make_room: Callable[[int], str | None]) -> None:
        self._limit_bytes, self._make_room = limit_bytes, make_room

    def __enter__(self) -> None:
        instrument = instrument_of(torch.device("cpu"))
        if not isinstance(instrument, CpuAllocator):
            raise MemfitError(
                f"the memory that torch takes on the CPU cannot be limited: {instrument.source}; install g++, or name "
                "a compiler in CXX"
            )
        self._library = instrument.library
        self._before: CpuLimit | None = getattr(_limits, "innermost", None)
        _limits.innermost = self
        self._library.memfit_recorder_limit(self._limit_bytes, _ask)

    def __exit__(self, *raised: object) -> None:
        before = _limits.innermost = self._before
        if before is None:
            self._library.memfit_recorder_limit(0, MAKE_ROOM())
        else:
            self._library.memfit_recorder_limit(before._limit_bytes, _ask)

    def ask(self, need_bytes: int) -> int:
        """Make room, and return 0; or say why there is none, and return 1."""
        why = self._make_room(need_bytes)
        if why is None:
            return 0
        self._library.memfit_recorder_refuse(why.encode())
        return 1


_limits = threading.local()  # the innermost block of each thread


@MAKE_ROOM
def _ask(need_bytes: int) -> int:
    """Make room for memory that a thread is about to take; one function for all limits, which is never freed."""
    innermost: CpuLimit = _limits.innermost
    return innermost.ask(need_bytes)
