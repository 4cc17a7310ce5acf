"""Runs traces on torch's own CUDA allocator, in a process of its own; needs a CUDA build of torch and nothing else.

Reads one JSON from standard input, writes one to standard output. Started by `cuda_allocator.py`, which preloads the
GPU that is not there (`cuda_build.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from typing import Any

import torch

ALLOCATE, FREE, USE, FINISH, EMPTY = range(5)
STREAMS = 4
ROOM_BYTES, LARGE_BYTES = 64 << 30, 2 << 20


class Device:
    """torch's allocator over the fake device: events go in, three counters come out."""

    def __init__(self) -> None:
        self._fake = ctypes.CDLL(os.environ["FAKE_GPU"])
        self._capacity = ctypes.c_uint64.in_dll(self._fake, "fake_capacity_bytes")
        self._streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
        self._tensors: dict[int, torch.Tensor] = {}

    def replay(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Run a trace on an empty cache; return the counters after each event, and which requests were refused."""
        self._capacity.value = trace["capacity_bytes"]
        if trace["allowed_bytes"] is not None:
            fraction = trace["allowed_bytes"] / trace["capacity_bytes"]
            torch.cuda.set_per_process_memory_fraction(fraction)  # pyright: ignore
        rows: list[tuple[int, int, int]] = []
        refused: list[int] = []
        for position, (kind, block, size_bytes, stream) in enumerate(trace["events"]):
            if not self._happen(kind, block, size_bytes, stream):
                refused.append(position)
            rows.append(_counters())
        self._clear()
        if _counters() != (0, 0, 0) or ctypes.c_uint64.in_dll(self._fake, "fake_held_on").value != 0:
            raise RuntimeError(f"{_counters()} bytes and segments are left after a trace")
        return {"rows": rows, "refused": refused}

    def _clear(self) -> None:
        """Give all back, ranges of addresses too in which no page could be mapped: they depend on the capacity."""
        self._tensors.clear()
        torch.cuda.empty_cache()
        self._capacity.value = ROOM_BYTES
        for stream in range(STREAMS):
            for size_bytes in (1, LARGE_BYTES):
                self._happen(ALLOCATE, 0, size_bytes, stream)
                self._tensors.clear()
        torch.cuda.empty_cache()

    def _happen(self, kind: int, block: int, size_bytes: int, stream: int) -> bool:
        if kind == ALLOCATE:
            try:
                with torch.cuda.stream(self._streams[stream]):
                    self._tensors[block] = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return False
        elif kind == FREE:
            self._tensors.pop(block, None)
        elif kind == USE and block in self._tensors:
            self._tensors[block].record_stream(self._streams[stream])
        elif kind == FINISH:
            self._fake.fake_finish(ctypes.c_void_p(self._streams[stream].cuda_stream))
        elif kind == EMPTY:
            torch.cuda.empty_cache()
        return True


def _counters() -> tuple[int, int, int]:
    statistics: Any = torch._C._cuda_memoryStats(0)  # pyright: ignore
    names = ("allocated_bytes", "reserved_bytes", "segment")
    return tuple(statistics[name]["all"]["current"] for name in names)  # pyright: ignore


def main() -> None:
    """Run all traces of the input."""
    job = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        torch.cuda.init()
        device = Device()
        results = [device.replay(trace) for trace in job["traces"]]
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    json.dump({"torch": torch.__version__, "settings": settings, "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
