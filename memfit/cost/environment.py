"""What a measurement depends on besides the op: the device, the torch, and the switches that change kernels."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from memfit.errors import InvalidDeviceError


def find_device(name: str | torch.device) -> torch.device:
    """Return the CPU or CUDA device called `name`, with its index where it is CUDA.

    >>> find_device("cpu")
    device(type='cpu')

    Raises:
        InvalidDeviceError: not a device's name, or no such device here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidDeviceError(f"{str(name)!r} is not a device; expected cpu, cuda, cuda:0 and the like") from error
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        raise InvalidDeviceError(f"device '{device}' is not here: torch sees the CPU and {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def hardware_name(device: torch.device) -> str:
    """Return the model name of a processor or a GPU, as its maker gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    described = Path("/proc/cpuinfo")
    if described.exists():
        for line in described.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, str]:
    """Return all that makes the same op on the same inputs take another time or another workspace."""
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
    }
