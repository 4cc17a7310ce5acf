"""Copies to the host, as published planners decide them: the host's room, the streams, the plan of the first that fits.

These planners choose offload intervals (see `memfit.planners.engine.offloading.intervals`) and, other than planner
`offload`, also the places of the copies. What no paper here says is decided once, in this module: a copy to the host
that is not yet complete makes compute wait only if the budget needs the bytes of its storage; a copy back starts later
than it is asked for if the budget has no room for it until its reader; and an interval whose copy to the host does not
end before its reader is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from memfit.graph import Phase
from memfit.plan import Problem, Result
from memfit.planners.engine.offloading.absences import HostRoom
from memfit.planners.engine.offloading.intervals import OffloadIntervals
from memfit.planners.engine.results import Ending, make_result, predict
from memfit.schedule import Code, Schedule
from memfit.system.records import Flags, Integers


class CopyPlanner(ABC):
    """A planner that makes schedules with copies; its answer is the first that fits, or the one of the least peak."""

    __slots__ = ()
    name: ClassVar[str]

    @abstractmethod
    def schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Yield at least one schedule within the host's budget; no more are made once one fits.

        Args:
            problem: what to plan. Without a host or a link, nothing is copied.

        Raises:
            InvalidOptionError: an option out of range, a pin that cannot be honoured.
        """
        ...

    def plan(self, problem: Problem) -> Result:
        """Return the plan of the first schedule that fits, or that of the least peak as the leanest.

        Args:
            problem: what to plan.

        Raises:
            InvalidOptionError: an option out of range, a pin that cannot be honoured.
        """
        started_seconds = problem.clock()
        best: tuple[int, Schedule] | None = None
        for schedule in self.schedules(problem):
            peak_bytes = predict(problem, schedule).peak_bytes
            if best is None or peak_bytes < best[0]:
                best = peak_bytes, schedule
            if peak_bytes <= problem.budget_bytes:
                best = best[0], schedule
                break
        assert best is not None, "a planner makes a schedule"
        ending = Ending(
            planner=self.name,
            started_seconds=started_seconds,
            schedule=best[1],
            least_found_bytes=best[0],
            tried_all=True,
        )
        return make_result(problem, ending)


def op_at_stops(found: OffloadIntervals) -> list[int | None]:
    """Return for each stop the op that it computes; None for boundaries and the end."""
    schedule, position = found.schedule, found.position[:-1]
    is_op = schedule.codes[position] == Code.COMPUTE
    operands: list[int] = schedule.operands[position].tolist()
    return [op if computes else None for op, computes in zip(operands, is_op.tolist(), strict=True)] + [None]


def backward_start(problem: Problem, found: OffloadIntervals) -> int:
    """Return the first stop that computes an op of another phase than forward; the end if there is none."""
    ops = problem.graph.ops
    stops = enumerate(op_at_stops(found))
    return next((stop for stop, op in stops if op is not None and ops[op].phase is not Phase.FORWARD), len(found.stops))


def choose(
    problem: Problem, found: OffloadIntervals, numbers: Iterable[int], begun: Integers | None = None
) -> list[int]:
    """Choose intervals in this order, as long as the host has room for them; return those chosen.

    Args:
        problem: gives the host's budget.
        found: its intervals are chosen.
        numbers: of intervals.
        begun: int64[intervals], the stop after which each copy starts; by default the use that opens the interval.
    """
    begins: Integers = found.intervals["start"] if begun is None else begun
    room = HostRoom(found, problem.host_budget_bytes)
    chosen = [number for number in numbers if room.take(number, int(begins[number]))]
    found.intervals["chosen"][chosen] = True
    return chosen


def mark_copied(found: OffloadIntervals) -> None:
    """Mark the first chosen interval of each host copy as the one that makes it."""
    chosen = np.flatnonzero(found.intervals["chosen"])
    _, first = np.unique(found.intervals["host_copy"][chosen], return_index=True)
    found.intervals["copied"] = False
    found.intervals["copied"][chosen[first]] = True


