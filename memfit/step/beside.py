"""What is on the device beside a step's residents: results that the caller keeps, and the batch that the step was made
with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.memory.footprint import footprint
from memfit.planning import Settings
from memfit.system.budget import parse_budget
from memfit.system.recorder import taken_bytes
from memfit.torch_private.tensors import StorageWeakRef, tensors_in

_NUMBER_BYTES = 8  # no more are counted of a result: it is a number, on the least memory that there is


class Beside:
    """Follows the results of a step for as long as their memory is in use.

    A loss may be large: that of `nn.MSELoss` has the memory of the whole difference, and is there while the next step
    runs in a loop that assigns it to the same name.

    A budget in percent is a share of what an eager step takes, beside which they would be, too: they count with the
    rest of their bytes.

    Args:
        device: of the step.
        settings: with the budget as it was given.
    """

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self._device, self._share = device, None if settings.is_in_bytes else settings.budget
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self._counts = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing inside the block, whose steps are memfit's own: their results and batches are copies."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def note(self, returned: Any) -> None:
        """Note what a call returned."""
        for tensor in tensors_in(returned):
            if tensor.device.type == self._device.type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                size = storage.nbytes()
                if size > _NUMBER_BYTES:
                    self._kept[storage.data_ptr()] = StorageWeakRef(storage), taken_bytes(size, self._device)

    def bytes_beside(self, batch: Any, example: Any) -> int:
        """Return the bytes that are held beside a call, and count.

        Args:
            batch: of the call, which is counted by itself.
            example: the batch that the step holds.
        """
        self._kept = {at: kept for at, kept in self._kept.items() if not kept[0].expired()}
        held = {at: size for at, (_, size) in self._kept.items()}
        if example is not batch:
            held |= footprint(tensors_in(example), self._device)
        if not held or not self._counts:
            return 0
        own = footprint(tensors_in(batch), self._device)
        total_bytes = sum(size for at, size in held.items() if at not in own)
        if self._share is None or not total_bytes:
            return total_bytes
        return max(0, total_bytes - parse_budget(self._share, total_bytes))
