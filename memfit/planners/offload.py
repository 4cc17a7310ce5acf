"""Planner `offload`: recomputation and offloading, decided together on the simulated time.

The planner starts from two plans: planner `search`'s without copies, and the one that keeps everything and offloads the
excess. Between them, it searches at larger budgets than the problem's, and offloads the excess of those plans. From the
best plan on, it alternates two annealings: one over the retention, with host stays fixed, and one over the offload
intervals of the resulting schedule. Beside all that, planner `search` runs for as long on a thread of its own.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from memfit.plan import Problem, Progress, Result
from memfit.planners.engine.bounds.bounds import Proofs, least_budget_bound, least_recompute_seconds
from memfit.planners.engine.offloading.rounds import (
    SLICE_MOVES,
    Candidate,
    Offloading,
    improved,
    with_best_offloads,
)
from memfit.planners.engine.parts import Parts
from memfit.planners.engine.peak_reducing_order import search_order
from memfit.planners.engine.results import Ending, Searched, make_result
from memfit.planners.engine.retention.decisions import evaluate, keep_everything, simulated
from memfit.planners.engine.retention.instance import build_instance
from memfit.planners.protocols import SearchOptions
from memfit.planners.search import SearchPlanner

# Shares of the time limit, or of the moves: the search without copies; until when larger budgets are searched.
_ALONE, _LEVELS = 0.2, 0.45
_LEVEL = 0.06  # share for the search at each larger budget


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlanner(SearchOptions):
    """Offload storages to the host and recompute others, whichever costs the step less time.

    Without a host budget, or on a device without a link, the plan is planner `search`'s. Anytime; deterministic for a
    seed if `iterations` is given.

    Guaranteed, to rounding: if planner `search`, with the same seed and as many moves, finds a plan without the host,
    this planner finds a plan that is not slower, for that search is part of it. With a time limit in place of moves,
    that search has one thread. Not guaranteed if planning is interrupted, or has `rematerialize` false.

    Source: recomputation and swapping planned over a simulator as in "GPU memory management for deep neural networks
    using deep Q-network" (2020), by annealing instead.
    """

    name: ClassVar[str] = "offload"
    source: ClassVar[str] = "annealing over retention intervals and offload intervals, on the simulated time"

    rematerialize: bool = field(default=True, metadata={"help": "false: offload storages and recompute nothing"})

    def plan(self, problem: Problem) -> Result:
        """See `SearchOptions.plan`."""
        return _Run(self, problem).result() if problem.may_copy else _search(self, 1.0).plan(problem)


def _ignore(_: Progress) -> None:
    """Ignore a report about another budget."""


def _search(options: OffloadPlanner, share: float) -> SearchPlanner:
    iterations = None if options.iterations is None else max(1, int(share * options.iterations))
    return SearchPlanner(iterations=iterations, threads=options.threads, without=options.without)


class _Run:
    """One planning: the best candidate so far, and the share of the moves or of the time limit that is used up."""

    def __init__(self, options: OffloadPlanner, problem: Problem) -> None:
        self.options, self.problem, self.parts = options, problem, Parts.without(options.without)
        self.threads = options.threads if options.iterations is not None else max(1, options.threads - 1)
        self.started_seconds = problem.clock()
        self.task = Offloading(
            problem=problem,
            instance=build_instance(problem, search_order(problem.graph, problem.device, self.parts)),
            parts=self.parts,
            counts_moves=options.iterations is not None,
            stop=threading.Event(),
        )
        self.random = np.random.default_rng(problem.seed)
        self.moves = 0
        self.interrupted = False
        everything = keep_everything(self.task.instance)
        self.best = Candidate(seconds=np.inf, kept_bytes=0, peak_bytes=0, schedule=None, retention=everything)
        self.kept = self.best  # everything kept, with the best offload intervals
        self.least_bytes: int | None = None

    def result(self) -> Result:
        with ThreadPoolExecutor(1) as beside:
            try:
                self._plan(beside)
            except KeyboardInterrupt:  # the best plan so far is returned, as interrupted
                self._interrupt()
        ending = Ending(
            planner=OffloadPlanner.name,
            started_seconds=self.started_seconds,
            schedule=self.best.schedule,
            least_found_bytes=self.least_bytes,
            interrupted=self.interrupted,
            proofs=Proofs(
                least_budget=least_budget_bound(self.problem, self.parts),
                recompute=least_recompute_seconds(self.problem, parts=self.parts),
            ),
            stats={"moves": float(self.moves)},
        )
        return make_result(self.problem, ending)

    def _plan(self, beside: ThreadPoolExecutor) -> None:
        everything = self.best.retention
        self.kept = self._take(with_best_offloads(self.task, everything, self._seed(), is_scored=True))
        if self.kept.kept_bytes <= self.problem.budget_bytes:
            return
        if not self.options.rematerialize:
            while not self._is_done(1.0):
                self._take(with_best_offloads(self.task, everything, self._seed()))
            return
        search = beside.submit(self._search_beside)
        self._try_levels()
        self._improve()
        self._take(self._without_offloads(search.result()))

    def _search_beside(self) -> Searched:
        """Return what planner `search` finds in all of the moves, or of the time limit, on one thread."""

        def stop_if_asked(_: Progress) -> None:
            if self.task.stop.is_set():
                raise KeyboardInterrupt  # the search returns its best plan

        options = self.options if self.task.counts_moves else replace(self.options, threads=1)
        problem = replace(self.problem, host_budget_bytes=0, progress=stop_if_asked)
        return _search(options, 1.0).search(problem)

    def _try_levels(self) -> None:
        """Search at budgets between the problem's and the unplanned peak: first in the middle, then beside the best."""
        budget_bytes = self.problem.budget_bytes
        seconds = {
            budget_bytes: self._search_at(budget_bytes, _ALONE).seconds,
            self.kept.kept_bytes: self.kept.seconds,
        }
        while not self._is_done(_LEVELS):
            levels = sorted(seconds)
            place = levels.index(min(levels, key=lambda level: seconds[level]))
            sides = [(levels[i], levels[i + 1]) for i in (place - 1, place) if 0 <= i < len(levels) - 1]
            low, high = max(sides, key=lambda side: side[1] - side[0])
            middle = (low + high) // 2
            if middle in seconds:
                return
            seconds[middle] = self._search_at(middle, _LEVEL).seconds

    def _search_at(self, budget_bytes: int, share: float) -> Candidate:
        """Search without copies at a budget, then offload the excess over the problem's budget."""
        problem = replace(
            self.problem,
            budget_bytes=budget_bytes,
            host_budget_bytes=0,
            time_limit_seconds=share * self.problem.time_limit_seconds,
            progress=self.problem.progress if budget_bytes == self.problem.budget_bytes else _ignore,
        )
        searched = _search(self.options, share).search(problem)
        self.moves += int(searched.result.stats["moves"])
        alone = self._take(self._without_offloads(searched))
        if searched.result.interrupted:
            self._interrupt()
        if alone.schedule is not None or self.interrupted:
            return alone
        return self._take(
            with_best_offloads(self.task, searched.retention, self._seed(), self.kept.stays, is_scored=True)
        )

    def _without_offloads(self, searched: Searched) -> Candidate:
        """Return the result of a search without copies; its own plan if that fits, as the planner guarantees."""
        evaluation = evaluate(self.task.instance, simulated(self.task.instance, searched.retention))
        plan = searched.result.plan
        fits = plan is not None and plan.predicted.peak_bytes <= self.problem.budget_bytes
        return Candidate(
            seconds=plan.predicted.seconds if plan is not None and fits else np.inf,
            kept_bytes=evaluation.peak_bytes,
            peak_bytes=evaluation.peak_bytes,
            schedule=plan.schedule if plan is not None and fits else None,
            retention=searched.retention,
        )

    def _improve(self) -> None:
        """Run rounds from the best candidate, one a thread, until the time is up; none if nothing fits yet."""
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                while self.best.schedule is not None and not self._is_done(1.0):
                    seeds = [self._seed() for _ in range(self.threads)]
                    for found in pool.map(partial(improved, self.task, self.best), seeds):
                        self._take(found)
            except KeyboardInterrupt:  # before the pool waits for its threads
                self._interrupt()

    def _take(self, found: Candidate) -> Candidate:
        """Remember the fastest candidate that fits, and the least peak; report."""
        self.moves += max(found.moves, SLICE_MOVES)  # so that planning ends if nothing can be changed
        if found.schedule is not None and found.seconds < self.best.seconds:
            self.best = found
        self.least_bytes = min(found.peak_bytes, self.least_bytes or found.peak_bytes)
        fits = self.best.schedule is not None
        once_seconds = float(self.task.instance.tables.positions["seconds"].sum())
        self.problem.progress(
            Progress(
                elapsed_seconds=self.problem.clock() - self.started_seconds,
                best_overhead=max(0.0, self.best.seconds / max(once_seconds, 1e-12) - 1.0) if fits else None,
                best_peak_bytes=self.best.peak_bytes if fits else None,
                message=f"{self.moves:,} moves, {len(self.best.stays)} storages offloaded",
            )
        )
        return found

    def _interrupt(self) -> None:
        self.interrupted = True
        self.task.stop.set()

    def _is_done(self, share: float) -> bool:
        return self.interrupted or self._done() >= share

    def _done(self) -> float:
        """The share of the moves, or of the time limit, that is used up."""
        if self.options.iterations is not None:
            return self.moves / max(1, self.options.iterations)
        elapsed_seconds = self.problem.clock() - self.started_seconds
        return elapsed_seconds / max(self.problem.time_limit_seconds, 1e-9)

    def _seed(self) -> int:
        return int(self.random.integers(1 << 62))
