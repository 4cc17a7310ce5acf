"""What improving packers share: searches that work in small steps, and the loop that gives each its turn until time
is up.

Turns go by work, counted in operations that take about a nanosecond, never by the clock: the clock only says when to
stop. So the same seed gives the same sequence of layouts on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Layout, PackingProblem, Progress, make_layout

STEP_WORK = 1_000_000  # of one step: about a millisecond, so that deadlines are kept and turns are short
_NO_HEIGHT = 1 << 62

Offsets = NDArray[np.int64]


class Best:
    """The best layout so far, which all searches of one problem share, and the bounds proved on the way."""

    __slots__ = ("bound_bytes", "height_bytes", "offsets_bytes", "packer", "started")

    def __init__(self, problem: PackingProblem) -> None:
        self.started = problem.clock()  # what prepares the searches takes time, too
        self.offsets_bytes: Offsets = np.zeros(0, np.int64)
        self.height_bytes = _NO_HEIGHT if len(problem.blocks) else 0
        self.bound_bytes = problem.blocks.lower_bound_bytes
        self.packer = ""

    @property
    def proven(self) -> bool:
        """Whether no layout can be lower."""
        return self.height_bytes <= self.bound_bytes

    def offer(self, offsets_bytes: Offsets, height_bytes: int, packer: str) -> None:
        """Take this layout if it is lower than the best."""
        if height_bytes < self.height_bytes:
            self.offsets_bytes, self.height_bytes, self.packer = offsets_bytes.copy(), height_bytes, packer


# A search offers layouts to the Best it was made with, and yields the work of each step.
Steps = Iterator[int]


def search(
    problem: PackingProblem, best: Best, searches: Sequence[Steps], packer: str, *, handicaps: Sequence[int] = ()
) -> Layout:
    """Give the searches their turns, least work first, until the best is proven, all have ended, or time is up.

    A search with a handicap begins when the others have done so much work.

    The first step is always taken. A later one is not begun if, going by the longest so far, it would end too late. A
    KeyboardInterrupt ends the search with the best so far, once there is one.
    """
    try:
        _take_turns(problem, best, searches, handicaps or [0] * len(searches))
    except KeyboardInterrupt:
        if best.height_bytes == _NO_HEIGHT:
            raise
    return make_layout(problem.blocks, best.offsets_bytes, packer=packer, proven=best.proven)


def _take_turns(problem: PackingProblem, best: Best, searches: Sequence[Steps], handicaps: Sequence[int]) -> None:
    started = best.started
    work, longest = dict(enumerate(handicaps)), dict.fromkeys(range(len(searches)), 0.0)
    reported = best.height_bytes
    while work and not best.proven:
        turn = min(work, key=lambda number: (work[number], number))
        before = problem.clock()
        left = problem.time_limit_seconds - (before - started)
        expected = longest[turn] or max(longest.values())
        if reported < _NO_HEIGHT and left <= expected:
            work.pop(turn)
            continue
        done = next(searches[turn], None)
        now = problem.clock()
        if best.height_bytes < reported:
            reported = best.height_bytes
            problem.progress(Progress(seconds=now - started, height_bytes=reported, packer=best.packer))
        if done is None:
            work.pop(turn)
        else:
            work[turn] += done
            longest[turn] = max(longest[turn], now - before)
