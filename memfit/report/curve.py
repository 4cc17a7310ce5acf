"""The trade-off curve as a report takes it: points that the caller has planned, and their checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memfit.errors import InvalidOptionError
from memfit.plan import Plan, Result, Status


class CurvePoint(NamedTuple):
    """The result of a planner at one budget.

        >>> CurvePoint(6 << 30, 0.115, Status.FEASIBLE).budget_bytes
        6442450944

    Attributes:
        budget_bytes: the budget.
        overhead: predicted, of the plan; None where the planner found none.
        status: of the result.
        bound_overhead: proved: no plan within this budget has less. 0 where nothing is proved.
    """

    budget_bytes: int
    overhead: float | None
    status: Status
    bound_overhead: float = 0.0

    @staticmethod
    def of(budget_bytes: int, result: Result) -> CurvePoint:
        """Return the point of a planner's result at this budget.

        Args:
            budget_bytes: the budget of the result.
            result: a planner's answer.
        """
        overhead = result.plan.overhead if result.plan else None
        return CurvePoint(budget_bytes, overhead, result.status, result.bounds.overhead)


Curve = Iterable[CurvePoint | tuple[int, float | None, str]]
"""Points (budget in bytes, predicted overhead or None, status); a `CurvePoint` may carry a bound too."""


def curve_points(curve: Curve) -> Sequence[CurvePoint]:
    """Return the points in order of budget; plain tuples are converted to `CurvePoint`.

    Raises:
        InvalidOptionError: a point has no positive budget, an overhead that is not a number, or an unknown status.
    """
    points = [_point(number, CurvePoint(*entry)) for number, entry in enumerate(curve)]  # pyright: ignore[reportArgumentType]
    return sorted(points, key=lambda point: point.budget_bytes)


def with_plan(points: Sequence[CurvePoint], plan: Plan) -> Sequence[CurvePoint]:
    """Return the points with the plan's own, and with the plan in place of slower ones that it fits as well.

    Args:
        points: of the trade-off curve, in order of budget; nothing is added where there are none.
        plan: for the same graph and device.
    """
    own = CurvePoint(plan.budget_bytes, plan.overhead, plan.status, plan.bounds.overhead)
    if not points or plan.predicted.peak_bytes > plan.budget_bytes:
        return points
    others = [
        point._replace(overhead=plan.overhead, status=Status.FEASIBLE)
        if point.budget_bytes > plan.budget_bytes and (point.overhead is None or point.overhead > plan.overhead)
        else point
        for point in points
        if point.budget_bytes != plan.budget_bytes
    ]
    return sorted([own, *others], key=lambda point: point.budget_bytes)


def _point(number: int, point: CurvePoint) -> CurvePoint:
    if point.budget_bytes <= 0:
        raise InvalidOptionError(
            f"point {number} of the curve has a budget of {point.budget_bytes} bytes, expected 1 or more"
        )
    if point.overhead is not None and not math.isfinite(point.overhead):
        raise InvalidOptionError(
            f"point {number} of the curve has the overhead {point.overhead}, expected a number, or None for no plan"
        )
    if point.status not in list(Status):
        raise InvalidOptionError(
            f"point {number} of the curve has the status {point.status!r}, expected one of {', '.join(Status)}"
        )
    return point._replace(status=Status(point.status))
