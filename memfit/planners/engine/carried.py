"""Schedules carried over from one graph to another of the same structure: the same step on a batch of another size."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.errors import InvalidScheduleError
from memfit.plan import Prediction, Problem, Result
from memfit.planners.engine.bounds.bounds import Proofs
from memfit.planners.engine.bounds.minimum_cuts import NO_BOUND
from memfit.planners.engine.results import Ending, make_result, predict, unplanned_schedule
from memfit.schedule import Schedule
from memfit.simulate.in_place import apart, in_place

CARRIED = "carried over"
"""The planner of a plan whose schedule was made for a graph of other sizes."""


def carry_over(problem: Problem, schedules: Iterable[Schedule], started_seconds: float) -> Result:
    """Return the schedule that keeps everything if it fits a problem, or else the fastest of some schedules that fits.

    What is recomputed, dropped and offloaded stays as it is; in-place reuses are found anew. The result's plan is
    checked and simulated on the problem's graph. Its only bound is the bytes of the residents. Without a plan the
    result is timed out.

    Args:
        problem: what to plan.
        schedules: legal on graphs of the same structure as the problem's; others are left out.
        started_seconds: the problem's clock when planning began.
    """
    unplanned = unplanned_schedule(problem)
    predicted = predict(problem, unplanned)
    best = unplanned if problem.fits(predicted) else None
    least_bytes, least_seconds = predicted.peak_bytes, predicted.seconds
    for schedule in schedules if best is None else ():
        found = _carried(problem, schedule)
        if found is None:
            continue
        moved, prediction = found
        least_bytes = min(least_bytes, prediction.peak_bytes)
        if problem.fits(prediction) and (best is None or prediction.seconds < least_seconds):
            best, least_seconds = moved, prediction.seconds
    ending = Ending(
        planner=CARRIED,
        started_seconds=started_seconds,
        schedule=best,
        least_found_bytes=least_bytes,
        proofs=Proofs(least_budget=(problem.graph.resident_bytes, ()), recompute=NO_BOUND),
        unplanned=predicted,
    )
    return make_result(problem, ending)


def predicted_seconds(problem: Problem, schedule: Schedule) -> float | None:
    """Return the seconds that a schedule takes when it is carried over, or None where it does not fit.

    Args:
        problem: what to plan.
        schedule: legal on a graph of the same structure.
    """
    found = _carried(problem, schedule)
    return found[1].seconds if found is not None and problem.fits(found[1]) else None


def _carried(problem: Problem, schedule: Schedule) -> tuple[Schedule, Prediction] | None:
    """Return a schedule with in-place reuses of the problem's graph, and its prediction; None if it is not legal."""
    moved = in_place(problem.graph, apart(schedule))
    try:
        return moved, predict(problem, moved)
    except InvalidScheduleError:
        return None
