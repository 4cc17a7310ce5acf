"""Reading and writing memfit's files: strict decoding, errors that name the place, atomic writes."""

from __future__ import annotations

import gzip
import os
import re
import secrets
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from memfit.errors import InvalidFileError

T = TypeVar("T")

_SHARED_MEMORY = Path("/dev/shm")
_GZIP_MAGIC = b"\x1f\x8b"
_MOST_FILE_BYTES = 1 << 30  # a gzip bomb must not fill the memory of the machine that reads it
_CHUNK_BYTES = 1 << 24
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_MAY_READ_AND_WRITE = 0o666  # less the umask
_EXPECTED = re.compile(r"(?P<expected>Expected .*) - at `(?P<place>\$(\.\w+|\[\d+\])*)`")  # as msgspec writes it
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def cache_folder() -> Path:
    """Return the folder of memfit's caches: $MEMFIT_CACHE, ~/.cache/memfit, or one for temporary files.

    The last one is for users without a home, and for homes that can only be read and have no such folder. It is the
    user's alone; where somebody else has made one of that name, it is another one in each process.
    """
    named = os.environ.get("MEMFIT_CACHE")
    if named:
        return Path(named)
    try:
        home = Path.home() / ".cache" / "memfit"
    except RuntimeError:  # a user id without an entry, as containers have them
        return _temporary_folder()
    return home if home.is_dir() or _can_be_made(home) else _temporary_folder()


def writable_folder() -> Path | None:
    """Return a folder for temporary files where the system has none; None stands for the system's."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return _SHARED_MEMORY
    return None


def _can_be_made(folder: Path) -> bool:
    """Return whether a folder that is not there may be made."""
    there = next((each for each in folder.parents if each.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


@cache
def _temporary_folder() -> Path:
    try:
        path = Path(tempfile.gettempdir()) / f"memfit-{os.geteuid()}"
    except FileNotFoundError:  # nothing can be written but, in most containers, shared memory
        path = _SHARED_MEMORY / f"memfit-{os.geteuid()}"
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE:
            return path
    with suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="memfit-"))
    return path  # cannot be written: an attempt raises an error


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`, decompressed if the content is gzip, whatever its name.

    Raises:
        InvalidFileError: missing, not readable, truncated gzip, or more than 1 GiB after decompression.
    """
    return b"".join(read_chunks(path))


def read_chunks(path: Path, *, chunk_bytes: int = _CHUNK_BYTES, most_bytes: int = _MOST_FILE_BYTES) -> Iterator[bytes]:
    """Return the content of `path` in order, in chunks. It is opened once, as a pipe has to be.

    Args:
        path: of the file.
        chunk_bytes: the most of one chunk.
        most_bytes: of all, after decompression.

    Raises:
        InvalidFileError: as `read_bytes`.
    """
    size_bytes = 0
    try:
        with open(path, "rb") as file:
            whole = _Rest(begin=file.read(len(_GZIP_MAGIC)), file=file)
            content: Any = gzip.GzipFile(fileobj=whole) if whole.begin == _GZIP_MAGIC else whole  # pyright: ignore
            while chunk := content.read(chunk_bytes):
                size_bytes += len(chunk)
                if size_bytes > most_bytes:
                    raise InvalidFileError(f"{path}: more than {most_bytes} bytes once unpacked; not a memfit file")
                yield chunk
    except InvalidFileError:  # a ValueError as well
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InvalidFileError(f"{path}: cannot be read: {reason}") from error


@dataclass(slots=True)
class _Rest:
    """A file whose first bytes have been read: they come first again."""

    begin: bytes
    file: IO[bytes]

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end."""
        begin, self.begin = self.begin, b""
        return begin or self.file.read(size)


def decode(content: bytes, kind: type[T], path: Path | str) -> T:
    """Return strict JSON decoded into `kind`.

    Args:
        content: of the file.
        kind: a msgspec type.
        path: names the file in errors, which give the place in it, the expected and the actual value.

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
    """Add the actual value to a message that has only the expected type and the place."""
    match = _EXPECTED.fullmatch(message)
    if match is None or ", got " in message:
        return message
    try:
        value: Any = msgspec.json.decode(content)
        for key, index in _STEP.findall(match["place"]):
            value = value[key] if key else value[int(index)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return message  # what stands behind the place is malformed, or a key stands there twice
    return f"{match['expected']}, got {repr(value)[:60]} - at `{match['place']}`"


def require_writable(*paths: Path | None) -> None:
    """Raise InvalidFileError, before any work is done, for a file whose folder is missing, or that is a folder."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InvalidFileError(f"{path}: cannot be written: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise InvalidFileError(f"{path}: cannot be written: it is a folder; give a file's name")


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file beside `path`, then rename it: no reader sees an incomplete file.

    If `path` ends in `.gz`, the content is compressed without a time stamp, so that equal content gives equal bytes.

    Args:
        path: of the file; its folder exists.
        content: all of it.

    Raises:
        InvalidFileError: the folder is missing or not writable, or the disk is full; no temporary file remains.
    """
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    unfinished: Path | None = None
    try:
        if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
            path.write_bytes(content)
            return
        beside = path.with_name(f".memfit-{secrets.token_hex(8)}")
        # not by tempfile, which gives a mode of its own: others may read what the umask lets them read
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _ALL_MAY_READ_AND_WRITE)
        unfinished = beside
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidFileError(f"{path}: cannot be written: {reason}; choose another place") from error
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
