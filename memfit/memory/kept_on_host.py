"""Tensors of the optimizer's state that lie in host memory between steps.

On a GPU that memory is pinned. On a CPU it is a mapped file, from which the system may take pages when memory is short,
and which is not memory of torch's allocator. Either way `optimizer.state` holds tensors on the host with the current
values, so that `state_dict` and other readers find them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from memfit.memory.pinned import pin
from memfit.memory.place import Place, bytes_of
from memfit.system.spill_file import file_with_room

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
    size_bytes, what = tensor.untyped_storage().nbytes(), "the optimizer's state"
    if device.type == "cuda":
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        unpin = pin(memory, device, what)
    else:
        unpin = None
        with file_with_room(size_bytes, directory, what) as path:
            memory = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
    held = Place.of(tensor).on(memory)
    memory.copy_(bytes_of(tensor.detach()))
    address = held.untyped_storage().data_ptr()
    _addresses.add(address)
    weakref.finalize(held, _forget, address, unpin).atexit = False
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


def _forget(address: int, unpin: Callable[[], None] | None) -> None:
    _addresses.discard(address)
    if unpin is not None:
        unpin()
