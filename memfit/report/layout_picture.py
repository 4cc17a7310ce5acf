"""The picture of a layout as a PNG, drawn pixel by pixel: no browser is needed. And the same as text."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memfit.budget import format_bytes
from memfit.errors import InvalidOptionError
from memfit.files import write_atomically
from memfit.packing.blocks import Blocks, Layout

_LEAST_PIXELS, _MOST_PIXELS = 200, 8192
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 16, 28, 36  # margins in pixels
_TICKS = 8
_PAPER, _INK, _HEIGHT, _BOUND = (255, 255, 255), (60, 66, 72), (194, 65, 59), (47, 125, 79)
_COLOURS = np.array(
    [
        (76, 120, 168),
        (114, 160, 200),
        (84, 162, 75),
        (136, 192, 126),
        (178, 121, 162),
        (213, 166, 201),
        (224, 145, 60),
        (242, 189, 128),
        (140, 123, 107),
        (184, 169, 154),
        (61, 143, 138),
        (127, 192, 187),
    ],
    np.uint8,
)
_GLYPH_SCALE = 2
_GLYPHS = {  # 3 by 5 pixels, a row an octal digit from the top
    "0": "75557",
    "1": "26227",
    "2": "71747",
    "3": "71717",
    "4": "55711",
    "5": "74717",
    "6": "74757",
    "7": "71122",
    "8": "75757",
    "9": "75717",
    ".": "00002",
    "-": "00700",
    "B": "65656",
    "K": "55655",
    "M": "57755",
    "G": "74557",
    "T": "72222",
    "P": "75744",
    "i": "20222",
    "a": "03533",
    "b": "44657",
    "c": "03443",
    "d": "11357",
    "e": "07747",
    "g": "03536",
    "h": "44655",
    "k": "45655",
    "l": "62227",
    "n": "06555",
    "o": "02552",
    "p": "06564",
    "r": "05644",
    "s": "03616",
    "t": "27223",
    "u": "05557",
    "w": "05577",
    "y": "05536",
}
_TEXT_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

Pixels = NDArray[np.uint8]


def write_layout_png(
    blocks: Blocks, layout: Layout, path: Path | str, *, width_pixels: int = 1400, height_pixels: int = 800
) -> None:
    """Write a picture of the layout to `path`, atomically: steps to the right, addresses upwards.

    The red line is the height, the green one the lower bound. Blocks thinner than a pixel are still one pixel.

    Raises:
        InvalidOptionError: a size too small to hold a picture, or too large.
        InvalidFileError: the file cannot be written.
    """
    for name, pixels in (("width_pixels", width_pixels), ("height_pixels", height_pixels)):
        if not _LEAST_PIXELS <= pixels <= _MOST_PIXELS:
            raise InvalidOptionError(f"{name} is {pixels}, expected {_LEAST_PIXELS} to {_MOST_PIXELS}")
    write_atomically(Path(path), _png(_draw(blocks, layout, width_pixels, height_pixels)))


def layout_text(blocks: Blocks, layout: Layout, *, columns: int = 100, rows: int = 24) -> list[str]:
    """Return the layout as lines of text, the highest address first: a mark for the block in the middle of each cell.

    >>> from memfit.packing import Block, Blocks, pack
    >>> blocks = Blocks.of([Block(id=0, bytes=64, start=0, end=4), Block(id=1, bytes=64, start=2, end=6)])
    >>> layout_text(blocks, pack(blocks, "first_fit"), columns=6, rows=2)
    ['128 B | ..BBBB', '    0 | AAAA..']
    """
    cells = [["."] * columns for _ in range(rows)]
    first, last = _span(blocks)
    top = max(layout.height_bytes, 1)
    # Cell (r, c) stands for the middle of its part of the picture; a block marks the cells whose middle it holds.
    offsets, tops = layout.offsets_bytes, layout.offsets_bytes + blocks.sizes_bytes
    low_rows, high_rows = _cells(offsets, top, rows), _cells(tops, top, rows)
    low_columns, high_columns = (
        _cells(blocks.starts - first, last - first, columns),
        _cells(blocks.ends - first, last - first, columns),
    )
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


def _draw(blocks: Blocks, layout: Layout, width: int, height: int) -> Pixels:
    pixels = np.full((height, width, 3), 255, np.uint8)
    inner_width, inner_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    first, last = _span(blocks)
    top = max(layout.height_bytes, 1)
    across, up = inner_width / (last - first), inner_height / top
    left = _LEFT + ((blocks.starts - first) * across).astype(np.int64)
    right = np.maximum(_LEFT + ((blocks.ends - first) * across).astype(np.int64), left + 1)
    base = height - _BOTTOM - (layout.offsets_bytes * up).astype(np.int64)
    head = height - _BOTTOM - ((layout.offsets_bytes + blocks.sizes_bytes) * up).astype(np.int64)
    head = np.minimum(head, base - 1)
    for number, (a, b, c, d) in enumerate(
        zip(head.tolist(), base.tolist(), left.tolist(), right.tolist(), strict=True)
    ):
        pixels[a:b, c:d] = _COLOURS[number * 7 % len(_COLOURS)]
        if b - a > 4 and d - c > 4:  # a border only where it leaves something to see
            pixels[a, c:d] = pixels[a:b, c] = _PAPER
    _axes(pixels, layout, up, first, last)
    return pixels


def _axes(pixels: Pixels, layout: Layout, up: float, first: int, last: int) -> None:
    height, width, _ = pixels.shape
    floor = height - _BOTTOM
    pixels[floor, _LEFT:width] = pixels[_TOP:floor, _LEFT - 1] = _INK
    step = 1
    while layout.height_bytes / step > _TICKS:
        step *= 2
    for address in range(0, layout.height_bytes + 1, step):
        at = floor - int(address * up)
        pixels[at, _LEFT - 6 : _LEFT] = _INK
        _write(pixels, _short_bytes(address), _LEFT - 10, at - 5, right=True)
    for value, colour in ((layout.lower_bound_bytes, _BOUND), (layout.height_bytes, _HEIGHT)):
        at = max(floor - int(value * up), _TOP - 1)
        pixels[at : at + 2, _LEFT:width:8] = pixels[at : at + 2, _LEFT + 1 : width : 8] = colour
        pixels[at : at + 2, _LEFT + 2 : width : 8] = pixels[at : at + 2, _LEFT + 3 : width : 8] = colour
    _write(pixels, str(first), _LEFT, floor + 8)
    _write(pixels, "step", (_LEFT + width) // 2, floor + 8)
    _write(pixels, str(last), width - _RIGHT, floor + 8, right=True)
    _write(pixels, "address", _LEFT - 10, 8, right=True)


def _short_bytes(count: int) -> str:
    for unit, letter in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << unit:
            return f"{count / (1 << unit):.4g} {letter}"
    return f"{count} B"


def _write(pixels: Pixels, text: str, x: int, y: int, *, right: bool = False) -> None:
    """Write a text with its left, or right, upper corner at (x, y); what has no glyph is a gap."""
    advance = 4 * _GLYPH_SCALE
    x -= len(text) * advance if right else 0
    for character in text:
        for row, digit in enumerate(_GLYPHS.get(character, "00000")):
            for column in range(3):
                if int(digit, 8) >> (2 - column) & 1:
                    a, b = y + row * _GLYPH_SCALE, x + column * _GLYPH_SCALE
                    pixels[max(a, 0) : a + _GLYPH_SCALE, max(b, 0) : b + _GLYPH_SCALE] = _INK
        x += advance


def _png(pixels: Pixels) -> bytes:
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # filter 0 a row

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
