"""C++ beside torch: one file built by the system's compiler when it is first used, kept in memfit's cache, safe among
processes, loaded with ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from memfit.errors import InvalidFileError
from memfit.files import cache_folder

_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c++20")  # torch's headers ask for C++20 from 2.12 on
_BUILD_SECONDS = 120


class NativeLibraryError(Exception):
    """A library cannot be built or loaded on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A shared library of one C++ file.

    Attributes:
        name: of the library's file, without its ending.
        source: the file that is compiled.
        included: further files that `source` includes; a change in one is another library.
        linked: what the compiler links against, such as `-lc10`, which torch brings.
    """

    name: str
    source: Path
    included: tuple[Path, ...] = ()
    linked: tuple[str, ...] = ()

    def path(self) -> Path:
        """Return where the library is, or will be: under torch's version, the sources' hash and the machine's ABI."""
        sources = b"".join(path.read_bytes() for path in (*self.included, self.source))
        digest = hashlib.sha256(sources + " ".join(_FLAGS).encode()).hexdigest()[:16]
        abi = f"cxx11abi{torch.compiled_with_cxx11_abi():d}-{platform.machine()}"
        return cache_folder() / f"torch-{torch.__version__}-{digest}-{abi}" / f"{self.name}.so"

    def load(self) -> ctypes.PyDLL:
        """Build the library where the cache lacks it, and load it. Calls keep the interpreter's lock: they are short.

        Raises:
            NativeLibraryError: no C++ compiler, it failed, or the library cannot be loaded.
            InvalidFileError: the cache cannot be written.
        """
        path = self.path()
        if not path.exists():
            self._build(path)
        try:
            return ctypes.PyDLL(str(path))
        except OSError as error:
            raise NativeLibraryError(f"{path} cannot be loaded: {error}") from error

    def _build(self, path: Path) -> None:
        compiler = _compiler()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                unfinished = Path(folder) / path.name
                _run([compiler, *_FLAGS, *_torch_flags(), str(self.source), *self.linked, "-o", str(unfinished)])
                unfinished.replace(path)
        except OSError as error:
            raise InvalidFileError(
                f"{path.parent}: no room for {path.name}: {error.strerror}; set MEMFIT_CACHE to another folder"
            ) from error


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return found
    raise NativeLibraryError(f"there is no C++ compiler ({wanted or 'c++, g++ or clang++'}) on the PATH")


@functools.cache
def _torch_flags() -> tuple[str, ...]:
    folder = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}"
    return (abi, f"-I{folder / 'include'}", f"-L{folder / 'lib'}")


def _run(command: list[str]) -> None:
    compiler = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeLibraryError(f"{compiler} took more than {_BUILD_SECONDS} s") from error
    if done.returncode:
        if "No space left" in done.stderr:
            raise OSError(28, "No space left on device")
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise NativeLibraryError(f"{compiler} failed: {complaints[0].strip()}")
