"""The counters of the GPU that is not there (`_fake_gpu.cpp`), where this process runs over it."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from functools import cache

import torch

MOST_DEVICES = 8
MADE = ("mallocs", "streams", "registers", "contexts")  # what a device has for itself
LAUNCH_SECONDS = 1e-6


def let_launches_take_equal_times() -> None:
    """Let every op's launch cost the same: measured ones, which are the host's, change the plans from run to run.

    The times of kernels need nothing: all are equal over the GPU that is not there.
    """
    import memfit.cost.single_op as single_op
    import memfit.eager_mode.needs as needs

    calls = itertools.count()

    def now(_device: torch.device) -> float:
        return next(calls) * LAUNCH_SECONDS

    def dispatch_seconds(run: Callable[[], object], _device: torch.device) -> float:
        run()
        return LAUNCH_SECONDS

    single_op.dispatch_seconds = dispatch_seconds
    needs.now = now


class Driver:
    """What the driver has given, by device."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    @staticmethod
    @cache
    def of_this_process() -> Driver:
        """Return the driver that this process runs over.

        Raises:
            KeyError: it is a real one.
        """
        return Driver(os.environ["FAKE_GPU"])

    @staticmethod
    def is_there() -> bool:
        """Whether this process runs over it."""
        return "FAKE_GPU" in os.environ

    def become(self, *, devices: int = 1, segments_fail: bool = False) -> None:
        """Change what there is, before torch has seen it."""
        ctypes.c_int.in_dll(self._library, "fake_devices").value = devices
        ctypes.c_int.in_dll(self._library, "fake_vmm_fails").value = segments_fail

    def forget_peaks(self) -> None:
        """Let the peaks begin at what is held."""
        self._counter("peak")[:] = list(self._counter("held"))

    def peak_bytes(self, device: int) -> int:
        """Return the most bytes that were held at once since the peaks were forgotten."""
        return self._counter("peak")[device]

    def made_beside(self, device: int) -> list[str]:
        """Say what was made on other devices; nothing where nothing was."""
        counts = {name: list(self._counter(name)) for name in MADE}
        return [
            f"{count} {name} on device {other}"
            for name, by_device in counts.items()
            for other, count in enumerate(by_device)
            if count and other != device
        ]

    def _counter(self, name: str) -> ctypes.Array[ctypes.c_uint64]:
        return (ctypes.c_uint64 * MOST_DEVICES).in_dll(self._library, f"fake_{name}_on")
