"""Calls into the arena's C++ library, which is compiled at its first use and kept in memfit's cache."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.errors import MemfitError
from memfit.memory.arena import forwarding
from memfit.memory.arena.layout import ArenaPlan, Recording
from memfit.memory.arena.places import Places, Seen
from memfit.system.native import NativeLibrary, NativeLibraryError

_FOLDER = Path(__file__).parent
_SHARED = tuple(_FOLDER / f"arena_{name}.cpp" for name in ("core", "calls", "places", "table"))
CUDA_TYPES = _FOLDER / "cuda_types"
"""Headers with the names of CUDA that torch's own headers mention."""


def _cuda_headers() -> list[Path]:
    """Return the folders of CUDA's own headers here, for a torch that uses more of them than `cuda_types` has."""
    packages = [Path(entry) for entry in sys.path if entry]
    folders = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders += [package / "triton/backends/nvidia/include" for package in packages]
    folders += [Path(sys.prefix) / "include", Path("/usr/local/cuda/include")]
    return [folder for folder in folders if (folder / "cuda_runtime.h").exists() and (folder / "crt").exists()]


LIBRARIES = {
    "cpu": NativeLibrary("arena_cpu", _FOLDER / "arena.cpp", included=_SHARED, linked=("-lc10",)),
    "cuda": NativeLibrary(
        "arena_cuda",
        _FOLDER / "arena_cuda.cpp",
        included=(*_SHARED, *sorted(CUDA_TYPES.iterdir()), Path(forwarding.__file__)),
        linked=("-lc10", "-lc10_cuda"),
        flags=("-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",),  # a macro of torch's own build, for Windows alone
        written=lambda include: {"forwarding.inc": forwarding.forwarding_methods(include)},
        folders=lambda: [CUDA_TYPES, *_cuda_headers()],
    ),
}
"""The arena's library for each type of device."""

_FAILURES = {
    1: "another step already runs in an arena of this process, and steps cannot be nested; end that one first, or use "
    "one arena around both",
    3: "the CPU allocator in place has no raw deleter, so that an arena cannot stand in front of it",
    4: "a CPU allocator of higher priority is in place and stays; an arena cannot stand in front of it",
    5: "another allocator was put in front of the arena's on CUDA and stays, so that requests would go in circles",
}
_NO_PLAN = -1


class ArenaUnavailableError(MemfitError, RuntimeError):
    """There can be no arena on this machine, or not now; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Requests of one step, or of many.

    Attributes:
        served: answered from the arena.
        outliving: ordinary memory, as planned: still live at the end of the recorded step.
        recorded: ordinary memory, because there was no plan yet.
        unexpected: ordinary memory, because the request was larger than planned, or after the last planned one.
        occupied: ordinary memory, because a live tensor lay at the planned address.
        other_threads: ordinary memory, because of another thread (on CUDA: another stream).
        kept: how many of those served were still live at the end of their step.
    """

    served: int = 0
    outliving: int = 0
    recorded: int = 0
    unexpected: int = 0
    occupied: int = 0
    other_threads: int = 0
    kept: int = 0

    @property
    def not_served(self) -> int:
        """Requests that a plan expected in the arena, or did not expect, and that got ordinary memory."""
        return self.unexpected + self.occupied

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@functools.cache
def load_arena_library(device_type: str) -> ArenaLibrary:
    """Return the library for `cpu` or `cuda`; it is built first if the cache lacks it.

    Raises:
        ArenaUnavailableError: there is no C++ compiler, or it failed.
    """
    try:
        return ArenaLibrary(LIBRARIES[device_type].load(), device_type)
    except NativeLibraryError as error:
        raise ArenaUnavailableError(
            f"no arena: {error}; install a C++ compiler, name one with CXX, or go without an arena"
        ) from error


