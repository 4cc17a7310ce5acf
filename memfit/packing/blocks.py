"""The objects of packing: blocks with live ranges, the problem, and the layout that gives every block its address.

    >>> blocks = Blocks.of([Block(id=0, bytes=64, start=0, end=2), Block(id=1, bytes=32, start=2, end=3)])
    >>> len(blocks), lower_bound_bytes(blocks)
    (2, 64)

A block is live in the steps `[start, end)`, half-open. Two blocks overlap in time if both are live in some step.
Blocks are held as arrays: a million blocks take the memory of four million integers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidBlocksError

MOST_BYTES = 1 << 62  # of all blocks together, so that no sum of them leaves int64
_AT_ONCE = 1 << 20  # blocks that are counted at a time
MOST_STEP = 1 << 61  # of starts and ends, for the same reason


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at one address during the steps `[start, end)`."""

    id: int | str
    bytes: int
    start: int
    end: int


class Blocks:
    """Immutable blocks, held as arrays; `Blocks.of` makes them of `Block`s. Arrays that can be written to are copied.

    Args:
        ids: [n], a name for each block, all different: integers, or texts.
        sizes_bytes: [n], 1 or more; rounded up to `alignment_bytes`.
        starts: [n], the first step in which each block is live.
        ends: [n], the first step after it, in which the block is no longer live.
        alignment_bytes: every offset has to be a multiple of it.

    Raises:
        InvalidBlocksError: arrays of different lengths, an empty live range, a size below 1, an id twice, sums too
            large.
    """

    __slots__ = ("__dict__", "alignment_bytes", "ends", "ids", "sizes_bytes", "starts")

    ids: NDArray[Any]
    sizes_bytes: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    alignment_bytes: int

    def __init__(
        self,
        *,
        ids: NDArray[Any] | Sequence[int] | Sequence[str],
        sizes_bytes: NDArray[np.int64] | Sequence[int],
        starts: NDArray[np.int64] | Sequence[int],
        ends: NDArray[np.int64] | Sequence[int],
        alignment_bytes: int = 1,
    ) -> None:
        if not 1 <= alignment_bytes <= 1 << 40:
            raise InvalidBlocksError(f"alignment is {alignment_bytes}, expected 1 to {1 << 40}; 1 aligns nothing")
        self.ids = ids if _is_frozen(ids) else np.array(ids, dtype=None if len(ids) else np.int64)
        self.starts, self.ends = _integers(starts, "starts"), _integers(ends, "ends")
        sizes = _integers(sizes_bytes, "sizes_bytes")
        self.alignment_bytes = alignment_bytes
        _require_blocks(self.ids, sizes, self.starts, self.ends, alignment_bytes)
        self.sizes_bytes = sizes if alignment_bytes == 1 else -(-sizes // alignment_bytes) * alignment_bytes
        for array in (self.ids, self.sizes_bytes, self.starts, self.ends):
            array.setflags(write=False)

    @staticmethod
    def of(blocks: Iterable[Block], *, alignment_bytes: int = 1) -> Blocks:
        """Return blocks as arrays.

        Args:
            blocks: in any order, which is kept.
            alignment_bytes: every offset has to be a multiple of it.
        """
        rows = list(blocks)
        return Blocks(
            ids=cast("Sequence[str]", [block.id for block in rows]),
            sizes_bytes=[block.bytes for block in rows],
            starts=[block.start for block in rows],
            ends=[block.end for block in rows],
            alignment_bytes=alignment_bytes,
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Block:
        return Block(
            id=self.ids[index : index + 1].tolist()[0],
            bytes=int(self.sizes_bytes[index]),
            start=int(self.starts[index]),
            end=int(self.ends[index]),
        )

    def __iter__(self) -> Iterator[Block]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Blocks({len(self)} blocks, {self.alignment_bytes} bytes of alignment)"

    def part(self, chosen: NDArray[np.integer]) -> Blocks:
        """Return some of the blocks, by place, with their sizes as they are rounded up."""
        return Blocks(
            ids=self.ids[chosen],
            sizes_bytes=self.sizes_bytes[chosen],
            starts=self.starts[chosen],
            ends=self.ends[chosen],
        )

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The most bytes live in one step: no layout is lower."""
        return lower_bound_bytes(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An address for every block.

    Attributes:
        offsets_bytes: int64[n], the first byte of each block, from 0, in the order of the blocks.
        height_bytes: the highest used byte.
        lower_bound_bytes: no layout of these blocks is lower.
        packer: the name of the packer that found it.
        proven: whether no layout is lower: the height is the lower bound, or a search was exhausted.
    """

    offsets_bytes: NDArray[np.int64]
    height_bytes: int
    lower_bound_bytes: int
    packer: str
    proven: bool

    @property
    def ratio(self) -> float:
        """The height over the lower bound; 1 if there is nothing to pack."""
        return self.height_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingProgress:
    """What a packer reports when it has found a lower layout.

    Attributes:
        seconds: since the packer began.
        height_bytes: the least height so far.
        packer: the name of the part that found it.
    """

    seconds: float
    height_bytes: int
    packer: str


def _report_nothing(_progress: PackingProgress) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingProblem:
    """Give every block an address, so that the highest used byte is as low as possible.

    Args:
        blocks: what to pack.
        time_limit_seconds: after it, a packer that improves its answer returns the best layout so far.
        seed: of all random numbers; the same seed gives the same layout, unless time runs out first.
        clock: returns seconds. A packer reads no other clock.
        progress: called with each lower layout.
    """

    blocks: Blocks
    time_limit_seconds: float = 10.0
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[PackingProgress], None] = _report_nothing


def make_layout(blocks: Blocks, offsets_bytes: NDArray[np.int64], *, packer: str, proven: bool = False) -> Layout:
    """Return the layout of these offsets; its height and its lower bound are computed.

    Args:
        blocks: what is packed.
        offsets_bytes: int64[n], the first byte of each block.
        packer: the name of the packer that found it.
        proven: whether no layout is lower; a layout at the lower bound is proven anyway.
    """
    height = int((offsets_bytes + blocks.sizes_bytes).max(initial=0))
    bound = blocks.lower_bound_bytes
    frozen = np.array(offsets_bytes, np.int64)
    frozen.setflags(write=False)
    return Layout(
        offsets_bytes=frozen,
        height_bytes=height,
        lower_bound_bytes=bound,
        packer=packer,
        proven=proven or height == bound,
    )


def lower_bound_bytes(blocks: Blocks) -> int:
    """Return the most bytes that are live in one step, sizes rounded up to the alignment: no layout is lower.

    The most bytes are live where a block starts. What has started is counted there, less what has ended; a count over
    starts and ends together would take twice the memory.
    """
    if len(blocks) == 0:
        return 0
    starts, started_bytes = _sums_in_order(blocks.starts, blocks.sizes_bytes)
    ends, ended_bytes = _sums_in_order(blocks.ends, blocks.sizes_bytes)
    most = 0
    for place in range(0, len(blocks), _AT_ONCE):
        ended = np.searchsorted(ends, starts[place : place + _AT_ONCE], side="right")
        gone = np.where(ended > 0, ended_bytes[ended - 1], 0)
        most = max(most, int((started_bytes[place : place + _AT_ONCE] - gone).max()))
    return most


def _sums_in_order(steps: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the steps in order, and the running sum of their sizes."""
    order = np.argsort(steps)
    sums = sizes[order]
    np.cumsum(sums, out=sums)
    return steps[order], sums


def live_bytes(blocks: Blocks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (steps, bytes): the steps at which a block begins or ends, and the bytes live from each to the next."""
    steps = np.concatenate([blocks.starts, blocks.ends])
    changes = np.concatenate([blocks.sizes_bytes, -blocks.sizes_bytes])
    order = np.argsort(steps, kind="stable")
    steps, live = steps[order], np.cumsum(changes[order])
    last_of_step = np.flatnonzero(np.append(steps[1:] != steps[:-1], True)) if len(steps) else np.zeros(0, np.int64)
    return steps[last_of_step], live[last_of_step]


def _is_frozen(values: NDArray[Any] | Sequence[Any]) -> TypeGuard[NDArray[Any]]:
    """Return whether values are an array that nobody can write to."""
    return isinstance(values, np.ndarray) and values.flags.owndata and not values.flags.writeable


def _integers(values: NDArray[np.int64] | Sequence[int], name: str) -> NDArray[np.int64]:
    if _is_frozen(values) and values.dtype == np.int64:
        return values
    try:
        array = np.array(values if len(values) else np.zeros(0, np.int64))
        if array.dtype.kind not in "iu":
            raise InvalidBlocksError(
                f"{name} has values of type {array.dtype}, expected whole numbers that fit 63 bits"
            )
        return array.astype(np.int64)
    except OverflowError as error:
        raise InvalidBlocksError(f"{name} has a number beyond 63 bits; expected less than {MOST_BYTES}") from error


def _require_blocks(
    ids: NDArray[Any],
    sizes: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    alignment_bytes: int,
) -> None:
    lengths = {"ids": len(ids), "sizes_bytes": len(sizes), "starts": len(starts), "ends": len(ends)}
    if len(set(lengths.values())) > 1:
        raise InvalidBlocksError(f"blocks need as many ids as sizes, starts and ends, got {lengths}")
    for wrong, what, expected in (
        (sizes < 1, "size", "1 byte or more; leave out what takes no memory"),
        (sizes > MOST_BYTES, "size", f"at most {MOST_BYTES}"),
        ((starts < -MOST_STEP) | (starts > MOST_STEP), "start", f"a step between {-MOST_STEP} and {MOST_STEP}"),
        ((ends < -MOST_STEP) | (ends > MOST_STEP), "end", f"a step between {-MOST_STEP} and {MOST_STEP}"),
        (ends <= starts, "live range", "an end after the start: ranges are half-open, [start, end)"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            got = {"size": sizes[at], "start": starts[at], "end": ends[at]}.get(what, f"[{starts[at]}, {ends[at]})")
            raise InvalidBlocksError(f"block {at} (id {ids[at]}) has {what} {got}, expected {expected}")
    total = int(sizes.astype(np.float64).sum()) + alignment_bytes * len(sizes)
    if total > MOST_BYTES:
        raise InvalidBlocksError(f"all blocks together have about {total} bytes, expected at most {MOST_BYTES}")
    pair = first_duplicate(ids)
    if pair is not None:
        first, second = pair
        raise InvalidBlocksError(
            f"block {second} has id {ids[second]}, which block {first} has already; give every block its own"
        )


def first_duplicate(ids: NDArray[Any]) -> tuple[int, int] | None:
    """Return (first, second), the places of the first id that stands there twice; None if all differ."""
    if len(ids) < 2 or (ids.dtype.kind in "iu" and bool((ids[1:] > ids[:-1]).all())):
        return None
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    if not same.any():
        return None
    second = int(order[1:][same].min())
    return int(np.flatnonzero(ids == ids[second])[0]), second
