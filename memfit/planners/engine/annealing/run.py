"""One annealing run: from a retention, at a falling temperature, to the best retention that it meets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from memfit.planners.engine.annealing.loop import anneal
from memfit.planners.engine.annealing.state import AnnealingState, make_annealing_state
from memfit.planners.engine.parts import ALL_PARTS, Parts
from memfit.planners.engine.retention.decisions import Retention, retention_of, simulated
from memfit.planners.engine.retention.instance import Instance
from memfit.planners.engine.retention.live_bytes import weigh

_MOST_SLICE_MOVES, _SLICE_WORK = 1000, 1_000_000  # between two looks at the clock: moves; moves times positions
_SQUEEZED = 0.5  # share of a run after which its aim has fallen from the start's peak to the budget
# A descent aims below the peak by a share of it that falls from the first to the last of these, so many times.
_STEPS, _TEETH = (0.3, 0.01), 3
_PENALTY_UNIT = 0.01  # share of the budget whose excess in one stage costs one mean op at the start


class AnnealRun:
    """A run of annealing that another thread may observe and stop.

    Attributes:
        descends: set before the run: aim below the lowest peak so far, until a state fits.
        moves: how many were tried.
        leanest: the retention of the lowest peak between two slices of moves.
    """

    def __init__(
        self,
        instance: Instance,
        retention: Retention,
        temperatures: tuple[float, float],
        seed: int,
        stop: threading.Event,
        parts: Parts = ALL_PARTS,
    ) -> None:
        """Set up a run.

        Args:
            instance: gives the budget.
            retention: the start.
            temperatures: at the first and the last move, in mean op seconds.
            seed: of the random moves.
            stop: ends the run when set.
            parts: kinds of moves that are switched on.
        """
        self.instance, self.retention, self.temperatures, self.stop = instance, retention, temperatures, stop
        self.descends = False
        self.annealing: AnnealingState = make_annealing_state(instance, seed, parts)
        self.moves = 0
        self.leanest = retention

    def run(self, progress: Callable[[int], float]) -> AnnealRun:
        """Anneal until `progress` of the moves so far is at least 1, or `stop` is set; return self."""
        state = simulated(self.instance, self.retention)
        totals, positions = self.annealing.totals, self.instance.tables.positions
        mean_seconds = float(positions["seconds"].sum()) / max(1, len(positions))
        totals["penalty"] = mean_seconds / (_PENALTY_UNIT * max(1, self.instance.budget_bytes))
        first, last = self.temperatures
        slice_moves = max(1, min(_MOST_SLICE_MOVES, _SLICE_WORK // max(1, len(positions))))
        start_bytes = lowest_bytes = int(weigh(state, 0)[0])
        while (done := progress(self.moves)) < 1.0 and not self.stop.is_set():
            lowers = self.descends and not np.isfinite(self.best_seconds)
            totals["aim_bytes"] = self._aim(done, lowest_bytes if lowers else start_bytes, lowers=lowers)
            totals["temperature"] = mean_seconds * first * (last / first) ** (0.0 if lowers else done)
            anneal(self.instance.tables, state, self.annealing, slice_moves, 1.0)
            self.moves += slice_moves
            if int(totals["peak_bytes"][0]) < lowest_bytes:
                lowest_bytes = int(totals["peak_bytes"][0])
                self.leanest = retention_of(state)
        return self

    def _aim(self, done: float, peak_bytes: int, *, lowers: bool) -> int:
        """Return the bytes above which stages cost: below the peak so far (`lowers`), or falling to the budget."""
        budget_bytes = self.instance.budget_bytes
        if lowers:
            first, last = _STEPS
            step = first * (last / first) ** (_TEETH * done % 1.0)
            aim_bytes = peak_bytes - int(step * (self.instance.base_bytes + peak_bytes))
            return max(aim_bytes, budget_bytes)
        wide = 0.0 if self.descends else max(0.0, 1.0 - done / _SQUEEZED)
        return budget_bytes + int(wide * max(0, peak_bytes - budget_bytes))

    @property
    def best_seconds(self) -> float:
        """Seconds of the best state that fits; infinite if none does yet."""
        return float(self.annealing.totals["best_seconds"][0])

    @property
    def best_peak_bytes(self) -> int:
        """Peak bytes of that state, residents included."""
        return int(self.annealing.totals["best_peak_bytes"][0]) + self.instance.base_bytes

    @property
    def best(self) -> Retention | None:
        """The retention of that state; valid only after the run."""
        if not np.isfinite(self.best_seconds):
            return None
        return Retention(release=self.annealing.best["release"].copy(), hold=self.annealing.best["hold"].copy())


def warm_up(instance: Instance, retention: Retention) -> None:
    """Compile all functions of a run, so that the first run has all of its time.

    Args:
        instance: the tables of the graph.
        retention: any retention of the instance.
    """
    anneal(instance.tables, simulated(instance, retention), make_annealing_state(instance, seed=0), 0, 1.0)
