"""Planner `none`: keep everything to its last use. The unplanned step, and the reference for the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memfit.plan import Problem, Result
from memfit.planners.engine.results import Ending, keeping_schedule, make_result


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEverything:
    """Compute every op once, in the original order, and drop each storage right after its last use.

    The budget changes nothing but the status: infeasible where the peak exceeds it. Pins of False are honoured.

    Source: Chen 2016, section 3 (liveness); mxnet 1.0, "Optimizing Memory Consumption".
    """

    name: ClassVar[str] = "none"
    source: ClassVar[str] = "Chen et al. 2016, section 3: liveness"

    def plan(self, problem: Problem) -> Result:
        """Return the schedule that keeps everything, or no plan if it does not fit the budget.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        started_seconds = problem.clock()
        schedule = keeping_schedule(problem)
        ending = Ending(planner=self.name, started_seconds=started_seconds, schedule=schedule, tried_all=True)
        return make_result(problem, ending)
