"""Allocation traces as CSV files: one block a row, under a header such as `id,lower,upper,size`.

A file is read strictly and wholly, or not at all: what is not a block is an error that names the file, the row (from 1,
the header being row 1) and the column.
"""

# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point
from memfit.errors import InvalidFileError, InvalidOptionError
from memfit.files import read_bytes, write_atomically
from memfit.packing.blocks import MOST_BYTES, Blocks, Layout

Ends = Literal["exclusive", "inclusive"]

_COLUMNS = ("id", "start", "end", "size")
_NAMES = {
    "id": "id",
    "buffer": "id",
    "block": "id",
    "lower": "start",
    "start": "start",
    "upper": "end",
    "end": "end",
    "size": "size",
    "bytes": "size",
}
_HEADER = "a header `id,lower,upper,size` (or id,start,end,size), in any order"
_MOST_NUMBER = 1 << 61  # of steps and sizes, so that no sum of two leaves int64
_LEAST_ROW_BYTES = 7  # of `a,0,1,8`
_WIDEST_BYTES = 1 << 28  # of ids in an array whose cells are all as wide as the longest
_COMMA, _NEWLINE, _RETURN, _SPACE, _TAB, _ZERO, _NINE = 44, 10, 13, 32, 9, 48, 57
_FINE, _NOT_A_NUMBER, _TOO_LARGE, _TOO_FEW, _TOO_MANY, _BLANK = 0, 1, 2, 3, 4, 5


