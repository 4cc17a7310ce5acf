"""Calibration: measured rates of a device at hand: computation by dtype, memory, launch, link to the host."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch

from memfit.cost.environment import bytes_beside, environment, find_device, hardware_name
from memfit.cost.gpu_timing import synchronize
from memfit.cost.link import EXACT, Amounts, link_rates, with_link
from memfit.device import Device
from memfit.errors import HostMemoryError
from memfit.system.budget import Card
from memfit.system.cache import environment_path, keep, read_kept
from memfit.system.recorder import CPU_ALIGNMENT_BYTES, CUDA_ALIGNMENT_BYTES

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SATURATED_SECONDS = 0.02  # a product of this length runs at the rate of long ones
_COPY_SHARE = 8  # a copy takes at most this part of the free memory: one eighth
_LEAST_RUNS, _MOST_RUNS, _ENOUGH_SECONDS = 3, 50, 0.1
# Caches hold these copies, whose rate is up to twice the memory's.
_SMALL = {
    "cpu": Amounts(largest_product=512, copy_bytes=4 << 20),
    "cuda": Amounts(largest_product=1024, copy_bytes=16 << 20),
}

_log = logging.getLogger("memfit")


def calibrate(
    device: torch.device | str,
    directory: Path | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    amounts: Amounts = EXACT,
) -> Device:
    """Measure the rates of `device` and keep them on disk for `local_device`.

        profile = calibrate("cuda")
        profile.memory_bytes_per_second, profile.to_host_bytes_per_second

    Compute rates are those of square matrix products by dtype. The memory rate is that of a copy (bytes read plus bytes
    written), and `launch_seconds` is the time of the smallest op. For the link see `memfit.cost.link`: a GPU's is the
    one to pinned memory, a CPU's the one to a disk. Calibration takes a few seconds.

    Args:
        device: a CPU or CUDA device.
        directory: on the disk that a CPU offloads to; by default the system's temporary one.
        clock: gives seconds.
        amounts: how much is run to measure.

    Raises:
        InvalidDeviceError: there is no such device.
        HostMemoryError: the given directory cannot be used.
        InvalidOptionError: a directory is given, and the device is no CPU.
    """
    device = find_device(device)
    link, to = _link(device, directory, amounts), f", the link to the disk of {directory}" if directory else ""
    measured = msgspec.structs.replace(
        Probe(device=device, clock=clock, amounts=amounts).rates(),
        source=f"measured by `memfit calibrate` with torch {torch.__version__}{to}",
        **link,
    )
    keep(measured, environment_path("devices", environment(device)), "calibrated rates")
    return measured


def _link(device: torch.device, directory: Path | None, amounts: Amounts) -> dict[str, float]:
    """Return the rates of a device's link, measured now; none if the default directory is on no disk."""
    try:
        return msgspec.structs.asdict(link_rates(device, directory, again=True, amounts=amounts))
    except HostMemoryError as error:
        if directory is not None:
            raise
        _log.warning("the link to the host is not measured: %s", error)
        return {}


@cache
def rates_for_rooflines(device: torch.device) -> Device:
    """Return the calibrated profile of a device, or rates measured now, in 8 MiB of a CPU or 32 of a GPU, not kept.

    Rooflines are needed within a step whose memory is full, and give the seconds of a few ops only.

    Args:
        device: a CPU or CUDA device.

    Raises:
        InvalidDeviceError: there is no such device.
    """
    known = local_device(device)
    if known.memory_bytes_per_second is not None:
        return known
    return Probe(device=device, amounts=_SMALL[device.type]).rates()


def local_device(device: torch.device | str) -> Device:
    """Return the profile that predictions for `device` use: the calibrated one, or without calibration only sizes.

        >>> local_device("cpu").alignment_bytes
        64

    Raises:
        InvalidDeviceError: there is no such device.
    """
    device = find_device(device)
    path = environment_path("devices", environment(device))
    warning = "the calibrated rates are not used: %s; run `memfit calibrate` again"
    return read_kept(path, Device, warning) or _bare_device(device)


