"""Allocation traces as CSV files: one block a row, under a header such as `id,lower,upper,size`.

A file is read strictly: a row that is not a block is an error that names the file, the row and the column. The header
is row 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

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
_NUMBER = rb"(?:0|[1-9][0-9]{0,17})"
_NUMBERS = re.compile(rb"(?>%b,%b,%b,%b\r?\n)*" % ((_NUMBER,) * len(_SPELLINGS)))  # lines of such numbers alone


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


def _read_columns(path: Path | str) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return the name in the file, and the values, of each column: id, start, end and size. The first bad row raises.

    The file is read in pieces: its text takes several times the memory of its numbers.
    """
    pieces = _whole_lines(read_chunks(Path(path)))
    first = next(pieces, b"").removeprefix(b"\xef\xbb\xbf")
    columns, names = _read_header(path, first)
    found: dict[str, list[NDArray[Any]]] = {column: [] for column in columns}
    rows = 0
    for lines in chain([first.partition(b"\n")[2]], pieces):
        if _NUMBERS.fullmatch(lines):
            read = np.fromstring(lines.replace(b"\n", b","), np.int64, sep=",").reshape(-1, len(columns)).T
        else:
            read = _read_lines(path, lines, names, rows)
        rows += len(read[0])
        for column, values in zip(columns, read, strict=True):
            found[column].append(np.ascontiguousarray(values))
    if rows == 0:
        _fail(path, 2, "id", "there is no block below the header, expected one or more")
    # One column after the other: all pieces beside all columns would take twice the memory.
    return dict(zip(columns, names, strict=True)), {column: _joined(found.pop(column)) for column in columns}


def _joined(pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the values of a column; numbers become texts where one of the ids is no number."""
    if all(piece.dtype == np.int64 for piece in pieces):
        return np.concatenate(pieces)
    texts = [str(value) for piece in pieces for value in piece.tolist()]
    widest_bytes = 4 * len(texts) * max(map(len, texts))
    return np.array(texts, dtype=object if widest_bytes > _WIDEST_BYTES else None)


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


def _read_lines(path: Path | str, lines: bytes, names: Sequence[str], before: int) -> list[NDArray[Any]]:
    """Return the columns of some lines, one row after the other. The first bad row raises.

    Args:
        path: names the file in errors.
        lines: each ends in a newline.
        names: of the columns.
        before: how many rows of the file stand above these lines.
    """
    rows = [_read_line(path, number, names, line) for number, line in enumerate(BytesIO(lines), before + 2)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    whole = [all(isinstance(value, int) for value in column) for column in columns]
    return [np.array(column, np.int64 if each else object) for column, each in zip(columns, whole, strict=True)]


def _read_line(path: Path | str, number: int, names: Sequence[str], line: bytes) -> list[int | str]:
    """Return the values of one row: numbers, but for an id that is none."""
    fields = [field.strip(b" \t") for field in line.removesuffix(b"\n").removesuffix(b"\r").split(b",")]
    if not line.strip():
        _fail(path, number, names[0], "the line is blank, expected a block; remove it if nothing is missing")
    values = [_read_field(path, number, name, field) for name, field in zip(names, fields, strict=False)]
    if len(fields) != len(names):
        is_missing = "is missing: " if len(fields) < len(names) else ""
        name = names[min(len(fields), len(names) - 1)]
        _fail(path, number, name, f"{is_missing}expected {len(names)} values, got {len(fields)} in {_shown(line)}")
    return values


def _read_field(path: Path | str, number: int, name: str, field: bytes) -> int | str:
    kind = _NAMES[name]
    is_number = field.isdigit() and len(field) <= _MOST_DIGITS and int(field) <= _MOST_NUMBER
    if kind == "id" and not (is_number and str(int(field)).encode() == field):  # 007 is another id than 7
        try:
            return field.decode() or _fail(path, number, name, "got '', expected an id")
        except UnicodeDecodeError:
            _fail(path, number, name, f"got {field[:60]!r}, expected text in UTF-8")
    if not field.isdigit():
        expected = f"a whole number from {1 if kind == 'size' else 0}"
        _fail(path, number, name, f"got {_shown(field)}, expected {expected}")
    if not is_number:
        _fail(path, number, name, f"got {_shown(field)}, which is too large: expected at most {_MOST_NUMBER}")
    return int(field)


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


def _require_different(path: Path | str, name: str, ids: NDArray[Any]) -> None:
    pair = first_duplicate(ids)
    if pair is not None:
        first, again = pair
        _fail(path, again + 2, name, f"got {ids[again]}, which row {first + 2} has already; expected ids to differ")
