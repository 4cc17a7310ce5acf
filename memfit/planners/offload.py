"""Planner `offload`: what is computed again and what goes to the host, decided together on the simulated time.

It begins with two plans: the search's without copies, and the one that keeps everything and sends away what does not
fit. In between, the search plans for larger budgets than there is, and trips to the host bring those plans down to the
budget. From the best of them on, two annealings take turns: one over the windows, with what is away out of the way, and
one over the trips, for the schedule that comes out. Where the best plan makes no trip after half of the time, as on a
slow link, the search has the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from memfit.plan import INTERRUPTED, Problem, Progress, Result
from memfit.planners.anneal_run import AnnealRun
from memfit.planners.away import Absence, Draft, absences, is_possible, make_draft, take_along, without
from memfit.planners.lean_order import lean_order
from memfit.planners.program import build_program
from memfit.planners.result import make_result
from memfit.planners.search import Search, Searched
from memfit.planners.streams import Streams, anneal, make_possible, make_streams, prune, run
from memfit.planners.trips import with_trips
from memfit.planners.windows import Windows, evaluate, free_gaps, keep_everything, simulated
from memfit.schedule import Schedule

# Of the time: the search without copies; then larger budgets; then turns, to see whether trips are of use.
_ALONE, _LEVELS, _TRIED = 0.2, 0.45, 0.55
_LEVEL = 0.06  # of the time, for the search at each larger budget
_TURN = 0.05  # of the time, at most, for each half of a turn
_WINDOW_MOVES, _TRIP_MOVES = 40, 80  # of a turn: for each gap, for each trip
_SLICE_MOVES = 500
_WARM, _COLD = (1.0, 1e-3), (0.03, 1e-4)  # temperatures in mean op seconds: for trips; for windows around them
_PENALTY_UNIT = 0.01  # as in `memfit.planners.anneal_run`
_MOST_ROOM = 0.15  # of what a plan without copies is over the budget: what trips free beyond need, for the windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Send storages to the host and compute others again, whichever costs the step less time.

    Where the problem has no host budget, or its device no link, the plan is planner `search`'s. Anytime; deterministic
    for a seed where `iterations` is given.

    Guaranteed, to rounding: where planner `search`, with the same seed and a fifth of the moves or of the time, finds a
    plan without the host, there is a plan, and it is not slower. For that search is run first, and its plan kept until
    a faster one is found. It does not hold of a planning that is interrupted before, that is given windows to start
    from, or with `rematerialize` false.
    That the plan is not slower than a search's in all of the time is not guaranteed; but where no trip is of use after
    half of it, the search has the rest, from its own best plan on.

    Source: DESIGN.md, section 2 (three streams); recomputation and swapping planned over a simulator as in "GPU
    memory management for deep neural networks using deep Q-network" (2020), by annealing instead.
    """

    name: ClassVar[str] = "offload"
    source: ClassVar[str] = "annealing over retention windows and trips to the host, on the simulated time"

    iterations: int | None = field(
        default=None, metadata={"help": "moves to try in all, in place of the time limit: the same plan on any machine"}
    )
    threads: int = field(default=2, metadata={"help": "runs at a time; they are part of what a seed determines"})
    rematerialize: bool = field(default=True, metadata={"help": "false: send storages to the host and nothing else"})

    def plan(self, problem: Problem) -> Result:
        """Return the best plan found within the problem's time limit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        return self.plan_from(problem).result

    def plan_from(self, problem: Problem, warm: Sequence[Windows] = ()) -> Searched:
        """Return the best plan found, and its windows; `warm` are windows for the same graph to start from as well."""
        if not has_link(problem):
            return _search(self, 1.0).plan_from(problem, warm)
        return _Offloading(self, problem, warm).run()


def has_link(problem: Problem) -> bool:
    """Return whether anything may be copied to the host and back."""
    return problem.host_budget_bytes > 0 and problem.device.has_link


def _unheard(_: Progress) -> None:
    """Take a report about another budget."""


def _search(options: Offload, share: float) -> Search:
    iterations = None if options.iterations is None else max(1, int(share * options.iterations))
    return Search(iterations=iterations, threads=options.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Windows, and the trips around them.

    `schedule` is None where they do not fit, and `seconds` infinite. `kept_bytes` is the peak with no trips.
    """

    seconds: float
    kept_bytes: int
    peak_bytes: int
    schedule: Schedule | None
    windows: Windows
    away: tuple[Absence, ...] = ()
    moves: int = 0


