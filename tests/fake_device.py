"""A device that is not there: memfit's CUDA arena over fake_cuda/runtime.cpp, and torch's CPU tensors in its memory.

To be used in a process of its own: torch's allocator cannot be put back.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

FOLDER = Path(__file__).parent / "fake_cuda"


def build_fakes(folder: Path, *flags: str) -> None:
    """Compile both libraries into `folder`, with more flags for the compiler."""
    build = [
        "c++",
        *flags,
        "-shared",
        "-fPIC",
        "-O1",
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}",
    ]
    torch_libraries = str(Path(torch.__file__).parent / "lib")
    subprocess.run([*build, str(FOLDER / "runtime.cpp"), "-o", str(folder / "runtime.so")], check=True)
    command = [*build, *(f"-I{path}" for path in include_paths()), str(FOLDER / "stand_in.cpp")]
    subprocess.run([*command, f"-L{torch_libraries}", "-lc10", "-o", str(folder / "stand_in.so")], check=True)


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """The fake runtime, memfit's library over it, and torch's current stream there."""

    runtime: ctypes.CDLL
    library: Any
    stream: list[int]

    def malloc(self, size: int, device: int = 0, stream: int = 0) -> int:
        return self.library.memfit_arena_cuda_malloc(size, device, stream)

    def free(self, pointer: int, device: int = 0, stream: int = 0) -> None:
        self.library.memfit_arena_cuda_free(pointer, 0, device, stream)

    def record_stream(self, pointer: int, stream: int) -> None:
        self.library.memfit_arena_cuda_record_stream(pointer, stream)

    def number(self, name: str) -> ctypes.c_int64:
        """A counter of the runtime; its value can be set."""
        return ctypes.c_int64.in_dll(self.runtime, name)

    def usage(self, device: int = 0) -> list[int]:
        """Live bytes, the most of them, bytes held, the most of them."""
        usage = (ctypes.c_int64 * 4)()
        self.library.memfit_arena_cuda_usage(device, usage)
        return list(usage)


def start(folder: str) -> FakeDevice:
    """Load the fakes, and let every arena of this process be one on the fake devices."""
    runtime = ctypes.CDLL(f"{folder}/runtime.so", mode=ctypes.RTLD_GLOBAL)
    from memfit.runtime.arena import arena as rooms
    from memfit.runtime.arena.cuda import CudaArenaLibrary
    from memfit.runtime.arena.library import load_arena_library

    raw = load_arena_library("cuda").library
    pointer, number = ctypes.c_void_p, ctypes.c_int
    raw.memfit_arena_cuda_malloc.restype = pointer
    raw.memfit_arena_cuda_malloc.argtypes = [ctypes.c_ssize_t, number, pointer]
    raw.memfit_arena_cuda_free.argtypes = [pointer, ctypes.c_ssize_t, number, pointer]
    raw.memfit_arena_cuda_free.restype = raw.memfit_arena_cuda_record_stream.restype = None
    raw.memfit_arena_cuda_record_stream.argtypes = [pointer, pointer]
    assert raw.memfit_arena_cuda_prepare(0) == 0
    fake = FakeDevice(runtime, raw, [0])
    torch.cuda.current_stream = lambda _device: type("Stream", (), {"cuda_stream": fake.stream[0]})  # pyright: ignore
    libraries = [CudaArenaLibrary(raw, index) for index in (0, 1)]
    rooms._library_for = lambda device: libraries[device.index or 0]  # pyright: ignore
    return fake


def start_with_tensors(folder: str) -> FakeDevice:
    """As `start`; from here on CPU tensors lie on fake device 0, whose bytes memfit's records count.

    What is measured of this CPU from here on, its alignment with it, is kept in a cache folder of its own.
    """
    fake = start(folder)
    cache = Path(folder) / f"cache-{os.getpid()}"
    cache.mkdir()
    for built in Path(os.environ["MEMFIT_CACHE"]).glob("torch-*"):
        (cache / built.name).symlink_to(built.resolve())
    os.environ["MEMFIT_CACHE"] = str(cache)
    from memfit.cost import calibration
    from memfit.runtime.arena import arena as rooms
    from memfit.runtime.arena.cuda import ArenaCounters
    from memfit.system import recorder

    recorder.count_with(ArenaCounters(library=fake.library, index=0), torch.device("cpu"))
    rooms.ALIGNMENT_BYTES["cpu"] = 512
    calibration.CPU_ALIGNMENT_BYTES = recorder.CPU_ALIGNMENT_BYTES = 512  # pyright: ignore
    functions = [fake.library.memfit_arena_cuda_malloc, fake.library.memfit_arena_cuda_free]
    ctypes.CDLL(f"{folder}/stand_in.so").stand_in(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    return fake
