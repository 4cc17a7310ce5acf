"""Planner `search`: simulated annealing over windows of retention, with the exact simulation as
objective, from minimum cuts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.plan import INTERRUPTED, PROVED_TO, Problem, Progress, Result
from memfit.planners.anneal_run import AnnealRun, warm_up
from memfit.planners.blocks import Blocks, Option, option_of
from memfit.planners.bounds import least_budget_bound, least_seconds_again
from memfit.planners.cuts import Bound, kept_at
from memfit.planners.emit import emit
from memfit.planners.families import kept_by_segments
from memfit.planners.families import structured as structured_windows
from memfit.planners.lean_order import lean_order
from memfit.planners.moments import exact
from memfit.planners.nested import nested_windows
from memfit.planners.program import build_program
from memfit.planners.repeats import Repeats, spread
from memfit.planners.result import make_result, predict, unplanned_schedule
from memfit.planners.stage_program import kept_by_stages
from memfit.planners.windows import (
    Evaluation,
    Windows,
    evaluate,
    free_gaps,
    joined,
    keep_everything,
    keep_only,
    simulated,
)

_REPORT_SECONDS = 0.05
_MOST_CUTS = 16  # kept sets of minimum cuts tried as starting points
_MOVES_PER_GAP = 400  # of one run, where there is time for several; fewer get nowhere, more gain little
_EXPLORING, _JOINING = 0.55, 0.8  # of a round: from starting points; from the best; the rest polishes the best
_BOUNDING = 0.15  # of the time, at most, for the bound and its cuts
_EXACTLY = 0.05  # of the time, at most, for the exact bound at one op, and what it keeps
_STAGING = 0.2  # of the time, at most, for what an integer program of full stages keeps
_STRUCTURING = 0.1  # of the time, at most, for windows joined block by block
_FINISHING = 1.5  # times what the unplanned step takes to check and simulate, to end with: a plan is longer
_LEAST_SEARCHING = 0.5  # of the time, whatever ending takes
_MOST_FAMILIES = 1000  # windows that they are joined from
_SHORTEST = 0.02  # of a round: a wave shorter than this is added to the next
_ROUND_MOVES, _ROUND_SECONDS = 12_000, 0.02  # for each gap: a round rarely finds anything after so many
_FRESH, _MOST_FRESH = 0.5, 6  # of the search, for rounds that know nothing of each other; how many at most
_NESTED = (1, 2, 4, 8)  # results stored on each path of recursive checkpointing
_ELITE = 6  # best runs that later waves start from
# Temperatures in mean op seconds, from the first to the last move of a run.
_HOT, _WIDE, _MILD, _NARROW = (3.0, 1e-3), (0.3, 1e-3), (0.1, 1e-3), (0.03, 1e-4)

Temperatures = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Anneal over what is kept between any two uses of a storage.

    Starting points are the kept set of an integer program of the fullest stages (`memfit.planners.stage_program`),
    what a dynamic program joins block by block (`memfit.planners.families`), the kept sets of minimum cuts
    (`memfit.planners.cuts`), keeping everything, and Chen's segments of several sizes. Waves of runs start from them,
    one run a thread; later waves start from the best runs, from two of them joined, and from the best of what they do
    in each of the blocks that repeat (`memfit.planners.repeats`); the last ones polish the best. Where there is time
    for it, several such rounds begin afresh, and a last one joins the best of all. As long as nothing fits, later
    waves lower the peak itself, from the least so far, and the first wave too begins there where the budget is below
    the proved least. Anytime: the best plan so far is the answer when time is up or Ctrl-C comes, and the search ends
    early where the bound proves its plan optimal. Deterministic for a seed where `iterations` is given; a time limit
    depends on the machine's speed. Compiling, once on a machine, is not counted.

    Source: DESIGN.md, section 4; Kirkpatrick et al. 1983 (annealing); Jain et al. 2020 (retention by stage).
    """

    name: ClassVar[str] = "search"
    source: ClassVar[str] = "simulated annealing over retention windows, from minimum cuts"

    iterations: int | None = field(
        default=None, metadata={"help": "moves to try in all, in place of the time limit: the same plan on any machine"}
    )
    threads: int = field(default=2, metadata={"help": "runs at a time; they are part of what a seed determines"})

    def plan(self, problem: Problem) -> Result:
        """Return the best plan found within the problem's time limit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        return self.plan_from(problem).result

    def plan_from(self, problem: Problem, warm: Sequence[Windows] = ()) -> Searched:
        """Return the best plan found, and its windows; `warm` are windows for the same graph to start from as well."""
        return _Search(self, problem, warm).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search's result, and the best windows: of the plan, or with the least peak where none fits."""

    result: Result
    windows: Windows


