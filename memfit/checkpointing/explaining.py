"""The reasons of a plan: the largest parts of a step's peak, and the price of other budgets. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.checkpointing.planning import Planned, Planner
from memfit.system.budget import format_bytes

_MORE = (1.1, 1.25, 1.5)  # of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBudget:
    """A plan for another budget.

    Attributes:
        budget_bytes: that it is for.
        seconds: for what is recomputed.
    """

    budget_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What takes the most in a step of one size, and what other budgets would change.

    Attributes:
        numel: elements of the batch.
        planned: the plan.
        larger: plans for larger budgets that compute less again.
        least_bytes: that the leanest plan is predicted to take.
        most_bytes: that a step takes if everything is kept.
    """

    numel: int
    planned: Planned
    larger: tuple[OtherBudget, ...]
    least_bytes: int
    most_bytes: int

    def __str__(self) -> str:
        planned = self.planned
        parts = {
            "before the step": planned.start_bytes,
            "kept by blocks": planned.kept_bytes,
            "inputs of blocks": planned.inputs_bytes,
        }
        parts["gradients, and what that part of the step takes"] = planned.predicted_bytes - sum(parts.values())
        lines = [
            f"{self.numel:,} elements: {format_bytes(planned.predicted_bytes)} predicted, most of it in "
            f"{planned.peak_is_in}:",
            *(f"  {format_bytes(size_bytes):>12}  {name}" for name, size_bytes in parts.items() if size_bytes),
            f"  {planned.seconds * 1e3:.1f} ms are recomputed; no plan of such choices takes fewer than "
            f"{planned.bound_seconds * 1e3:.1f} ms",
        ]
        lines += [
            f"  {format_bytes(other.budget_bytes)}: {other.seconds * 1e3:.1f} ms would be recomputed"
            for other in self.larger
        ]
        least, most = format_bytes(self.least_bytes), format_bytes(self.most_bytes)
        return "\n".join([*lines, f"  the least is {least}; everything is kept from {most} on"])


def explained(planner: Planner, planned: Planned, numel: int, budget_bytes: int) -> Explanation:
    """Return the explanation of a plan.

    Args:
        planner: that made it.
        planned: the plan.
        numel: elements of the batch.
        budget_bytes: that it is for.
    """
    larger: list[OtherBudget] = []
    for times in _MORE:
        other = planner.plan(int(times * budget_bytes), planned.more_bytes)
        if other.seconds < (larger[-1].seconds if larger else planned.seconds):
            larger.append(OtherBudget(budget_bytes=int(times * budget_bytes), seconds=other.seconds))
    return Explanation(
        numel=numel,
        planned=planned,
        larger=tuple(larger),
        least_bytes=planner.least(planned.more_bytes).predicted_bytes,
        most_bytes=planner.everything_kept(planned.more_bytes).predicted_bytes,
    )
