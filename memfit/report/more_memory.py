"""What more memory buys: read from the points of a trade-off curve that the caller has planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.plan import Plan
from memfit.report.curve import CurvePoint

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """What `step_bytes` more than the plan's budget buy. Overheads are predicted, against the unplanned step.

    Attributes:
        step_bytes: how much more memory.
        budget_bytes: the plan's budget and `step_bytes` together.
        overhead: of the plan itself.
        found_overhead: of the fastest plan of the curve that fits the larger budget; None where no point has one.
        bound_overhead: proved: no plan within the larger budget has less. 0 where nothing is proved.
    """

    step_bytes: int
    budget_bytes: int
    overhead: float
    found_overhead: float | None
    bound_overhead: float


def next_step_bytes(plan: Plan) -> int:
    """Return how much more memory a report asks about: 1 GiB, or a tenth of the budget.

    A tenth is taken where 1 GiB more would hold the unplanned step.
    """
    if plan.budget_bytes + _GIB <= plan.unplanned.peak_bytes:
        return _GIB
    return max(1, plan.budget_bytes // 10)


def more_memory(plan: Plan, points: Sequence[CurvePoint] = ()) -> MoreMemory | None:
    """Return what the next GiB buys; None where ops have no times, or the plan is as fast as the unplanned step.

    A point at or below the larger budget has a plan that fits it. A point at or above it has a bound that holds for it.

    Args:
        plan: gives the budget.
        points: of the trade-off curve, in any order.
    """
    if plan.unplanned.seconds <= 0 or plan.predicted.seconds <= plan.unplanned.seconds * (1 + 1e-9):
        return None
    step_bytes = next_step_bytes(plan)
    budget_bytes = plan.budget_bytes + step_bytes
    found = [
        point.overhead
        for point in points
        if point.overhead is not None and plan.budget_bytes < point.budget_bytes <= budget_bytes
    ]
    return MoreMemory(
        step_bytes=step_bytes,
        budget_bytes=budget_bytes,
        overhead=plan.overhead,
        found_overhead=min(found, default=None),
        bound_overhead=max((p.bound_overhead for p in points if p.budget_bytes >= budget_bytes), default=0.0),
    )