class _Offloading:
    def __init__(self, options: Offload, problem: Problem, warm: Sequence[Windows]) -> None:
        self.options, self.problem, self.warm = options, problem, warm
        self.started_seconds = problem.clock()
        self.program = build_program(problem, lean_order(problem.graph, problem.device))
        self.random = np.random.default_rng(problem.seed)
        self.moves = 0
        self.stop = threading.Event()
        self.best = _Found(
            seconds=np.inf, kept_bytes=0, peak_bytes=0, schedule=None, windows=keep_everything(self.program)
        )
        self.unplanned = self.best  # with everything kept, but for its trips
        self.least_bytes: int | None = None
        seconds = self.program.tables.positions["seconds"]
        self.once_seconds = float(seconds.sum())
        self.mean_seconds = self.once_seconds / max(1, len(seconds))

    def run(self) -> Searched:
        stats: dict[str, float] = {}
        try:
            self._plan()
        except KeyboardInterrupt:  # the best so far is the answer; whoever called knows of the interruption
            self.stop.set()
            stats[INTERRUPTED] = 1.0
        result = make_result(
            self.problem,
            self.best.schedule,
            planner=Offload.name,
            started_seconds=self.started_seconds,
            least_found_bytes=self.least_bytes,
            stats={**stats, "moves": float(self.moves)},
        )
        return Searched(result=result, windows=self.best.windows)

    def _plan(self) -> None:
        everything = keep_everything(self.program)
        unplanned = self.unplanned = self._take(self._with_trips(everything, self._seed()))
        if unplanned.kept_bytes <= self.problem.budget_bytes:
            return
        if not self.options.rematerialize:
            while not self._is_done(1.0):
                self._take(self._with_trips(everything, self._seed()))
            return
        self._try_levels(unplanned)
        self._take_turns(_TRIED)
        if not self.best.away and not self._is_done(1.0):
            self._search_at(self.problem.budget_bytes, 1.0 - self._done())
        self._take_turns(1.0)

    def _take_turns(self, until: float) -> None:
        """Turns from the best plan on, one a thread, until a share of the time is up; none where nothing fits yet."""
        with ThreadPoolExecutor(self.options.threads) as pool:
            try:
                while self.best.schedule is not None and not self._is_done(until):
                    seeds = [self._seed() for _ in range(self.options.threads)]
                    for found in pool.map(partial(self._turn, self.best), seeds):
                        self._take(found)
            except KeyboardInterrupt:
                self.stop.set()
                raise

    def _search_at(self, budget_bytes: int, share: float) -> _Found:
        """Search without copies at a budget, then bring what was found down to the problem's by trips."""
        limit_seconds = share * self.problem.time_limit_seconds
        problem = replace(
            self.problem,
            budget_bytes=budget_bytes,
            host_budget_bytes=0,
            time_limit_seconds=limit_seconds,
            progress=self.problem.progress if budget_bytes == self.problem.budget_bytes else _unheard,
        )
        searched = _search(self.options, share).plan_from(problem, self.warm)
        self.moves += int(searched.result.stats["moves"])
        self.warm = (searched.windows,)
        alone = self._take(self._alone(searched))
        if INTERRUPTED in searched.result.stats:
            raise KeyboardInterrupt
        if alone.schedule is not None:
            return alone
        return self._take(self._with_trips(searched.windows, self._seed(), self.unplanned.away))

    def _try_levels(self, unplanned: _Found) -> None:
        """Search at budgets between the problem's and the unplanned peak: first in the middle, then beside the best."""
        budget_bytes = self.problem.budget_bytes
        seconds = {
            budget_bytes: self._search_at(budget_bytes, _ALONE).seconds,
            unplanned.kept_bytes: unplanned.seconds,
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

    def _turn(self, best: _Found, seed: int) -> _Found:
        """Free more bytes by trips than are needed, use them to compute less again, then choose the trips anew."""
        random = np.random.default_rng(seed)
        draft = make_draft(self.program, self.problem, best.windows)
        room = random.random() * _MOST_ROOM * max(0, draft.peak_bytes - self.problem.budget_bytes)
        take_along(draft, best.away)
        streams = self._choose_trips(draft, int(random.integers(1 << 62)), _WARM, room_bytes=int(room))
        away = absences(draft)
        program = without(self.program, away)
        moves = int(streams.totals["tried"][0])
        if free_gaps(program) == 0 or not is_possible(program, best.windows):
            return self._with_trips(best.windows, int(random.integers(1 << 62)), away)
        annealing = AnnealRun(program, best.windows, _COLD, int(random.integers(1 << 62)), self.stop)
        annealing.run(self._pace(_WINDOW_MOVES * free_gaps(program)))
        windows = annealing.best or annealing.leanest
        found = self._with_trips(windows, int(random.integers(1 << 62)), away)
        return replace(found, moves=found.moves + moves + annealing.moves)

    def _alone(self, searched: Searched) -> _Found:
        """Return what a search without copies found: its own plan where that fits, as is guaranteed."""
        evaluation = evaluate(self.program, simulated(self.program, searched.windows))
        plan = searched.result.plan
        fits = plan is not None and plan.predicted.peak_bytes <= self.problem.budget_bytes
        return _Found(
            seconds=plan.predicted.seconds if plan is not None and fits else np.inf,
            kept_bytes=evaluation.peak_bytes,
            peak_bytes=evaluation.peak_bytes,
            schedule=plan.schedule if plan is not None and fits else None,
            windows=searched.windows,
        )

    def _with_trips(self, windows: Windows, seed: int, away: Sequence[Absence] = ()) -> _Found:
        """Return the best choice of trips around these windows, from those of `away` on."""
        draft = make_draft(self.program, self.problem, windows)
        take_along(draft, away)
        streams = self._choose_trips(draft, seed, _WARM)
        fits = bool(np.isfinite(streams.totals["best_seconds"][0]))
        if fits:
            draft.trips.trips["made"] = streams.best
            prune(streams)
        run(streams)
        return _Found(
            seconds=float(streams.totals["seconds"][0]) if fits else np.inf,
            kept_bytes=draft.peak_bytes,
            peak_bytes=int(streams.totals["peak_bytes"][0]),
            schedule=with_trips(draft.trips) if fits else None,
            windows=windows,
            away=tuple(absences(draft)),
            moves=int(streams.totals["tried"][0]),
        )

    def _choose_trips(self, draft: Draft, seed: int, temperatures: tuple[float, float], room_bytes: int = 0) -> Streams:
        """Anneal over the trips of `draft` until they fit into the budget less `room_bytes`."""
        problem = self.problem
        streams = make_streams(draft.trips, problem.budget_bytes - room_bytes, problem.host_budget_bytes, seed)
        make_possible(streams)
        totals, pace = streams.totals, self._pace(_TRIP_MOVES * len(draft.trips.trips))
        totals["penalty"] = self.mean_seconds / (_PENALTY_UNIT * max(1, problem.budget_bytes))
        first, last = temperatures
        while (done := pace(int(totals["tried"][0]))) < 1.0 and not self.stop.is_set():
            totals["temperature"] = self.mean_seconds * first * (last / first) ** done
            anneal(streams, _SLICE_MOVES, 1.0)
            if len(draft.trips.trips) == 0:
                break
        return streams

    def _pace(self, moves: int) -> Callable[[int], float]:
        """Return what says how far an annealing is, by its moves: the last of `moves`, or half a turn's time."""
        if self.options.iterations is not None:
            return lambda made: made / max(1, moves)
        begun, length = self.problem.clock(), max(_TURN * self.problem.time_limit_seconds, 1e-9)
        return lambda made: max(made / max(1, moves), (self.problem.clock() - begun) / length)

    def _take(self, found: _Found) -> _Found:
        """Remember the fastest that fits, and the least peak; report."""
        self.moves += max(found.moves, _SLICE_MOVES)  # where nothing can be changed, that ends too
        if found.schedule is not None and found.seconds < self.best.seconds:
            self.best = found
        self.least_bytes = min(found.peak_bytes, self.least_bytes or found.peak_bytes)
        fits = self.best.schedule is not None
        self.problem.progress(
            Progress(
                elapsed_seconds=self.problem.clock() - self.started_seconds,
                best_overhead=max(0.0, self.best.seconds / max(self.once_seconds, 1e-12) - 1.0) if fits else None,
                best_peak_bytes=self.best.peak_bytes if fits else None,
                message=f"{self.moves:,} moves, {len(self.best.away)} trips to the host",
            )
        )
        return found

    def _is_done(self, share: float) -> bool:
        return self._done() >= share

    def _done(self) -> float:
        """The share of the moves, or of the time, that is used up."""
        if self.options.iterations is not None:
            return self.moves / max(1, self.options.iterations)
        elapsed_seconds = self.problem.clock() - self.started_seconds
        return elapsed_seconds / max(self.problem.time_limit_seconds, 1e-9)

    def _seed(self) -> int:
        return int(self.random.integers(1 << 62))
