"""Progress of a search: by its moves, which give the same plan on any machine, or by its time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from memfit.plan import Problem

_FINISHING = 1.5  # times the check and simulation of the unplanned step: the plan's own, at the end, take longer
_LEAST_SEARCHING = 0.5  # of the time limit is left to the search, however long its end takes


def processor_clock(threads: int) -> Callable[[], float]:
    """Return a clock for a search of this thread that other processes take nothing of.

    It counts the time in which processors worked for this thread, or for the process by the search's threads: the
    longer one.

    Args:
        threads: that search at a time, 1 or more.
    """
    own = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: max(time.clock_gettime(own), time.process_time() / threads)


class Pace:
    """Limits a search and its steps. Shares are of the whole search, from 0 at its start to 1 at its end.

    With a number of moves, time does not count. With a time limit, its last part is left for the check of the plan.
    """

    def __init__(self, problem: Problem, iterations: int | None, threads: int, started_seconds: float) -> None:
        """Begin to count.

        Args:
            problem: gives the clock and the time limit.
            iterations: moves in all; None if time counts.
            threads: runs at a time, which divide the moves among them.
            started_seconds: the problem's clock before the unplanned step was checked and simulated.
        """
        self._clock, self._started_seconds = problem.clock, started_seconds
        self._iterations, self._threads = iterations, threads
        self._limit_seconds = max(problem.time_limit_seconds, 1e-9) if iterations is None else math.inf
        left_seconds = self._limit_seconds - _FINISHING * (self._clock() - started_seconds)
        self._searching_seconds = max(left_seconds, _LEAST_SEARCHING * self._limit_seconds)

    def done(self, moves: int) -> float:
        """Return the share of the search that is done after so many moves in all."""
        if self._iterations is not None:
            return moves / max(1, self._iterations)
        return (self._clock() - self._started_seconds) / self._searching_seconds

    def of_run(self, share: float, most_moves: int) -> Callable[[int], float]:
        """Return the progress, by its moves, of one annealing run that begins now: 1 at its end.

        Args:
            share: of the search, for all threads together.
            most_moves: the run ends after so many in any case.
        """
        if self._iterations is not None:
            moves = max(1.0, min(most_moves, share * self._iterations / self._threads))
            return lambda made: made / moves
        begun, length = self._clock(), max(share * self._searching_seconds, 1e-9)
        return lambda made: max(made / most_moves, (self._clock() - begun) / length)

    def seconds(self, share: float) -> float:
        """Return this share of the time limit; infinite if moves are counted."""
        return share * self._limit_seconds

    def deadline(self, share: float) -> float:
        """Return the problem's clock at this share of the time limit; infinite if moves are counted."""
        return self._started_seconds + self.seconds(share)
