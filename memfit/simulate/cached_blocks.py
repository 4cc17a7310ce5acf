"""Blocks of a caching allocator's segments, and the lists of those that are free; see `cuda_allocator`."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

PAGE_BYTES, LARGE_PAGE_BYTES = 2 << 20, 20 << 20  # of small and of large requests


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment.

    Attributes:
        pool: whose requests it serves.
        start: its address.
        size: in bytes.
        before: its neighbour in the segment at lower addresses, if any.
        after: that at higher ones.
        base: where its range of addresses begins, with expandable segments.
        mapped: whether memory lies behind it; only expandable segments have blocks without.
        busy: from its request until it is free for the next.
        streams: other streams that use it.
        pending: events that it waits for before it is free.
    """

    pool: Pool
    start: int
    size: int
    before: Block | None = None
    after: Block | None = None
    base: int = 0
    mapped: bool = True
    busy: bool = False
    streams: set[int] = field(default_factory=set[int])
    pending: int = 0

    @property
    def growing_bytes(self) -> int:
        """The bytes of a free block with those that it can be extended by."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)

    def merge(self) -> None:
        """Take in the free neighbours that are mapped, or not mapped, as this block is; it is in no list."""
        before, after = self.before, self.after
        if before is not None and not before.busy and before.mapped == self.mapped:
            self.pool.remove(before)
            self.start, self.before = before.start, before.before
            self.size += before.size
            if self.before is not None:
                self.before.after = self
        if after is not None and not after.busy and after.mapped == self.mapped:
            self.pool.remove(after)
            self.after = after.after
            self.size += after.size
            if self.after is not None:
                self.after.before = self

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes of a block that is in no list; return the rest, in no list either."""
        start, rest_bytes = self.start + size, self.size - size
        rest = Block(self.pool, start, rest_bytes, before=self, after=self.after, base=self.base, mapped=self.mapped)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest


class Pool:
    """The free blocks of one stream's small or large requests.

    Attributes:
        stream: whose they are.
        is_small: for requests of at most 1 MiB.
        page_bytes: what its expandable segment grows by.
        sizes: (size, address) of its free blocks, ascending.
        free: these blocks by address.
        gaps: addresses of its unmapped blocks, ascending.
        unmapped: these blocks by address.
    """

    def __init__(self, stream: int, *, is_small: bool) -> None:
        self.stream, self.is_small = stream, is_small
        self.page_bytes = PAGE_BYTES if is_small else LARGE_PAGE_BYTES
        self.sizes: list[tuple[int, int]] = []
        self.free: dict[int, Block] = {}
        self.gaps: list[int] = []
        self.unmapped: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Put a block into the list where it belongs."""
        if block.mapped:
            insort(self.sizes, (block.size, block.start))
            self.free[block.start] = block
        else:
            insort(self.gaps, block.start)
            self.unmapped[block.start] = block

    def remove(self, block: Block) -> None:
        """Take a block out of its list."""
        if block.mapped:
            del self.sizes[bisect_left(self.sizes, (block.size, block.start))], self.free[block.start]
        else:
            del self.gaps[bisect_left(self.gaps, block.start)], self.unmapped[block.start]
