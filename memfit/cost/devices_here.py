"""What is here: the devices as torch and the system tell them, for `memfit doctor`; nothing is measured."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch

from memfit.cost.calibration import local_device, memory_bytes
from memfit.cost.environment import environment, free_bytes, hardware_name
from memfit.cost.observations import Observations
from memfit.torch_private.cuda import allocator_settings_text


def devices_here() -> list[dict[str, Any]]:
    """Return a plain description of the CPU and of each CUDA device: sizes in bytes, rates as they were calibrated."""
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [_described(torch.device(name)) for name in names]


def _described(device: torch.device) -> dict[str, Any]:
    profile = local_device(device)
    found: dict[str, Any] = {
        "device": str(device),
        "hardware": hardware_name(device),
        "memory_bytes": memory_bytes(device),
        "free_bytes": free_bytes(device),
        "is_calibrated": bool(profile.flops_per_second),
        "link": {
            name: value
            for name, value in msgspec.to_builtins(profile).items()
            if name.startswith(("to_host", "to_device")) and value
        },
        "measured_ops": len(Observations.load(environment(device)).by_key),
    }
    if device.type == "cpu":
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return found | {"threads": torch.get_num_threads(), "processors": os.cpu_count(), "load": busy}
    return found | {
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": torch.cuda.get_allocator_backend(),
        "allocator_settings": allocator_settings_text(),
    }
