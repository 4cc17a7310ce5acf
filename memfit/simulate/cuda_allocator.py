"""A model of torch's CUDA caching allocator: the bytes that it takes from the device for a sequence of requests.

The rules are those of `CUDACachingAllocator` in torch 2.13 (c10/cuda/CUDACachingAllocator.cpp), by number:

1. A request is rounded up to 512 bytes.
2. Requests of at most 1 MiB have pools of their own, and so has each stream.
3. The smallest free block of the pool that fits serves it; of equal ones that with the lowest address.
4. Otherwise a segment is taken from the device: 2 MiB for a small request, 20 MiB for one below 10 MiB, else the
   request rounded up to 2 MiB.
5. A block that serves a smaller request is split, in a small pool if at least 512 bytes remain, in a large one if more
   than 1 MiB does.
6. A freed block merges with its free neighbours in the segment.
7. A block that other streams used is free once those have reached the point of the free, noticed at the next request.
8. When the device or the cap is exhausted, segments that are wholly free are returned, and the request is tried again.
9. With expandable segments a pool has one range of addresses, mapped in pages of 2 MiB (small) or 20 MiB (large) where
   its free end does not suffice; blocks are split wherever 512 bytes remain; rule 8 returns pages that are wholly free.

Addresses of segments only grow. The driver may give a returned address again, which changes the choice among free
blocks of equal size, and nothing else. Not modelled: private pools of CUDA graphs, garbage collection, peer devices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from memfit.simulate.cached_blocks import LARGE_PAGE_BYTES, PAGE_BYTES, Block, Pool

CUDA_ALIGNMENT_BYTES = 512
"""What a request is rounded up to."""
_SMALL_BYTES = 1 << 20  # the largest request of a small pool; a large block keeps a remainder of at most this
_LEAST_OWN_SEGMENT_BYTES = 10 << 20
_UNLIMITED = 1 << 60


def whole_segments_bytes(size_bytes: int) -> int:
    """Return a size that leaves nothing of its segment to other requests, where it gets a segment of its own.

    A segment that serves another request, too, is not returned to the device before both are freed.

    >>> whole_segments_bytes((10 << 20) + 1) >> 20
    12
    """
    return size_bytes if size_bytes < _LEAST_OWN_SEGMENT_BYTES else -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What `PYTORCH_CUDA_ALLOC_CONF` and the device set; the defaults are torch's, on a device without end.

    Attributes:
        expandable_segments: rule 9.
        max_split_bytes: blocks of at least this size are not split (`max_split_size_mb`); None: all are.
        capacity_bytes: what the device has for segments; None: no limit.
        allowed_bytes: the cap of `torch.cuda.set_per_process_memory_fraction`; None: no cap.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    capacity_bytes: int | None = None
    allowed_bytes: int | None = None

    @staticmethod
    def parse(text: str, *, capacity_bytes: int | None = None) -> AllocatorSettings:
        """Return the settings that a text in the form of `PYTORCH_CUDA_ALLOC_CONF` has, as far as they are modelled.

            >>> AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:64").max_split_bytes
            67108864

        Args:
            text: as the environment variable has it.
            capacity_bytes: see above.
        """
        pairs = [pair.partition(":") for pair in text.replace(" ", "").split(",")]
        found = {key.lower(): value for key, _, value in pairs}
        split_mb = found.get("max_split_size_mb", "")
        return AllocatorSettings(
            expandable_segments=found.get("expandable_segments", "").lower() == "true",
            max_split_bytes=int(split_mb) << 20 if split_mb.isdigit() else None,
            capacity_bytes=capacity_bytes,
        )


class CachingAllocator:
    """torch's allocator on one device, event by event; see `replay` for whole traces.

    Attributes:
        allocated_bytes: rounded bytes of blocks that were requested and not freed.
        reserved_bytes: bytes taken from the device.
        segments: segments taken from the device, without expandable ones.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self.allocated_bytes = self.reserved_bytes = self.segments = 0
        self._expandable = settings.expandable_segments
        self._most_split = settings.max_split_bytes or _UNLIMITED
        self._capacity = settings.capacity_bytes or _UNLIMITED
        self._allowed = settings.allowed_bytes if settings.allowed_bytes is not None else _UNLIMITED
        self._next_address = PAGE_BYTES
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._blocks: dict[int, Block] = {}
        self._waiting: dict[int, deque[tuple[int, Block]]] = {}  # stream -> (number of the event, block)
        self._begun: dict[int, int] = {}  # stream -> events put on it
        self._reached: dict[int, int] = {}  # stream -> events that it has reached

    def allocate(self, name: int, size_bytes: int, stream: int = 0) -> bool:
        """Serve a request; return whether there was memory for it. A request of no bytes takes none.

        Args:
            name: of the block, until its free.
            size_bytes: as requested.
            stream: whose request it is.
        """
        if size_bytes == 0:
            return True
        self._notice_events()
        size = -(-size_bytes // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES
        key = stream, size <= _SMALL_BYTES
        pool = self._pools.setdefault(key, Pool(stream, is_small=key[1]))
        block = self._fitting(pool, size) or self._new(pool, size)
        if block is None:
            return False
        self._split(block, size)
        block.busy = True
        self._blocks[name] = block
        self.allocated_bytes += block.size
        return True

    def free(self, name: int) -> None:
        """Free a block; where other streams used it, once these have reached what is on them now."""
        block = self._blocks.pop(name, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        for stream in block.streams:
            self._begun[stream] = self._begun.get(stream, 0) + 1
            self._waiting.setdefault(stream, deque()).append((self._begun[stream], block))
        block.pending = len(block.streams)
        block.streams = set()
        if not block.pending:
            self._put_back(block)

    def addresses(self) -> dict[int, tuple[int, int]]:
        """Return address and rounded bytes of each block that was requested and not freed, by name."""
        return {name: (block.start, block.size) for name, block in self._blocks.items()}

    def use(self, name: int, stream: int) -> None:
        """Note that another stream uses a block (`Tensor.record_stream`).

        Args:
            name: of the block; one that is not there is ignored.
            stream: that uses it; that of its request changes nothing.
        """
        block = self._blocks.get(name)
        if block is not None and stream != block.pool.stream:
            block.streams.add(stream)

    def finish(self, stream: int) -> None:
        """Let a stream reach all that is on it."""
        self._reached[stream] = self._begun.get(stream, 0)

    def empty_cache(self) -> None:
        """Wait for all streams, and return to the device what is wholly free."""
        for stream in self._waiting:
            self.finish(stream)
        self._notice_events()
        for pool in self._pools.values():
            for block in [pool.free[start] for _, start in pool.sizes]:
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._return(block)

    def _notice_events(self) -> None:
        for stream, waiting in self._waiting.items():
            while waiting and waiting[0][0] <= self._reached.get(stream, 0):
                _, block = waiting.popleft()
                block.pending -= 1
                if not block.pending:
                    self._put_back(block)

    def _put_back(self, block: Block) -> None:
        """Make a block free, and one with its free neighbours."""
        block.busy = False
        block.merge()
        block.pool.add(block)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if block.pool.is_small or self._expandable:
            is_split = rest >= CUDA_ALIGNMENT_BYTES
        else:
            is_split = size < self._most_split and rest > _SMALL_BYTES
        if is_split:
            block.pool.add(block.cut(size))

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        """Take the best fitting free block out of its pool."""
        at = bisect_left(pool.sizes, (size, 0))
        if at == len(pool.sizes):
            return None
        block = pool.free[pool.sizes[at][1]]
        if self._expandable:  # a block before unmapped pages counts with them, and so is filled last
            for _, start in pool.sizes[at + 1 :]:
                if pool.free[start].growing_bytes >= block.growing_bytes:
                    break
                block = pool.free[start]
        if size < self._most_split <= block.size:
            return None
        if size >= self._most_split and block.size >= size + LARGE_PAGE_BYTES:
            return None
        pool.remove(block)
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        """Return a block in memory of the device, in no list; None where that is exhausted, and the cache too."""
        block = self._taken(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._taken(pool, size)
        if block is None:
            self.empty_cache()
            block = self._taken(pool, size)
        return block

    def _taken(self, pool: Pool, size: int) -> Block | None:
        segment_bytes = _segment_bytes(size)
        if self.reserved_bytes + segment_bytes > self._allowed:
            return None
        if self._expandable:
            return self._grown(pool, size)
        if self.reserved_bytes + segment_bytes > self._capacity:
            return None
        self.reserved_bytes += segment_bytes
        self.segments += 1
        return Block(pool, self._address(segment_bytes), segment_bytes)

    def _address(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        return address

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Return free blocks that are too large to be split to the device; whether that may be enough."""
        wanted = max(size, self._most_split)
        at = bisect_left(pool.sizes, (wanted, 0))
        if at < len(pool.sizes):
            self._return(pool.free[pool.sizes[at][1]])
            return True
        released = 0
        while released < wanted and pool.sizes and pool.sizes[-1][0] >= self._most_split:
            released += pool.sizes[-1][0]
            self._return(pool.free[pool.sizes[-1][1]])
        return released >= wanted

    def _return(self, segment: Block) -> None:
        segment.pool.remove(segment)
        self.reserved_bytes -= segment.size
        self.segments -= 1

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """Return a free block of at least `size` bytes, out of its pool, at the lowest address where pages make one."""
        block = self._extendable(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            gap = block.after
            assert gap is not None, "an extendable block has addresses enough"
            if not self._map(gap, min(size - block.size, gap.size)):
                return None
            block = gap  # it has taken in the block before it
        pool.remove(block)
        return block

    def _extendable(self, pool: Pool, size: int) -> Block:
        for start in pool.gaps:
            first = pool.unmapped[start]
            if first.before is not None and not first.before.busy:
                first = first.before
            found, block = 0, first
            while found < size and block is not None and not block.busy:
                found, block = found + block.size, block.after
            if found >= size:
                return first
        capacity = self._capacity if self._capacity < _UNLIMITED else 1 << 50
        range_bytes = -(-(capacity + capacity // 8) // pool.page_bytes) * pool.page_bytes
        base = self._address(range_bytes)
        gap = Block(pool, base, range_bytes, base=base, mapped=False)
        pool.add(gap)
        return gap

    def _map(self, gap: Block, size: int) -> bool:
        """Put pages behind the first `size` bytes of an unmapped block, which becomes free."""
        page_bytes = gap.pool.page_bytes
        mapped_bytes = -(-size // page_bytes) * page_bytes
        if self.reserved_bytes + mapped_bytes > self._capacity:
            return False
        gap.pool.remove(gap)
        if mapped_bytes < gap.size:
            gap.pool.add(gap.cut(mapped_bytes))
        gap.mapped = True
        gap.merge()
        gap.pool.add(gap)
        self.reserved_bytes += mapped_bytes
        return True

    def _unmap(self, block: Block) -> None:
        """Return the pages that lie wholly within a free block."""
        page_bytes, pool = block.pool.page_bytes, block.pool
        first = block.base + -(-(block.start - block.base) // page_bytes) * page_bytes
        last = block.base + (block.start + block.size - block.base) // page_bytes * page_bytes
        if first >= last:
            return
        pool.remove(block)
        if last < block.start + block.size:
            pool.add(block.cut(last - block.start))
        if first > block.start:
            pages = block.cut(first - block.start)
            pool.add(block)
            block = pages
        block.mapped = False
        block.merge()
        if block.before is not None or block.after is not None:
            pool.add(block)
        self.reserved_bytes -= last - first


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_BYTES:
        return PAGE_BYTES
    if size < _LEAST_OWN_SEGMENT_BYTES:
        return LARGE_PAGE_BYTES
    return -(-size // PAGE_BYTES) * PAGE_BYTES
