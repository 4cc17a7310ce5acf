"""The checker of layouts: no two live blocks share bytes. It shares no code with any packer.

A sweep over time keeps the live blocks in a tree ordered by offset. As long as no two of them overlap, a block that
begins can only overlap its two neighbours in the tree, so each event costs O(log n).
"""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidLayoutError
from memfit.packing.blocks import Blocks, Layout
from memfit.system.compiled import compiled, entry_point

_NONE = -1


def check_layout(blocks: Blocks, layout: Layout) -> None:
    """Return if every block has its own bytes in every step in which it is live; O(n log n) for n blocks.

    Args:
        blocks: what was packed.
        layout: its offsets, its height and its lower bound are checked.

    >>> from memfit.packing.blocks import Block, make_layout
    >>> blocks = Blocks.of([Block(id="a", bytes=64, start=0, end=5), Block(id="b", bytes=64, start=4, end=9)])
    >>> try:
    ...     check_layout(blocks, make_layout(blocks, np.array([0, 32]), packer="hand"))
    ... except InvalidLayoutError as error:
    ...     print(error)
    layout of packer 'hand': blocks a and b overlap in bytes [32, 64) during steps [4, 5)

    Raises:
        InvalidLayoutError: two blocks overlap in address and in time, an offset is negative or not aligned, or the
            height or the lower bound is wrong. The message names the blocks and the steps.
    """
    offsets = layout.offsets_bytes
    if offsets.shape != (len(blocks),):
        _fail(layout, f"has {offsets.shape} offsets for {len(blocks)} blocks, expected one for each")
    wrong = (offsets < 0) | (offsets % blocks.alignment_bytes != 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        expected = f"a multiple of {blocks.alignment_bytes} from 0"
        _fail(layout, f"block {blocks.ids[at]} has offset {offsets[at]}, expected {expected}")
    tops = offsets + blocks.sizes_bytes
    pair = _first_overlap(blocks, offsets, tops)
    if pair is not None:
        _fail_overlap(blocks, layout, tops, *pair)
    _require_figures(layout, int(tops.max(initial=0)), _most_live_bytes(blocks))


def _require_figures(layout: Layout, height: int, most_live: int) -> None:
    if layout.height_bytes != height:
        _fail(layout, f"says height {layout.height_bytes}, expected {height}, the highest used byte")
    if layout.lower_bound_bytes != most_live:
        _fail(layout, f"says lower bound {layout.lower_bound_bytes}, expected {most_live}, the most live bytes")


def _fail(layout: Layout, message: str) -> NoReturn:
    raise InvalidLayoutError(f"layout of packer {layout.packer!r}: {message}")


def _fail_overlap(blocks: Blocks, layout: Layout, tops: NDArray[np.int64], first: int, second: int) -> NoReturn:
    offsets = layout.offsets_bytes
    shared_bytes = max(offsets[first], offsets[second]), min(tops[first], tops[second])
    steps = max(blocks.starts[first], blocks.starts[second]), min(blocks.ends[first], blocks.ends[second])
    _fail(
        layout,
        f"blocks {blocks.ids[first]} and {blocks.ids[second]} overlap in bytes [{shared_bytes[0]}, {shared_bytes[1]}) "
        f"during steps [{steps[0]}, {steps[1]})",
    )


def _in_order(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the numbers of the blocks, sorted by a value of each; there are fewer than 2^31 blocks."""
    return np.argsort(values, kind="stable").astype(np.int32)


def _most_live_bytes(blocks: Blocks) -> int:
    by_start, by_end = _in_order(blocks.starts), _in_order(blocks.ends)
    return int(_most_live(by_start, by_end, blocks.starts, blocks.ends, blocks.sizes_bytes))


def _first_overlap(blocks: Blocks, offsets: NDArray[np.int64], tops: NDArray[np.int64]) -> tuple[int, int] | None:
    count = len(blocks)
    if count < 2:
        return None
    by_offset = _in_order(offsets)
    ranks = np.empty(count, np.int32)
    ranks[by_offset] = np.arange(count, dtype=np.int32)
    leaves = 1 << (count - 1).bit_length()
    live = np.zeros(2 * leaves, np.bool_)
    by_start, by_end = _in_order(blocks.starts), _in_order(blocks.ends)
    first, second = _sweep(by_start, by_end, blocks.starts, blocks.ends, ranks, by_offset, offsets, tops, live)
    return None if first == _NONE else (int(first), int(second))


@entry_point
def _most_live(by_start: Any, by_end: Any, starts: Any, ends: Any, sizes: Any) -> int:
    """Return the most bytes that are live in a step; what ends there is gone before anything starts."""
    bytes_now, most, ended = 0, 0, 0
    for block in by_start:
        while ends[by_end[ended]] <= starts[block]:
            bytes_now -= sizes[by_end[ended]]
            ended += 1
        bytes_now += sizes[block]
        most = max(most, bytes_now)
    return most


@entry_point
def _sweep(
    by_start: Any, by_end: Any, starts: Any, ends: Any, ranks: Any, by_offset: Any, offsets: Any, tops: Any, live: Any
) -> tuple[int, int]:
    """Return the first two blocks that are live together and overlap, or (-1, -1).

    `live[leaves + r]` says whether the block of rank r is live, `live[k]` whether anything below node k is.
    """
    leaves, ended = len(live) // 2, 0
    for block in by_start:
        while ends[by_end[ended]] <= starts[block]:
            node = leaves + ranks[by_end[ended]]
            ended += 1
            live[node] = False
            while node > 1 and not live[node ^ 1]:
                node //= 2
                live[node] = False
        node = leaves + ranks[block]
        below, above = _neighbour(live, node, 1), _neighbour(live, node, 0)
        if below >= 0 and tops[by_offset[below]] > offsets[block]:
            return by_offset[below], block
        if above >= 0 and offsets[by_offset[above]] < tops[block]:
            return by_offset[above], block
        while node >= 1 and not live[node]:
            live[node] = True
            node //= 2
    return _NONE, _NONE


@compiled
def _neighbour(live: Any, node: int, side: int) -> int:
    """Return the rank of the next live leaf on one side of `node`, or -1; side 1 looks to lower ranks, 0 to higher."""
    while node > 1 and (node & 1 != side or not live[node ^ 1]):
        node //= 2
    if node <= 1:
        return _NONE
    node ^= 1
    leaves = len(live) // 2
    while node < leaves:
        node = 2 * node + side
        if not live[node]:
            node ^= 1
    return node - leaves
