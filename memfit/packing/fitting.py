"""First fit in any order, over a million blocks: the loop that several packers share.

Time is cut into windows of a few sections. Each window keeps the placed blocks that are live in it, sorted by offset; a
block is fitted by walking up the lists of its windows in turn until all agree on one offset. Offsets only go up, so
that each list is walked once for each block.
"""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point
from memfit.packing.blocks import Blocks
from memfit.packing.sections import Sections

_WINDOWS_A_RANGE = 4  # of mean length: fewer make lists longer, more make blocks stand in more lists
_PLACED = np.dtype([("offset", np.int64), ("top", np.int64), ("first", np.int32), ("last", np.int32)])


class Shelf(NamedTuple):
    """Blocks as arrays and room for the windows' lists: made once, filled anew by each run of first fit.

    `fixed[i]` is the offset that block i has to have, or -1.
    """

    sizes_bytes: NDArray[np.int64]
    firsts: NDArray[np.int32]
    lasts: NDArray[np.int32]
    fixed: NDArray[np.int64]
    window_sections: int
    heads: NDArray[np.int64]
    counts: NDArray[np.int64]
    cursors: NDArray[np.int64]
    placed: NDArray[Any]


def shelf_of(blocks: Blocks, sections: Sections) -> Shelf:
    """Return an empty shelf for these blocks."""
    return make_shelf(blocks.sizes_bytes, sections.firsts, sections.lasts)


def make_shelf(
    sizes_bytes: NDArray[np.int64],
    firsts: NDArray[np.int32],
    lasts: NDArray[np.int32],
    fixed: NDArray[np.int64] | None = None,
) -> Shelf:
    """Return an empty shelf; `firsts` and `lasts` are in sections, half-open."""
    lengths = lasts - firsts
    width = max(1, int(lengths.mean() / _WINDOWS_A_RANGE)) if len(lengths) else 1
    windows = int(lasts.max(initial=1) - 1) // width + 1
    begins = np.bincount(firsts // width, minlength=windows + 1)
    ends = np.bincount((lasts - 1) // width + 1, minlength=windows + 1)
    heads = np.zeros(windows + 1, np.int64)
    np.cumsum(np.cumsum(begins - ends)[:windows], out=heads[1:])
    return Shelf(
        sizes_bytes=sizes_bytes,
        firsts=firsts,
        lasts=lasts,
        fixed=np.full(len(sizes_bytes), -1, np.int64) if fixed is None else fixed,
        window_sections=width,
        heads=heads,
        counts=np.zeros(windows, np.int64),
        cursors=np.zeros(windows, np.int64),
        placed=np.zeros(int(heads[-1]), _PLACED),
    )


def fit_in_order(shelf: Shelf, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offset of each block when the blocks of `order` take, one by one, the lowest place that is free."""
    offsets = np.zeros(len(shelf.sizes_bytes), np.int64)
    _fit_once(order, shelf, offsets)
    return offsets


@compiled
def _lowest_place(
    size: int, first: int, last: int, width: int, heads: Any, counts: Any, cursors: Any, placed: Any
) -> int:
    """Return the lowest offset at which a block of `size` is free in the sections `[first, last)`."""
    low, high = first // width, (last - 1) // width
    for window in range(low, high + 1):
        cursors[window] = heads[window]
    offset, settled, window = 0, 0, low
    while settled <= high - low:
        moved, cursor, end = False, cursors[window], heads[window] + counts[window]
        while cursor < end:
            other = placed[cursor]
            if other.offset >= offset + size:
                break
            if other.top > offset and other.first < last and first < other.last:
                offset, moved = other.top, True
            cursor += 1
        cursors[window] = cursor
        settled = 1 if moved else settled + 1
        window = window + 1 if window < high else low
    return offset


@compiled
def _put(block: int, offset: int, shelf: Any) -> None:
    """Enter a block into the lists of its windows."""
    sizes, firsts, lasts, _, width, heads, counts, _, placed = shelf
    first, last, top = firsts[block], lasts[block], offset + sizes[block]
    for window in range(first // width, (last - 1) // width + 1):
        head = heads[window]
        place = head + counts[window]
        while place > head and placed[place - 1].offset > offset:
            placed[place] = placed[place - 1]
            place -= 1
        entry = placed[place]
        entry.offset, entry.top, entry.first, entry.last = offset, top, first, last
        counts[window] += 1


@compiled
def fit_blocks(order: Any, shelf: Any, offsets: Any) -> None:
    """Empty the shelf, and place the blocks of `order` one by one: at their fixed offsets, or as low as they go."""
    sizes, firsts, lasts, fixed, width, heads, counts, cursors, placed = shelf
    counts[:] = 0
    for at in range(len(order)):
        block = order[at]
        size, first, last, offset = sizes[block], firsts[block], lasts[block], fixed[block]
        if offset < 0:
            offset = _lowest_place(size, first, last, width, heads, counts, cursors, placed)
        _put(block, offset, shelf)
        offsets[block] = offset


@entry_point
def _fit_once(order: Any, shelf: Any, offsets: Any) -> None:
    fit_blocks(order, shelf, offsets)
