"""One round of planner `offload`: offload intervals for a retention, and a retention for offload intervals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.plan import Problem
from memfit.planners.engine.annealing.run import AnnealRun
from memfit.planners.engine.offloading.absences import SINGLE_WEIGHTS, Absences, Outcome
from memfit.planners.engine.offloading.host_stays import (
    Draft,
    HostStay,
    choose_again,
    host_stays,
    is_possible,
    make_draft,
    with_host_stays,
)
from memfit.planners.engine.offloading.intervals import OffloadIntervals, with_offloads
from memfit.planners.engine.offloading.streams import Streams, anneal, make_possible, make_streams, prune, run
from memfit.planners.engine.parts import Parts
from memfit.planners.engine.retention.decisions import Retention
from memfit.planners.engine.retention.instance import Instance
from memfit.schedule import Schedule

_HALF_SECONDS = 0.05  # of the time limit: the most for each half of a round
_RETENTION_MOVES, _OFFLOAD_MOVES = 40, 80  # of a round: for each retention interval, for each offload interval
_WARM, _COLD = (1.0, 1e-3), (0.03, 1e-4)  # temperatures in mean op seconds: for offload intervals; for retention
_PENALTY_UNIT = 0.01  # as in `memfit.planners.engine.annealing.run`
_MOST_ROOM = 0.15  # share of the excess without copies: the most bytes freed beyond need, for the retention to use
SLICE_MOVES = 500  # moves between two looks at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A retention with offload intervals chosen for it.

    Attributes:
        seconds: of the step; infinite if it does not fit.
        kept_bytes: peak without offloading.
        peak_bytes: peak with offloading.
        schedule: None if it does not fit.
        retention: the retention.
        stays: the host stays of the chosen intervals.
        moves: how many moves it took to find.
    """

    seconds: float
    kept_bytes: int
    peak_bytes: int
    schedule: Schedule | None
    retention: Retention
    stays: tuple[HostStay, ...] = ()
    moves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """The problem that all rounds share; `counts_moves` says that moves, not seconds, limit a round."""

    problem: Problem
    instance: Instance
    parts: Parts
    counts_moves: bool
    stop: threading.Event

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of an op."""
        seconds = self.instance.tables.positions["seconds"]
        return float(seconds.sum()) / max(1, len(seconds))


def with_best_offloads(
    task: Offloading, retention: Retention, seed: int, stays: Sequence[HostStay] = (), *, is_scored: bool = False
) -> Candidate:
    """Return `retention` with the best offload intervals found for it.

    Args:
        task: the problem.
        retention: stays as it is.
        seed: of the annealing.
        stays: host stays whose intervals are chosen at the start.
        is_scored: whether to start from those that a score chooses (see `Absences`), if they are better.
    """
    draft = make_draft(task.instance, task.problem, retention)
    choose_again(draft, stays)
    if is_scored:
        _choose_by_scores(task.problem, draft.offloads)
    streams = _anneal_choice(task, draft, seed)
    fits = bool(np.isfinite(streams.totals["best_seconds"][0]))
    if fits:
        draft.offloads.intervals["chosen"] = streams.best
        prune(streams)
    run(streams)
    return Candidate(
        seconds=float(streams.totals["seconds"][0]) if fits else np.inf,
        kept_bytes=draft.peak_bytes,
        peak_bytes=int(streams.totals["peak_bytes"][0]),
        schedule=with_offloads(draft.offloads) if fits else None,
        retention=retention,
        stays=tuple(host_stays(draft)),
        moves=int(streams.totals["tried"][0]),
    )


def improved(task: Offloading, best: Candidate, seed: int) -> Candidate:
    """Return the candidate of one round from `best`.

    The round frees more bytes than needed by offloading, anneals the retention to recompute less in them, and then
    chooses the offload intervals anew.

    Args:
        task: the problem.
        best: the candidate to start from.
        seed: of all random choices of the round.
    """
    random = np.random.default_rng(seed)
    draft = make_draft(task.instance, task.problem, best.retention)
    room = random.random() * _MOST_ROOM * max(0, draft.peak_bytes - task.problem.budget_bytes)
    choose_again(draft, best.stays)
    streams = _anneal_choice(task, draft, int(random.integers(1 << 62)), room_bytes=int(room))
    stays = host_stays(draft)
    instance = with_host_stays(task.instance, stays)
    moves = int(streams.totals["tried"][0])
    intervals = int(instance.may_save.sum())
    if intervals == 0 or not is_possible(instance, best.retention):
        return with_best_offloads(task, best.retention, int(random.integers(1 << 62)), stays)
    annealing = AnnealRun(instance, best.retention, _COLD, int(random.integers(1 << 62)), task.stop, task.parts)
    annealing.run(_pace(task, _RETENTION_MOVES * intervals))
    retention = annealing.best or annealing.leanest
    found = with_best_offloads(task, retention, int(random.integers(1 << 62)), stays)
    return replace(found, moves=found.moves + moves + annealing.moves)


def _choose_by_scores(problem: Problem, found: OffloadIntervals) -> None:
    """Choose the intervals of the best score, unless those that are chosen fit better, or as well and faster."""
    absences, budget_bytes = Absences(problem, found), problem.budget_bytes

    def rank(outcome: Outcome) -> tuple[int, float]:
        return max(0, outcome.excess_bytes), outcome.seconds

    best, chosen = rank(absences.place(budget_bytes)), found.intervals["chosen"].copy()
    for weights in SINGLE_WEIGHTS:
        now = rank(absences.choose(weights, budget_bytes))
        if now < best:
            best, chosen = now, found.intervals["chosen"].copy()
    found.intervals["chosen"] = chosen


def _anneal_choice(task: Offloading, draft: Draft, seed: int, room_bytes: int = 0) -> Streams:
    """Anneal over the intervals of `draft` until they fit into the budget less `room_bytes`."""
    problem, intervals = task.problem, draft.offloads.intervals
    streams = make_streams(
        draft.offloads,
        problem.budget_bytes - room_bytes,
        problem.host_budget_bytes,
        seed,
        copy_compute_seconds_per_byte=problem.device.copy_compute_seconds_per_byte,
    )
    make_possible(streams)
    totals, pace = streams.totals, _pace(task, _OFFLOAD_MOVES * len(intervals))
    totals["penalty"] = task.mean_seconds / (_PENALTY_UNIT * max(1, problem.budget_bytes))
    first, last = _WARM
    while (done := pace(int(totals["tried"][0]))) < 1.0 and not task.stop.is_set():
        totals["temperature"] = task.mean_seconds * first * (last / first) ** done
        anneal(streams, SLICE_MOVES, 1.0)
        if len(intervals) == 0:
            break
    return streams


def _pace(task: Offloading, moves: int) -> Callable[[int], float]:
    """Return a function from the moves made to the share of an annealing that is done: of `moves`, or of its time."""
    if task.counts_moves:
        return lambda made: made / max(1, moves)
    clock = task.problem.clock
    begun, length = clock(), max(_HALF_SECONDS * task.problem.time_limit_seconds, 1e-9)
    return lambda made: max(made / max(1, moves), (clock() - begun) / length)
