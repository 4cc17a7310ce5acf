"""Allocation traces as CSV files: one block a row, under a header such as `id,lower,upper,size`.

A file is read strictly: a row that is not a block is an error that names the file, the row and the column. The header
is row 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidFileError, InvalidOptionError
from memfit.packing.blocks import MOST_BYTES, Blocks, Layout, first_duplicate
from memfit.system.files import read_chunks, write_atomically

ENDS = ("exclusive", "inclusive")

_SPELLINGS = {"id": "id buffer block", "start": "lower start", "end": "upper end", "size": "size bytes"}
_NAMES = {name: column for column, names in _SPELLINGS.items() for name in names.split()}
_HEADER = "a header `id,lower,upper,size` (or id,start,end,size), in any order"
_MOST_NUMBER = 1 << 61  # of steps and sizes, so that no sum of two leaves int64
_MOST_DIGITS = 19  # of numbers up to `_MOST_NUMBER`
_WIDEST_BYTES = 1 << 28  # of ids in an array whose cells are all as wide as the longest
_COMMA, _NEWLINE, _RETURN, _SPACE, _TAB, _ZERO = 44, 10, 13, 32, 9, 48
_BLANK_LINE = re.compile(rb"\n[ \t\r]*(?=\n)")


def read_trace(path: Path | str, *, ends: str = "exclusive", alignment_bytes: int = 1) -> Blocks:
    """Return the blocks of a CSV file, which may be compressed with gzip.

    Args:
        path: columns id, start (or lower), end (or upper) and size (or bytes), in any order. Sizes and steps are whole
            numbers, sizes 1 or more, steps 0 or more; an id is any text without a comma, and no two are the same.
            Lines end in LF or CRLF; a blank line is an error.
        ends: whether a block is live in its end step (`inclusive`) or no longer (`exclusive`).
        alignment_bytes: sizes are rounded up to it, and every offset has to be a multiple of it.

    Raises:
        InvalidFileError: the file is not as above; the message names the file, the row and the column.
        InvalidOptionError: `ends` or `alignment_bytes` is out of range.
    """
    if ends not in ENDS:
        raise InvalidOptionError(f"ends is {ends!r}, expected exclusive (half-open ranges) or inclusive")
    if not 1 <= alignment_bytes <= 1 << 40:
        raise InvalidOptionError(f"alignment is {alignment_bytes}, expected 1 to {1 << 40}; 1 aligns nothing")
    names, columns = _read_columns(path)
    ids, starts, sizes = columns["id"], columns["start"], columns["size"]
    after = columns.pop("end") + (ends == "inclusive")
    _require_ranges(path, names, starts, after, sizes, ends, alignment_bytes)
    _require_different(path, names["id"], ids)
    for column in (ids, starts, after, sizes):
        column.setflags(write=False)  # what is frozen is not copied
    return Blocks(ids=ids, sizes_bytes=sizes, starts=starts, ends=after, alignment_bytes=alignment_bytes)


def write_offsets(path: Path | str, blocks: Blocks, layout: Layout) -> None:
    """Write `id,lower,upper,size,offset`, one block a row, atomically; ends are exclusive.

    Args:
        path: of the CSV file.
        blocks: in the order of the rows.
        layout: gives the offset of each block.

    Raises:
        InvalidFileError: the file cannot be written.
    """
    columns = (blocks.ids, blocks.starts, blocks.ends, blocks.sizes_bytes, layout.offsets_bytes)
    lines = [f"{a},{b},{c},{d},{e}\n" for a, b, c, d, e in zip(*(c.tolist() for c in columns), strict=True)]
    write_atomically(Path(path), ("id,lower,upper,size,offset\n" + "".join(lines)).encode())


def _fail(path: Path | str, row: int, column: str, message: str) -> NoReturn:
    raise InvalidFileError(f"{path}: row {row}, column {column!r}: {message}")


class _Rows(NamedTuple):
    """Rows of a file, as int64[rows, columns] three times.

    Attributes:
        numbers: the number of each field; -1 for an id that is no number.
        begins, stops: where the text of each field begins and stops.
    """

    numbers: NDArray[np.int64]
    begins: NDArray[np.int64]
    stops: NDArray[np.int64]


def _read_columns(path: Path | str) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return the name in the file, and the values, of each column: id, start, end and size. The first bad row raises.

    The file is read in pieces: its text takes several times the memory of its numbers.
    """
    pieces = _whole_lines(read_chunks(Path(path)))
    first = next(pieces, b"").removeprefix(b"\xef\xbb\xbf")
    columns, names = _read_header(path, first)
    grown = [_Grown() for _ in columns]
    texts: dict[int, list[str]] = {}  # row that a piece begins with -> its ids, where one of them is a text
    at, before = columns.index("id"), 0
    for lines in chain([first.partition(b"\n")[2]], pieces):
        content = b"\n" + lines
        rows = _read_rows(path, content, names, before)
        if (rows.numbers[:, at] < 0).any():
            texts[before] = _texts(path, names[at], content, rows.begins[:, at], rows.stops[:, at], before)
        for number, column in enumerate(grown):
            column.add(rows.numbers[:, number])
        before += len(rows.numbers)
    if before == 0:
        _fail(path, 2, "id", "there is no block below the header, expected one or more")
    values: dict[str, NDArray[Any]] = {name: column.whole() for name, column in zip(columns, grown, strict=True)}
    if texts:
        values["id"] = _with_texts(values["id"], texts)
    return dict(zip(columns, names, strict=True)), values


