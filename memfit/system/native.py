"""Native libraries: C++ files built against torch by the system's compiler at first use, and loaded with ctypes.

A library is kept in memfit's cache, under a name that holds the digest of its content. It is opened only if the digest
is right, and if only this user (or root) can write to it. Several processes may build it at once. A cache that cannot
be written costs the time of a build in each process. This module imports no torch.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from memfit.system.files import cache_folder

_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c++20")  # torch's headers ask for C++20 from 2.12 on
_BUILD_SECONDS = 120
_DIGEST_DIGITS = 32
_PRIVATE = 0o700
_ROOT = 0  # the id of the user who may write everywhere

_log = logging.getLogger(__name__)


class NativeLibraryError(Exception):
    """A library cannot be built or loaded on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A shared library of one C++ file.

    Attributes:
        name: the library's file name, without its digest and its ending.
        source: the file that is compiled.
        included: further files that `source` includes; a change in one of them gives another library.
        linked: linker flags, such as `-lc10` for a library of torch.
        flags: further ones of the compiler.
        written: given the folder of torch's headers, returns further headers by name, which are written from them.
        folders: returns folders of headers from elsewhere; each is tried until the source compiles with one.
    """

    name: str
    source: Path
    included: tuple[Path, ...] = ()
    linked: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    written: Callable[[Path], Mapping[str, str]] = field(default=lambda _: {})
    folders: Callable[[], Sequence[Path]] = field(default=tuple)

    def file(self) -> Path:
        """Return the library's file, built first if the cache has none that can be trusted.

        Raises:
            NativeLibraryError: no C++ compiler, it failed, or no folder can be written.
        """
        builder = _builders.get(self)
        if builder is not None and builder is not threading.current_thread():
            builder.join()
        folder = self._folder()
        kept = _intact(folder, self.name)
        if kept is not None:
            return kept
        try:
            _make_private(folder)
            return self.build(folder)
        except OSError as error:
            why = error.strerror or error
            _log.warning("%s is not kept: %s: %s; MEMFIT_CACHE names another folder", self.name, folder, why)
            return built_apart(self)

    def build_beside(self) -> bool:
        """Begin to build the library on a thread if the cache has none, and `file` waits; return whether it began."""
        if self in _builders or _intact(self._folder(), self.name) is not None:
            return False
        _builders[self] = threading.Thread(target=self._build_quietly, name=f"memfit builds {self.name}", daemon=True)
        _builders[self].start()
        return True

    def _build_quietly(self) -> None:
        with suppress(NativeLibraryError):  # `file` raises the same error for whoever needs the library
            self.file()

    def load(self) -> ctypes.PyDLL:
        """Return the library. Its functions are short, and hold Python's lock.

        Raises:
            NativeLibraryError: as `file`, or the library cannot be loaded.
        """
        path = self.file()
        try:
            return ctypes.PyDLL(str(path))
        except OSError as error:
            raise NativeLibraryError(f"{path} cannot be loaded: {error}") from error

    def _folder(self) -> Path:
        """Return the folder in the cache, which depends on torch's version, the sources and the machine."""
        sources = b"".join(path.read_bytes() for path in (*self.included, self.source))
        digest = hashlib.sha256(sources + " ".join(_FLAGS + self.flags + self.linked).encode()).hexdigest()[:16]
        torch_version = importlib.metadata.version("torch")
        return cache_folder() / f"torch-{torch_version}-{digest}-{platform.machine()}"

    def build(self, folder: Path) -> Path:
        """Build the library in a folder and return its file.

        Args:
            folder: exists, and is private.

        Raises:
            NativeLibraryError: no C++ compiler, or it failed.
            OSError: there is no room.
        """
        compiler = _compiler()
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            unfinished = Path(inner) / f"{self.name}.so"
            torch_folder = _torch_folder()
            for name, text in self.written(torch_folder / "include").items():
                (Path(inner) / name).write_text(text)
            include = [f"-I{inner}", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
            command = [compiler, *_FLAGS, *self.flags, *include]
            self._compile(command, [str(self.source), *self.linked, "-o", str(unfinished)])
            unfinished.chmod(_PRIVATE)
            return unfinished.replace(folder / f"{self.name}-{_digest(unfinished)}.so")

    def _compile(self, command: list[str], rest: list[str]) -> None:
        folders = self.folders()
        failure: NativeLibraryError | None = None
        for flags in [[f"-isystem{folder}"] for folder in folders] or [[]]:
            try:
                return _run([*command, *flags, *rest], Path(rest[-1]).parent)
            except NativeLibraryError as error:
                failure = failure or error
        assert failure is not None
        raise failure


_builders: dict[NativeLibrary, threading.Thread] = {}


@functools.cache
def built_apart(library: NativeLibrary) -> Path:
    """Return the file of a library in a folder of its own, which is deleted at the end of this process.

    Raises:
        NativeLibraryError: no C++ compiler, it failed, or there is no room either.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="memfit-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return library.build(folder)
    except OSError as error:
        raise NativeLibraryError(f"no folder has room for {library.name}: {error.strerror or error}") from error


def _intact(folder: Path, name: str) -> Path | None:
    """Return a library of the folder that is as it was built, and that nobody else can change."""
    try:
        for path in sorted(folder.glob(f"{name}-*.so")):
            if _is_private(folder) and _is_private(path) and path.stem == f"{name}-{_digest(path)}":
                return path
    except OSError:  # deleted, or not to be read
        pass
    return None


def _make_private(folder: Path) -> None:
    """Make a folder that no other user can write to; raise OSError if there is one that others own."""
    folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if folder.stat().st_uid not in _trusted():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if not _is_private(folder):
        folder.chmod(_PRIVATE)


def _is_private(path: Path) -> bool:
    """Return whether only this user and root can write to a file, or put files into a folder."""
    found = path.stat()
    return found.st_uid in _trusted() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _trusted() -> tuple[int, ...]:
    return os.geteuid(), _ROOT


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGEST_DIGITS]


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return found
    raise NativeLibraryError(f"there is no C++ compiler ({wanted or 'c++, g++ or clang++'}) on the PATH")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _run(command: list[str], folder: Path) -> None:
    """Run a compiler, which writes what it needs meanwhile to a folder: there may be none for temporary files."""
    compiler = command[0]
    environment = os.environ | {"TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NativeLibraryError(f"{compiler} took more than {_BUILD_SECONDS} s") from error
    if done.returncode:
        if "No space left" in done.stderr:
            raise OSError(28, "No space left on device")
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise NativeLibraryError(f"{compiler} failed: {complaints[0].strip()}")
