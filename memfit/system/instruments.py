"""Instruments that count the bytes of a device, one for each.

On a CPU it is a wrapper of torch's allocator (`recorder.cpp`), or torch.profiler where it cannot be built; on CUDA the
statistics of the caching allocator, or of the arena that has replaced it (`memory/arena/cuda.py`).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

import torch

from memfit.errors import InvalidDeviceError, MemfitError
from memfit.system.alive import alive_objects
from memfit.system.files import writable_folder
from memfit.system.native import NativeLibrary, NativeLibraryError

CPU_ALIGNMENT_BYTES = 64  # c10/core/alignment.h, gAlignment
_PROFILER_LEVEL = "KINETO_LOG_LEVEL"
LIBRARY = NativeLibrary("recorder", Path(__file__).with_name("recorder.cpp"), linked=("-lc10",))
_INSTALL_FAILURES = {
    1: "the CPU allocator in place has no raw deleter, so it cannot be wrapped",
    2: "a CPU allocator of higher priority is in place and stays",
}
MAKE_ROOM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


@dataclass(slots=True)
class Usage:
    """The figures of one record, complete at the end of its `with` block.

    Attributes:
        source: name of the instrument.
        start_bytes: live at the start of the record, as `allocated_bytes` counts them.
        end_bytes: `start_bytes`, and what the record's own thread holds more at the end.
        peak_bytes: the most live bytes in between, above `start_bytes`.
        reserved_bytes: the most bytes that CUDA's allocator had taken from the device, in total; None on a CPU.
    """

    source: str
    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    reserved_bytes: int | None = None

    @property
    def taken_bytes(self) -> int:
        """The most bytes taken from the device, above those live at the start: the peak, and on CUDA also the unused
        parts of the allocator's blocks.
        """
        held_bytes = 0 if self.reserved_bytes is None else self.reserved_bytes - self.start_bytes
        return max(self.peak_bytes, held_bytes)

    @property
    def most_live_bytes(self) -> int:
        """The most bytes that were live on the device, as `allocated_bytes` counts them."""
        return self.start_bytes + self.peak_bytes

    @property
    def most_taken_bytes(self) -> int:
        """The most bytes that were taken from the device: these, and on CUDA also what its allocator held unused."""
        return self.start_bytes + self.taken_bytes


class Instrument(ABC):
    """Counts the bytes of a device; `source` is its name in a record's Usage."""

    source: str

    @abstractmethod
    def open(self, usage: Usage) -> int:
        """Begin a record, and return its token."""

    @abstractmethod
    def close(self, usage: Usage, token: int) -> None:
        """End a record, and complete its usage.

        Args:
            usage: that `open` was given; gets its `end_bytes`, and the peaks that it does not have yet.
            token: as `open` returned it; not valid any more afterwards.
        """

    @abstractmethod
    def live_bytes(self) -> int:
        """Return the bytes that are live now."""

    def knows(self, pointer: int) -> bool:  # noqa: ARG002
        """Return whether the live bytes hold the memory that begins at an address."""
        return True

    def is_quick(self) -> bool:
        """Return whether a record can be opened now, and costs microseconds."""
        return True

    def held_bytes(self) -> int:
        """Return the bytes that the allocator holds, unused ones included; 0 for torch's allocator on a CPU."""
        return 0

    def empty_cache(self) -> None:  # noqa: B027 - an allocator may hold none
        """Return memory that the allocator holds unused; torch's allocator on a CPU holds none."""


