"""Planner `none`: keep everything to its last use. The unplanned step, and the reference for the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memfit.plan import Problem, Result
from memfit.planners.emit import emit
from memfit.planners.order import original_order
from memfit.planners.program import build_program
from memfit.planners.result import make_result
from memfit.planners.windows import evaluate, keep_everything, simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEverything:
    """Compute every op once, in the original order, and drop each storage right after its last use.

    The budget changes nothing but the status: infeasible where the peak exceeds it. Pins of False are honoured.

    Source: Chen 2016, section 3 (liveness); mxnet 1.0, "Optimizing Memory Consumption".
    """

    name: ClassVar[str] = "none"
    source: ClassVar[str] = "Chen et al. 2016, section 3: liveness"

    def plan(self, problem: Problem) -> Result:
        """Return the schedule that keeps everything, with status infeasible where it does not fit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        started_seconds = problem.clock()
        program = build_program(problem, original_order(problem.graph))
        evaluation = evaluate(program, simulated(program, keep_everything(program)))
        schedule = emit(program, evaluation.sequence)
        return make_result(problem, schedule, planner=self.name, started_seconds=started_seconds)
