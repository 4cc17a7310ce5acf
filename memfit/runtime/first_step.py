"""What a planned step took of its device, and the correction of its plan where that exceeds the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memfit.plan import Plan
from memfit.system.budget import format_bytes
from memfit.system.recorder import empty_cache, record, watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A plan of which a step took more than the budget.

    Attributes:
        budget_bytes: the budget.
        predicted_bytes: the peak that the plan predicted.
        measured_bytes: the bytes that the step took, with all that was there before it.
        aim_bytes: the budget of the plan that replaces it: `budget_bytes` less the error of the prediction. None where
            no plan fits that, so that the plan stays.
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


def measured_step(
    run: Callable[[], torch.Tensor], device: torch.device, bytes_before: int, *, is_first: bool
) -> tuple[torch.Tensor, int]:
    """Run a step; return its loss and the bytes that it took of `device`.

    On CUDA the bytes that the caching allocator held in a first step count, with the blocks that no storage fitted
    into. Of a later step only what was allocated does, for the blocks may be those of an evaluation in between. With an
    arena the whole arena counts.

    Args:
        run: runs the step.
        device: the device that the step runs on.
        bytes_before: the bytes of the step that are on the device already: residents, and an arena.
        is_first: whether the step is the first of its kind; memory that the allocator holds unused is returned before.
    """
    if is_first:
        empty_cache(device)
    with record(device) if is_first else watch(device) as usage:
        loss = run()
    return loss, bytes_before + (usage.taken_bytes if is_first else usage.peak_bytes)


def needed_correction(plan: Plan, budget_bytes: int, measured_bytes: int) -> Correction | None:
    """Return the correction of a plan of which a step exceeded the budget, or None where it stayed within.

    The measured step may have taken more than the plan predicted because a library chose other workspaces than when its
    ops were measured one by one.

    Args:
        plan: the plan that the step carried out.
        budget_bytes: what the user allows; a plan that was corrected before has a smaller budget of its own.
        measured_bytes: the bytes that the step took.
    """
    if measured_bytes <= budget_bytes:
        return None
    mispredicted_bytes = measured_bytes - plan.predicted.peak_bytes
    return Correction(
        budget_bytes=budget_bytes,
        predicted_bytes=plan.predicted.peak_bytes,
        measured_bytes=measured_bytes,
        aim_bytes=max(1, budget_bytes - mispredicted_bytes),
    )