class CpuAllocator(Instrument):
    """The allocator of recorder.cpp; a token is the index of one of its counters."""

    source = "cpu allocator"

    def __init__(self, library: ctypes.PyDLL) -> None:
        self.library = library
        self._open_window = library.memfit_recorder_open
        self._close_window = library.memfit_recorder_close
        self._live_bytes = library.memfit_recorder_live_bytes
        self._counts = library.memfit_recorder_counts

    def open(self, usage: Usage) -> int:
        live = ctypes.c_int64()
        window: int = self._open_window(ctypes.byref(live))
        if window == -1:
            gc.collect()  # records that nobody can end end with their objects
            window = self._open_window(ctypes.byref(live))
        if window == -1:
            raise MemfitError("64 records are open on the CPU, the most there can be; leave one first")
        if window == -2:
            raise MemfitError("another CPU allocator was installed over memfit's recorder; install it before memfit")
        usage.start_bytes = live.value
        return window

    def close(self, usage: Usage, token: int) -> None:
        peak = ctypes.c_int64()
        usage.end_bytes = usage.start_bytes + self._close_window(token, ctypes.byref(peak))
        usage.peak_bytes = peak.value

    def live_bytes(self) -> int:
        return self._live_bytes()

    def knows(self, pointer: int) -> bool:
        return bool(self.library.memfit_recorder_knows(pointer))

    def is_quick(self) -> bool:
        """Return whether no other allocator stands in front of this one."""
        return bool(self._counts())


@dataclass(slots=True)
class Segmented(Instrument):
    """An instrument with a single peak counter that all open records share: each start or end of a record cuts it."""

    source: str
    opened: dict[int, Usage] = field(default_factory=dict[int, Usage])
    next_token: int = 0

    @abstractmethod
    def cut(self) -> tuple[int, int, int | None]:
        """End the running segment, and return (bytes live now, peak bytes in it, most bytes reserved in it or None)."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a segment."""

    def open(self, usage: Usage) -> int:
        usage.start_bytes = self._cut_all()
        self.next_token += 1
        self.opened[self.next_token] = usage
        self.begin()
        return self.next_token

    def close(self, usage: Usage, token: int) -> None:
        usage.end_bytes = self._cut_all()
        del self.opened[token]
        if self.opened:
            self.begin()

    def _cut_all(self) -> int:
        live, peak, reserved = self.cut()
        for usage in self.opened.values():
            usage.peak_bytes = max(usage.peak_bytes, peak - usage.start_bytes)
            if reserved is not None:
                usage.reserved_bytes = max(usage.reserved_bytes or 0, reserved)
        return live


@dataclass(slots=True)
class CudaStatistics(Segmented):
    """The statistics of torch's caching allocator."""

    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    begins: bool = False

    def begin(self) -> None:
        self.begins = True
        try:
            torch.cuda.reset_peak_memory_stats(self.device)
        finally:
            self.begins = False

    def note(self) -> None:
        """Note the peaks in open records: somebody is about to set them back."""
        if not self.begins:  # else they are noted
            self._cut_all()

    def cut(self) -> tuple[int, int, int | None]:
        allocated, reserved = self._read("allocated_bytes", "reserved_bytes")
        return allocated["current"], allocated["peak"], reserved["peak"]

    def so_far(self) -> tuple[int, int]:
        """Return the bytes that are live now, and the most that torch's statistics have seen."""
        (allocated,) = self._read("allocated_bytes")
        return allocated["current"], allocated["peak"]

    def held_bytes(self) -> int:
        return self._read("reserved_bytes")[0]["current"]

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def live_bytes(self) -> int:
        return self._read("allocated_bytes")[0]["current"]

    def _read(self, *names: str) -> list[dict[str, int]]:
        """Return counters, in a tenth of the time of `torch.cuda.memory_allocated`, which flattens and sorts all."""
        counters = torch.cuda.memory_stats_as_nested_dict(self.device)
        return [counters[name]["all"] if counters else {"current": 0, "peak": 0} for name in names]


