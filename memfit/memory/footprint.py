"""What tensors take of a device, each storage once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memfit.memory.kept_on_host import is_kept_on_host
from memfit.system.recorder import taken_bytes
from memfit.torch_private.sharding import local


def footprint(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Return the storages that tensors have on a device, each once: address -> bytes that it takes.

    Of a sharded tensor this rank's part counts. What is no tensor, or is one without a storage, is left out, and so is
    state that is kept on the host.

    Args:
        tensors: those on other devices do not count.
        device: a CPU or CUDA device.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != device.type:
            continue
        if is_kept_on_host(tensor):
            continue
        try:
            storage = local(tensor).untyped_storage()
            found[storage.data_ptr()] = taken_bytes(storage.nbytes(), device)
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of torch.func, or what tracing left behind
            continue
    return found
