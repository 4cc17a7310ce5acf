"""Absences: the storages that a step does not use around its peak, and four scores by which they leave for the host.

The scores are those of SmartPool's AutoSwap (Zhang et al. 2019, "Efficient Memory Management for GPU-based Deep
Learning Systems"); see `memfit.papers.planners.autoswap`, which optimizes their weights. Planner `offload` starts
from the choices that each of them makes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.plan import Problem
from memfit.planners.engine.offloading.intervals import OffloadIntervals
from memfit.planners.engine.offloading.streams import make_possible, make_streams
from memfit.system.records import Integers

SCORES = ("DOA", "AOA", "WDOA", "SWDOA")
Weights = NDArray[np.float64]
SINGLE_WEIGHTS: tuple[Weights, ...] = (*np.eye(len(SCORES)), np.ones(len(SCORES)))  # each score alone, and all


def load(found: OffloadIntervals) -> Integers:
    """Return int64[stops]: the least bytes on the device with the chosen intervals, and no copy back early."""
    change = np.zeros(len(found.stops) + 1, np.int64)
    rows = found.intervals[found.intervals["chosen"]]
    np.subtract.at(change, rows["start"] + 1, rows["size_bytes"])
    np.add.at(change, rows["end"], rows["size_bytes"])
    return found.stops["held_bytes"] + np.cumsum(change)[:-1]


class HostRoom:
    """Bytes of host copies after each stop, and whether one more interval fits the host's budget."""

    def __init__(self, found: OffloadIntervals, budget_bytes: int) -> None:
        self._found, self._budget_bytes = found, budget_bytes
        self._held = np.zeros(len(found.stops), np.int64)
        self._spans: dict[int, tuple[int, int]] = {}

    def take(self, number: int, begun: int) -> bool:
        """Add an interval whose copy to the host starts after stop `begun`; return False if the host has no room.

        One host copy serves all intervals of a version of a storage, from the first copy to the last read.

        Args:
            number: of the interval.
            begun: the stop after which the copy starts.
        """
        row = self._found.intervals[number]
        host_copy, size_bytes = int(row["host_copy"]), int(row["host_bytes"])
        first, last = self._spans.get(host_copy, (begun, begun))
        span = min(first, begun), max(last, int(row["end"]))
        held = self._held.copy()
        held[first:last] -= size_bytes
        held[span[0] : span[1]] += size_bytes
        if held.max() > self._budget_bytes:
            return False
        self._held, self._spans[host_copy] = held, span
        return True


class Outcome(NamedTuple):
    """What a choice gives: seconds of the step, and the bytes above the budget at its peak."""

    seconds: float
    excess_bytes: int


class Absences:
    """The storages that may leave around a step's peak, and their scores.

    Args:
        problem: gives budgets and the seed.
        found: the step's offload intervals; the choice among them is changed.
        threshold_bytes: only storages of more bytes leave.
    """

    def __init__(self, problem: Problem, found: OffloadIntervals, threshold_bytes: int = 0) -> None:
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

    def cost(self, weights: Weights) -> float:
        """Return the seconds of the step with these weights; above all of them if it does not fit."""
        outcome = self.choose(weights, self.problem.budget_bytes)
        if outcome.excess_bytes > 0:
            return self.step_seconds * (2.0 + outcome.excess_bytes / max(1, self.found.stops["held_bytes"].max()))
        return outcome.seconds

    def choose(self, weights: Weights, limit_bytes: int) -> Outcome:
        """Choose variables by their scores until the load is within a limit, and place their copies.

        Args:
            weights: of the scores.
            limit_bytes: of the load on the device.
        """
        self.found.intervals["chosen"] = False
        self.found.intervals["chosen"][self._chosen(weights, limit_bytes)] = True
        return self.place(limit_bytes)

    def place(self, limit_bytes: int) -> Outcome:
        """Place the copies of the chosen variables, and leave those out that have no time for them."""
        streams = make_streams(self.found, limit_bytes, self.problem.host_budget_bytes, self.problem.seed)
        make_possible(streams)
        totals = streams.totals[0]
        return Outcome(float(totals["seconds"]), int(totals["peak_bytes"]) - self.problem.budget_bytes)

    def _chosen(self, weights: Weights, limit_bytes: int) -> list[int]:
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

    def _overload_seconds(self, now: Integers, limit_bytes: int) -> Weights:
        """Return float64[candidates]: bytes above the limit, integrated over the seconds of each absence."""
        above = np.maximum(now - limit_bytes, 0) * self.found.stops["seconds"]
        total = np.concatenate([[0.0], np.cumsum(above)])
        return total[self.end] - total[self.start]


def _scaled(score: Weights) -> Weights:
    return score / (np.abs(score).max(initial=0.0) or 1.0)
