"""Traces of torch's CUDA allocator: events of blocks, streams and the cache, and what it holds after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.simulate.cuda_allocator import AllocatorSettings, CachingAllocator


class EventKind(IntEnum):
    """What happens to a block, to a stream, or to the cache."""

    ALLOCATE = 0
    FREE = 1
    USE = 2  # by another stream: Tensor.record_stream
    FINISH = 3  # a stream reaches all that was put on it
    EMPTY = 4  # torch.cuda.empty_cache


class Event(NamedTuple):
    """One event of a trace; `block` is any number that names the block from its request to its free."""

    kind: EventKind
    block: int = 0
    size_bytes: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the allocator held after each event of a trace; arrays have one entry for each event.

    Attributes:
        allocated_bytes: int64[n], rounded bytes of blocks that were requested and not freed.
        reserved_bytes: int64[n], bytes taken from the device.
        segments: int64[n], segments that they are in; those of expandable segments are not counted, as in torch.
        refused: positions of requests that ran out of memory.
        peak_allocated_bytes: the largest of `allocated_bytes`; 0 without events.
    """

    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    segments: NDArray[np.int64]
    refused: tuple[int, ...]

    @property
    def peak_allocated_bytes(self) -> int:
        return int(self.allocated_bytes.max(initial=0))


def replay(events: Sequence[Event], settings: AllocatorSettings | None = None) -> Replay:
    """Return what torch's allocator holds after each event of a trace.

        >>> trace = [Event(EventKind.ALLOCATE, 0, 3 << 20), Event(EventKind.FREE, 0), Event(EventKind.EMPTY)]
        >>> found = replay(trace)
        >>> found.allocated_bytes.tolist(), found.reserved_bytes.tolist(), found.segments.tolist()
        ([3145728, 0, 0], [20971520, 20971520, 0], [1, 1, 0])

    Args:
        events: a trace. Events of a block whose request was refused, or had no bytes, are passed over.
        settings: the allocator's; torch's defaults if None.
    """
    allocator = CachingAllocator(settings or AllocatorSettings())
    rows = np.empty((3, len(events)), np.int64)
    refused: list[int] = []
    for position, (kind, block, size_bytes, stream) in enumerate(events):
        if kind == EventKind.ALLOCATE:
            if not allocator.allocate(block, size_bytes, stream):
                refused.append(position)
        elif kind == EventKind.FREE:
            allocator.free(block)
        elif kind == EventKind.USE:
            allocator.use(block, stream)
        elif kind == EventKind.FINISH:
            allocator.finish(stream)
        else:
            allocator.empty_cache()
        rows[:, position] = allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments
    return Replay(allocated_bytes=rows[0], reserved_bytes=rows[1], segments=rows[2], refused=tuple(refused))
