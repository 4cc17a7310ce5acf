"""The rates of a device that is here: computation by dtype, memory, launch, and the link to the host."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from memfit.cost.disk import environment_path, keep
from memfit.cost.environment import environment, find_device, hardware_name
from memfit.device import Device
from memfit.errors import InvalidFileError
from memfit.files import decode, read_bytes

CPU_ALIGNMENT_BYTES = 64  # c10/core/alignment.h, gAlignment
CUDA_ALIGNMENT_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SMALLEST_PRODUCT, _LARGEST_PRODUCT = 256, 8192  # rows of the square matrices that are multiplied
_SATURATED_SECONDS = 0.02  # a product that takes this long shows the rate of long ones
_COPY_BYTES = 256 << 20  # well beyond every cache
_COPY_SHARE = 8  # of the device's free memory, at most one part in so many is copied
_LEAST_RUNS, _MOST_RUNS, _ENOUGH_SECONDS = 3, 50, 0.2
_LAUNCHES = 200

_log = logging.getLogger(__name__)


def calibrate(device: torch.device | str, *, clock: Callable[[], float] = time.perf_counter) -> Device:
    """Measure the rates of `device` and keep them on disk for `local_device`.

        profile = calibrate("cuda")
        profile.memory_bytes_per_second, profile.to_host_bytes_per_second

    Compute rates are those of square matrix products by dtype, the memory rate that of a copy (bytes read plus bytes
    written), the link's that of copies from and to pinned memory, and `launch_seconds` what the smallest op takes. A
    CPU has no link: its host is itself. Takes a few seconds.

    Raises:
        InvalidDeviceError: no such device here.
    """
    device = find_device(device)
    probe = _Probe(device=device, clock=clock)
    bare = _bare_device(device)
    with torch.no_grad():
        to_host, to_device = probe.link_rates() if device.type == "cuda" else (None, None)
        flops = {str(dtype).removeprefix("torch."): probe.flops_per_second(dtype) for dtype in _DTYPES}
        if device.type == "cuda":
            flops["tfloat32"] = probe.tf32_flops_per_second()
        measured = msgspec.structs.replace(
            bare,
            flops_per_second=flops,
            memory_bytes_per_second=probe.memory_bytes_per_second(),
            to_host_bytes_per_second=to_host,
            to_device_bytes_per_second=to_device,
            launch_seconds=probe.launch_seconds(),
            source=f"measured by `memfit calibrate` with torch {torch.__version__}",
        )
    keep(measured, environment_path("devices", environment(device)), "calibrated rates")
    return measured


def local_device(device: torch.device | str) -> Device:
    """Return the profile that predictions for `device` use: the calibrated one where there is one, else bare sizes.

        >>> local_device("cpu").alignment_bytes
        64

    Raises:
        InvalidDeviceError: no such device here.
    """
    device = find_device(device)
    path = environment_path("devices", environment(device))
    if path.exists():
        try:
            return decode(read_bytes(path), Device, path)
        except InvalidFileError as error:
            _log.warning("the calibrated rates are not used: %s; run `memfit calibrate` again", error)
    return _bare_device(device)


def _bare_device(device: torch.device) -> Device:
    """What is known of a device without measuring it."""
    is_cuda = device.type == "cuda"
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        name=hardware_name(device),
        alignment_bytes=CUDA_ALIGNMENT_BYTES if is_cuda else CPU_ALIGNMENT_BYTES,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_cuda else host_bytes,
        host_memory_bytes=host_bytes if is_cuda else None,
        source="sizes as the system gives them; no rates (run `memfit calibrate`)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Runs the few operations that rates are read from."""

    device: torch.device
    clock: Callable[[], float]

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """Multiply ever larger matrices until two sizes have taken long enough; the best rate seen counts.

        Two, because a first one may be long only for what else the machine is doing.
        """
        best, size, long_ones = 0.0, _SMALLEST_PRODUCT, 0
        while True:
            left = torch.rand(size, size, device=self.device).to(dtype)
            seconds = self._seconds(lambda left=left: torch.mm(left, left))
            best = max(best, 2 * size**3 / seconds)
            long_ones += seconds >= _SATURATED_SECONDS
            if long_ones == 2 or size >= _LARGEST_PRODUCT:
                return best
            size *= 2

    def tf32_flops_per_second(self) -> float:
        settings = torch.backends.cuda.matmul
        before = settings.fp32_precision
        settings.fp32_precision = "tf32"
        try:
            return self.flops_per_second(torch.float32)
        finally:
            settings.fp32_precision = before

    def memory_bytes_per_second(self) -> float:
        size = self._copy_bytes()
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.ones_like(source)
        return 2 * size / self._seconds(lambda: target.copy_(source))

    def link_rates(self) -> tuple[float, float]:
        """Return (to host, to device) in bytes per second."""
        size = self._copy_bytes()
        here = torch.ones(size, dtype=torch.uint8, device=self.device)
        host = torch.ones(size, dtype=torch.uint8).pin_memory()
        to_host = size / self._seconds(lambda: host.copy_(here, non_blocking=True))
        return to_host, size / self._seconds(lambda: here.copy_(host, non_blocking=True))

    def launch_seconds(self) -> float:
        one = torch.ones(1, device=self.device)

        def launches() -> None:
            for _ in range(_LAUNCHES):
                torch.add(one, one)

        return self._seconds(launches) / _LAUNCHES

    def _copy_bytes(self) -> int:
        if self.device.type != "cuda":
            return _COPY_BYTES
        return min(_COPY_BYTES, torch.cuda.mem_get_info(self.device)[0] // _COPY_SHARE)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the shortest of several runs: a rate is what the device can do, whatever else it was doing."""
        run()
        seconds: list[float] = []
        while len(seconds) < _LEAST_RUNS or (len(seconds) < _MOST_RUNS and sum(seconds) < _ENOUGH_SECONDS):
            self._synchronize()
            started = self.clock()
            run()
            self._synchronize()
            seconds.append(self.clock() - started)
        return min(seconds)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
