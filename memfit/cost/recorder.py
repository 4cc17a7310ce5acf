"""Recorder: how many bytes torch allocates on a device while something runs.

On CPU it wraps torch's CPU allocator (`recorder.cpp`), in place from the first record to the end of the process. It
counts the bytes that were asked for, in all threads, kernels' scratch memory included. On CUDA it reads the caching
allocator's own counters, or the arena's where that has replaced it (`runtime/arena_cuda.py`). Where the wrapper cannot
be built, torch.profiler's memory events take its place, and `Usage.source` says so.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memfit.errors import InvalidDeviceError, MemfitError
from memfit.native import NativeLibrary, NativeLibraryError

_LIBRARY = NativeLibrary("recorder", Path(__file__).with_name("recorder.cpp"), linked=("-lc10",))
_INSTALL_FAILURES = {
    1: "the CPU allocator in place has no raw deleter, so it cannot be wrapped",
    2: "a CPU allocator of higher priority is in place and stays",
}


@dataclass(slots=True)
class Usage:
    """What one record saw; complete when its `with` block has been left.

    `start_bytes` and `end_bytes` were live at the two ends, as `allocated_bytes` counts them; `peak_bytes` is the most
    in between, above `start_bytes`. `reserved_bytes` is the most that the allocator on CUDA held of the device, in
    all (None elsewhere). `source` names the instrument.
    """

    source: str
    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    reserved_bytes: int | None = None

    @property
    def taken_bytes(self) -> int:
        """What the device had to give, above what was live at the start: the peak, and what the allocator on CUDA
        held beside it, in blocks that nothing fitted into.
        """
        held_bytes = 0 if self.reserved_bytes is None else self.reserved_bytes - self.start_bytes
        return max(self.peak_bytes, held_bytes)


def record(device: torch.device | str) -> AbstractContextManager[Usage]:
    """Record the bytes that torch allocates on `device` inside the block.

        >>> import torch
        >>> from memfit.cost.recorder import record
        >>> with record("cpu") as usage:
        ...     roots = torch.empty(1000).sqrt()
        >>> usage.peak_bytes, usage.end_bytes - usage.start_bytes
        (8000, 4000)

    Records may be nested, and may overlap in threads; each sees what the whole process allocates. One costs a few
    microseconds.

    Args:
        device: a CPU or CUDA device; "cuda" is the current one.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device that is here.
        InvalidFileError: the recorder has to be built and the cache cannot be written.
    """
    return _Record(_instrument_of(torch.device(device)))


def allocated_bytes(device: torch.device | str) -> int:
    """Return the bytes now live on `device`; on CPU, those allocated since the recorder was installed.

    >>> import torch
    >>> from memfit.cost.recorder import allocated_bytes
    >>> before = allocated_bytes("cpu")
    >>> kept = torch.empty(1000)
    >>> allocated_bytes("cpu") - before
    4000

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device that is here.
        MemfitError: the wrapper could not be built; torch.profiler sees only what happens inside a record.
    """
    return _instrument_of(torch.device(device)).live_bytes()


def empty_cache(device: torch.device) -> None:
    """Give back what the allocator on CUDA holds and nobody uses, so that what it holds next is what it needs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Record:
    """The `with` block of `record`; a class, because contextlib's generators take longer than the record itself."""

    __slots__ = ("_instrument", "_token", "_usage")

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument

    def __enter__(self) -> Usage:
        self._usage = Usage(source=self._instrument.source)
        self._token = self._instrument.open(self._usage)
        return self._usage

    def __exit__(self, *raised: object) -> None:
        self._instrument.close(self._usage, self._token)


class Instrument(ABC):
    """What counts the bytes of a device; `source` is its name in a record's Usage."""

    source: str

    @abstractmethod
    def open(self, usage: Usage) -> int:
        """Begin a record; return its number here."""

    @abstractmethod
    def close(self, usage: Usage, token: int) -> None:
        """End the record with this number: complete its usage."""

    @abstractmethod
    def live_bytes(self) -> int:
        """Return the bytes that are live now."""


def count_with(instrument: Instrument, device: torch.device) -> None:
    """Let records of `device`, a CPU or a CUDA device with its index, be counted by `instrument` from now on."""
    _instruments[device] = instrument


class _Wrapper(Instrument):
    """The allocator of recorder.cpp; a token is the number of a window there."""

    source = "cpu allocator"

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._open_window = library.memfit_recorder_open
        self._close_window = library.memfit_recorder_close
        self._live_bytes = library.memfit_recorder_live_bytes

    def open(self, usage: Usage) -> int:
        live = ctypes.c_int64()
        window: int = self._open_window(ctypes.byref(live))
        if window == -1:
            raise MemfitError("64 records are open on the CPU, the most there can be; leave one first")
        if window == -2:
            raise MemfitError("another CPU allocator was installed over memfit's recorder; install it before memfit")
        usage.start_bytes = live.value
        return window

    def close(self, usage: Usage, token: int) -> None:
        peak = ctypes.c_int64()
        usage.end_bytes = self._close_window(token, ctypes.byref(peak))
        usage.peak_bytes = peak.value - usage.start_bytes

    def live_bytes(self) -> int:
        return self._live_bytes()


@dataclass(slots=True)
class Segmented(Instrument):
    """An instrument with a single peak counter: open records share it, cut wherever one of them opens or closes."""

    source: str
    opened: dict[int, Usage] = field(default_factory=dict[int, Usage])
    next_token: int = 0

    @abstractmethod
    def cut(self) -> tuple[int, int, int | None]:
        """End the running segment: (bytes live now, most bytes live in it, most bytes reserved in it)."""

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

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)


@dataclass(slots=True)
class _Profiler(Segmented):
    """torch.profiler in place of the wrapper: milliseconds a record, this thread only, and blind between records."""

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

    def live_bytes(self) -> int:
        raise MemfitError(f"the bytes live on the CPU are not known: {self.source}")


def _memory_events(profiler: torch.profiler.profile) -> list[int]:
    """Bytes allocated (freed: negative) on the CPU, in order of time; a trace file is the only public door."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    return [int(event["args"]["Bytes"]) for event in sorted(memory, key=lambda event: event["ts"])]


_instruments: dict[torch.device, Instrument] = {}  # an allocator is the process's: installed once, never taken out


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
    """Build the recorder where the cache lacks it, install it as torch's CPU allocator, and return it.

    Raises:
        NativeLibraryError: no C++ compiler, it failed, or the allocator in place cannot be wrapped.
        InvalidFileError: the cache cannot be written.
    """
    library = _LIBRARY.load()
    pointer = ctypes.POINTER(ctypes.c_int64)
    library.memfit_recorder_live_bytes.restype = ctypes.c_int64
    library.memfit_recorder_open.argtypes = [pointer]
    library.memfit_recorder_close.argtypes = [ctypes.c_int, pointer]
    library.memfit_recorder_close.restype = ctypes.c_int64
    failure = library.memfit_recorder_install()
    if failure:
        raise NativeLibraryError(_INSTALL_FAILURES[failure])
    return library