@dataclass(slots=True)
class Profiler(Segmented):
    """torch.profiler in place of the wrapper: milliseconds a record, this thread alone, nothing between records."""

    profiler: torch.profiler.profile | None = None
    live: int = 0

    def begin(self) -> None:
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        with _quietly():
            self.profiler.start()

    def cut(self) -> tuple[int, int, int | None]:
        peak = self.live
        if self.profiler is not None:
            self.profiler.stop()
            for change_bytes in _memory_events(self.profiler):
                self.live += change_bytes
                peak = max(peak, self.live)
            self.profiler = None
        return self.live, peak, None

    def is_quick(self) -> bool:
        return False

    def live_bytes(self) -> int:
        raise MemfitError(
            f"the bytes live on the CPU are not known: {self.source}; install g++, or name a compiler in CXX (on a GPU "
            "none is needed); memfit.fit needs none"
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Let torch's profiler, which reads this when it is first started, write no line for each start and stop."""
    if _PROFILER_LEVEL in os.environ:
        yield
        return
    os.environ[_PROFILER_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_PROFILER_LEVEL]


def _memory_events(profiler: torch.profiler.profile) -> list[int]:
    """Return bytes allocated on the CPU (freed: negative), in order of time. They are public only in a trace file."""
    with tempfile.TemporaryDirectory(dir=writable_folder()) as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    changes = [int(event["args"]["Bytes"]) for event in sorted(memory, key=lambda event: event["ts"])]
    return [_aligned(size) if size > 0 else -_aligned(-size) for size in changes]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // CPU_ALIGNMENT_BYTES) * CPU_ALIGNMENT_BYTES


instruments: dict[torch.device, Instrument] = {}  # an allocator is installed once in a process, and never removed
older_reducers: WeakSet[torch.nn.parallel.DistributedDataParallel] = WeakSet()  # than the recorder of a CPU


def instrument_of(device: torch.device) -> Instrument:
    """Return the instrument of a device.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand, or one whose bytes torch does not count.
    """
    found = instruments.get(device)
    if found is not None:
        return found
    if device.type == "cpu":
        instruments[device] = instruments.get(torch.device("cpu")) or _cpu_instrument()
        return instruments[device]
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise InvalidDeviceError(
            f"memory of device '{device}' cannot be recorded: expected cpu, or a CUDA device that is here"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    exact = torch.device("cuda", index)
    # "cuda" without an index follows the current device, so only the exact name is remembered
    if exact not in instruments and not _is_counted(exact):
        raise InvalidDeviceError(
            f"memory of device '{exact}' cannot be recorded: torch counts none of the bytes that its allocator gives. "
            "Unset PYTORCH_NO_CUDA_MEMORY_CACHING, or leave torch's caching allocator on and in its place"
        )
    return instruments.setdefault(exact, CudaStatistics(source="torch.cuda.max_memory_allocated", device=exact))


def _is_counted(device: torch.device) -> bool:
    """Return whether torch's statistics show what its allocator gives: they do not if it caches nothing."""
    pointer = torch.cuda.caching_allocator_alloc(1, device)
    try:
        return torch.cuda.memory_allocated(device) > 0
    except RuntimeError:  # an allocator of somebody else has no statistics
        return False
    finally:
        torch.cuda.caching_allocator_delete(pointer)


def note_cuda_peaks() -> None:
    """Note the peaks of all CUDA devices in open records."""
    for instrument in tuple(instruments.values()):
        if isinstance(instrument, CudaStatistics):
            instrument.note()


def _cpu_instrument() -> Instrument:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        kind = torch.nn.parallel.DistributedDataParallel
        older_reducers.update(each for each in alive_objects() if issubclass(type(each), kind))  # isinstance runs code
    try:
        return CpuAllocator(load_library())
    except NativeLibraryError as error:
        return Profiler(source=f"torch.profiler, because the CPU recorder is not there: {error}")


def load_library() -> ctypes.PyDLL:
    """Return the recorder, built if the cache lacks it, and installed as torch's CPU allocator.

    Raises:
        NativeLibraryError: no C++ compiler, it failed, or the allocator in place cannot be wrapped.
    """
    library = LIBRARY.load()
    pointer = ctypes.POINTER(ctypes.c_int64)
    library.memfit_recorder_live_bytes.restype = ctypes.c_int64
    library.memfit_recorder_knows.argtypes = [ctypes.c_void_p]
    library.memfit_recorder_open.argtypes = [pointer]
    library.memfit_recorder_close.argtypes = [ctypes.c_int, pointer]
    library.memfit_recorder_close.restype = ctypes.c_int64
    library.memfit_recorder_limit.argtypes = [ctypes.c_int64, MAKE_ROOM]
    library.memfit_recorder_limit.restype = None
    library.memfit_recorder_refuse.argtypes = [ctypes.c_char_p]
    library.memfit_recorder_refuse.restype = None
    failure = library.memfit_recorder_install()
    if failure:
        raise NativeLibraryError(_INSTALL_FAILURES[failure])
    return library
