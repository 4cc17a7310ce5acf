"""First fit in any order, fast enough for a million blocks: the loop that several packers share.

Time is cut into windows of a few sections. Each window has a list of the placed blocks that are live in it, sorted by
offset. To place a block, its offset is raised along the lists of its windows in turn, until it is free in all of them.
The offset only rises, so each list is read once for each block.
"""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks
from memfit.packing.sections import Sections
from memfit.system.compiled import compiled, entry_point
from memfit.system.records import record

_WINDOWS_A_RANGE = 4  # of mean length: with fewer, lists are longer; with more, blocks are in more lists
_PLACED = record("offset top", short="first last")


class Shelf(NamedTuple):
    """Blocks as arrays, and the windows' lists: made once, refilled by each run of first fit.

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


def make_shelf(blocks: Blocks, sections: Sections, fixed: NDArray[np.int64] | None = None) -> Shelf:
    """Return an empty shelf.

    Args:
        blocks: what is placed.
        sections: those of the blocks.
        fixed: int64[n], the offset that a block has to have, or -1; none fixes no block.
    """
    firsts, lasts = sections.firsts, sections.lasts
    lengths = lasts - firsts
    width = max(1, int(lengths.mean() / _WINDOWS_A_RANGE)) if len(lengths) else 1
    windows = int(lasts.max(initial=1) - 1) // width + 1
    begins = np.bincount(firsts // width, minlength=windows + 1)
    ends = np.bincount((lasts - 1) // width + 1, minlength=windows + 1)
    heads = np.zeros(windows + 1, np.int64)
    np.cumsum(np.cumsum(begins - ends)[:windows], out=heads[1:])
    return Shelf(
        sizes_bytes=blocks.sizes_bytes,
        firsts=firsts,
        lasts=lasts,
        fixed=np.full(len(blocks), -1, np.int64) if fixed is None else fixed,
        window_sections=width,
        heads=heads,
        counts=np.zeros(windows, np.int64),
        cursors=np.zeros(windows, np.int64),
        placed=np.zeros(int(heads[-1]), _PLACED),
    )


def fit_in_order(shelf: Shelf, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64[n], the offset in bytes of each block if one after the other takes the lowest free place.

    Args:
        shelf: the blocks; its windows' lists are filled anew.
        order: int64[n], the blocks in the order in which they are placed.

    Source: first fit in any order; by decreasing size Pisarchyk & Lee 2020.
    """
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
    """Empty the shelf, and place the blocks of `order` one by one, at their fixed offset or the lowest free place.

    Args:
        order: int64[n], numbers of blocks.
        shelf: from `make_shelf`.
        offsets: int64[n], gets the offset of each block.
    """
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
