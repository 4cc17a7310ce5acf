"""Recorder: how many bytes torch allocates on a device while something runs.

On CPU it wraps torch's CPU allocator (`recorder.cpp`) from the first record to the end of the process. It counts the
bytes, in multiples of 64, of the thread that opens the record, and of the threads that kernels use, scratch memory
included; what other threads of Python allocate meanwhile is theirs. On CUDA it reads the counters of the caching
allocator, or of the arena that has replaced it (`memory/arena/cuda.py`). If the wrapper cannot be built,
torch.profiler's memory events are used, and `Usage.source` says so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from memfit.system.instruments import CPU_ALIGNMENT_BYTES, CudaStatistics, Instrument, Usage, instrument_of, instruments

CUDA_ALIGNMENT_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize

_PAGE_BYTES = {"cuda": 2 << 20}  # c10/cuda/CUDACachingAllocator.cpp, kSmallBuffer and the step of larger segments


def record(device: torch.device | str) -> Record:
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
    return Record(instrument_of(torch.device(device)))


def watch(device: torch.device) -> AbstractContextManager[Usage]:
    """Record as `record` does, without setting torch's own statistics back, which a training loop may print.

    On CUDA the peak of a block that stays below an earlier peak of the process is not seen, and reads as 0 bytes.

    Args:
        device: a CPU or CUDA device.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
    """
    instrument = instrument_of(device)
    return _CudaWatch(instrument) if isinstance(instrument, CudaStatistics) else Record(instrument)


def records_at_once(device: torch.device) -> bool:
    """Return whether `device` can be recorded now in microseconds: each step can then be watched.

    >>> records_at_once(torch.device("meta"))
    False
    """
    instrument = instruments.get(device)
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
    return instrument_of(torch.device(device)).live_bytes()


def is_counted(pointer: int, device: torch.device) -> bool:
    """Return whether `allocated_bytes` counts the memory at an address: on a CPU, what came after the recorder.

    Args:
        pointer: to the beginning of a storage.
        device: that it is on.

    Raises:
        InvalidDeviceError, MemfitError: as `allocated_bytes`.
    """
    return instrument_of(device).knows(pointer)


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


def empty_cache(device: torch.device) -> None:
    """Return memory that the allocator of `device` holds unused; from then on it takes only what is needed.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
    """
    instrument_of(device).empty_cache()


def held_bytes(device: torch.device) -> int:
    """Return the bytes that the allocator of `device` has taken from it, unused ones included; 0 if it keeps none.

    Raises:
        InvalidDeviceError: neither a CPU nor a CUDA device at hand.
    """
    return instrument_of(device).held_bytes()


def page_bytes(device: torch.device) -> int:
    """Return the step in which the allocator of a device takes memory from it; 0 if it takes each storage by itself."""
    return _PAGE_BYTES.get(device.type, 0)


class Record:
    """The `with` block of `record`. A class, because a generator of contextlib takes longer than the record.

    A record that nobody can end any more ends with its object: there are only so many at a time.

        >>> opened = record("cpu").begin()
        >>> roots = torch.empty(1024).sqrt()
        >>> opened.close().peak_bytes
        8192
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

    def begin(self) -> Record:
        """Begin, and return the record itself, for code that no `with` block can hold."""
        self.__enter__()
        return self

    def close(self) -> Usage:
        """End what `begin` has begun, and return its figures."""
        self.__exit__()
        return self._usage

    def __del__(self) -> None:
        try:  # noqa: SIM105 - at the interpreter's exit a driver may be gone, and this file's names
            self.__exit__()
        except RuntimeError:
            pass


class _CudaWatch:
    """The `with` block of `watch` on CUDA."""

    __slots__ = ("_instrument", "_peak_bytes", "_usage")

    def __init__(self, instrument: CudaStatistics) -> None:
        self._instrument = instrument

    def __enter__(self) -> Usage:
        live_bytes, self._peak_bytes = self._instrument.so_far()
        self._usage = Usage(source=self._instrument.source, start_bytes=live_bytes)
        return self._usage

    def __exit__(self, *raised: object) -> None:
        usage = self._usage
        usage.end_bytes, peak_bytes = self._instrument.so_far()
        usage.peak_bytes = peak_bytes - usage.start_bytes if peak_bytes > self._peak_bytes else 0
