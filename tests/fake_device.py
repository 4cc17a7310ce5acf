"""A device that is not there: memfit's CUDA arena over fake_cuda/c10_cuda.cpp, and torch's CPU tensors in its memory.

For a torch without CUDA, and to be used in a process of its own: torch's allocator cannot be put back.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

FOLDER = Path(__file__).parent / "fake_cuda"
ALIGNMENT_BYTES = 512


def build_fakes(folder: Path, *flags: str) -> None:
    """Compile both libraries into `folder`, with more flags for the compiler."""
    from memfit.memory.arena.forwarding import forwarding_methods
    from memfit.memory.arena.library import CUDA_TYPES

    include = Path(torch.__file__).parent / "include"
    (folder / "forwarding.inc").write_text(forwarding_methods(include))
    folders = [f"-I{path}" for path in (*include_paths(), folder)] + [f"-isystem{CUDA_TYPES}"]
    build = ["c++", *flags, "-shared", "-fPIC", "-O1", "-std=c++20", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", *folders]
    link = [f"-L{Path(torch.__file__).parent / 'lib'}", f"-L{folder}", "-lc10"]
    for name, more in (("c10_cuda", ()), ("stand_in", ("-lc10_cuda",))):
        into = f"lib{name}.so"
        source = str(FOLDER / f"{name}.cpp")
        command = [*build, source, *link, *more, f"-Wl,-soname,{into}", "-o", str(folder / into)]
        subprocess.run(command, check=True)


@dataclass(slots=True)
class FakeDevice:
    """The stand-in of torch's CUDA library, memfit's library over it, and torch's current stream there."""

    torch: ctypes.PyDLL
    library: Any
    deleters: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        for name in ("fake_malloc", "fake_base", "fake_raw_alloc"):
            getattr(self.torch, name).restype = ctypes.c_void_p
        self.torch.fake_stream.restype = ctypes.c_int64

    @property
    def stream(self) -> int:
        """The current stream."""
        return int(self.torch.fake_stream())

    def on(self, stream: int, device: int = 0) -> None:
        """Make a stream of a device the current one of the calling thread."""
        self.torch.fake_current(device, ctypes.c_int64(stream))

    def malloc(self, size: int, device: int = 0, stream: int = 0) -> int | None:
        """As a tensor's memory is asked for on a stream of a device."""
        self.on(stream, device)
        deleter = ctypes.c_void_p()
        pointer = self.torch.fake_malloc(ctypes.c_int64(size), ctypes.byref(deleter))
        self.on(0)
        if pointer is not None:
            self.deleters[pointer] = deleter.value or 0
        return pointer

    def free(self, pointer: int) -> None:
        """As a tensor's memory is given back."""
        self.torch.fake_free(ctypes.c_void_p(pointer), ctypes.c_void_p(self.deleters.pop(pointer)))

    def record_stream(self, pointer: int, stream: int) -> None:
        """As `Tensor.record_stream`."""
        deleter = ctypes.c_void_p(self.deleters[pointer])
        self.torch.fake_record_stream(ctypes.c_void_p(pointer), deleter, ctypes.c_int64(stream))

    def is_in_front(self) -> bool:
        """Whether torch asks the arena's allocator."""
        return bool(self.library.memfit_arena_cuda_is_in_front())

    def number(self, name: str) -> ctypes.c_int64:
        """A counter of the stand-in; its value can be set."""
        return ctypes.c_int64.in_dll(self.torch, name)

    def usage(self, device: int = 0) -> list[int]:
        """Live bytes, the most of them, bytes held, the most of them."""
        usage = (ctypes.c_int64 * 4)()
        self.torch.fake_usage(device, usage)
        return list(usage)


def start(folder: str) -> FakeDevice:
    """Load the fakes, and let every arena on CUDA of this process be one on the fake devices."""
    standing = ctypes.PyDLL(f"{folder}/libc10_cuda.so")  # found by its name in what needs it
    os.environ["LIBRARY_PATH"] = folder  # of the linker
    from memfit.memory.arena import planned_memory
    from memfit.memory.arena.cuda import CudaArenaLibrary
    from memfit.memory.arena.library import load_arena_library

    fake = FakeDevice(standing, load_arena_library("cuda").library)
    torch.cuda.current_stream = lambda _device: type("Stream", (), {"cuda_stream": fake.stream})  # pyright: ignore
    libraries = [CudaArenaLibrary(fake.library, index) for index in (0, 1)]
    planned_memory.library_for = lambda device: libraries[device.index or 0]  # pyright: ignore
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
    from memfit.memory import in_arena
    from memfit.memory.arena import devices, planned_memory
    from memfit.system import instruments, recorder

    class Counters(instruments.Segmented):
        """The stand-in's counters of device 0, as torch's statistics on CUDA."""

        def begin(self) -> None:
            fake.torch.fake_reset_peaks(0)

        def cut(self) -> tuple[int, int, int | None]:
            live, peak, _, reserved = fake.usage()
            return live, peak, reserved

        def live_bytes(self) -> int:
            return fake.usage()[0]

        def held_bytes(self) -> int:
            return fake.usage()[2]

        def empty_cache(self) -> None:
            fake.torch.fake_empty_cache()

    fake.number("chunk_bytes").value = ALIGNMENT_BYTES  # small steps are to be counted exactly
    instruments.instruments[torch.device("cpu")] = Counters(source="the stand-in's counters")
    devices.ALIGNMENT_BYTES["cpu"] = ALIGNMENT_BYTES
    calibration.CPU_ALIGNMENT_BYTES = recorder.CPU_ALIGNMENT_BYTES = ALIGNMENT_BYTES  # pyright: ignore
    in_arena.library_for = planned_memory.library_for  # pyright: ignore
    ctypes.CDLL(f"{folder}/libstand_in.so").stand_in()
    return fake
