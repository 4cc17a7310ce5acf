"""Reading and writing memfit's files: strict decoding, errors that name the place, writes that are never half done."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from memfit.errors import InvalidFileError

T = TypeVar("T")

_GZIP_MAGIC = b"\x1f\x8b"
_MOST_FILE_BYTES = 2 << 30  # a gzip bomb must not fill the memory of the machine that reads it


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`, gunzipped where it is gzip, and refuse what is not a readable file."""
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        opener = gzip.open if is_gzip else open
        with opener(path, "rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InvalidFileError(f"{path}: cannot be read: {reason}") from error
    if len(content) > _MOST_FILE_BYTES:
        raise InvalidFileError(f"{path}: more than {_MOST_FILE_BYTES} bytes once unpacked; not a memfit file")
    return content


def decode(content: bytes, kind: type[T], path: Path | str) -> T:
    """Decode strict JSON into `kind`; an error names the file, the place in it, what was expected and what stands there.

    Raises:
        InvalidFileError: truncated or malformed JSON, an unknown key, a missing key, a wrong type.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFileError(f"{path}: {error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` under a temporary name beside it, then rename: a reader never sees half a file.

    A path that ends in `.gz` is compressed, without a time stamp, so that equal content gives equal bytes.

    Raises:
        InvalidFileError: the folder is missing or not writable, or the disk is full; nothing is left behind.
    """
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    unfinished: str | None = None
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, path)
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be written: {error.strerror}; choose another place") from error
    finally:
        if unfinished is not None and os.path.exists(unfinished):
            os.unlink(unfinished)
