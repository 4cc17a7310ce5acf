"""The trade-off curve: plans for a list of budgets, monotone by construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from memfit.plan import Plan, Problem, Result, Status
from memfit.planners.auto import Auto
from memfit.planners.offload import Offload
from memfit.planners.search import Search
from memfit.planners.windows import Windows


def plan_frontier(
    problem: Problem, budgets: Sequence[int], *, planner: Search | Offload | Auto | None = None
) -> list[Result]:
    """Return a result for each budget, in the order given; a larger budget never gives a slower plan.

    Each budget is planned with the problem's time limit, from the smallest to the largest, and starts from what was
    found for the one before (its plan, or the least peak where it had none). A plan for a smaller budget is also one
    for a larger: where it is faster, it takes the other's place.

    Args:
        problem: what to plan; its own budget does not count.
        budgets: bytes, in any order.
        planner: the search to use, with its options.
    """
    chosen = planner or Auto()
    results: dict[int, Result] = {}
    fastest: Plan | None = None
    warm: Sequence[Windows] = ()
    for budget in sorted(set(budgets)):
        searched = chosen.plan_from(replace(problem, budget_bytes=budget), warm)
        result, warm = searched.result, (searched.windows,)
        if fastest is not None and (result.plan is None or fastest.predicted.seconds < result.plan.predicted.seconds):
            result = _reused(fastest, result, budget)
        if result.plan is not None:
            fastest = result.plan
        results[budget] = result
    return [results[budget] for budget in budgets]


def _reused(plan: Plan, result: Result, budget_bytes: int) -> Result:
    """The plan of a smaller budget as the answer for this one, with this one's bounds."""
    return Result(
        status=Status.FEASIBLE,
        plan=msgspec.structs.replace(plan, budget_bytes=budget_bytes, status=Status.FEASIBLE, bounds=result.bounds),
        bounds=result.bounds,
        stats=result.stats,
    )