def read_trace(path: Path | str, *, ends: Ends = "exclusive", alignment_bytes: int = 1) -> Blocks:
    """Read the blocks of a CSV file; gzip is read too.

    Args:
        path: columns id, start (or lower), end (or upper) and size (or bytes), in any order. Sizes and steps are whole
            numbers, sizes 1 or more, steps 0 or more; an id is any text without a comma, and no two are the same.
            Lines end in LF or CRLF; a blank line is an error.
        ends: whether a block is live in its end step (`inclusive`) or no longer (`exclusive`).
        alignment_bytes: sizes are rounded up to it, offsets will be multiples of it.

    Raises:
        InvalidFileError: see above; the message names the file, the row and the column.
        InvalidOptionError: `ends` or `alignment_bytes` is out of range.
    """
    if ends not in get_args(Ends):
        raise InvalidOptionError(f"ends is {ends!r}, expected exclusive (half-open ranges) or inclusive")
    if not 1 <= alignment_bytes <= 1 << 40:
        raise InvalidOptionError(f"alignment is {alignment_bytes}, expected 1 to {1 << 40}; 1 aligns nothing")
    content = read_bytes(Path(path)).removeprefix(b"\xef\xbb\xbf")
    columns, names, header_bytes = _read_header(path, content)
    rows = content.count(b"\n", header_bytes) + (not content.endswith(b"\n") and len(content) > header_bytes)
    if rows == 0:
        _fail(path, 2, "id", "there is no block below the header, expected one or more")
    rows = min(rows, len(content) // _LEAST_ROW_BYTES + 1)  # where there are more, one of these is too short
    values, spans = np.zeros((len(columns), rows), np.int64), np.zeros((2, rows), np.int64)
    text = np.frombuffer(content, np.uint8)
    id_column = columns.index("id")
    found = _parse(text, header_bytes, id_column, values, spans)
    if found[0] != _FINE:
        _fail_row(path, content, header_bytes, names, *found[:3])
    by_name, shown = dict(zip(columns, values, strict=True)), dict(zip(columns, names, strict=True))
    starts, stops, sizes = by_name["start"], by_name["end"] + (ends == "inclusive"), by_name["size"]
    _require_ranges(path, shown, starts, stops, sizes, ends, alignment_bytes)
    ids = by_name["id"] if found[3] else _texts(path, shown["id"], content, spans)
    _require_different(path, shown["id"], ids)
    return Blocks(ids=ids, sizes_bytes=sizes, starts=starts, ends=stops, alignment_bytes=alignment_bytes)


def write_offsets(path: Path | str, blocks: Blocks, layout: Layout) -> None:
    """Write `id,lower,upper,size,offset`, one block a row, atomically; ends are exclusive."""
    columns = (blocks.ids, blocks.starts, blocks.ends, blocks.sizes_bytes, layout.offsets_bytes)
    lines = [f"{a},{b},{c},{d},{e}\n" for a, b, c, d, e in zip(*(c.tolist() for c in columns), strict=True)]
    write_atomically(Path(path), ("id,lower,upper,size,offset\n" + "".join(lines)).encode())


def _fail(path: Path | str, row: int, column: str, message: str) -> NoReturn:
    raise InvalidFileError(f"{path}: row {row}, column {column!r}: {message}")


def _read_header(path: Path | str, content: bytes) -> tuple[list[str], list[str], int]:
    """Return what each column is, what the file calls it, and where the rows begin."""
    line, newline, _ = content.partition(b"\n")
    if not content.strip():
        _fail(path, 1, "id", f"the file is empty, expected {_HEADER}")
    fields = [field.strip().lower() for field in line.decode("utf-8", "replace").split(",")]
    if all(field.lstrip("-").isdigit() for field in fields):
        _fail(path, 1, "id", f"there is no header, got {_shown(line)}; put {_HEADER} above the blocks")
    columns: list[str] = []
    for field in fields:
        name = _NAMES.get(field)
        if name is None or name in columns:
            what = "stands there twice" if name else "is not known"
            _fail(path, 1, field[:40], f"the column {what}, expected {_HEADER}; leave out other columns")
        columns.append(name)
    for name in _COLUMNS:
        if name not in columns:
            _fail(path, 1, name, f"the column is missing, expected {_HEADER}, got {_shown(line)}")
    return columns, fields, len(line) + len(newline)


def _shown(text: bytes) -> str:
    return ascii(text.strip(b"\r\n").decode("utf-8", "replace")[:60])


def _fail_row(
    path: Path | str, content: bytes, header_bytes: int, names: Sequence[str], code: int, row: int, column: int
) -> NoReturn:
    at = header_bytes
    for _ in range(row):
        at = content.index(b"\n", at) + 1
    end = content.find(b"\n", at)
    line = content[at : end if end >= 0 else len(content)]
    fields = line.rstrip(b"\r").split(b",")
    name = names[min(column, len(names) - 1)]
    field = fields[column] if column < len(fields) else b""
    number, count = row + 2, len(names)
    if code == _BLANK:
        _fail(path, number, names[0], "the line is blank, expected a block; remove it if nothing is missing")
    if code == _TOO_FEW:
        _fail(path, number, name, f"is missing: expected {count} values, got {len(fields)} in {_shown(line)}")
    if code == _TOO_MANY:
        _fail(path, number, names[-1], f"expected {count} values, got {len(fields)} in {_shown(line)}")
    if code == _TOO_LARGE:
        _fail(path, number, name, f"got {_shown(field)}, which is too large: expected at most {_MOST_NUMBER}")
    kind = _NAMES[name]
    expected = "an id" if kind == "id" else f"a whole number from {1 if kind == 'size' else 0}"
    _fail(path, number, name, f"got {_shown(field)}, expected {expected}")


def _require_ranges(
    path: Path | str,
    names: Mapping[str, str],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    sizes: NDArray[np.int64],
    ends: str,
    alignment_bytes: int,
) -> None:
    wrong = (stops <= starts) | (sizes < 1)
    totals = np.cumsum(sizes.astype(np.float64) + (alignment_bytes - 1))
    wrong |= totals > MOST_BYTES
    if not wrong.any():
        return
    at = int(np.argmax(wrong))
    start, stop = int(starts[at]), int(stops[at])
    if sizes[at] < 1:
        _fail(path, at + 2, names["size"], f"got {sizes[at]}, expected 1 or more; leave out what takes no memory")
    if stop <= start and ends == "inclusive":
        _fail(
            path,
            at + 2,
            names["end"],
            f"the range is reversed: got [{start}, {stop - 1}], expected an end from {start} on",
        )
    if stop <= start:
        what = "empty" if stop == start else "reversed"
        remedy = f"[{start}, {stop}) holds no step; if ends are live too, say --ends inclusive"
        _fail(path, at + 2, names["end"], f"the range is {what}, expected an end after the start: {remedy}")
    _fail(path, at + 2, names["size"], f"all blocks to here have more than {MOST_BYTES} bytes together; expected less")


def _texts(path: Path | str, name: str, content: bytes, spans: NDArray[np.int64]) -> NDArray[Any]:
    texts: list[str] = []
    for row, (begin, end) in enumerate(spans.T.tolist()):
        try:
            texts.append(content[begin:end].decode())
        except UnicodeDecodeError:
            _fail(path, row + 2, name, f"got {content[begin:end][:60]!r}, expected text in UTF-8")
    widest_bytes = 4 * len(texts) * max(map(len, texts))
    return np.array(texts, dtype=object if widest_bytes > _WIDEST_BYTES else None)


def _require_different(path: Path | str, name: str, ids: NDArray[Any]) -> None:
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    if same.any():
        again = int(order[1:][same].min())
        first = int(np.flatnonzero(ids == ids[again])[0])
        _fail(path, again + 2, name, f"got {ids[again]}, which row {first + 2} has already; expected ids to differ")


@compiled
def _skip_blanks(text: Any, at: int) -> int:
    while at < len(text) and (text[at] == _SPACE or text[at] == _TAB):
        at += 1
    return at


@compiled
def _field_end(text: Any, at: int) -> int:
    """Return where the field that begins at `at` ends: at a comma, a line's end (LF or CRLF), or the text's."""
    while at < len(text) and text[at] != _COMMA and text[at] != _NEWLINE:
        if text[at] == _RETURN and (at + 1 == len(text) or text[at + 1] == _NEWLINE):
            break
        at += 1
    return at


@compiled
def _number(text: Any, begin: int, end: int, most: int) -> int:
    """Return the whole number in `text[begin:end]`, -1 where it is none, -2 where it is larger than `most`."""
    if begin == end:
        return -1
    for at in range(begin, end):
        if text[at] < _ZERO or text[at] > _NINE:
            return -1
    value = 0
    for at in range(begin, end):
        digit = np.int64(text[at]) - _ZERO
        if value > (most - digit) // 10:
            return -2
        value = value * 10 + digit
    return value


@entry_point
def _parse(text: Any, at: int, id_column: int, values: Any, spans: Any) -> tuple[int, int, int, bool]:
    """Fill in `values[column, row]`; return what is wrong first, its row and column, and whether ids are numbers."""
    columns, rows = values.shape
    id_is_number, stop = True, at
    for row in range(rows):
        for column in range(columns):
            begin = _skip_blanks(text, at)
            stop = _field_end(text, begin)
            end = stop
            while end > begin and (text[end - 1] == _SPACE or text[end - 1] == _TAB):
                end -= 1
            at_line_end = stop >= len(text) or text[stop] != _COMMA
            if column == 0 and at_line_end and end == begin:
                return _BLANK, row, 0, False
            if column == id_column:
                spans[0, row], spans[1, row] = begin, end
            value = _number(text, begin, end, _MOST_NUMBER)
            is_padded = end > begin + 1 and text[begin] == _ZERO  # 007 is another id than 7
            if column == id_column and end > begin and (value < 0 or is_padded):
                id_is_number, value = False, 0
            if value < 0:
                return (_TOO_LARGE if value == -2 else _NOT_A_NUMBER), row, column, False
            values[column, row] = value
            if column < columns - 1 and at_line_end:
                return _TOO_FEW, row, column + 1, False
            if column == columns - 1 and not at_line_end:
                return _TOO_MANY, row, column, False
            at = stop + 1
        if stop < len(text) and text[stop] == _RETURN:
            at = stop + 2
    return _FINE, 0, 0, id_is_number
