"""Planner `search`: simulated annealing over retention intervals, with the exact simulation as objective."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from memfit.plan import PROVED_TO, Prediction, Problem, Progress, Result
from memfit.planners.engine.annealing.run import AnnealRun, warm_up
from memfit.planners.engine.bounds.bounds import LeastBudget, Proofs, least_budget_bound, least_recompute_seconds
from memfit.planners.engine.bounds.minimum_cuts import NO_BOUND
from memfit.planners.engine.bounds.per_op import exact
from memfit.planners.engine.overlapping import largest_gather_bytes
from memfit.planners.engine.pace import Pace
from memfit.planners.engine.parts import Parts
from memfit.planners.engine.peak_reducing_order import search_order
from memfit.planners.engine.pool import Pool
from memfit.planners.engine.results import (
    Ending,
    Searched,
    kept_schedule,
    make_result,
    overlapped,
    predict,
    unplanned_schedule,
)
from memfit.planners.engine.retention.decisions import Retention, keep_everything
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import Instance, build_instance
from memfit.planners.engine.starts.starting_points import MILD, NARROW, WIDE, Start, starting_points
from memfit.planners.protocols import SearchOptions
from memfit.schedule import Schedule
from memfit.system.shipped import shipped_functions

_REPORT_SECONDS = 0.05  # between two reports of progress while a wave runs
_BOUNDING = 0.15  # share of the time, at most, for the bound by minimum cuts
_EXACTLY = 0.05  # share of the time, at most, for the exact bound at one op
_EXPLORING, _VARYING = 0.55, 0.8  # share of the search until which runs explore; vary the best; the rest polishes
_SHORTEST_WAVE = 0.02  # of the search: a shorter wave is added to the next
_OF_RESULT = 2.5  # times the check and simulation of the unplanned step: the result's own takes longer
_LEAST_SEARCHING = 0.5  # of the time limit is left to searches of a graph with gathers
_MOVES_PER_INTERVAL = 400  # of one run, where there is time for several; fewer gain little, more too


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlanner(SearchOptions):
    """Anneal over the retention of each storage between any two of its uses.

    A search consists of waves of runs, one run a thread. The first waves start from starting points
    (`memfit.planners.engine.starts.starting_points`), the next ones from any of the best runs so far, and the last ones
    polish the best.

    As long as nothing fits, waves lower the peak itself, from the least so far. If the budget is below the proved
    least, the first wave does so, too.

    Guarantees: the best plan so far is returned when time is up, or at Ctrl-C. The search ends early if the bound
    proves its plan optimal. It is deterministic for a seed if `iterations` is given; with a time limit the plan depends
    on the machine's speed. Compilation, once on a machine, does not count as time.

    Source: Kirkpatrick et al. 1983 (annealing); Jain et al. 2020 (retention by stage).
    """

    name: ClassVar[str] = "search"
    source: ClassVar[str] = "simulated annealing over retention intervals, from minimum cuts"

    def plan(self, problem: Problem) -> Result:
        """See `SearchOptions.plan`."""
        return self.search(problem).result

    def search(self, problem: Problem) -> Searched:
        """Return the best plan found, and its retention."""
        parts, started_seconds = Parts.without(self.without), problem.clock()
        order = search_order(problem.graph, problem.device, parts)
        instance = build_instance(problem, order)
        if all(problem.pinned.values()):  # nothing has to be recomputed
            schedule = kept_schedule(instance)
            if predict(problem, schedule).peak_bytes <= problem.budget_bytes:
                return _without_search(problem, instance, schedule, started_seconds, parts)
        if not any(op.is_gather for op in problem.graph.ops):
            ending, retention = _Search(self, problem, instance, parts).run()
        else:
            spent_seconds = problem.clock() - started_seconds
            _compile(problem, instance)
            ending, retention = self._with_gathers(problem, order, problem.clock() - spent_seconds, parts)
        return Searched(result=make_result(problem, ending), retention=retention)

    def _with_gathers(
        self, problem: Problem, order: Sequence[int], started_seconds: float, parts: Parts
    ) -> tuple[Ending, Retention]:
        """Return the fastest of three searches: how much of a gather compute hides is known only once all are placed.

        A repeated gather costs the first search nothing and the second all of its seconds. The third one leaves room
        for the largest gather to start early. What is known before them takes its part of the time limit, too.
        """
        room_bytes = largest_gather_bytes(problem.graph, problem.device)
        variants = (
            problem,
            replace(problem, gather_weight=1.0),
            replace(problem, budget_bytes=problem.budget_bytes - room_bytes),
        )
        iterations = None if self.iterations is None else max(1, self.iterations // len(variants))
        options = replace(self, iterations=iterations)
        limit_seconds, known = problem.time_limit_seconds, _Known.of(problem, parts)
        found: list[tuple[Ending, Retention]] = []
        for number, variant in enumerate(variants):
            left = len(variants) - number  # each ends with a check and a simulation, and so does the result
            ending_seconds = (left + _OF_RESULT) * known.predicting_seconds
            left_seconds = limit_seconds - ending_seconds - (problem.clock() - started_seconds)
            seconds = max(left_seconds / left, _LEAST_SEARCHING * limit_seconds / len(variants))
            share = replace(variant, time_limit_seconds=seconds)
            found.append(_Search(options, share, build_instance(share, order), parts, known).run())
            if found[-1][0].interrupted:
                break
        moves = sum(ending.stats["moves"] for ending, _ in found)
        first = found[0][0]  # whose proofs hold for the problem
        least = min(each.least_found_bytes for each, _ in found if each.least_found_bytes is not None)
        best, retention = min(found, key=lambda each: _promise(problem, each[0]))
        changed = {"schedule": best.schedule, "least_found_bytes": least, "interrupted": found[-1][0].interrupted}
        return replace(first, **changed, started_seconds=started_seconds, stats={"moves": moves}), retention


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What holds for all searches of a graph, whatever their budgets: the unplanned step, and the least budget.

    `predicting_seconds` is how long its schedule took to be made, checked and simulated.
    """

    unplanned: Prediction
    least_budget: LeastBudget
    predicting_seconds: float

    @staticmethod
    def of(problem: Problem, parts: Parts) -> _Known:
        started_seconds = problem.clock()
        unplanned = predict(problem, unplanned_schedule(problem))
        predicting_seconds = problem.clock() - started_seconds
        least_budget = least_budget_bound(problem, parts)
        return _Known(unplanned=unplanned, least_budget=least_budget, predicting_seconds=predicting_seconds)


