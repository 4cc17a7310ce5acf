"""What is on a device beside a graph's own tensors."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from memfit.system.alive import alive_objects
from memfit.system.recorder import allocated_bytes, is_counted, taken_bytes


def bytes_beside(own: Sequence[torch.Tensor], device: torch.device) -> int:
    """Return the bytes of all tensors on `device` whose storage is none of `own`'s.

    On CUDA the allocator counts them. On a CPU all tensors that have a Python object are counted, which those that
    autograd saved for backward need not have. What only waits for the garbage collector is collected first.

    Args:
        own: tensors that are not counted.
        device: a CPU or CUDA device.
    """
    mine = _storages(own, device)
    if device.type == "cuda":
        gc.collect()
        return max(0, allocated_bytes(device) - sum(mine.values()))
    everything = _storages(_all_tensors(), device)
    return sum(size for pointer, size in everything.items() if pointer not in mine)


def bytes_from_before(device: torch.device) -> int:
    """Return the bytes of tensors on `device` that `allocated_bytes` does not count: a CPU's from before the recorder.

    Args:
        device: a CPU or CUDA device.
    """
    if device.type == "cuda":
        return 0
    return sum(size for pointer, size in _storages(_all_tensors(), device).items() if not is_counted(pointer, device))


def bytes_of(tensors: Sequence[torch.Tensor], device: torch.device) -> int:
    """Return the bytes that the storages of `tensors` take of `device`, each storage once."""
    return sum(_storages(tensors, device).values())


def _all_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [thing for thing in alive_objects() if issubclass(type(thing), torch.Tensor)]


def _storages(tensors: Sequence[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Data pointer -> bytes of the storages on the device, each once; fakes and other dataless tensors have none."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type != device.type or tensor.layout is not torch.strided or type(tensor) not in _WITH_DATA:
            continue
        try:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = taken_bytes(storage.nbytes(), device)
        except RuntimeError:  # a wrapper of torch.func, or what tracing left behind for the garbage collector
            continue
    return found


_WITH_DATA = (torch.Tensor, torch.nn.Parameter)