def memory_bytes(device: torch.device | str) -> int:
    """Return the size of a device's memory; of a CPU that of the machine.

        >>> memory_bytes("cpu") > 0
        True

    Args:
        device: a CPU or CUDA device.

    Raises:
        InvalidDeviceError: there is no such device.
    """
    device = find_device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def card_of(device: torch.device | str | None = None) -> Card:
    """Return the memory of a device, with what is taken of it beside torch's allocator.

    Args:
        device: None stands for the current CUDA device if there is one, else for the CPU.

    Raises:
        InvalidDeviceError: there is no such device.
    """
    presumed = "cuda" if torch.cuda.device_count() else "cpu"
    found = find_device(presumed if device is None else device)
    return Card(memory_bytes(found), bytes_beside(found))


def linked_device(device: torch.device | str, host_budget_bytes: int, directory: Path | None = None) -> Device:
    """Return the profile that predictions for `device` use, with its link if storages may be offloaded.

    Args:
        device: a CPU or CUDA device.
        host_budget_bytes: 0 if nothing is offloaded; the link is then not looked at.
        directory: on the disk that a CPU offloads to; None stands for the system's temporary one.

    Raises:
        HostMemoryError: the directory cannot be used.
    """
    profile = local_device(device)
    return with_link(profile, find_device(device), directory) if host_budget_bytes else profile


def _bare_device(device: torch.device) -> Device:
    """Return the sizes of a device, without rates."""
    is_cuda = device.type == "cuda"
    return Device(
        name=hardware_name(device),
        alignment_bytes=CUDA_ALIGNMENT_BYTES if is_cuda else CPU_ALIGNMENT_BYTES,
        memory_bytes=memory_bytes(device),
        host_memory_bytes=memory_bytes(torch.device("cpu")) if is_cuda else None,
        source="sizes as the system gives them; no rates (run `memfit calibrate`)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measures rates by running a few operations.

    Attributes:
        device: a CPU or CUDA device.
        clock: gives seconds.
        amounts: how much is run.
    """

    device: torch.device
    clock: Callable[[], float] = time.perf_counter
    amounts: Amounts = EXACT

    def rates(self) -> Device:
        """Return the device's sizes with its rates, without its link."""
        with torch.no_grad():
            flops = {str(dtype).removeprefix("torch."): self.flops_per_second(dtype) for dtype in _DTYPES}
            if self.device.type == "cuda":
                flops["tfloat32"] = self.tf32_flops_per_second()
            return msgspec.structs.replace(
                _bare_device(self.device),
                flops_per_second=flops,
                memory_bytes_per_second=self.memory_bytes_per_second(),
                launch_seconds=self.launch_seconds(),
                source=f"measured with torch {torch.__version__}",
            )

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """Return the best rate over products of growing size, until one has taken long enough, twice.

        Once is not enough: it may only have been slowed down by other processes.
        """
        best, size, long_ones = 0.0, self.amounts.smallest_product, 0
        while True:
            left = torch.rand(size, size, device=self.device).to(dtype)
            seconds = self._seconds(lambda left=left: torch.mm(left, left))
            best = max(best, 2 * size**3 / seconds)
            if seconds >= _SATURATED_SECONDS:
                long_ones += 1
            elif size < self.amounts.largest_product:
                size *= 2
            else:
                return best
            if long_ones == 2:
                return best

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

    def launch_seconds(self) -> float:
        one, count = torch.ones(1, device=self.device), self.amounts.launches

        def launches() -> None:
            for _ in range(count):
                torch.add(one, one)

        return self._seconds(launches) / count

    def _copy_bytes(self) -> int:
        if self.device.type != "cuda":
            return self.amounts.copy_bytes
        return min(self.amounts.copy_bytes, torch.cuda.mem_get_info(self.device)[0] // _COPY_SHARE)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the shortest of several runs: other processes can only slow a run down."""
        run()
        seconds: list[float] = []
        while len(seconds) < _LEAST_RUNS or (len(seconds) < _MOST_RUNS and sum(seconds) < _ENOUGH_SECONDS):
            synchronize(self.device)
            started = self.clock()
            run()
            synchronize(self.device)
            seconds.append(self.clock() - started)
        return min(seconds)
