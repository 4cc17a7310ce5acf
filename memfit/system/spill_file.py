"""A file that device memory is spilled to, and the two threads that copy to it and back.

The file has no name from the start, so that nothing is left behind by a crash. It is as large as it will ever be from
the start too, so that a full disk is an error before the first copy. Where the file system allows it, copies go past
the page cache: what was spilled would otherwise stay in memory.

Direct I/O needs addresses, sizes and offsets that are multiples of the disk's block. Each thread therefore copies
through an aligned buffer of its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from memfit.errors import HostMemoryError, InvalidOptionError
from memfit.system.budget import format_bytes
from memfit.system.worker import Call, Worker

BLOCK_BYTES = 4096  # offsets and sizes in a file are multiples: no disk has larger blocks
_BUFFER_BYTES = 1 << 21
_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mounts")  # man 5 proc_pid_mounts
_ESCAPED = re.compile(r"\\([0-7]{3})")  # of a mount point in it: spaces, tabs, line ends, backslashes (man 3 getmntent)

Span = tuple[float, float]  # when a copy started and ended, in the seconds of `time.perf_counter`


class SpillFile:
    """A nameless file of a fixed size. Copies in each direction are carried out one after the other.

    Attributes:
        size_bytes: of the file.
        is_direct: whether copies go past the page cache.
    """

    def __init__(self, size_bytes: int, directory: Path | None = None) -> None:
        """Make the file.

        Args:
            size_bytes: rounded up to whole blocks.
            directory: on the disk that is to hold it; by default see `spill_directory`.

        Raises:
            HostMemoryError: the directory cannot be written to, or its disk has not that much room.
        """
        self.size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        where = spill_directory(directory)
        try:
            self._file, self.is_direct = _open_unnamed(where)
        except OSError as error:
            raise HostMemoryError(
                f"no file can be made in {str(where)!r} for what is offloaded: {error.strerror}; name another "
                "directory as host_dir"
            ) from error
        self._close = weakref.finalize(self, os.close, self._file)  # a copy under way refers to this object
        for thread in (_writer, _reader):
            thread(os.getpid())  # started now, and not in the middle of a step
        self._pending: set[object] = set()  # a token for each copy under way, and for each that was to be started
        try:
            _take_room(self._file, self.size_bytes)
        except OSError as error:
            self._close()
            raise _no_room(where, self.size_bytes, "offloaded storages", error) from error

    def write(self, address: int, size_bytes: int, offset: int, owner: object = None) -> Call[Span]:
        """Start the copy of `size_bytes` at a memory address to the file; the memory must stay as it is until then.

        Args:
            address: of the first byte in memory.
            size_bytes: how many.
            offset: in the file, a multiple of BLOCK_BYTES.
            owner: of the memory; referred to until the copy has ended.
        """
        return self._start(_writer(os.getpid()), partial(self._write, address, size_bytes, offset), owner)

    def read(self, address: int, size_bytes: int, offset: int, owner: object = None) -> Call[Span]:
        """Start the copy from the file to memory.

        Args:
            address: of the first byte in memory.
            size_bytes: how many.
            offset: in the file, a multiple of BLOCK_BYTES.
            owner: of the memory; referred to until the copy has ended.
        """
        return self._start(_reader(os.getpid()), partial(self._read, address, size_bytes, offset), owner)

    def settle(self) -> None:
        """Wait until no copy is under way; errors of copies that nobody waits for any more are ignored."""
        if not self._pending:
            return
        for thread in (_writer(os.getpid()), _reader(os.getpid())):  # they copy in turn: what was before this has ended
            thread.submit(_nothing).wait()
        self._pending.clear()

    def close(self) -> None:
        """Give the disk's room back, after the copies under way."""
        self.settle()
        self._close()

    def _start(self, thread: _Thread, copy: Callable[[mmap.mmap], None], owner: object) -> Call[Span]:
        token, owners = object(), [owner]

        def timed() -> Span:
            started = time.perf_counter()
            try:
                copy(thread.buffer)
            finally:
                owners.clear()  # before whoever waits goes on, and counts what is in memory
                self._pending.discard(token)
            return started, time.perf_counter()

        self._pending.add(token)  # before the start: Ctrl-C may come after it, and the copy must not be forgotten
        return thread.submit(timed)

    def _write(self, address: int, size_bytes: int, offset: int, buffer: mmap.mmap) -> None:
        for start in range(0, size_bytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size_bytes - start)
            ctypes.memmove(_address(buffer), address + start, count)
            whole = -(-count // BLOCK_BYTES) * BLOCK_BYTES
            _all_of(os.pwritev, self._file, buffer, whole, offset + start)
        if not self.is_direct:
            os.fdatasync(self._file)  # only what is on the disk can leave the page cache
            os.posix_fadvise(self._file, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def _read(self, address: int, size_bytes: int, offset: int, buffer: mmap.mmap) -> None:
        for start in range(0, size_bytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size_bytes - start)
            whole = -(-count // BLOCK_BYTES) * BLOCK_BYTES
            _all_of(os.preadv, self._file, buffer, whole, offset + start)
            ctypes.memmove(address + start, _address(buffer), count)
        if not self.is_direct:
            os.posix_fadvise(self._file, offset, size_bytes, os.POSIX_FADV_DONTNEED)


class _Thread(Worker):
    """A thread that copies, and the aligned buffer that it copies through."""

    def __init__(self, name: str) -> None:
        self.buffer = mmap.mmap(-1, _BUFFER_BYTES)
        super().__init__(f"memfit-{name}")
        self.end_at_exit()


@cache
def _writer(_process: int) -> _Thread:
    return _Thread("to-disk")


@cache
def _reader(_process: int) -> _Thread:
    return _Thread("from-disk")


def parse_host_dir(given: Path | str | None) -> Path | None:
    """Return the directory for what is offloaded; None stands for the system's temporary one.

    >>> parse_host_dir("/mnt/nvme"), parse_host_dir(None)
    (PosixPath('/mnt/nvme'), None)

    Raises:
        InvalidOptionError: not a path, or an empty one.
    """
    if given is None:
        return None
    is_path = isinstance(given, (str, Path))  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_path or not str(given) or "\0" in str(given):
        raise InvalidOptionError(f"host_dir is {given!r}, expected the path of a directory")
    return Path(given)


def require_host_budget(directory: Path | None, host_budget_bytes: int) -> None:
    """Refuse a directory to which nothing would go.

    Raises:
        InvalidOptionError: a directory is given without a host budget.
    """
    if directory is not None and host_budget_bytes == 0:
        raise InvalidOptionError(
            f"host_dir is {str(directory)!r} and host_budget is 0, so that nothing goes there: give both, or none"
        )


@contextmanager
def file_with_room(size_bytes: int, directory: Path | None, what: str) -> Iterator[str]:
    """Give the block the path of a new file of this size, whose room on the disk is taken; its name goes after it.

    Args:
        size_bytes: of the file.
        directory: as for `SpillFile`.
        what: the file is for, in errors.

    Raises:
        HostMemoryError: as `SpillFile`.
    """
    where = spill_directory(directory)
    try:
        file, path = tempfile.mkstemp(prefix="memfit-", dir=where)
        try:
            _take_room(file, max(1, size_bytes))  # a full disk is an error now, and not in a step
            yield path
        finally:
            os.close(file)
            Path(path).unlink()
    except OSError as error:
        raise _no_room(where, size_bytes, what, error) from error


def _no_room(where: Path, size_bytes: int, what: str, error: OSError) -> HostMemoryError:
    return HostMemoryError(
        f"{str(where)!r} has no room for {format_bytes(size_bytes)} of {what}: {error.strerror}; free some, lower the "
        "host budget, or name another directory as host_dir"
    )


def spill_directory(named: Path | None = None) -> Path:
    """Return the directory for spilled memory: the one that a user named, or the system's temporary one.

    Raises:
        HostMemoryError: its file system holds its files in memory, so that what is offloaded there frees nothing.
    """
    if named is not None:
        if is_in_memory(named):
            raise HostMemoryError(
                f"host_dir {str(named)!r} is in memory, so what is offloaded there frees nothing; name a directory on "
                "a disk"
            )
        return named
    places = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    for place in places:
        if place.is_dir() and not is_in_memory(place):
            return place
    raise HostMemoryError(
        f"{' and '.join(map(str, places))} are in memory, so what is offloaded there frees nothing; name a directory "
        "on a disk as host_dir"
    )


def is_in_memory(directory: Path, mounts: Path = _MOUNTS) -> bool:
    """Return whether the file system of a directory holds its files in memory.

    Args:
        directory: need not exist.
        mounts: the kernel's list of mounted file systems; if it does not exist, none is in memory.
    """
    if not mounts.exists():
        return False
    rows = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    path = Path(os.path.realpath(directory))
    found = [(at, row[2]) for row in rows if path.is_relative_to(at := Path(_ESCAPED.sub(_character, row[1])))]
    return bool(found) and max(reversed(found), key=lambda mount: len(mount[0].parts))[1] in _IN_MEMORY


def _character(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 8))


def _open_unnamed(directory: Path) -> tuple[int, bool]:
    """Open a new file without a name; return its descriptor, and whether it is open for direct I/O."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = os.O_RDWR | os.O_CLOEXEC
    unnamed = getattr(os, "O_TMPFILE", 0)
    attempts = [(unnamed, direct), (unnamed, 0)] if unnamed else []
    for kind, extra in attempts:
        try:
            return os.open(directory, flags | kind | extra, 0o600), bool(extra)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
    file, name = tempfile.mkstemp(prefix="memfit-", dir=directory)
    Path(name).unlink()
    return file, False


def _take_room(file: int, size_bytes: int) -> None:
    """Make a file of this size whose room on the disk is taken."""
    if not size_bytes:
        return
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        # The file system cannot, and what the C library does then fails under direct I/O: write zeros.
        with mmap.mmap(-1, min(size_bytes, _BUFFER_BYTES)) as zeros:
            for start in range(0, size_bytes, len(zeros)):
                _all_of(os.pwritev, file, zeros, min(len(zeros), size_bytes - start), start)


def _all_of(call: Callable[..., int], file: int, buffer: mmap.mmap, size_bytes: int, offset: int) -> None:
    """Read or write all of these bytes, in as many calls as it takes."""
    view, done = memoryview(buffer), 0
    while done < size_bytes:
        moved = call(file, [view[done:size_bytes]], offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "the file ended early")
        done += moved


def _nothing() -> None:
    """Do nothing, after all that a thread was given before."""


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
