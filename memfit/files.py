"""Reading and writing memfit's files: strict decoding, errors that name the place, writes that are never half done."""

from __future__ import annotations

import gzip
import os
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memfit.errors import InvalidFileError

T = TypeVar("T")

_GZIP_MAGIC = b"\x1f\x8b"
_MOST_FILE_BYTES = 1 << 30  # a gzip bomb must not fill the memory of the machine that reads it
_CHUNK_BYTES = 1 << 24
_EXPECTED = re.compile(r"(?P<expected>Expected .*) - at `(?P<place>\$(\.\w+|\[\d+\])*)`")  # as msgspec writes it
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def cache_folder() -> Path:
    """Return the folder that memfit keeps its caches in: $MEMFIT_CACHE, else ~/.cache/memfit."""
    return Path(os.environ.get("MEMFIT_CACHE") or Path.home() / ".cache" / "memfit")


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`, gunzipped where it is gzip, whatever its name.

    Raises:
        InvalidFileError: missing, not readable, truncated gzip, or more than 1 GiB once unpacked.
    """
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        opener = gzip.open if is_gzip else open
        with opener(path, "rb") as file:
            while size_bytes <= _MOST_FILE_BYTES and (chunk := file.read(_CHUNK_BYTES)):
                chunks.append(chunk)
                size_bytes += len(chunk)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InvalidFileError(f"{path}: cannot be read: {reason}") from error
    if size_bytes > _MOST_FILE_BYTES:
        raise InvalidFileError(f"{path}: more than {_MOST_FILE_BYTES} bytes once unpacked; not a memfit file")
    return b"".join(chunks)


def decode(content: bytes, kind: type[T], path: Path | str) -> T:
    """Decode strict JSON into `kind`; an error names the file, the place in it, what was expected and what is there.

    Raises:
        InvalidFileError: truncated or malformed JSON, an unknown key, a missing key, a wrong type.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidFileError(f"{path}: {_with_value(str(error), content)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        size = f"{len(content)} bytes that are not"
        raise InvalidFileError(f"{path}: {error}; expected a whole JSON document, got {size}") from error


def _with_value(message: str, content: bytes) -> str:
    """Add the value that was found to a message that says only what was expected, and where."""
    match = _EXPECTED.fullmatch(message)
    if match is None or ", got " in message:
        return message
    value: Any = msgspec.json.decode(content)
    for key, index in _STEP.findall(match["place"]):
        value = value[key] if key else value[int(index)]
    return f"{match['expected']}, got {repr(value)[:60]} - at `{match['place']}`"


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` under a temporary name beside it, then rename: a reader never sees half a file.

    A path that ends in `.gz` is compressed, without a time stamp, so that equal content gives equal bytes.

    Raises:
        InvalidFileError: the folder is missing or not writable, or the disk is full; nothing is left behind.
    """
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    unfinished: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.chmod(0o644)  # mkstemp lets only its owner read
        unfinished.replace(path)
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be written: {error.strerror or error}; choose another place") from error
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
