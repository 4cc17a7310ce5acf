"""Dense cuts of layouts: a rectangle of steps and bytes, so that a layout as high as the lower bound is known.

Three kinds, each with 150 to 500 blocks, drawn by a seed:

- `window`: the rectangle alone; what crosses its sides is cut off there;
- `split`: blocks of a rectangle are split at random, along the steps or the bytes, where they are large;
- `filled`: nine of ten gaps of a rectangle are filled, each with a block as long as the gap allows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing import Blocks, Layout
from memfit.packing.sections import live_in_sections, sections_of

KINDS = ("window", "split", "filled")
LEAST_BLOCKS, MOST_BLOCKS = 150, 500
_WINDOW_BLOCKS = {"window": (150, 500), "split": (60, 250), "filled": (100, 400)}
_LEAST_FILL = {"window": 0.93, "split": 0.93, "filled": 0.8}  # of a rectangle, in the mean over its sections
_LEAST_SECTIONS, _SHARE_FILLED, _TRIES = 25, 0.9, 2000


class Pieces(NamedTuple):
    """Blocks with their places: live in the steps `[starts, ends)`, at the bytes `[lows, highs)`."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lows: NDArray[np.int64]
    highs: NDArray[np.int64]

    def blocks(self) -> Blocks:
        """Return them without their places."""
        return Blocks(
            ids=np.arange(len(self.starts)), sizes_bytes=self.highs - self.lows, starts=self.starts, ends=self.ends
        )


def pieces_of(blocks: Blocks, layout: Layout) -> Pieces:
    """Return the blocks of a layout with their places."""
    lows = layout.offsets_bytes
    return Pieces(blocks.starts, blocks.ends, lows, lows + blocks.sizes_bytes)


def dense_cut(layout: Pieces, kind: str, seed: int) -> tuple[Pieces, int] | None:
    """Return a cut in a drawn order with its height, which is its lower bound, or None if none is found.

    Args:
        layout: what is cut.
        kind: one of `KINDS`.
        seed: the same seed gives the same cut.
    """
    random = np.random.default_rng(seed)
    for _ in range(_TRIES):
        pieces, height = _rectangle(layout, random)
        if not _is_dense(pieces, height, _WINDOW_BLOCKS[kind], _LEAST_FILL[kind], full=kind != "filled"):
            continue
        if kind == "split":
            pieces = _split(pieces, int(random.integers(LEAST_BLOCKS, 400)), random)
        elif kind == "filled":
            pieces = _filled(pieces, height, random)
        if _is_dense(pieces, height, (LEAST_BLOCKS, MOST_BLOCKS), 0.0, full=True):
            order = random.permutation(len(pieces.starts))
            return Pieces(*(column[order] for column in pieces)), height
    return None


def _rectangle(layout: Pieces, random: np.random.Generator) -> tuple[Pieces, int]:
    """Return a drawn rectangle of a layout and its height."""
    begin, end, height = int(layout.starts.min()), int(layout.ends.max()), int(layout.highs.max())
    first = int(begin + (end - begin) * random.uniform(0, 0.9))
    last = min(end, first + 1 + int((end - begin) * random.uniform(0.05, 1)))
    cut_height = max(1, int(height * random.uniform(0.1, 1)))
    low = int((height - cut_height) * random.uniform(0, 1))
    starts, ends = np.maximum(layout.starts, first) - first, np.minimum(layout.ends, last) - first
    lows, highs = np.maximum(layout.lows, low) - low, np.minimum(layout.highs, low + cut_height) - low
    inside = (starts < ends) & (lows < highs)
    return Pieces(starts[inside], ends[inside], lows[inside], highs[inside]), cut_height


def _is_dense(pieces: Pieces, height: int, counts: tuple[int, int], least_fill: float, *, full: bool) -> bool:
    """Return whether these are so many blocks and fill their height so far, and in `full` all of it somewhere."""
    if not counts[0] <= len(pieces.starts) <= counts[1]:
        return False
    blocks = pieces.blocks()
    sections = sections_of(blocks)
    live = live_in_sections(blocks, sections)
    is_full = not full or int(live.max()) == height
    return is_full and sections.count >= _LEAST_SECTIONS and float(live.mean()) >= least_fill * height


def _split(pieces: Pieces, count: int, random: np.random.Generator) -> Pieces:
    """Split blocks, the large ones sooner, until there are so many."""
    rows = [list(map(int, row)) for row in zip(*pieces, strict=True)]
    while len(rows) < count:
        areas = np.array([(end - start) * (high - low) for start, end, low, high in rows], np.float64) ** 0.5
        row = rows[int(random.choice(len(rows), p=areas / areas.sum()))]
        side = 0 if random.random() < 0.5 else 2  # steps or bytes
        if row[side + 1] - row[side] > 1:
            cut = int(random.integers(row[side] + 1, row[side + 1]))
            rows.append([*row[:side], cut, *row[side + 1 :]])
            row[side + 1] = cut
    return Pieces(*np.array(rows, np.int64).T)


def _filled(pieces: Pieces, height: int, random: np.random.Generator) -> Pieces:
    """Fill gaps, the earliest and lowest first, each until a step in which other blocks need some of it."""
    rows = [tuple(map(int, row)) for row in zip(*pieces, strict=True)]
    given, steps = len(rows), sorted({step for row in rows for step in row[:2]})
    place = 0
    while place < len(steps) - 1 and len(rows) <= 2 * MOST_BLOCKS:
        gaps = _gaps(rows, steps[place], height)
        if not gaps:
            place += 1
            continue
        low, high = gaps[0]
        after = place + 1
        while after < len(steps) - 1 and any(a <= low and high <= b for a, b in _gaps(rows, steps[after], height)):
            after += 1
        rows.append((steps[place], steps[after], low, high))
    kept = rows[:given] + [row for row in rows[given:] if random.random() < _SHARE_FILLED]
    return Pieces(*np.array(kept, np.int64).T)


def _gaps(rows: list[tuple[int, ...]], step: int, height: int) -> list[tuple[int, int]]:
    """Return the free bytes of a step, from below."""
    taken = sorted((low, high) for start, end, low, high in rows if start <= step < end)
    tops = [0, *(high for _, high in taken)]
    bases = [*(low for low, _ in taken), height]
    return [(top, base) for top, base in zip(tops, bases, strict=True) if top < base]