class _Grown:
    """A column that grows where it lies: pieces that are joined at the end would take its memory twice."""

    def __init__(self) -> None:
        self._values, self._count = np.empty(0, np.int64), 0

    def add(self, more: NDArray[np.int64]) -> None:
        count = self._count + len(more)
        if count > len(self._values):
            self._values.resize(max(count, len(self._values) * 9 // 8), refcheck=False)
        self._values[self._count : count] = more
        self._count = count

    def whole(self) -> NDArray[np.int64]:
        self._values.resize(self._count, refcheck=False)
        return self._values


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Return the same bytes in pieces that end in a newline; one is added at the end if it is missing."""
    rest = b""
    for chunk in chunks:
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            yield rest + head + newline
            rest = tail
        else:
            rest += chunk
    if rest:
        yield rest + b"\n"


def _with_texts(ids: NDArray[np.int64], pieces: Mapping[int, Sequence[str]]) -> NDArray[Any]:
    """Return the ids as texts.

    Args:
        ids: those that are numbers.
        pieces: row -> the texts of a piece that begins there.
    """
    texts: list[str] = [str(number) for number in ids.tolist()]
    for row, piece in pieces.items():
        texts[row : row + len(piece)] = piece
    widest_bytes = 4 * len(texts) * max(map(len, texts))
    return np.array(texts, dtype=object if widest_bytes > _WIDEST_BYTES else None)


def _read_header(path: Path | str, content: bytes) -> tuple[list[str], list[str]]:
    """Return the meaning of each column, and its name in the file."""
    line = content.partition(b"\n")[0]
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
    for name in _SPELLINGS:
        if name not in columns:
            _fail(path, 1, name, f"the column is missing, expected {_HEADER}, got {_shown(line)}")
    return columns, fields


def _shown(text: bytes) -> str:
    return ascii(text.strip(b"\r\n").decode("utf-8", "replace")[:60])


def _read_rows(path: Path | str, content: bytes, names: Sequence[str], before: int) -> _Rows:
    """Return the rows of some lines. The first bad row raises.

    Args:
        path: names the file in errors.
        content: a newline, and the lines, each of which ends in a newline.
        names: of the columns.
        before: how many rows of the file stand above these lines.
    """
    blank = _BLANK_LINE.search(content)
    text = np.frombuffer(content, np.uint8)[: blank.start() + 1 if blank else None]
    separators = np.flatnonzero((text == _NEWLINE) | (text == _COMMA))
    at_ends = np.flatnonzero(text[separators] == _NEWLINE)
    ends, bad = separators[at_ends], np.diff(at_ends) != len(names)
    rows = int(np.argmax(bad)) if bad.any() else len(bad)  # of as many fields as there are columns
    stops = separators[at_ends[0] : at_ends[rows] + 1]
    begins, stops = (each.reshape(rows, len(names)) for each in (stops[:-1] + 1, stops[1:]))
    stops[:, -1] -= text[stops[:, -1] - 1] == _RETURN
    _strip(text, begins, stops)
    values = _numbers(text, begins, stops)
    is_id = np.array([_NAMES[name] == "id" for name in names])
    wrong = np.where(is_id, begins == stops, values < 0).any(axis=1)
    if wrong.any() or rows < len(bad):
        row = int(np.argmax(wrong)) if wrong.any() else rows
        _fail_row(path, names, before + row + 2, content[ends[row] + 1 : ends[row + 1]])
    if blank:
        _fail(path, before + rows + 2, names[0], "the line is blank, expected a block; remove it if nothing is missing")
    is_padded = is_id & (stops > begins + 1) & (text[begins] == _ZERO)  # 007 is another id than 7
    return _Rows(np.where(is_padded, -1, values), begins, stops)


def _strip(text: NDArray[np.uint8], begins: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
    """Move the ends of fields inwards over spaces and tabs."""
    is_blank = (text == _SPACE) | (text == _TAB)
    while (blank := (begins < stops) & is_blank[begins]).any():
        begins += blank
    while (blank := (begins < stops) & is_blank[stops - 1]).any():
        stops -= blank


def _numbers(text: NDArray[np.uint8], begins: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the whole number in each field, -1 for a field that has none up to `_MOST_NUMBER`."""
    lengths = stops - begins
    values, wrong = np.zeros_like(lengths), (lengths == 0) | (lengths > _MOST_DIGITS)
    for place in range(min(int(lengths.max(initial=0)), _MOST_DIGITS)):
        inside = place < lengths
        digits = text[np.minimum(begins + place, len(text) - 1)] - np.uint8(_ZERO)  # above 9 for what is no digit
        wrong |= inside & (digits > 9)
        values = np.where(inside, 10 * values + digits, values)
    return np.where(wrong | (values < 0) | (values > _MOST_NUMBER), -1, values)


def _fail_row(path: Path | str, names: Sequence[str], number: int, line: bytes) -> NoReturn:
    fields = [field.strip(b" \t") for field in line.removesuffix(b"\r").split(b",")]
    for name, field in zip(names, fields, strict=False):
        kind = _NAMES[name]
        if not (field if kind == "id" else field.isdigit()):
            expected = "an id" if kind == "id" else f"a whole number from {1 if kind == 'size' else 0}"
            _fail(path, number, name, f"got {_shown(field)}, expected {expected}")
        if kind != "id" and (len(field) > _MOST_DIGITS or int(field) > _MOST_NUMBER):
            _fail(path, number, name, f"got {_shown(field)}, which is too large: expected at most {_MOST_NUMBER}")
    is_missing = "is missing: " if len(fields) < len(names) else ""
    name = names[min(len(fields), len(names) - 1)]
    _fail(path, number, name, f"{is_missing}expected {len(names)} values, got {len(fields)} in {_shown(line)}")


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
    if stop > start:
        _fail(path, at + 2, names["size"], f"all blocks to here have more than {MOST_BYTES} bytes; expected less")
    if ends == "inclusive":
        what = f"reversed: got [{start}, {stop - 1}], expected an end from {start} on"
    else:
        what = f"{'empty' if stop == start else 'reversed'}, expected an end after the start: [{start}, {stop}) "
        what += "holds no step; if ends are live too, say --ends inclusive"
    _fail(path, at + 2, names["end"], f"the range is {what}")


def _texts(
    path: Path | str, name: str, content: bytes, begins: NDArray[np.int64], stops: NDArray[np.int64], before: int
) -> list[str]:
    """Return the texts of one column of some rows."""
    texts: list[str] = []
    for row, (begin, stop) in enumerate(zip(begins.tolist(), stops.tolist(), strict=True)):
        try:
            texts.append(content[begin:stop].decode())
        except UnicodeDecodeError:
            _fail(path, before + row + 2, name, f"got {content[begin:stop][:60]!r}, expected text in UTF-8")
    return texts


def _require_different(path: Path | str, name: str, ids: NDArray[Any]) -> None:
    pair = first_duplicate(ids)
    if pair is not None:
        first, again = pair
        _fail(path, again + 2, name, f"got {ids[again]}, which row {first + 2} has already; expected ids to differ")