def place_copies(problem: Problem, found: OffloadIntervals, begun: Integers, triggers: Integers) -> Flags:
    """Find when the storages of the chosen intervals leave and return; return which of them arrive late.

    Args:
        problem: gives the budget.
        found: its chosen intervals are placed; those too short for their copies are no longer chosen.
        begun: int64[intervals], the stop after which each copy to the host starts.
        triggers: int64[intervals], the stop before which each copy back starts if there is room.
    """
    while True:
        mark_copied(found)
        streams = _Streams(problem, found, begun, triggers)
        streams.run()
        if not streams.too_short:
            return streams.late
        found.intervals["chosen"][streams.too_short] = False


class _Streams:
    """The three streams of a step, stop by stop, as the simulator has them, with given places of copies."""

    def __init__(self, problem: Problem, found: OffloadIntervals, begun: Integers, triggers: Integers) -> None:
        self.budget_bytes, self.rows = problem.budget_bytes, found.intervals
        self.seconds: list[float] = found.stops["seconds"].tolist()
        self.live: Integers = found.stops["held_bytes"].copy()  # those away count again from their reader on
        self.triggers = triggers
        chosen: list[int] = np.flatnonzero(self.rows["chosen"]).tolist()
        self.begins = _by_stop(begun, [number for number in chosen if self.rows["copied"][number]])
        self.opens = _by_stop(self.rows["start"], chosen)
        self.closes = _by_stop(self.rows["end"], [n for n in found.by_end.tolist() if self.rows["chosen"][n]])
        self.rank = {number: rank for rank, number in enumerate(found.by_end.tolist())}
        self.now = self.offload_end = self.prefetch_end = 0.0
        self.offloaded_at: dict[int, float] = {}
        self.leaving: list[int] = []
        self.away: list[int] = []
        self.arrives_at: dict[int, float] = {}
        self.too_short: list[int] = []
        self.late: Flags = np.zeros(len(self.rows), np.bool_)

    def run(self) -> None:
        for stop, seconds in enumerate(self.seconds):
            self._leave(stop)
            self._return(stop)
            for number in self.closes.get(stop, ()):
                if self.arrives_at.get(number, 0.0) > self.now:
                    self.late[number], self.now = True, self.arrives_at[number]
            self.now += seconds
            for number in self.begins.get(stop, ()):
                self.offload_end = max(self.now, self.offload_end) + float(self.rows["offload_seconds"][number])
                self.offloaded_at[number] = self.offload_end
            self.leaving += self.opens.get(stop, [])
            self.leaving.sort(key=lambda number: (self.offloaded_at.get(number, 0.0), number))

    def _leave(self, stop: int) -> None:
        """Free storages whose copy is complete, and wait for more of them if the budget needs their bytes."""
        closing = self.closes.get(stop, [])
        self.too_short += [number for number in self.leaving if number in closing]
        self.leaving = [number for number in self.leaving if number not in closing]
        while self.leaving:
            number = self.leaving[0]
            done = self.offloaded_at.get(number, 0.0)
            if done > self.now and self.live[stop] <= self.budget_bytes:
                return
            self.now = max(self.now, done)
            self.rows["left"][number] = stop
            self.live[stop : self.rows["end"][number]] -= self.rows["size_bytes"][number]
            self.away.append(self.leaving.pop(0))

    def _return(self, stop: int) -> None:
        """Start the copies back of storages read here, and of those triggered that have room until their reader."""
        for number in sorted(self.away, key=lambda number: self.rank[number]):
            end, size_bytes = self.rows["end"][number], self.rows["size_bytes"][number]
            if end > stop:
                if self.triggers[number] > stop or self.live[stop:end].max() + size_bytes > self.budget_bytes:
                    continue
                self.live[stop:end] += size_bytes
            self.prefetch_end = max(self.now, self.prefetch_end) + float(self.rows["prefetch_seconds"][number])
            self.arrives_at[number] = self.prefetch_end
            self.rows["returned"][number] = stop
            self.away.remove(number)


def _by_stop(stops: Integers, numbers: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number in numbers:
        found.setdefault(int(stops[number]), []).append(number)
    return found
