"""Planner `search`, the default: simulated annealing over windows of retention, with the exact simulation as
objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.plan import Problem, Progress, Result
from memfit.planners.anneal import anneal
from memfit.planners.course import Course, make_course
from memfit.planners.emit import emit
from memfit.planners.incremental import State
from memfit.planners.order import update_at_once_order
from memfit.planners.program import build_program
from memfit.planners.result import make_result
from memfit.planners.sublinear import Frontier
from memfit.planners.windows import Evaluation, Windows, evaluate, keep_everything, keep_only, simulated

_FIRST_SHARE, _SECOND_SHARE = 0.6, 0.75  # of the search: from keeping everything, then from segments, then the best
_REPORT_SECONDS = 0.05
_SLICE_MOVES = 1000  # between two changes of temperature and penalty
_SEED_SPLITS = 12  # segment sizes tried as starting points, spread evenly on a logarithmic scale
_PENALTY_UNIT = 0.01  # of the budget: one mean op for so many bytes of excess in one stage


_WIDE = (0.3, 1e-3)  # temperature in mean op seconds, from the first to the last move of a start, geometrically
_NARROW = (0.03, 1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Anneal over what is kept between any two uses of a storage.

    Starting points are keeping everything and Chen's segments of several sizes. Anytime: the best plan so far is the
    answer when time is up or Ctrl-C comes. Deterministic for a seed where `iterations` is given; a time limit depends
    on the machine's speed.

    Source: DESIGN.md, section 4; Kirkpatrick et al. 1983 (annealing); Jain et al. 2020 (retention by stage).
    """

    name: ClassVar[str] = "search"
    source: ClassVar[str] = "simulated annealing over retention windows"

    iterations: int | None = field(
        default=None, metadata={"help": "moves to try in all, in place of the time limit: the same plan on any machine"}
    )

    def plan(self, problem: Problem) -> Result:
        """Return the best plan found within the problem's time limit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        return _Search(self, problem).run()


class _Search:
    def __init__(self, options: Search, problem: Problem) -> None:
        self.options = options
        self.problem = problem
        self.started_seconds = problem.clock()
        self.program = build_program(problem, update_at_once_order(problem.graph))
        self.course: Course = make_course(self.program, problem.seed)
        self.unplanned_seconds = float(self.program.tables.positions["seconds"].sum())
        self.best: Evaluation | None = None
        self.least: Evaluation | None = None
        self.moves = 0

    def run(self) -> Result:
        try:
            self._search()
        except KeyboardInterrupt:  # the best so far is the answer; whoever called knows of the interruption
            if self._has_fitting():
                self._look_at(self._best_windows())
        chosen = self.best or self.least
        return make_result(
            self.problem,
            emit(self.program, chosen.sequence) if chosen is not None else None,
            planner="search",
            started_seconds=self.started_seconds,
            least_found_bytes=self.least.peak_bytes if self.least is not None else None,
            stats={"moves": float(self.moves)},
        )

    def _search(self) -> None:
        self._look_at(keep_everything(self.program))
        if self.best is not None or len(self.course.turning) + len(self.course.other) == 0:
            return  # nothing has to go, or nothing can
        seeds = [(self._look_at(windows), windows) for windows in self._segments()]
        ended = self._anneal(keep_everything(self.program), _WIDE, _FIRST_SHARE)
        fitting = [seed for seed in seeds if seed[0].peak_bytes <= self.problem.budget_bytes]
        if fitting:
            fastest = min(fitting, key=lambda seed: seed[0].seconds)[1]
            self._anneal(fastest, _WIDE, _SECOND_SHARE)
        self._anneal(self._best_windows() if self._has_fitting() else ended, _NARROW, 1.0)

    def _segments(self) -> list[Windows]:
        """Chen's segments of all sizes, from one candidate to half of everything."""
        frontier = Frontier.of(self.program)
        largest = max(2, sum(frontier.written_bytes) // 2)
        sizes = np.geomspace(max(1, largest / 500), largest, _SEED_SPLITS)
        kept = dict.fromkeys(frontier.split(int(size)).kept for size in (0, *sizes))
        return [keep_only(self.program, storages) for storages in kept]

    def _look_at(self, windows: Windows) -> Evaluation:
        evaluation = evaluate(self.program, simulated(self.program, windows))
        self._remember(evaluation)
        return evaluation

    def _remember(self, evaluation: Evaluation) -> None:
        if self.least is None or (evaluation.peak_bytes, evaluation.seconds) < (
            self.least.peak_bytes,
            self.least.seconds,
        ):
            self.least = evaluation
        fits = evaluation.peak_bytes <= self.problem.budget_bytes
        if fits and (self.best is None or evaluation.seconds < self.best.seconds):
            self.best = evaluation

    def _anneal(self, windows: Windows, temperature: tuple[float, float], until: float) -> Windows:
        """Anneal from `windows` until this share of the whole search is done; return where it ended."""
        state = simulated(self.program, windows)
        totals = self.course.totals
        mean_seconds = self.unplanned_seconds / max(1, len(self.problem.graph.ops))
        totals["penalty"] = mean_seconds / (_PENALTY_UNIT * max(1, self.program.budget_bytes))
        first, last = temperature
        begun, reported = self._done(), self.problem.clock()
        while (done := self._done()) < until:
            progress = (done - begun) / max(until - begun, 1e-9)
            totals["temperature"] = mean_seconds * first * (last / first) ** progress
            anneal(self.program.tables, state, self.course, _SLICE_MOVES, 1.0)
            self.moves += _SLICE_MOVES
            if self.problem.clock() - reported > _REPORT_SECONDS:
                reported = self.problem.clock()
                self._report()
        self._keep(state)
        return Windows(release=state.gaps["release"].copy(), hold=state.gaps["hold"].copy())

    def _keep(self, state: State) -> None:
        """Remember the best state of a start, and the one that it ended in."""
        self._remember(evaluate(self.program, state))
        if self._has_fitting():
            self._look_at(self._best_windows())

    def _has_fitting(self) -> bool:
        return bool(np.isfinite(self.course.totals["best_seconds"][0]))

    def _best_windows(self) -> Windows:
        return Windows(release=self.course.best["release"].copy(), hold=self.course.best["hold"].copy())

    def _done(self) -> float:
        """The share of the search that is done."""
        if self.options.iterations is not None:
            return self.moves / max(1, self.options.iterations)
        limit = max(self.problem.time_limit_seconds, 1e-9)
        return (self.problem.clock() - self.started_seconds) / limit

    def _report(self) -> None:
        seconds = float(self.course.totals["best_seconds"][0])
        found = np.isfinite(seconds)
        peak = int(self.course.totals["best_peak_bytes"][0]) + self.program.base_bytes
        if self.best is not None and (not found or self.best.seconds < seconds):
            seconds, peak, found = self.best.seconds, self.best.peak_bytes, True
        tell: Callable[[Progress], None] = self.problem.progress
        tell(
            Progress(
                elapsed_seconds=self.problem.clock() - self.started_seconds,
                best_overhead=seconds / self.unplanned_seconds - 1.0 if found and self.unplanned_seconds else None,
                best_peak_bytes=peak if found else None,
                message=f"{self.moves:,} moves",
            )
        )
