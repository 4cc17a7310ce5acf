"""The device at hand: its name, its free memory, and the environment that measurements on it depend on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from memfit.errors import InvalidDeviceError

_MEMINFO = Path("/proc/meminfo")  # man 5 proc_meminfo; MemAvailable is in KiB
_CGROUP = Path("/sys/fs/cgroup")  # of the process, as a container sees it: cgroup v2, Memory Interface Files


def find_device(name: str | torch.device) -> torch.device:
    """Return the CPU or CUDA device called `name`, with its index where it is CUDA.

    >>> find_device("cpu")
    device(type='cpu')

    Raises:
        InvalidDeviceError: not a device's name, or there is no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidDeviceError(f"{str(name)!r} is not a device; expected cpu, cuda, cuda:0 and the like") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise InvalidDeviceError(
            "device 'meta' is not one with memory to plan; call memfit once the tensors have some, "
            "after model.to_empty(device=...) and the weights: fully_shard and compile() may come before"
        )
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        raise InvalidDeviceError(f"device '{device}' is not here: torch sees the CPU and {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def hardware_name(device: torch.device) -> str:
    """Return the maker's model name of a processor or a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # not Linux, or no file can be opened
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a device; None if the system does not say.

    On a CPU this is the memory that Linux counts as available, or the rest of the process's cgroup limit if that is
    less. On CUDA it is the driver's free memory, and the unused memory that torch's allocator holds.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_system_bytes()


def free_system_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of main memory that this process can still take; None where `meminfo` does not exist.

    Args:
        meminfo: the kernel's file, in which MemAvailable is in KiB.
        cgroup: folder of the process's cgroup, whose limit counts if it has one.
    """
    if not meminfo.exists():
        return None
    free = _field_bytes(meminfo, "MemAvailable:") * 1024
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return free
    reclaimable = _field_bytes(cgroup / "memory.stat", "inactive_file")  # cached files that the kernel drops first
    used = int((cgroup / "memory.current").read_text()) - reclaimable
    return max(0, min(free, int(limit.read_text()) - used))


def bytes_beside(device: torch.device) -> int:
    """Return the bytes of a GPU that are taken, and not by torch's allocator in this process; 0 for a CPU.

    These are CUDA's context with the kernels loaded so far, what libraries and communicators have allocated by
    themselves, and other processes.
    """
    if device.type != "cuda":
        return 0
    free, whole = torch.cuda.mem_get_info(device)
    return max(0, whole - free - torch.cuda.memory_reserved(device))


def _field_bytes(path: Path, name: str) -> int:
    """Return the number that stands beside `name` in a file of /proc or of a cgroup."""
    fields = (line.split() for line in path.read_text().splitlines())
    return next(int(field[1]) for field in fields if field[0] == name)


def environment(device: torch.device) -> dict[str, str]:
    """Return the settings under which the same op on the same inputs takes the same time and workspace."""
    cudnn = torch.backends.cudnn
    return {
        "hardware": hardware_name(device),
        "device": device.type,
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "matmul_precision": torch.backends.cuda.matmul.fp32_precision,
        "convolution_precision": cudnn.conv.fp32_precision,
        "cudnn": f"{cudnn.enabled} {cudnn.benchmark} {cudnn.deterministic}",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        **({"timing": "cold caches, dispatch apart"} if device.type == "cuda" else {}),
    }
