"""What a report can be given beside the plan: points of the trade-off curve, and what was measured on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memfit.errors import InvalidOptionError
from memfit.plan import Plan, Result, Status
from memfit.report.words import change_text

STATUS_MEANING = {
    Status.OPTIMAL: "optimal: proved that no plan within this budget is faster",
    Status.FEASIBLE: "feasible: the best plan found in the time given; a longer time limit may find a faster one",
    Status.TIMED_OUT: "timed out: the best plan found until then",
    Status.INFEASIBLE: "infeasible: no plan within this budget was found",
}
_LEAST_SAID = 0.0005  # a bound below this is no news
_OPTIMAL_IN_ORDER = "optimal in its order of operations: proved that no such plan within this budget is faster"


def status_meaning(plan: Plan) -> str:
    """Return in words how planning ended, and for which plans a proof holds."""
    if plan.status is Status.OPTIMAL and not plan.is_optimal_in_every_order:
        return _OPTIMAL_IN_ORDER
    return STATUS_MEANING[plan.status]


def least_overhead(plan: Plan) -> str:
    """Return in words the bounds on the extra time, each with what it holds for; nothing where they say nothing."""
    every, in_order = plan.bounds.overhead, plan.bounds.overhead_in_order or 0.0
    said = [f"{change_text(every)} in any order"] if every >= _LEAST_SAID else []
    if in_order >= max(_LEAST_SAID, every * (1 + 1e-9)):
        said.append(f"{change_text(in_order)} in this plan's order")
    return ", or ".join(said)


class CurvePoint(NamedTuple):
    """What a planner reached at one budget: the predicted overhead, or None where it found no plan.

    >>> CurvePoint(6 << 30, 0.115, Status.FEASIBLE).budget_bytes
    6442450944
    """

    budget_bytes: int
    overhead: float | None
    status: Status

    @staticmethod
    def of(budget_bytes: int, result: Result) -> CurvePoint:
        """Return the point of a planner's answer at this budget."""
        return CurvePoint(budget_bytes, result.plan.overhead if result.plan else None, result.status)


Curve = Iterable[CurvePoint | tuple[int, float | None, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a machine measured: the planned step, and beside it the baseline, which is eager PyTorch.

        >>> measured = Measured(peak_bytes=286 << 20, step_seconds=1.18, machine="2 CPU cores")
        >>> measured.baseline_peak_bytes is None
        True

    Args:
        peak_bytes, step_seconds: the planned step.
        baseline_peak_bytes, baseline_step_seconds: the same step in eager PyTorch; None where it was not run.
        overhead: the median of the ratios of planned to baseline seconds of neighbours in time, minus one; None without
            a baseline.
        bitwise_equal: whether outputs, gradients and buffers were the same bits as the unplanned step's; None where
            that was not compared.
        machine: where this was measured, in words.
        note: what else is to be said of it, as a sentence.
    """

    peak_bytes: int
    step_seconds: float
    baseline_peak_bytes: int | None = None
    baseline_step_seconds: float | None = None
    overhead: float | None = None
    bitwise_equal: bool | None = None
    machine: str = ""
    note: str = ""


def curve_points(curve: Curve) -> Sequence[CurvePoint]:
    """Return the points in order of budget, plain tuples made into `CurvePoint`s.

    Raises:
        InvalidOptionError: a point has no positive budget, an overhead that is not a number, or an unknown status.
    """
    points = [_point(number, *entry) for number, entry in enumerate(curve)]
    return sorted(points, key=lambda point: point.budget_bytes)


def _point(number: int, budget_bytes: int, overhead: float | None, status: str) -> CurvePoint:
    if budget_bytes <= 0:
        raise InvalidOptionError(
            f"point {number} of the curve has a budget of {budget_bytes} bytes, expected 1 or more"
        )
    if overhead is not None and not math.isfinite(overhead):
        raise InvalidOptionError(
            f"point {number} of the curve has the overhead {overhead}, expected a number, or None for no plan"
        )
    if status not in list(Status):
        raise InvalidOptionError(
            f"point {number} of the curve has the status {status!r}, expected one of {', '.join(Status)}"
        )
    return CurvePoint(budget_bytes, overhead, Status(status))
