"""The pool of a search: the fastest retention that fits, the one of the least peak, and the best runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.planners.engine.annealing.run import AnnealRun
from memfit.planners.engine.parts import Parts
from memfit.planners.engine.retention.decisions import Evaluation, Retention, evaluate, keep_everything, simulated
from memfit.planners.engine.retention.instance import Instance

_ELITE = 6  # best runs from which later waves start

Evaluated = tuple[Evaluation, Retention]


class Pool:
    """Evaluates retentions of one instance, and keeps the best.

    Attributes:
        everything: the retention that keeps everything.
        best: the fastest that fits the budget; None as long as none does.
        least: the one of the least peak, the faster of equals.
        elite: the best runs that fit, as (seconds, retention), the fastest first; no two take equally long.
    """

    def __init__(self, instance: Instance, parts: Parts) -> None:
        self._instance, self._parts = instance, parts
        self._once_seconds = float(instance.tables.positions["seconds"].sum())
        self.everything = keep_everything(instance)
        self.best: Evaluated | None = None
        self.least: Evaluated = (evaluate(instance, simulated(instance, self.everything)), self.everything)
        self.elite: list[tuple[float, Retention]] = []
        self.look_at(self.everything)

    def look_at(self, retention: Retention) -> Evaluation:
        """Evaluate `retention`; store it if it is the fastest that fits, or has the least peak."""
        evaluation = evaluate(self._instance, simulated(self._instance, retention))
        least, _ = self.least
        if (evaluation.peak_bytes, evaluation.seconds) < (least.peak_bytes, least.seconds):
            self.least = (evaluation, retention)
        fits = evaluation.peak_bytes <= self._instance.problem.budget_bytes
        if fits and (self.best is None or evaluation.seconds < self.best[0].seconds):
            self.best = (evaluation, retention)
        return evaluation

    def by_promise(self, retentions: Sequence[Retention]) -> list[Retention]:
        """Evaluate each, and return them with the most promising first."""
        found = [(self.look_at(each), each) for each in retentions]
        found.sort(key=lambda item: self.promise(item[0].seconds, item[0].peak_bytes))
        return [each for _, each in found]

    def promise(self, seconds: float, peak_bytes: int) -> float:
        """Return the sum of relative seconds and relative bytes above the budget; less is more promising.

        Args:
            seconds: of the whole step.
            peak_bytes: of the whole step, residents included.
        """
        budget_bytes = max(1, self._instance.problem.budget_bytes)
        return seconds / max(self._once_seconds, 1e-12) + max(0.0, peak_bytes / budget_bytes - 1.0)

    def take(self, runs: Iterable[AnnealRun]) -> None:
        """Store the results of runs that have ended."""
        for run in runs:
            if run.best is not None:
                evaluation = self.look_at(run.best)
                if all(evaluation.seconds != seconds for seconds, _ in self.elite):
                    self.elite.append((evaluation.seconds, run.best))
            elif self._parts.leanest:
                self.look_at(run.leanest)
        self.elite = sorted(self.elite, key=lambda item: item[0])[:_ELITE]
