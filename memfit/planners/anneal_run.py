"""One annealing run: from windows, through a falling temperature, to the best windows on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from memfit.planners.anneal import anneal
from memfit.planners.course import Course, make_course
from memfit.planners.program import Program
from memfit.planners.spans import weigh
from memfit.planners.windows import Windows, simulated

_MOST_SLICE_MOVES, _SLICE_WORK = 1000, 1_000_000  # between two looks at the clock: moves, and these times positions
_SQUEEZED = 0.5  # of a run: by then what is aimed at has come down from the start's peak to the budget
_STEPS, _TEETH = (0.3, 0.01), 3  # of the peak: how far below it a descent aims, from far to near; and how often anew
_PENALTY_UNIT = 0.01  # of the budget: one mean op for so many bytes of excess in one stage, to begin with


class AnnealRun:
    """A run of annealing that another thread may look at, and stop."""

    def __init__(
        self, program: Program, windows: Windows, temperatures: tuple[float, float], seed: int, stop: threading.Event
    ) -> None:
        """Set up a run from `windows`, with temperatures in mean op seconds from the first to the last move.

        Before it starts, it may be told to descend: to aim below the lowest peak that it has seen, until a state fits;
        and to overshoot: to aim below the budget meanwhile, where fewer states are dead ends.
        """
        self.program, self.windows, self.temperatures, self.stop = program, windows, temperatures, stop
        self.descends, self.overshoots = False, False
        self.course: Course = make_course(program, seed)
        self.moves = 0
        self.leanest = windows  # of the states between two slices

    def run(self, progress: Callable[[int], float]) -> AnnealRun:
        """Anneal until `progress` of the moves made so far is 1 or more, or somebody stops it; return itself."""
        state = simulated(self.program, self.windows)
        totals, positions = self.course.totals, self.program.tables.positions
        mean_seconds = float(positions["seconds"].sum()) / max(1, len(positions))
        totals["penalty"] = mean_seconds / (_PENALTY_UNIT * max(1, self.program.budget_bytes))
        first, last = self.temperatures
        slice_moves = max(1, min(_MOST_SLICE_MOVES, _SLICE_WORK // max(1, len(positions))))
        start_bytes = lowest_bytes = int(weigh(state, 0)[0])
        while (done := progress(self.moves)) < 1.0 and not self.stop.is_set():
            lowers = self.descends and not np.isfinite(self.best_seconds)
            totals["aim_bytes"] = self._aim(done, lowest_bytes if lowers else start_bytes, lowers=lowers)
            totals["temperature"] = mean_seconds * first * (last / first) ** (0.0 if lowers else done)
            anneal(self.program.tables, state, self.course, slice_moves, 1.0)
            self.moves += slice_moves
            if int(totals["peak_bytes"][0]) < lowest_bytes:
                lowest_bytes = int(totals["peak_bytes"][0])
                self.leanest = Windows(release=state.gaps["release"].copy(), hold=state.gaps["hold"].copy())
        return self

    def _aim(self, done: float, peak_bytes: int, *, lowers: bool) -> int:
        """Return the bytes above which a stage costs: below the peak so far, or from the start's down to the budget."""
        budget_bytes = self.program.budget_bytes
        if lowers:
            first, last = _STEPS
            step = first * (last / first) ** (_TEETH * done % 1.0)
            aim_bytes = peak_bytes - int(step * (self.program.base_bytes + peak_bytes))
            return aim_bytes if self.overshoots else max(aim_bytes, budget_bytes)
        wide = 0.0 if self.descends else max(0.0, 1.0 - done / _SQUEEZED)
        return budget_bytes + int(wide * max(0, peak_bytes - budget_bytes))

    @property
    def best_seconds(self) -> float:
        """The seconds of the best state that fits; infinite as long as none does."""
        return float(self.course.totals["best_seconds"][0])

    @property
    def best_peak_bytes(self) -> int:
        """The peak of that state, residents included."""
        return int(self.course.totals["best_peak_bytes"][0]) + self.program.base_bytes

    @property
    def best(self) -> Windows | None:
        """The windows of that state; only after the run has ended."""
        if not np.isfinite(self.best_seconds):
            return None
        return Windows(release=self.course.best["release"].copy(), hold=self.course.best["hold"].copy())


def warm_up(program: Program, windows: Windows) -> None:
    """Compile all that a run needs, so that the first one does not pay for it."""
    anneal(program.tables, simulated(program, windows), make_course(program, seed=0), 0, 1.0)
