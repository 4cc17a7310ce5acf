"""What more memory would buy: a schedule for a larger budget that is at hand, and the bound that none can beat."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.checker import check
from memfit.plan import Plan, Problem
from memfit.planners.bounds import least_seconds_again
from memfit.report.edits import Edits
from memfit.report.figures import CurvePoint
from memfit.report.prices import Price

_GIB = 1 << 30
_BOUND_SECONDS = 2.0
_MOST_BOUND_OPS = 20_000  # a single cut of a longer step takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """What `step_bytes` more than the plan's budget would buy; overheads are predicted, against the unplanned step.

    Attributes:
        overhead: the plan's own.
        kept: storages that the plan computes again or offloads, and that the larger budget has room to keep.
        kept_overhead: the overhead of the plan with those kept: a schedule that fits, simulated exactly.
        found: the best plan that a search found for the larger budget, where one was made.
        bound_overhead: no plan within the larger budget is faster: a proved lower bound; None where none was asked.
    """

    step_bytes: int
    budget_bytes: int
    overhead: float
    kept: tuple[int, ...]
    kept_overhead: float
    found: CurvePoint | None
    bound_overhead: float | None


def next_step_bytes(plan: Plan) -> int:
    """Return how much more memory is worth asking about: 1 GiB, or a tenth of the budget where that is too much.

    It is too much where the step would fit unplanned.
    """
    if plan.budget_bytes + _GIB <= plan.unplanned.peak_bytes:
        return _GIB
    return max(1, plan.budget_bytes // 10)


def more_memory(
    plan: Plan, edits: Edits | None, prices: Mapping[int, Price], points: Sequence[CurvePoint] = ()
) -> MoreMemory | None:
    """Return what the next GiB would buy; None where the step has no times, or is as fast as the unplanned one.

    Args:
        plan: whose budget it is.
        edits, prices: of the plan; None and nothing where it cannot be edited.
        points: of a trade-off curve; the one at the larger budget is what was found.
    """
    if plan.unplanned.seconds <= 0 or plan.predicted.seconds <= plan.unplanned.seconds * (1 + 1e-9):
        return None
    step_bytes = next_step_bytes(plan)
    budget_bytes = plan.budget_bytes + step_bytes
    kept, seconds = _keep_more(plan, edits, prices, budget_bytes) if edits else ((), plan.predicted.seconds)
    return MoreMemory(
        step_bytes=step_bytes,
        budget_bytes=budget_bytes,
        overhead=plan.overhead,
        kept=kept,
        kept_overhead=seconds / plan.unplanned.seconds - 1.0,
        found=next((point for point in points if point.budget_bytes == budget_bytes), None),
        bound_overhead=_bound_overhead(plan, budget_bytes),
    )


def _keep_more(
    plan: Plan, edits: Edits, prices: Mapping[int, Price], budget_bytes: int
) -> tuple[tuple[int, ...], float]:
    """Return what is worth keeping within the larger budget, dearest a byte first, and the seconds of the step then."""
    outside_bytes = 0 if plan.graph.boundaries else plan.bytes_outside
    saved = {storage: -price.keep.seconds for storage, price in prices.items() if price.keep}
    sizes = plan.graph.storages
    worth = [storage for storage, seconds in saved.items() if seconds > 0]
    worth.sort(key=lambda storage: (-saved[storage] / max(1, sizes[storage].bytes), storage))
    kept: list[int] = []
    best = edits.base
    for storage in worth:
        tried = edits.attempt(kept=[*kept, storage])
        if tried is None or tried.timeline.peak_bytes + outside_bytes > budget_bytes or tried.seconds > best.seconds:
            continue
        kept.append(storage)
        best = tried
    check(plan.graph, best.schedule)
    return tuple(kept), best.seconds


def _bound_overhead(plan: Plan, budget_bytes: int) -> float | None:
    if plan.host_budget_bytes > 0 or len(plan.graph.ops) > _MOST_BOUND_OPS:
        return None
    problem = Problem(graph=plan.graph, device=plan.device, budget_bytes=budget_bytes, bytes_outside=plan.bytes_outside)
    again = least_seconds_again(problem, until_seconds=time.monotonic() + _BOUND_SECONDS)
    return again.seconds / plan.unplanned.seconds