def _compile(problem: Problem, instance: Instance) -> None:
    """Compile the search, once on a machine."""
    if not shipped_functions():
        compiling = "compiling the search, once on a machine"
        problem.progress(Progress(elapsed_seconds=0.0, best_overhead=None, best_peak_bytes=None, message=compiling))
        warm_up(instance, keep_everything(instance))


def _promise(problem: Problem, ending: Ending) -> tuple[int, float]:
    """Return by what search results are compared: the bytes above the budget, then the seconds with overlap."""
    assert ending.schedule is not None
    predicted = predict(problem, overlapped(problem, ending.schedule))
    return max(0, predicted.peak_bytes - problem.budget_bytes), predicted.seconds


def _without_search(
    problem: Problem, instance: Instance, schedule: Schedule, started_seconds: float, parts: Parts
) -> Searched:
    """Return the result of a schedule that keeps everything and fits: no plan is faster."""
    ending = Ending(
        planner=SearchPlanner.name,
        started_seconds=started_seconds,
        schedule=schedule,
        proofs=Proofs(least_budget=least_budget_bound(problem, parts), recompute=NO_BOUND),
        stats={"moves": 0.0},
    )
    return Searched(result=make_result(problem, ending), retention=keep_everything(instance))


class _Search:
    """One search: bounds, then starting points, then waves of annealing runs."""

    def __init__(
        self,
        options: SearchPlanner,
        problem: Problem,
        instance: Instance,
        parts: Parts,
        known: _Known | None = None,
    ) -> None:
        self.problem, self.parts, self.threads = problem, parts, options.threads
        self.instance = instance
        _compile(problem, instance)
        self.started_seconds = problem.clock()
        known = known or _Known.of(problem, parts)
        self.unplanned, self.least_budget = known.unplanned, known.least_budget
        self.pace = Pace(problem, options.iterations, self.threads, self.started_seconds)
        self.is_hopeless = problem.budget_bytes < self.least_budget[0]
        self.once_seconds = float(self.instance.tables.positions["seconds"].sum())
        self.bound = NO_BOUND
        self.intervals = int(self.instance.may_save.sum())
        self.pool = Pool(self.instance, parts)
        self.random = np.random.default_rng(problem.seed)
        self.running: list[AnnealRun] = []
        self.stop = threading.Event()
        self.moves = 0

    def run(self) -> tuple[Ending, Retention]:
        """Search until the pace ends, the plan is proved optimal, or Ctrl-C is pressed; return the best retention."""
        interrupted = False
        try:
            if self.pool.best is None and self.intervals > 0:
                self._search()
        except KeyboardInterrupt:  # the best plan so far is returned, as interrupted
            self.stop.set()
            self._take_runs()
            interrupted = True
        chosen, retention = self.pool.best or self.pool.least
        ending = Ending(
            planner=SearchPlanner.name,
            started_seconds=self.started_seconds,
            schedule=emit(self.instance, chosen.sequence),
            least_found_bytes=self.pool.least[0].peak_bytes,
            interrupted=interrupted,
            proofs=Proofs(least_budget=self.least_budget, recompute=self.bound),
            unplanned=self.unplanned,
            stats={"moves": float(self.moves)},
        )
        return ending, retention

    def _search(self) -> None:
        self._prove()
        starts = starting_points(self.instance, self.pool, self.pace, self.parts, is_hopeless=self.is_hopeless)
        self._report()
        with ThreadPoolExecutor(self.threads) as executor:
            try:
                self._waves(executor, starts)
            finally:
                self.stop.set()

    def _prove(self) -> None:
        """Prove a bound on the seconds of recomputation."""
        deadline = self.pace.deadline(_BOUNDING)
        self.bound = least_recompute_seconds(self.problem, until_seconds=deadline, parts=self.parts)
        self._report()
        if self.parts.exact_per_op:
            self.bound = exact(self.problem, self.bound, limit_seconds=self.pace.seconds(_EXACTLY))
        self._report()

    def _waves(self, executor: ThreadPoolExecutor, starts: list[Start]) -> None:
        """Explore, vary and polish until the search ends."""
        wave = 0
        while (done := self.pace.done(self.moves)) < 1.0 and not self._is_optimal():
            phase = next(
                phase for phase in (_EXPLORING, _VARYING, 1.0) if phase - done > _SHORTEST_WAVE or phase == 1.0
            )
            runs = [self._make_run(starts, wave, thread, phase) for thread in range(self.threads)]
            self._wave(executor, runs, phase)
            wave += 1

    def _wave(self, executor: ThreadPoolExecutor, runs: list[AnnealRun], ends: float) -> None:
        """Run one annealing in each thread until a share of the search is done, and take their results."""
        self.running = runs
        share = ends - self.pace.done(self.moves)
        pace = self.pace.of_run(share, _MOVES_PER_INTERVAL * self.intervals)
        futures = [executor.submit(run.run, pace) for run in runs]
        while wait(futures, timeout=_REPORT_SECONDS).not_done:
            self._report()
        for future in futures:
            future.result()
        self._take_runs()

    def _make_run(self, starts: list[Start], wave: int, thread: int, phase: float) -> AnnealRun:
        """Return the run of one thread. As long as nothing fits, it may descend."""
        retention, temperatures = self._start(starts, wave, thread, phase)
        seed = int(self.random.integers(1 << 62))
        run = AnnealRun(self.instance, retention, temperatures, seed, self.stop, self.parts)
        run.descends = self.parts.descents and self.pool.best is None and (wave > 0 or thread % 2 == 1)
        return run

    def _start(self, starts: list[Start], wave: int, thread: int, phase: float) -> Start:
        """Return the starting point of a run, and its temperatures."""
        starting_point = starts[(wave * self.threads + thread) % len(starts)]
        if self.is_hopeless and wave == 0:
            return self.pool.least[1], (MILD, WIDE)[thread % 2]
        if self.pool.best is None and wave > 0:
            return self.pool.least[1] if thread == 0 else starting_point[0], MILD
        if phase == _EXPLORING or not self.pool.elite:
            return starting_point
        elite = [retention for _, retention in self.pool.elite]
        if phase == _VARYING:
            return elite[int(self.random.integers(len(elite)))], (MILD, WIDE)[thread % 2]
        return elite[min(thread, len(elite) - 1)], (NARROW, MILD)[thread % 2]

    def _take_runs(self) -> None:
        self.moves += sum(run.moves for run in self.running)
        self.pool.take(self.running)
        self.running = []

    def _is_optimal(self) -> bool:
        """Return whether the best plan takes no longer than the bound."""
        least_seconds = self.once_seconds + self.bound.seconds
        best = self.pool.best
        return best is not None and best[0].seconds <= least_seconds + PROVED_TO * self.once_seconds

    def _report(self) -> None:
        best = self.pool.best
        seconds, peak_bytes = (best[0].seconds, best[0].peak_bytes) if best else (np.inf, None)
        for run in self.running:
            if run.best_seconds < seconds:
                seconds, peak_bytes = run.best_seconds, run.best_peak_bytes
        moves = self.moves + sum(run.moves for run in self.running)
        share = 1.0 / self.once_seconds if self.once_seconds else 0.0
        recompute_seconds = max(0.0, seconds - self.once_seconds)  # sums in another order differ in the last digit
        self.problem.progress(
            Progress(
                elapsed_seconds=self.problem.clock() - self.started_seconds,
                best_overhead=recompute_seconds * share if peak_bytes is not None else None,
                best_peak_bytes=peak_bytes,
                bound_overhead=self.bound.seconds * share,
                message=f"{moves:,} moves",
            )
        )
