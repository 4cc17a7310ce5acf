"""Recorder: how many bytes torch allocates on a device while something runs.

On CPU it wraps torch's CPU allocator (`recorder.cpp`) from the first record to the end of the process. It counts the
bytes, in multiples of 64, of the thread that opens the record, and of the threads that kernels use, scratch memory
included; what other threads of Python allocate meanwhile is theirs. On CUDA it reads the counters of the caching
allocator, or of the arena that has replaced it (`memory/arena/cuda.py`). If the wrapper cannot be built,
torch.profiler's memory events are used, and `Usage.source` says so.

On a CPU a thread can have a limit, too: before it takes memory that passes the limit, room is made for it, or it is
refused.
"""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memfit.errors import InvalidDeviceError, MemfitError
from memfit.system.native import NativeLibrary, NativeLibraryError

CPU_ALIGNMENT_BYTES = 64  # c10/core/alignment.h, gAlignment
CUDA_ALIGNMENT_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize

LIBRARY = NativeLibrary("recorder", Path(__file__).with_name("recorder.cpp"), linked=("-lc10",))
_PAGE_BYTES = {"cuda": 2 << 20}  # c10/cuda/CUDACachingAllocator.cpp, kSmallBuffer and the step of larger segments
_INSTALL_FAILURES = {
    1: "the CPU allocator in place has no raw deleter, so it cannot be wrapped",
    2: "a CPU allocator of higher priority is in place and stays",
}


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


def record(device: torch.device | str) -> AbstractContextManager[Usage]:
    """Record the bytes that torch allocates on `device` inside the block.

        >>> import torch
        >>> from memfit.system.recorder import record
        >>> with record("cpu") as usage:
        ...     roots = torch.empty(1024).sqrt()
        >>> usage.peak_bytes, usage.end_bytes - usage.start_bytes
        (8192, 4096)

    Records may be nested, and may overlap in threads. On a CPU each counts its own thread, and the threads without
    Python that kernels use; on CUDA the whole process. A record costs a few microseconds.

    Args:
        device: a CPU or CUDA device; "cuda" is the current one.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
    """
    return _Record(_instrument_of(torch.device(device)))


def watch(device: torch.device) -> AbstractContextManager[Usage]:
    """Record as `record` does, without setting torch's own statistics back, which a training loop may print.

    On CUDA the peak of a block that stays below an earlier peak of the process is not seen, and reads as 0 bytes.

    Args:
        device: a CPU or CUDA device.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
    """
    instrument = _instrument_of(device)
    return _CudaWatch(instrument) if isinstance(instrument, _Cuda) else _Record(instrument)


def records_at_once(device: torch.device) -> bool:
    """Return whether `device` can be recorded now in microseconds: each step can then be watched.

    >>> records_at_once(torch.device("meta"))
    False
    """
    instrument = _instruments.get(device)
    return instrument is not None and instrument.is_quick()


def allocated_bytes(device: torch.device | str) -> int:
    """Return the bytes now live on `device`; on CPU, those allocated since the recorder was installed.

    >>> import torch
    >>> from memfit.system.recorder import allocated_bytes
    >>> before = allocated_bytes("cpu")
    >>> kept = torch.empty(1024)
    >>> allocated_bytes("cpu") - before
    4096

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
        MemfitError: the wrapper could not be built; torch.profiler counts only inside a record.
    """
    return _instrument_of(torch.device(device)).live_bytes()


def is_counted(pointer: int, device: torch.device) -> bool:
    """Return whether `allocated_bytes` counts the memory at an address: on a CPU, what came after the recorder.

    Args:
        pointer: to the beginning of a storage.
        device: that it is on.

    Raises:
        InvalidDeviceError, MemfitError: as `allocated_bytes`.
    """
    return _instrument_of(device).knows(pointer)


