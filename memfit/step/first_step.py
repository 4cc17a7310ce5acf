"""The proof that a planned step keeps its budget: what its first steps take of the device, and corrections of its plan.

A plan is proved when two steps in a row were within the budget. Until then a step counts with all that torch's
allocator takes from the device, blocks without a storage included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memfit.system.budget import format_bytes
from memfit.system.recorder import empty_cache, held_bytes, record, watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A plan of which a step took more than the budget.

    Attributes:
        budget_bytes: the budget.
        predicted_bytes: that the plan was predicted to take.
        measured_bytes: the bytes that the step took, with all that was there before it.
        aim_bytes: the budget of the plan that replaces it, as `Contract` gives it. None where no plan fits that, so
            that the plan stays.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    aim_bytes: int | None

    def __str__(self) -> str:
        took = (
            f"a step took {format_bytes(self.measured_bytes)}, more than its budget of "
            f"{format_bytes(self.budget_bytes)} and the {format_bytes(self.predicted_bytes)} that were predicted"
        )
        if self.aim_bytes is None:
            return f"{took}; a plan that allows for it was not found"
        return f"{took}; later steps run a plan made for {format_bytes(self.aim_bytes)}"


class Meter:
    """Measures the steps of a planned step on its device.

    Args:
        device: a CPU or CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left_bytes: int | None = None  # what the allocator held after the last step that was to prove a plan

    def run(self, run: Callable[[], torch.Tensor], bytes_before: int, *, is_proved: bool) -> tuple[torch.Tensor, int]:
        """Run a step; return its loss and the bytes that it took of the device.

        While its plan has to be proved, the bytes that CUDA's caching allocator holds count, with the blocks that no
        storage fitted into. Those that other code has left unused since the last such step are returned before; those
        of the last step stay, because a second step may take more than a first, whose blocks it splits. Of a later step
        only what was allocated counts. With an arena the whole arena counts.

        Args:
            run: runs the step.
            bytes_before: the bytes of the step that are on the device already: residents, an arena, and workspaces that
                libraries keep.
            is_proved: whether the plan was seen to keep its budget.
        """
        if is_proved:
            with watch(self._device) as usage:
                loss = run()
            return loss, bytes_before + usage.peak_bytes
        if self._left_bytes is None or held_bytes(self._device) > self._left_bytes:
            empty_cache(self._device)
        if self._left_bytes is None:
            gc.collect()
        with _older_garbage_stays(), record(self._device) as usage:
            loss = run()
        self._left_bytes = held_bytes(self._device)
        return loss, bytes_before + usage.taken_bytes


@contextmanager
def _older_garbage_stays() -> Iterator[None]:
    """Let Python free no garbage inside the block that is older: it would hide as many bytes of the peak.

    A full collection before it would do so, too, but takes a quarter of a second where much is imported.
    """
    gc.collect(1)
    *young, oldest = gc.get_threshold()
    gc.set_threshold(*young, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*young, oldest)
