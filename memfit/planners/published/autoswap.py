"""Planner `autoswap`: variables are swapped by priority scores (Zhang et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from memfit.errors import InvalidOptionError
from memfit.plan import Problem, Result
from memfit.planners.engine.offloading.intervals import OffloadIntervals, find_offload_intervals, with_offloads
from memfit.planners.engine.offloading.streams import make_possible, make_streams
from memfit.planners.engine.results import keeping_schedule
from memfit.planners.engine.tables import Integers
from memfit.planners.offload import has_link
from memfit.planners.published.copies import HostRoom, answer, load
from memfit.planners.published.gaussian_process import Point, minimize
from memfit.schedule import Schedule

SCORES = ("DOA", "AOA", "WDOA", "SWDOA")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSwap:
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
    uses_host: ClassVar[bool] = True
    source: ClassVar[str] = "Zhang et al. 2019"

    threshold: int = field(default=0, metadata={"help": "swap only variables of more bytes than this"})
    weights: str = field(
        default="", metadata={"help": "of DOA, AOA, WDOA and SWDOA, four numbers with commas; optimized if left out"}
    )
    evaluations: int = field(default=20, metadata={"help": "weights to try, if none are given"})

    def plan(self, problem: Problem) -> Result:
        """Return the plan of the weights; without a host or a link, the one that keeps everything.

        Raises:
            InvalidOptionError: an option out of range, a pin that cannot be honoured.
        """
        given = self._given_weights()
        for option, least in (("threshold", 0), ("evaluations", 1)):
            if getattr(self, option) < least:
                raise InvalidOptionError(
                    f"planner 'autoswap': option {option} is {getattr(self, option)}, expected {least} or more"
                )
        started_seconds = problem.clock()
        return answer(problem, self.name, started_seconds, self._schedules(problem, given))

    def _given_weights(self) -> Point | None:
        try:
            weights = np.array([float(text) for text in self.weights.split(",") if text.strip()])
        except ValueError:
            weights = np.array([np.nan])
        if self.weights and (len(weights) != len(SCORES) or not (np.isfinite(weights) & (weights >= 0)).all()):
            raise InvalidOptionError(
                f"planner 'autoswap': option weights is {self.weights!r}, expected four numbers of 0 or more, "
                f"such as 1,0,0,0.5"
            )
        return weights if self.weights else None

    def _schedules(self, problem: Problem, weights: Point | None) -> Iterator[Schedule]:
        schedule = keeping_schedule(problem)
        if not has_link(problem):
            yield schedule
            return
        swapping = _Swapping(problem, find_offload_intervals(problem, schedule), self.threshold)
        if weights is None:
            first = [*np.eye(len(SCORES)), np.ones(len(SCORES))]
            weights = minimize(swapping.cost, first, self.evaluations, problem.seed)
        swapping.swap(weights, problem.budget_bytes)
        yield with_offloads(swapping.found)
        swapping.swap(np.ones(len(SCORES)), 0)
        yield with_offloads(swapping.found)


class _Outcome(NamedTuple):
    """What a choice gives: seconds of the step, and the bytes above the budget at its peak."""

    seconds: float
    excess_bytes: int


class _Swapping:
    """The candidates of a step and their scores."""

    def __init__(self, problem: Problem, found: OffloadIntervals, threshold_bytes: int) -> None:
        self.problem, self.found, rows = problem, found, found.intervals
        peak_stop = int(np.argmax(found.stops["held_bytes"]))
        across = (rows["start"] < peak_stop) & (peak_stop < rows["end"]) & (rows["host_bytes"] > threshold_bytes)
        self.candidates: Integers = np.flatnonzero(across).astype(np.int64)
        chosen = rows[self.candidates]
        self.start, self.end, self.size_bytes = chosen["start"] + 1, chosen["end"], chosen["size_bytes"]
        done = found.stops["done_seconds"]
        absent = done[self.end] - done[self.start] - chosen["offload_seconds"] - chosen["prefetch_seconds"]
        self.static = np.array([_scaled(absent), _scaled(absent * self.size_bytes)])
        self.step_seconds = float(done[-1]) + float(rows["offload_seconds"].sum() + rows["prefetch_seconds"].sum())

    def cost(self, weights: Point) -> float:
        """Return the seconds of the step with these weights; above all of them if it does not fit."""
        outcome = self.swap(weights, self.problem.budget_bytes)
        if outcome.excess_bytes > 0:
            return self.step_seconds * (2.0 + outcome.excess_bytes / max(1, self.found.stops["held_bytes"].max()))
        return outcome.seconds

    def swap(self, weights: Point, limit_bytes: int) -> _Outcome:
        """Choose variables by their scores until the load is at most `limit_bytes`, and place their copies."""
        self.found.intervals["chosen"] = False
        self.found.intervals["chosen"][self._chosen(weights, limit_bytes)] = True
        streams = make_streams(self.found, limit_bytes, self.problem.host_budget_bytes, self.problem.seed)
        make_possible(streams)
        totals = streams.totals[0]
        return _Outcome(float(totals["seconds"]), int(totals["peak_bytes"]) - self.problem.budget_bytes)

    def _chosen(self, weights: Point, limit_bytes: int) -> list[int]:
        room = HostRoom(self.found, self.problem.host_budget_bytes)
        left = np.ones(len(self.candidates), np.bool_)
        now, chosen = load(self.found), list[int]()
        first = self._overload_seconds(now, limit_bytes)
        most = first.max(initial=0.0) or 1.0
        fixed = weights[:2] @ self.static + weights[2] * first / most
        while left.any() and now.max() > limit_bytes:
            score = fixed + weights[3] * self._overload_seconds(now, limit_bytes) / most
            best = int(np.argmax(np.where(left, score, -np.inf)))
            left[best] = False
            if room.take(int(self.candidates[best]), int(self.start[best]) - 1):
                chosen.append(int(self.candidates[best]))
                now[self.start[best] : self.end[best]] -= self.size_bytes[best]
        return chosen

    def _overload_seconds(self, now: Integers, limit_bytes: int) -> Point:
        """Return float64[candidates]: bytes above the limit, integrated over the seconds of each absence."""
        above = np.maximum(now - limit_bytes, 0) * self.found.stops["seconds"]
        total = np.concatenate([[0.0], np.cumsum(above)])
        return total[self.end] - total[self.start]


def _scaled(score: Point) -> Point:
    return score / (np.abs(score).max(initial=0.0) or 1.0)
