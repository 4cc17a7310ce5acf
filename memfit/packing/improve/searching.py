"""The loop of improving packers: searches work in small steps and take turns until the time limit.

Turns are given by work, counted in operations of about a nanosecond, and not by the clock, which only ends the search.
So the same seed gives the same sequence of layouts on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Layout, PackingProblem, PackingProgress, make_layout

STEP_WORK = 1_000_000  # of one step: about a millisecond, so that deadlines are kept and turns are short
_NO_HEIGHT = 1 << 62

Offsets = NDArray[np.int64]


class Best:
    """The best layout so far, which all searches of one problem share, and the bounds proved on the way."""

    __slots__ = ("bound_bytes", "height_bytes", "offsets_bytes", "packer", "sizes_bytes", "started")

    def __init__(self, problem: PackingProblem) -> None:
        self.started = problem.clock()  # preparing the searches takes time, too
        self.sizes_bytes = problem.blocks.sizes_bytes
        self.offsets_bytes: Offsets = np.zeros(0, np.int64)
        self.height_bytes = _NO_HEIGHT if len(problem.blocks) else 0
        self.bound_bytes = problem.blocks.lower_bound_bytes
        self.packer = ""

    @property
    def proven(self) -> bool:
        """Whether no layout can be lower."""
        return self.height_bytes <= self.bound_bytes

    def offer(self, offsets_bytes: Offsets, packer: str) -> None:
        """Take this layout if it is lower than the best.

        Args:
            offsets_bytes: int64[blocks].
            packer: the part that found it.
        """
        height_bytes = int((offsets_bytes + self.sizes_bytes).max(initial=0))
        if height_bytes < self.height_bytes:
            self.offsets_bytes, self.height_bytes, self.packer = offsets_bytes.copy(), height_bytes, packer


# A search offers layouts to the Best it was made with, and yields the work of each step.
Steps = Iterator[int]


class Turns(NamedTuple):
    """A search, and how it takes turns with others.

    Attributes:
        steps: yields the work of each step.
        handicap: the work that each of the others does before this one begins.
        weight: how many times its own work counts; more gives it fewer turns.
    """

    steps: Steps
    handicap: int = 0
    weight: int = 1


def require_limit(packer: str, option: str, limit: int) -> None:
    """Return if a limit by count is not negative; 0 is no limit.

    Args:
        packer: its name, for the message.
        option: the name of the limit, for the message.
        limit: the value.

    Raises:
        InvalidOptionError: it is negative; the message names the packer and the option.
    """
    if limit < 0:
        raise InvalidOptionError(f"{packer} has {option} {limit}, expected 0 (no limit) or more")


def search(
    problem: PackingProblem, best: Best, searches: Sequence[Turns], packer: str, *, most_work: int | None = None
) -> Layout:
    """Give the searches their turns, least work first, until the best is proven, all have ended, or time is up.

    The first step is always taken. A later step is not begun if, going by the longest step so far, it would end too
    late. A KeyboardInterrupt ends the search with the best layout so far, if there is one.

    Args:
        problem: its clock and its time limit end the search.
        best: the layout that all searches improve.
        searches: in the order in which ties are broken.
        packer: the name that the layout gets.
        most_work: the search ends after the step in which the work of all steps reaches it; none is no limit.
    """
    try:
        _take_turns(problem, best, searches, most_work)
    except KeyboardInterrupt:
        if best.height_bytes == _NO_HEIGHT:
            raise
    return make_layout(problem.blocks, best.offsets_bytes, packer=packer, proven=best.proven)


def _take_turns(problem: PackingProblem, best: Best, searches: Sequence[Turns], most_work: int | None) -> None:
    started = best.started
    work = {number: turns.handicap for number, turns in enumerate(searches)}
    longest = dict.fromkeys(work, 0.0)
    reported, left_work = best.height_bytes, most_work
    while work and not best.proven and (left_work is None or left_work > 0):
        turn = min(work, key=lambda number: (work[number], number))
        before = problem.clock()
        left = problem.time_limit_seconds - (before - started)
        expected = longest[turn] or max(longest.values())
        if reported < _NO_HEIGHT and left <= expected:
            work.pop(turn)
            continue
        done = next(searches[turn].steps, None)
        now = problem.clock()
        if best.height_bytes < reported:
            reported = best.height_bytes
            problem.progress(PackingProgress(seconds=now - started, height_bytes=reported, packer=best.packer))
        if done is None:
            work.pop(turn)
            continue
        work[turn] += done * searches[turn].weight
        longest[turn] = max(longest[turn], now - before)
        left_work = None if left_work is None else left_work - done
