"""What tensors take of a device, each storage once."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from memfit.system.alive import alive_objects
from memfit.system.recorder import is_counted, taken_bytes
from memfit.torch_private.sharding import local

_WITH_DATA = (torch.Tensor, torch.nn.Parameter)


def footprint(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Return the storages that tensors have on a device, each once: address -> bytes that it takes.

    Of a sharded tensor this rank's part counts. What is no tensor, or is one without a storage, is left out.

    Args:
        tensors: those on other devices do not count.
        device: a CPU or CUDA device.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != device.type:
            continue
        try:
            storage = local(tensor).untyped_storage()
            found[storage.data_ptr()] = taken_bytes(storage.nbytes(), device)
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of torch.func, or what tracing left behind
            continue
    return found


def bytes_from_before(device: torch.device) -> int:
    """Return the bytes of tensors on `device` that `allocated_bytes` does not count: a CPU's from before the recorder.

    Tensors that have a Python object are counted. What only waits for the garbage collector is collected first.

    Args:
        device: a CPU or CUDA device.
    """
    if device.type == "cuda":
        return 0
    gc.collect()
    alive = (thing for thing in alive_objects() if type(thing) in _WITH_DATA)
    return sum(size for pointer, size in footprint(alive, device).items() if not is_counted(pointer, device))
