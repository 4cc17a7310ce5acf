"""Tensors of the optimizer's state that lie in host memory between steps.

On a GPU that memory is pinned. On a CPU it is a mapped file, from which the system may take pages when memory is short,
and which torch's allocator knows nothing of. Either way what stands in `optimizer.state` is a tensor on the host with
the values of now, so that `state_dict` and whoever reads it find them.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from memfit.errors import HostMemoryError
from memfit.memory.place import Place, bytes_of
from memfit.system.budget import format_bytes
from memfit.system.spill_file import on_disk, spill_directory

_addresses: set[int] = set()  # of the tensors on the host that this module has made


def kept_on_host(tensor: torch.Tensor, device: torch.device, directory: Path | None = None) -> torch.Tensor:
    """Return a copy of a tensor in host memory, with its strides.

    Args:
        tensor: dense; on the device, or anywhere else.
        device: that it is copied to and from in each step.
        directory: for the file of a CPU; by default see `spill_directory`.

    Raises:
        HostMemoryError: the host, or the disk, has no room for it.
    """
    size_bytes = tensor.untyped_storage().nbytes()
    memory = _pinned(size_bytes, device) if device.type == "cuda" else _mapped(size_bytes, directory)
    held = Place.of(tensor).on(memory)
    memory.copy_(bytes_of(tensor.detach()))
    address = held.untyped_storage().data_ptr()
    _addresses.add(address)
    weakref.finalize(held, _forget, address, device if device.type == "cuda" else None).atexit = False
    return held


def is_kept_on_host(tensor: torch.Tensor) -> bool:
    """Return whether `kept_on_host` has made a tensor, or the one whose memory it is on."""
    return bool(_addresses) and tensor.device.type == "cpu" and _address(tensor) in _addresses


def any_kept_on_host() -> bool:
    """Return whether there is any such tensor."""
    return bool(_addresses)


@contextmanager
def on_its_device(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Have all of an optimizer's state on the device in this block, as in a step that keeps none on the host.

    Args:
        optimizer: None has no state.
    """
    moved: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
    if optimizer is not None and _addresses:
        for parameter, state in optimizer.state.items():
            for name, held in state.items():
                if isinstance(held, torch.Tensor) and is_kept_on_host(held):
                    moved.append((state, name, held))
                    state[name] = on_device(held, parameter.device)
    try:
        yield
    finally:
        for state, name, held in moved:
            held.copy_(state[name])
            state[name] = held


def on_device(held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on the device, with its strides."""
    whole = torch.empty(held.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    whole.copy_(bytes_of(held.detach()))
    return Place.of(held).on(whole)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
        return 0


def _mapped(size_bytes: int, directory: Path | None) -> torch.Tensor:
    where = spill_directory() if directory is None else on_disk(directory)
    try:
        file, path = tempfile.mkstemp(prefix="memfit-", dir=where)
        try:
            os.posix_fallocate(file, 0, max(1, size_bytes))  # a full disk is an error now, and not in a step
            return torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
        finally:
            os.close(file)
            Path(path).unlink()
    except OSError as error:
        raise HostMemoryError(
            f"{str(where)!r} has no room for {format_bytes(size_bytes)} of the optimizer's state: {error.strerror}; "
            "free some, lower the host budget, or name another directory as host_dir"
        ) from error


def _pinned(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return pinned memory of exactly this size: torch's own allocator would round it up to a power of two."""
    memory = torch.empty(size_bytes, dtype=torch.uint8)
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size_bytes, 0)) if size_bytes else 0
    if status:
        raise HostMemoryError(
            f"{format_bytes(size_bytes)} of the optimizer's state cannot be pinned on the host (CUDA error {status}); "
            "lower the host budget, or raise the limit on locked memory (ulimit -l)"
        )
    return memory


def _forget(address: int, device: torch.device | None) -> None:
    _addresses.discard(address)
    if device is not None:
        with suppress(RuntimeError), torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)
