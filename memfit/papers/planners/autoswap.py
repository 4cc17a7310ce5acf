"""Planner `autoswap`: variables are swapped by priority scores (Zhang et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.papers.options import refuse
from memfit.papers.planners.copies import CopyPlanner
from memfit.papers.planners.gaussian_process import Point, minimize
from memfit.plan import Problem
from memfit.planners.engine.offloading.absences import SCORES, SINGLE_WEIGHTS, Absences
from memfit.planners.engine.offloading.intervals import find_offload_intervals, with_offloads
from memfit.planners.engine.results import keeping_schedule
from memfit.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSwap(CopyPlanner):
    """Swap the variables of the highest priority that are absent across the peak, until the load fits the budget.

    A variable is absent between two accesses. Its duration of absence (DOA) is the time between them less its two
    transfers. AOA is DOA times its bytes. WDOA is the load above the budget, integrated over the absence. SWDOA is
    WDOA, recomputed after each choice. The priority is a weighted sum of the four. Without given weights, Bayesian
    optimization finds them over the simulator. Copies out run in order on one stream, right after the access before;
    copies back as late as they can, backwards from the accesses after, within the budget.

    Where the paper leaves a choice, or its framework differs:
    - Scores are divided by the greatest absolute value among the candidates, and weights are from 0 to 1. The
      optimization begins with each score alone and all four, and then adds points of most expected improvement.
    - Of weights whose plans do not fit, those of the least peak are the best.
    - The load after a choice is counted as if a variable were away from one access to the other.
    - If memory is short, compute waits for a copy out. A variable that cannot be copied in its absence stays, and so
      does one for which the host has no room.
    - If no weights give a plan that fits, all candidates are swapped.
    - The layout, SmartPool in the paper, is the one of every plan (`memfit.packing`).

    Source: Zhang et al. 2019, "Efficient Memory Management for GPU-based Deep Learning Systems".
    """

    name: ClassVar[str] = "autoswap"
    source: ClassVar[str] = "Zhang et al. 2019"

    threshold: int = field(default=0, metadata={"help": "swap only variables of more bytes than this"})
    weights: str = field(
        default="", metadata={"help": "of DOA, AOA, WDOA and SWDOA, four numbers with commas; optimized if left out"}
    )
    evaluations: int = field(default=20, metadata={"help": "weights to try, if none are given"})

    def schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Yield the schedule of the weights; without a host or a link, the one that keeps everything."""
        weights = self._given_weights()
        for option, least in (("threshold", 0), ("evaluations", 1)):
            if getattr(self, option) < least:
                refuse(self, option, f"{least} or more")
        schedule = keeping_schedule(problem)
        if not problem.may_copy:
            yield schedule
            return
        absences = Absences(problem, find_offload_intervals(problem, schedule), self.threshold)
        if weights is None:
            weights = minimize(absences.cost, SINGLE_WEIGHTS, self.evaluations, problem.seed)
        absences.choose(weights, problem.budget_bytes)
        yield with_offloads(absences.found)
        absences.choose(np.ones(len(SCORES)), 0)
        yield with_offloads(absences.found)

    def _given_weights(self) -> Point | None:
        try:
            weights = np.array([float(text) for text in self.weights.split(",") if text.strip()])
        except ValueError:
            weights = np.array([np.nan])
        if self.weights and (len(weights) != len(SCORES) or not (np.isfinite(weights) & (weights >= 0)).all()):
            refuse(self, "weights", "four numbers of 0 or more, such as 1,0,0,0.5")
        return weights if self.weights else None
