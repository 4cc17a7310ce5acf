"""The picture of a layout as lines of text, for a terminal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks, Layout
from memfit.system.budget import format_bytes

_TEXT_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def layout_text(blocks: Blocks, layout: Layout, *, columns: int = 100, rows: int = 24) -> list[str]:
    """Return the layout as lines of text, the highest address first.

    A cell is marked with the block that holds its middle: A for the first block, B for the second, and so on.

    >>> from memfit.packing import Block, Blocks, pack
    >>> blocks = Blocks.of([Block(id=0, bytes=64, start=0, end=4), Block(id=1, bytes=64, start=2, end=6)])
    >>> layout_text(blocks, pack(blocks, "first_fit"), columns=6, rows=2)
    ['128 B | ..BBBB', '    0 | AAAA..']

    Args:
        blocks: those of the layout.
        layout: their offsets.
        columns: cells in each row; they divide the steps.
        rows: they divide the addresses up to the height.
    """
    cells = [["."] * columns for _ in range(rows)]
    first, last = _span(blocks)
    top = max(layout.height_bytes, 1)
    # Cell (r, c) stands for the middle of its part of the picture; a block marks the cells whose middle it holds.
    offsets, tops = layout.offsets_bytes, layout.offsets_bytes + blocks.sizes_bytes
    low_rows, high_rows = _cells(offsets, top, rows), _cells(tops, top, rows)
    low_columns = _cells(blocks.starts - first, last - first, columns)
    high_columns = _cells(blocks.ends - first, last - first, columns)
    for number in np.flatnonzero((low_rows < high_rows) & (low_columns < high_columns)).tolist():
        for row in range(int(low_rows[number]), int(high_rows[number])):
            for column in range(int(low_columns[number]), int(high_columns[number])):
                cells[row][column] = _TEXT_MARKS[number % len(_TEXT_MARKS)]
    labels = [format_bytes(top)] + [""] * (rows - 2) + ["0"] * (rows > 1)
    width = max(len(label) for label in labels)
    return [f"{label:>{width}} | {''.join(row)}" for label, row in zip(labels, reversed(cells), strict=True)]


def _cells(values: NDArray[np.int64], whole: int, cells: int) -> NDArray[np.int64]:
    """Return the first cell whose middle is at or above each value."""
    return np.ceil(values.astype(np.float64) * cells / whole - 0.5).astype(np.int64)


def _span(blocks: Blocks) -> tuple[int, int]:
    first = int(blocks.starts.min(initial=np.iinfo(np.int64).max)) if len(blocks) else 0
    return first, max(int(blocks.ends.max(initial=first)), first + 1)