class ArenaLibrary:
    """Typed calls into the library; a handle stands for one arena."""

    def __init__(self, library: ctypes.PyDLL, device_type: str) -> None:
        self.library = library  # PyDLL: releasing the interpreter's lock would take longer than these calls
        handle, number, numbers = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
        prefix = f"memfit_arena_{device_type}"
        signatures: dict[str, tuple[list[Any], Any]] = {
            "memfit_arena_create": ([], handle),
            "memfit_arena_destroy": ([handle], None),
            "memfit_arena_set_plan": ([handle, number, number, numbers, numbers, numbers], None),
            "memfit_arena_set_places": ([handle, number, *[numbers] * 10], None),
            "memfit_arena_seen_places": ([handle, *[numbers] * 5], None),
            "memfit_arena_begun_at": ([handle, numbers], number),
            "memfit_arena_at": ([number], None),
            "memfit_arena_drop_plan": ([handle, number], None),
            "memfit_arena_resize": ([handle, number], ctypes.c_int),
            "memfit_arena_live_blocks": ([handle], number),
            "memfit_arena_owns": ([handle, handle], ctypes.c_int),
            "memfit_arena_seen": ([handle, numbers, numbers], None),
            "memfit_arena_number": ([handle], number),
            "memfit_arena_again": ([number], None),
            "memfit_arena_ended": ([number], None),
            "memfit_arena_interrupt": ([], None),
            "memfit_arena_resume": ([], None),
            f"{prefix}_end_step": ([handle, numbers], number),
        }
        if device_type == "cuda":
            integer = ctypes.c_int
            signatures |= {
                "memfit_arena_cuda_begin_step": ([handle, number, integer, handle, integer], integer),
                "memfit_arena_cuda_place_slabs": ([integer, handle], None),
                "memfit_arena_cuda_is_in_front": ([], integer),
            }
        else:
            signatures |= {
                "memfit_arena_cpu_begin_step": ([handle, number], ctypes.c_int),
                "memfit_arena_test_allocate": ([number], handle),
                "memfit_arena_test_free": ([handle], None),
                "memfit_arena_time": ([number, numbers], number),
            }
        for name, (arguments, result) in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self._end_step = getattr(library, f"{prefix}_end_step")
        self.at = library.memfit_arena_at
        self.number = library.memfit_arena_number
        self.again = library.memfit_arena_again
        self.ended = library.memfit_arena_ended
        self.interrupt = library.memfit_arena_interrupt
        self.resume = library.memfit_arena_resume

    def create(self) -> int:
        """Return the handle of a new arena, without memory."""
        return self.library.memfit_arena_create()

    def destroy(self, handle: int) -> None:
        """Free the arena's memory, as soon as no tensor lies in it."""
        self.library.memfit_arena_destroy(handle)

    def begin_step(self, handle: int, plan: int | None, *, of_this_thread: bool = False) -> None:
        """Begin a step of the calling thread.

        Args:
            handle: the arena.
            plan: number of the step's plan or places, if it has any.
            of_this_thread: on CUDA, serve no other thread on the step's stream; on a CPU that is always so.

        Raises:
            ArenaUnavailableError: another step runs, or the present allocator cannot be replaced.
        """
        failure = self._begin(handle, _NO_PLAN if plan is None else plan, of_this_thread=of_this_thread)
        if failure:
            raise ArenaUnavailableError(f"this step cannot run in an arena: {_FAILURES[failure]}")

    def _begin(self, handle: int, plan: int, *, of_this_thread: bool) -> int:  # noqa: ARG002
        return self.library.memfit_arena_cpu_begin_step(handle, plan)

    def end_step(self, handle: int) -> tuple[Counts, int]:
        """End the step; return its counts and the number of its requests."""
        names = [field.name for field in fields(Counts)]
        counts = (ctypes.c_int64 * len(names))()
        requests = self._end_step(handle, counts)
        return Counts(**dict(zip(names, counts, strict=True))), requests

    def seen(self, handle: int, requests: int) -> Recording:
        """Return the requests of the last step.

        Args:
            handle: the arena.
            requests: how many there were, as `end_step` returned it.
        """
        sizes, ends = np.empty(requests, np.int64), np.empty(requests, np.int64)
        self.library.memfit_arena_seen(handle, as_pointer(sizes), as_pointer(ends))
        return Recording(sizes_bytes=sizes, ends=ends)

    def set_plan(self, handle: int, number: int, plan: ArenaPlan) -> None:
        """Set the plan with this number.

        Args:
            handle: the arena.
            number: replaces the plan that had it, if there was one.
            plan: sizes and addresses of a step's requests.
        """
        arrays = [plan.recording.sizes_bytes, plan.sizes_bytes, plan.offsets_bytes]
        arrays = [np.ascontiguousarray(array, np.int64) for array in arrays]
        self.library.memfit_arena_set_plan(handle, number, len(arrays[0]), *map(as_pointer, arrays))

    def set_places(self, handle: int, number: int, places: Places) -> None:
        """Set the places with this number.

        Args:
            handle: the arena.
            number: replaces the places or the plan that had it, if there were any.
            places: sizes and addresses, by the instruction at which a request is made.
        """
        arrays = [np.ascontiguousarray(array, np.int64) for array in places.arrays()]
        self.library.memfit_arena_set_places(handle, number, *map(as_pointer, arrays))

    def seen_places(self, handle: int, requests: int) -> Seen:
        """Return the requests of the last step, which had places.

        Args:
            handle: the arena.
            requests: how many there were, as `end_step` returned it.
        """
        arrays = [np.empty(requests, np.int64) for _ in range(5)]
        self.library.memfit_arena_seen_places(handle, *map(as_pointer, arrays))
        begun_at = np.empty(self.library.memfit_arena_begun_at(handle, None), np.int64)
        self.library.memfit_arena_begun_at(handle, as_pointer(begun_at))
        sizes, starts, ends, positions, offsets = arrays
        return Seen(
            sizes_bytes=sizes, starts=starts, ends=ends, positions=positions, offsets=offsets, begun_at=begun_at
        )

    def drop_plan(self, handle: int, plan: int) -> None:
        """Drop the plan or the places with a number.

        Args:
            handle: the arena.
            plan: the number; one that none has changes nothing.
        """
        self.library.memfit_arena_drop_plan(handle, plan)

    def resize(self, handle: int, bytes_: int) -> bool:
        """Replace the arena's memory; return whether there was enough. If not, the arena has none.

        Args:
            handle: the arena; tensors in its memory keep their place there until they are gone.
            bytes_: of the new memory; 0 takes none.
        """
        return not self.library.memfit_arena_resize(handle, bytes_)

    def live_blocks(self, handle: int) -> int:
        """Return the number of tensors in the arena's memory."""
        return self.library.memfit_arena_live_blocks(handle)

    def owns(self, handle: int, address: int) -> bool:
        """Return whether an address lies in the arena's present memory.

        Args:
            handle: the arena.
            address: of any memory, in bytes.
        """
        return bool(self.library.memfit_arena_owns(handle, address))


def as_pointer(array: NDArray[np.int64]) -> ctypes.Array[ctypes.c_int64]:
    """Return a pointer to the array's memory for a call; the array has to live until the call returns."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))  # pyright: ignore[reportReturnType]
