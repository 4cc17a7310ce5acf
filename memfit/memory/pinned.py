"""Pinned host memory of exactly its size: torch's own allocator would round it up to a power of two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from memfit.errors import HostMemoryError
from memfit.system.budget import format_bytes


def pin(memory: torch.Tensor, device: torch.device, what: str) -> Callable[[], None]:
    """Pin memory of the host, and return what lets the system take its pages again.

    Args:
        memory: bytes, one after the other.
        device: the CUDA device that it is copied to and from.
        what: the memory is for, in errors.

    Raises:
        HostMemoryError: it cannot be pinned.
    """
    address, size_bytes = memory.data_ptr(), memory.nbytes
    if not size_bytes:
        return lambda: None
    with torch.cuda.device(device):  # CUDA pins for the current device, and makes a context there if there is none
        status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if status:
        raise HostMemoryError(
            f"{format_bytes(size_bytes)} of {what} cannot be pinned (CUDA error {status}); lower the host budget, or "
            "raise the limit on locked memory (ulimit -l)"
        )
    return partial(_unpin, address, device)


def _unpin(address: int, device: torch.device) -> None:
    with suppress(RuntimeError), torch.cuda.device(device):  # at the interpreter's exit the driver may be gone
        torch.cuda.cudart().cudaHostUnregister(address)
