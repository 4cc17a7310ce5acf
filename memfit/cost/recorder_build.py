"""Building the CPU recorder's library: one call of the C++ compiler, kept in memfit's cache, safe among processes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from memfit.errors import InvalidFileError

_SOURCE = Path(__file__).with_name("recorder.cpp")
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c++20")  # torch's headers ask for C++20 from 2.12 on
_BUILD_SECONDS = 120
_INSTALL_FAILURES = {
    1: "the CPU allocator in place has no raw deleter, so it cannot be wrapped",
    2: "a CPU allocator of higher priority is in place and stays",
}


class RecorderUnavailableError(Exception):
    """The library cannot be had on this machine; the message says why, and becomes part of `Usage.source`."""


def cache_folder() -> Path:
    """Return the folder that memfit keeps its caches in: $MEMFIT_CACHE, else ~/.cache/memfit."""
    return Path(os.environ.get("MEMFIT_CACHE") or Path.home() / ".cache" / "memfit")


def load_library() -> ctypes.PyDLL:
    """Build the recorder where the cache lacks it, install it as torch's CPU allocator, and return it.

    Raises:
        RecorderUnavailableError: no C++ compiler, it failed, or the allocator in place cannot be wrapped.
        InvalidFileError: the cache cannot be written.
    """
    path = _library_path()
    if not path.exists():
        _build(path)
    try:
        library = ctypes.PyDLL(str(path))  # its calls are shorter than letting go of the interpreter's lock
    except OSError as error:
        raise RecorderUnavailableError(f"{path} cannot be loaded: {error}") from error
    pointer = ctypes.POINTER(ctypes.c_int64)
    library.memfit_recorder_live_bytes.restype = ctypes.c_int64
    library.memfit_recorder_open.argtypes = [pointer]
    library.memfit_recorder_close.argtypes = [ctypes.c_int, pointer]
    library.memfit_recorder_close.restype = ctypes.c_int64
    failure = library.memfit_recorder_install()
    if failure:
        raise RecorderUnavailableError(_INSTALL_FAILURES[failure])
    return library


def _library_path() -> Path:
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    abi = f"cxx11abi{torch.compiled_with_cxx11_abi():d}-{platform.machine()}"
    return cache_folder() / f"torch-{torch.__version__}-{digest}-{abi}" / "recorder.so"


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return found
    raise RecorderUnavailableError(f"no C++ compiler ({wanted or 'c++, g++ or clang++'}) on the PATH")


def _build(path: Path) -> None:
    compiler = _compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            _compile(compiler, unfinished)
            unfinished.replace(path)
    except OSError as error:
        raise InvalidFileError(
            f"{path.parent}: no room for the CPU recorder: {error.strerror}; set MEMFIT_CACHE to another folder"
        ) from error


def _compile(compiler: str, output: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    command = [
        compiler,
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}",
        f"-I{torch_folder / 'include'}",
        str(_SOURCE),
        f"-L{torch_folder / 'lib'}",
        "-lc10",
        "-o",
        str(output),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise RecorderUnavailableError(f"{compiler} took more than {_BUILD_SECONDS} s") from error
    if done.returncode:
        if "No space left" in done.stderr:
            raise OSError(28, "No space left on device")
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise RecorderUnavailableError(f"{compiler} failed: {complaints[0].strip()}")
