"""What planners that try a few plans have in common: take the fastest that fits, and make a Result of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.plan import Problem, Result
from memfit.planners.emit import emit
from memfit.planners.program import Program
from memfit.planners.result import make_result
from memfit.planners.windows import Evaluation


def choose(found: Sequence[Evaluation], budget_bytes: int) -> Evaluation:
    """Return the fastest evaluation that fits, else the one with the least peak."""
    fitting = [evaluation for evaluation in found if evaluation.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda evaluation: (evaluation.seconds, evaluation.peak_bytes))
    return min(found, key=lambda evaluation: (evaluation.peak_bytes, evaluation.seconds))


def answer(
    program: Program,
    found: Sequence[Evaluation],
    *,
    planner: str,
    started_seconds: float,
    stats: Mapping[str, float] | None = None,
) -> Result:
    """Return the Result of a planner that judged `found`."""
    problem: Problem = program.problem
    return make_result(
        problem,
        emit(program, choose(found, problem.budget_bytes).sequence),
        planner=planner,
        started_seconds=started_seconds,
        least_found_bytes=min(evaluation.peak_bytes for evaluation in found),
        stats=stats,
    )
