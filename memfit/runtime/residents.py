"""Where a step's tensors are when it runs: parameters and buffers in the model, inputs in the batch, and so on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.binding import Origin, Resident

Fetch = Callable[[Sequence[Any]], Any]


def make_fetchers(model: torch.nn.Module, residents: Sequence[Resident], takes: Sequence[int]) -> list[Fetch]:
    """Return, for each storage a program takes, the function that finds its tensor, given the batch's leaves.

    Parameters and buffers are looked up by name at every step: load_state_dict, `.to` and user code may replace them.
    """
    first: dict[int, Resident] = {}
    for resident in residents:
        first.setdefault(resident.value.storage, resident)
    return [_fetcher(model, first[storage]) for storage in takes]


def _fetcher(model: torch.nn.Module, resident: Resident) -> Fetch:
    if resident.origin is Origin.CONSTANT:
        constant = resident.constant
        return lambda _leaves: constant
    if resident.origin is Origin.INPUT:
        number = int(resident.key)
        return lambda leaves: at_offset_zero(leaves[number])
    module_name, _, name = str(resident.key).rpartition(".")
    module = model.get_submodule(module_name)
    table = module._buffers if resident.origin is Origin.BUFFER else module._parameters
    if resident.origin is Origin.GRADIENT:
        return lambda _leaves: table[name].grad  # pyright: ignore[reportOptionalMemberAccess]
    assert resident.origin in (Origin.PARAMETER, Origin.BUFFER), resident
    return lambda _leaves: table[name]


def at_offset_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or the same memory as a tensor that starts at the beginning of its storage.

    A batch is captured as if it had a storage of its own; one cut out of a larger tensor starts somewhere in it.
    """
    if tensor.storage_offset() == 0:
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start:]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())