def taken_bytes(size_bytes: int, device: torch.device) -> int:
    """Return the bytes that a storage of `size_bytes` takes of a device, as a record counts them.

    >>> taken_bytes(40, torch.device("cpu")), taken_bytes(40, torch.device("cuda", 0))
    (64, 512)

    Args:
        size_bytes: of the storage, 0 or more.
        device: rounds it up to a multiple of its alignment.
    """
    alignment_bytes = CUDA_ALIGNMENT_BYTES if device.type == "cuda" else CPU_ALIGNMENT_BYTES
    return -(-size_bytes // alignment_bytes) * alignment_bytes


class CpuLimit:
    """The `with` block in which this thread is asked for room before it takes memory on the CPU that passes a limit.

        >>> from memfit.system.recorder import CpuLimit, allocated_bytes
        >>> asked = []
        >>> with CpuLimit(allocated_bytes("cpu") + 4096, asked.append):
        ...     small, large = torch.empty(512), torch.empty(1024)
        >>> asked
        [4096]

    It may be asked inside of a kernel: the kernel's live buffers may not change. Memory that is taken meanwhile
    is not asked for. Operators are called as outside of any mode or transformation. Threads without Python that kernels
    use are not asked. Of blocks in blocks the innermost counts.

    Args:
        limit_bytes: of all live bytes, as `allocated_bytes` counts them.
        make_room: called with the bytes that are about to be taken. If it returns a text, they are not taken, and
            torch raises `torch.OutOfMemoryError` with it. It raises nothing.

    Raises:
        MemfitError: at the block's entry, the recorder cannot be built.
    """

    __slots__ = ("_before", "_library", "_limit_bytes", "_make_room")

    def __init__(self, limit_bytes: int, make_room: Callable[[int], str | None]) -> None:
        self._limit_bytes, self._make_room = limit_bytes, make_room

    def __enter__(self) -> None:
        instrument = _instrument_of(torch.device("cpu"))
        if not isinstance(instrument, _Wrapper):
            raise MemfitError(f"memory of the CPU cannot be limited: {instrument.source}")
        self._library = instrument.library
        self._before: CpuLimit | None = getattr(_limits, "innermost", None)
        _limits.innermost = self
        self._library.memfit_recorder_limit(self._limit_bytes, _ask)

    def __exit__(self, *raised: object) -> None:
        before = _limits.innermost = self._before
        if before is None:
            self._library.memfit_recorder_limit(0, _MakeRoom())
        else:
            self._library.memfit_recorder_limit(before._limit_bytes, _ask)

    def ask(self, need_bytes: int) -> int:
        """Make room, and return 0; or say why there is none, and return 1."""
        why = self._make_room(need_bytes)
        if why is None:
            return 0
        self._library.memfit_recorder_refuse(why.encode())
        return 1


_limits = threading.local()  # the innermost block of each thread
_MakeRoom = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


@_MakeRoom
def _ask(need_bytes: int) -> int:
    """Make room for memory that a thread is about to take; one function for all limits, which is never freed."""
    innermost: CpuLimit = _limits.innermost
    return innermost.ask(need_bytes)


def empty_cache(device: torch.device) -> None:
    """Return memory that the allocator of `device` holds unused; from then on it takes only what is needed.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
    """
    _instrument_of(device).empty_cache()


def held_bytes(device: torch.device) -> int:
    """Return the bytes that the allocator of `device` has taken from it, unused ones included; 0 if it keeps none.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
    """
    return _instrument_of(device).held_bytes()


def page_bytes(device: torch.device) -> int:
    """Return the step in which the allocator of a device takes memory from it; 0 if it takes each storage by itself."""
    return _PAGE_BYTES.get(device.type, 0)


class _Record:
    """The `with` block of `record`. A class, because a generator of contextlib takes longer than the record.

    A record that nobody can end any more ends with its object: there are only so many at a time.
    """

    __slots__ = ("_instrument", "_token", "_usage")

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument
        self._token: int | None = None

    def __enter__(self) -> Usage:
        self._usage = Usage(source=self._instrument.source)
        self._token = self._instrument.open(self._usage)
        return self._usage

    def __exit__(self, *raised: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._instrument.close(self._usage, token)

    def __del__(self) -> None:
        try:  # noqa: SIM105 - at the interpreter's exit a driver may be gone, and this file's names
            self.__exit__()
        except RuntimeError:
            pass


class _CudaWatch:
    """The `with` block of `watch` on CUDA."""

    __slots__ = ("_instrument", "_peak_bytes", "_usage")

    def __init__(self, instrument: _Cuda) -> None:
        self._instrument = instrument

    def __enter__(self) -> Usage:
        live_bytes, self._peak_bytes = self._instrument.so_far()
        self._usage = Usage(source=self._instrument.source, start_bytes=live_bytes)
        return self._usage

    def __exit__(self, *raised: object) -> None:
        usage = self._usage
        usage.end_bytes, peak_bytes = self._instrument.so_far()
        usage.peak_bytes = peak_bytes - usage.start_bytes if peak_bytes > self._peak_bytes else 0


class Instrument(ABC):
    """Counts the bytes of a device; `source` is its name in a record's Usage."""

    source: str

    @abstractmethod
    def open(self, usage: Usage) -> int:
        """Begin a record, and return its token."""

    @abstractmethod
    def close(self, usage: Usage, token: int) -> None:
        """End the record with this token, and complete its usage."""

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


def count_with(instrument: Instrument, device: torch.device) -> None:
    """Count later records of `device`, a CPU or a CUDA device with its index, by `instrument`.

    Args:
        instrument: counts the bytes of this device.
        device: a CPU, or a CUDA device with its index.
    """
    _instruments[device] = instrument


class _Wrapper(Instrument):
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
class _Cuda(Segmented):
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def cut(self) -> tuple[int, int, int | None]:
        peak = torch.cuda.max_memory_allocated(self.device)
        return self.live_bytes(), peak, torch.cuda.max_memory_reserved(self.device)

    def so_far(self) -> tuple[int, int]:
        """Return the bytes that are live now, and the most that torch's statistics have seen."""
        allocated = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        return allocated["current"], allocated["peak"]

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)


@dataclass(slots=True)
class _Profiler(Segmented):
    """torch.profiler in place of the wrapper: milliseconds a record, this thread alone, nothing between records."""

    profiler: torch.profiler.profile | None = None
    live: int = 0

    def begin(self) -> None:
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
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
        raise MemfitError(f"the bytes live on the CPU are not known: {self.source}")


def _memory_events(profiler: torch.profiler.profile) -> list[int]:
    """Return bytes allocated on the CPU (freed: negative), in order of time. They are public only in a trace file."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    changes = [int(event["args"]["Bytes"]) for event in sorted(memory, key=lambda event: event["ts"])]
    cpu = torch.device("cpu")
    return [taken_bytes(size, cpu) if size > 0 else -taken_bytes(-size, cpu) for size in changes]


_instruments: dict[torch.device, Instrument] = {}  # an allocator is installed once in a process, and never removed


def _instrument_of(device: torch.device) -> Instrument:
    found = _instruments.get(device)
    if found is not None:
        return found
    if device.type == "cpu":
        _instruments[device] = _instruments.get(torch.device("cpu")) or _cpu_instrument()
        return _instruments[device]
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise InvalidDeviceError(
            f"memory of device '{device}' cannot be recorded: expected cpu, or a CUDA device that is here"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    exact = torch.device("cuda", index)
    # "cuda" without an index follows the current device, so only the exact name is remembered
    return _instruments.setdefault(exact, _Cuda(source="torch.cuda.max_memory_allocated", device=exact))


def _cpu_instrument() -> Instrument:
    try:
        return _Wrapper(load_library())
    except NativeLibraryError as error:
        return _Profiler(source=f"torch.profiler, because the CPU recorder is not there: {error}")


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
    library.memfit_recorder_limit.argtypes = [ctypes.c_int64, _MakeRoom]
    library.memfit_recorder_limit.restype = None
    library.memfit_recorder_refuse.argtypes = [ctypes.c_char_p]
    library.memfit_recorder_refuse.restype = None
    failure = library.memfit_recorder_install()
    if failure:
        raise NativeLibraryError(_INSTALL_FAILURES[failure])
    return library