class _Search:
    def __init__(self, options: Search, problem: Problem, warm: Sequence[Windows]) -> None:
        self.options, self.problem, self.warm = options, problem, warm
        self.program = build_program(problem, lean_order(problem.graph, problem.device))
        self.everything = keep_everything(self.program)
        self.random = np.random.default_rng(problem.seed)
        compiling = "compiling the search, once on a machine"
        problem.progress(Progress(elapsed_seconds=0.0, best_overhead=None, best_peak_bytes=None, message=compiling))
        warm_up(self.program, self.everything)
        self.started_seconds = problem.clock()
        self.unplanned = predict(problem, unplanned_schedule(problem))
        self.searching_seconds = self._searching_seconds()
        self.least_budget = least_budget_bound(problem)
        self.is_hopeless = problem.budget_bytes < self.least_budget[0]
        self.unplanned_seconds = float(self.program.tables.positions["seconds"].sum())
        self.bound = Bound(op=None, seconds=0.0, cuts=())
        self.best: tuple[Evaluation, Windows] | None = None
        self.least = (evaluate(self.program, simulated(self.program, self.everything)), self.everything)
        self.elite: list[tuple[float, Windows]] = []
        self.running: list[AnnealRun] = []
        self.repeats: Repeats | None = None
        self.stop = threading.Event()
        self.moves = 0
        self.gaps = free_gaps(self.program)

    def run(self) -> Searched:
        self._look_at(self.everything)
        stats: dict[str, float] = {}
        try:
            self._search()
        except KeyboardInterrupt:  # the best so far is the answer; whoever called knows of the interruption
            self.stop.set()
            self._take_over()
            stats[INTERRUPTED] = 1.0
        chosen, windows = self.best or self.least
        result = make_result(
            self.problem,
            emit(self.program, chosen.sequence),
            planner="search",
            started_seconds=self.started_seconds,
            least_found_bytes=self.least[0].peak_bytes,
            again=self.bound,
            unplanned=self.unplanned,
            least_budget=self.least_budget,
            stats={**stats, "moves": float(self.moves)},
        )
        return Searched(result=result, windows=windows)

    def _search(self) -> None:
        if self.best is not None or self.gaps == 0:
            return  # nothing has to go, or nothing can
        bounded_until = self.started_seconds + _BOUNDING * self.problem.time_limit_seconds
        self.bound = least_seconds_again(
            self.problem, until_seconds=None if self.options.iterations is not None else bounded_until
        )
        self._report()
        limit_seconds = None if self.options.iterations is not None else _EXACTLY * self.problem.time_limit_seconds
        self.bound = exact(self.problem, self.bound, limit_seconds=limit_seconds)
        self._report()
        starts = self._starting_points()
        self._report()
        with ThreadPoolExecutor(self.options.threads) as pool:
            try:
                for begins, ends in itertools.pairwise([0.0, *self._rounds()]):
                    self._round(pool, starts, begins, ends)
            finally:
                self.stop.set()

    def _rounds(self) -> list[float]:
        """Return where each round ends, as a share of the search: several that begin afresh, where there is time for
        them, and one that has the best of them all.
        """
        if self.options.iterations is not None:
            rounds = self.options.iterations / (_ROUND_MOVES * self.gaps)
        else:
            rounds = self.searching_seconds / (_ROUND_SECONDS * self.gaps)
        fresh = min(_MOST_FRESH, int(_FRESH * rounds))
        return [*(_FRESH * (number + 1) / fresh for number in range(fresh)), 1.0]

    def _round(
        self, pool: ThreadPoolExecutor, starts: list[tuple[Windows, Temperatures]], begins: float, ends: float
    ) -> None:
        """Explore, join and polish between two shares of the search; only the last round knows the best so far."""
        before = self.elite
        self.elite = before if ends == 1.0 else []
        wave = 0
        while self._done() < ends and not self._is_optimal():
            self._wave(pool, starts, wave, begins, ends)
            wave += 1
        self._keep_elite([*before, *self.elite])

    def _wave(
        self,
        pool: ThreadPoolExecutor,
        starts: list[tuple[Windows, Temperatures]],
        wave: int,
        round_begins: float,
        round_ends: float,
    ) -> None:
        """Run one annealing in each thread, and remember what comes out."""
        length = round_ends - round_begins
        done = (self._done() - round_begins) / length
        ends = next(end for end in (_EXPLORING, _JOINING, 1.0) if end - done > _SHORTEST or end == 1.0)
        self.running = []
        for thread in range(self.options.threads):
            windows, temperatures = self._start(starts, wave, thread, ends)
            seed = int(self.random.integers(1 << 62))
            run = AnnealRun(self.program, windows, temperatures, seed, self.stop)
            run.overshoots = thread % 2 == 1
            run.descends = self.best is None and (wave > 0 or run.overshoots)
            self.running.append(run)
        pace = self._pace(round_begins + ends * length)
        futures = [pool.submit(run.run, pace) for run in self.running]
        while wait(futures, timeout=_REPORT_SECONDS).not_done:
            self._report()
        for future in futures:
            future.result()
        self._take_over()

    def _start(
        self, starts: list[tuple[Windows, Temperatures]], wave: int, thread: int, ends: float
    ) -> tuple[Windows, Temperatures]:
        """Return where a run starts, and its temperatures."""
        first = wave * self.options.threads + thread
        if self.is_hopeless and wave == 0:
            return self.least[1], (_MILD, _WIDE)[thread % 2]
        if self.best is None and wave > 0:
            return self.least[1] if thread == 0 else starts[first % len(starts)][0], _MILD
        if ends == _EXPLORING or not self.elite:
            return starts[first % len(starts)]
        return self._from_best(thread, joins=ends == _JOINING)

    def _from_best(self, thread: int, *, joins: bool) -> tuple[Windows, Temperatures]:
        """Return where a run starts that comes from the best ones: two of them joined, or one of the best."""
        if not joins:
            return self.elite[min(thread, len(self.elite) - 1)][1], (_NARROW, _MILD)[thread % 2]
        repeated = self._repeated() if thread % 2 == 0 else None
        if repeated is not None:
            return repeated, _NARROW
        first, second = (int(rank) for rank in self.random.integers(len(self.elite), size=2))
        if first == second:
            return self.elite[first][1], (_MILD, _WIDE)[thread % 2]
        place = int(self.random.integers(self.program.backward_start))
        return joined(self.program, self.elite[first][1], self.elite[second][1], place), _MILD

    def _repeated(self) -> Windows | None:
        """Return windows in which repeated blocks do alike, from one of the best and a few others; None where no block
        is repeated.
        """
        repeats = self.repeats = self.repeats or Repeats.of(Blocks.of(self.program))
        chosen = {0, *(int(rank) for rank in self.random.integers(len(self.elite), size=2))}
        found = spread(repeats, [option_of(repeats.blocks, self.elite[rank][1]) for rank in sorted(chosen)])
        budget_bytes = max(1, self.problem.budget_bytes)

        def promise(option: Option) -> float:
            excess = max(0.0, option.peak_bytes / budget_bytes - 1.0)
            return option.total_seconds / max(self.unplanned_seconds, 1e-12) + excess

        return min(found, key=promise).windows if found else None

    def _take_over(self) -> None:
        """Remember what the runs have found."""
        for run in self.running:
            self.moves += run.moves
            if run.best is not None:
                evaluation = self._look_at(run.best)
                if all(evaluation.seconds != seconds for seconds, _ in self.elite):
                    self.elite.append((evaluation.seconds, run.best))
            else:
                self._look_at(run.leanest)
        self.running = []
        self._keep_elite(self.elite)

    def _keep_elite(self, runs: Sequence[tuple[float, Windows]]) -> None:
        """Keep the best of these runs, one for each time that they reached."""
        best = dict(runs)
        self.elite = sorted(best.items(), key=lambda item: item[0])[:_ELITE]

    def _starting_points(self) -> list[tuple[Windows, Temperatures]]:
        """Return where the first runs start, the most promising first: kept sets of full stages, windows joined block
        by block, kept sets of cuts, segments, everything; where none fits, the best of those and of recursion.
        """
        by_block = [] if self.is_hopeless else structured_windows(self.program, self._is_enough)
        staged = self._by_promise([] if self.is_hopeless else self._kept_by_stages())
        structured = self._by_promise([option.windows for option in by_block])
        cuts = self._by_promise(self._kept_by_cuts())
        others = self._by_promise([*kept_by_segments(self.program), self.everything])
        chosen = [(others[0], _WIDE), (self.everything, _WIDE), (self.everything, _HOT)]
        warm = [(each, _MILD) for each in self._by_promise(self.warm)]
        if cuts:
            second = cuts[min(1, len(cuts) - 1)]
            chosen = [(cuts[0], _MILD), *chosen, (second, _WIDE), (cuts[0], _HOT), (cuts[0], _NARROW)]
        if structured:
            most_promising = self._by_promise([structured[0], *cuts[:1]])[0]
            chosen = [(structured[0], _NARROW), (most_promising, _MILD), *chosen, (structured[0], _WIDE)]
        if staged and self._by_promise([*staged[:1], *structured[:1]])[0] is staged[0]:
            chosen = [(staged[0], _MILD), (staged[0], _NARROW), *chosen, (staged[0], _WIDE)]
        if self.best is None:
            for stored in _NESTED:
                self._look_at(nested_windows(self.program, stored))
            chosen = [((self.best or self.least)[1], _MILD), *chosen]
        return [*warm, *chosen]

    def _by_promise(self, windows: Sequence[Windows]) -> list[Windows]:
        """Sort by time, and by how far the peak is above the budget, both as shares."""
        found = [(self._look_at(each), each) for each in windows]
        budget_bytes = max(1, self.problem.budget_bytes)

        def promise(item: tuple[Evaluation, Windows]) -> float:
            evaluation, _ = item
            seconds = evaluation.seconds / max(self.unplanned_seconds, 1e-12)
            return seconds + max(0.0, evaluation.peak_bytes / budget_bytes - 1.0)

        return [each for _, each in sorted(found, key=promise)]

    def _is_enough(self, simulated_count: int) -> bool:
        """Whether enough families of windows have been simulated: their share of the time is up."""
        if self.options.iterations is not None:
            return simulated_count >= _MOST_FAMILIES
        share = (self.problem.clock() - self.started_seconds) / max(self.problem.time_limit_seconds, 1e-9)
        return share >= _BOUNDING + _STRUCTURING or simulated_count >= _MOST_FAMILIES

    def _kept_by_stages(self) -> list[Windows]:
        """What the integer program of full stages keeps."""
        until_seconds = self.problem.clock() + _STAGING * self.problem.time_limit_seconds
        counted = self.options.iterations is not None
        return kept_by_stages(self.program, None if counted else lambda: until_seconds - self.problem.clock())

    def _kept_by_cuts(self) -> list[Windows]:
        """The minimum cuts at the op that gives the bound, and at those beside it while there is room for more."""
        cuts = sorted(self.bound.cuts, key=lambda cut: abs(cut.op - (self.bound.op or 0)))
        kept = dict.fromkeys(kept_at(self.problem.graph, cut) for cut in cuts)
        return [keep_only(self.program, storages) for storages in list(kept)[:_MOST_CUTS]]

    def _look_at(self, windows: Windows) -> Evaluation:
        """Evaluate, and remember the fastest that fits and the least peak."""
        evaluation = evaluate(self.program, simulated(self.program, windows))
        least, _ = self.least
        if (evaluation.peak_bytes, evaluation.seconds) < (least.peak_bytes, least.seconds):
            self.least = (evaluation, windows)
        fits = evaluation.peak_bytes <= self.problem.budget_bytes
        if fits and (self.best is None or evaluation.seconds < self.best[0].seconds):
            self.best = (evaluation, windows)
        return evaluation

    def _is_optimal(self) -> bool:
        """Whether the best plan is as fast as the bound says that any is."""
        least_seconds = self.unplanned_seconds + self.bound.seconds
        return self.best is not None and self.best[0].seconds <= least_seconds + PROVED_TO * self.unplanned_seconds

    def _done(self) -> float:
        """The share of the search that is done."""
        if self.options.iterations is not None:
            return self.moves / max(1, self.options.iterations)
        return (self.problem.clock() - self.started_seconds) / self.searching_seconds

    def _searching_seconds(self) -> float:
        """The time limit, less what the last look at the plan will take, by what that took for the unplanned step."""
        limit_seconds = max(self.problem.time_limit_seconds, 1e-9)
        finishing_seconds = _FINISHING * (self.problem.clock() - self.started_seconds)
        return max(limit_seconds - finishing_seconds, _LEAST_SEARCHING * limit_seconds)

    def _pace(self, ends: float) -> Callable[[int], float]:
        """Return what says how far a run is, by its moves: to the last of its moves, or to where its wave ends."""
        wanted, share = _MOVES_PER_GAP * self.gaps, ends - self._done()
        if self.options.iterations is not None:
            moves = max(1.0, min(wanted, share * self.options.iterations / self.options.threads))
            return lambda made: made / moves
        begun, length = self.problem.clock(), max(share * self.searching_seconds, 1e-9)
        return lambda made: max(made / wanted, (self.problem.clock() - begun) / length)

    def _report(self) -> None:
        seconds, peak = (self.best[0].seconds, self.best[0].peak_bytes) if self.best else (np.inf, None)
        for run in self.running:
            if run.best_seconds < seconds:
                seconds, peak = run.best_seconds, run.best_peak_bytes
        moves = self.moves + sum(run.moves for run in self.running)
        share = 1.0 / self.unplanned_seconds if self.unplanned_seconds else 0.0
        again_seconds = max(0.0, seconds - self.unplanned_seconds)  # sums in another order differ in the last digit
        self.problem.progress(
            Progress(
                elapsed_seconds=self.problem.clock() - self.started_seconds,
                best_overhead=again_seconds * share if peak is not None else None,
                best_peak_bytes=peak,
                bound_overhead=self.bound.seconds * share,
                message=f"{moves:,} moves",
            )
        )
