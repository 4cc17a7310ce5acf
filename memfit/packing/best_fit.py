"""Packer `best_fit`: the lowest offset line gets, of the blocks that fit there, the one with the longest live range."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks, Layout, PackingProblem, make_layout
from memfit.packing.sections import Sections, sections_of
from memfit.system.compiled import compiled, entry_point
from memfit.system.records import record

_LINE = record("offset", short="last before after at")
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFit:
    """Fill memory from below, always at the lowest offset line.

    A line is a span of time and the offset up to which it is filled. The lowest line, the leftmost of several, gets the
    block with the longest live range of those that fit into its span. If none fits, the line is lifted to its lowest
    neighbour and joined with it. Of blocks with equally long live ranges the larger is placed first; the paper leaves
    this open.

    Source: Sekiyama, Imai & Raymond 2018, section 3.2, after Burke et al. 2004.
    """

    name: ClassVar[str] = "best_fit"
    source: ClassVar[str] = "Sekiyama et al. 2018, section 3.2"

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the layout, whatever the time limit; at worst quadratic in the number of blocks."""
        blocks = problem.blocks
        return make_layout(blocks, fill_lines(blocks, sections_of(blocks)), packer=self.name)


def fill_lines(blocks: Blocks, sections: Sections) -> NDArray[np.int64]:
    """Return int64[n], the offset in bytes of each block by the best-fit heuristic (see `BestFit`).

    Args:
        blocks: what is packed.
        sections: those of the blocks.

    Source: Sekiyama, Imai & Raymond 2018, section 3.2.
    """
    lengths = blocks.ends - blocks.starts
    by_first = np.lexsort((-blocks.sizes_bytes, -lengths, sections.firsts))
    starts = np.searchsorted(sections.firsts[by_first], np.arange(sections.count + 1))
    offsets = np.zeros(len(blocks), np.int64)
    next_left = np.arange(len(blocks) + 1, dtype=np.int64)
    lines, heap = np.zeros(max(sections.count, 1), _LINE), np.zeros(max(sections.count, 1), np.int32)
    _fill(by_first, starts, sections.lasts, blocks.sizes_bytes, lengths, next_left, lines, heap, offsets)
    return offsets


@entry_point
def _fill(
    by_first: Any,
    starts: Any,
    lasts: Any,
    sizes: Any,
    lengths: Any,
    next_left: Any,
    lines: Any,
    heap: Any,
    offsets: Any,
) -> None:
    """Place every block. Line k begins at section k; `heap` holds the lines, lowest and leftmost first."""
    if len(by_first) == 0:
        return
    lines[0].last, lines[0].before, lines[0].after = len(lines), _NONE, _NONE
    count, left = 1, len(by_first)
    while left > 0:
        line = heap[0]
        place = _longest(by_first, starts, lasts, sizes, lengths, next_left, line, lines[line].last)
        if place == _NONE:
            count = _lift(lines, heap, count, line)
            continue
        block = by_first[place]
        next_left[place] = place + 1
        offsets[block] = lines[line].offset
        first = _section_of(starts, place, line, lines[line].last)
        count = _split(lines, heap, count, line, first, lasts[block], sizes[block])
        left -= 1


@compiled
def _left(next_left: Any, place: int) -> int:
    """Return the first place from `place` on whose block is not placed yet (with halving of paths)."""
    while next_left[place] != place:
        next_left[place] = next_left[next_left[place]]
        place = next_left[place]
    return place


@compiled
def _longest(
    by_first: Any, starts: Any, lasts: Any, sizes: Any, lengths: Any, next_left: Any, first: int, last: int
) -> int:
    """Return the place of the block that fits into `[first, last)` and lives longest, or -1."""
    best, place = _NONE, _left(next_left, starts[first])
    while place < starts[last]:
        block = by_first[place]
        if lasts[block] <= last:
            better = best == _NONE or lengths[block] > lengths[by_first[best]]
            if not better and lengths[block] == lengths[by_first[best]]:
                better = sizes[block] > sizes[by_first[best]]
            if better:
                best = place
        place = _left(next_left, place + 1)
    return best


@compiled
def _section_of(starts: Any, place: int, low: int, high: int) -> int:
    """Return the section in which the block at `place` begins, which is in `[low, high)`."""
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= place:
            low = middle
        else:
            high = middle
    return low


@compiled
def _is_lower(lines: Any, a: int, b: int) -> bool:
    return lines[a].offset < lines[b].offset or (lines[a].offset == lines[b].offset and a < b)


@compiled
def _rise(lines: Any, heap: Any, place: int) -> None:
    line = heap[place]
    while place > 0 and _is_lower(lines, line, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        lines[heap[place]].at = place
        place = (place - 1) // 2
    heap[place] = line
    lines[line].at = place


@compiled
def _sink(lines: Any, heap: Any, count: int, place: int) -> None:
    line = heap[place]
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and _is_lower(lines, heap[child + 1], heap[child]):
            child += 1
        if not _is_lower(lines, heap[child], line):
            break
        heap[place] = heap[child]
        lines[heap[place]].at = place
        place = child
    heap[place] = line
    lines[line].at = place


@compiled
def _add(lines: Any, heap: Any, count: int, line: int) -> int:
    heap[count] = line
    _rise(lines, heap, count)
    return count + 1


@compiled
def _remove(lines: Any, heap: Any, count: int, line: int) -> int:
    place = lines[line].at
    count -= 1
    if place != count:
        heap[place] = heap[count]
        lines[heap[place]].at = place
        _rise(lines, heap, place)
        _sink(lines, heap, count, lines[heap[place]].at)
    return count


@compiled
def _lift(lines: Any, heap: Any, count: int, line: int) -> int:
    """Lift the line to its lowest neighbour and join them, all three where both neighbours are equally low."""
    before, after = lines[line].before, lines[line].after
    offset = lines[after].offset if before == _NONE else lines[before].offset
    if after != _NONE and lines[after].offset < offset:
        offset = lines[after].offset
    lines[line].offset = offset
    _sink(lines, heap, count, lines[line].at)
    if after != _NONE and lines[after].offset == offset:
        count = _join_next(lines, heap, count, line)
    if before != _NONE and lines[before].offset == offset:
        count = _join_next(lines, heap, count, before)
    return count


@compiled
def _join_next(lines: Any, heap: Any, count: int, line: int) -> int:
    gone = lines[line].after
    count = _remove(lines, heap, count, gone)
    lines[line].last, lines[line].after = lines[gone].last, lines[gone].after
    if lines[gone].after != _NONE:
        lines[lines[gone].after].before = line
    return count


@compiled
def _split(lines: Any, heap: Any, count: int, line: int, first: int, last: int, size: int) -> int:
    """Raise the part `[first, last)` of the line by `size`; what is left and right of it stays as lines of its own."""
    offset, end = lines[line].offset, lines[line].last
    if last < end:
        lines[last].offset, lines[last].last = offset, end
        lines[last].before, lines[last].after = line, lines[line].after
        if lines[line].after != _NONE:
            lines[lines[line].after].before = last
        lines[line].last, lines[line].after = last, last
        count = _add(lines, heap, count, last)
    if first > line:
        lines[first].offset, lines[first].last = offset + size, lines[line].last
        lines[first].before, lines[first].after = line, lines[line].after
        if lines[line].after != _NONE:
            lines[lines[line].after].before = first
        lines[line].last, lines[line].after = first, first
        return _add(lines, heap, count, first)
    lines[line].offset = offset + size
    _sink(lines, heap, count, lines[line].at)
    return count
