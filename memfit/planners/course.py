"""The course of an annealing: what it may change, what it has found, and its random draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled
from memfit.planners.program import KEPT, Program, Table

MOST_CHANGES = 64  # windows changed by one move

_TRIES = 8  # draws for a gap over the peak before any gap will do
_BEST = np.dtype([("release", np.int64), ("hold", np.int64)], align=True)
_CHANGED = np.dtype([("gap", np.int64), ("release", np.int64), ("hold", np.int64)], align=True)
_TOTALS = np.dtype(
    [
        ("random", np.uint64),
        ("budget_bytes", np.int64),
        ("aim_bytes", np.int64),
        ("temperature", np.float64),
        ("penalty", np.float64),
        ("cost", np.float64),
        ("excess", np.float64),
        ("peak_bytes", np.int64),
        ("peak_stage", np.int64),
        ("best_seconds", np.float64),
        ("best_peak_bytes", np.int64),
        ("best_is_current", np.bool_),
        ("dropped", np.int64),
        ("changes", np.int64),
        ("accepted", np.int64),
        ("tried", np.int64),
    ],
    align=True,
)


class Course(NamedTuple):
    """What annealing remembers.

    Attributes:
        turning: the gaps that last from forward to backward, where dropping pays; the dropped ones come first.
        place: gap -> its place in `turning`, or -1.
        ordered: the same gaps by where they start.
        other: all other gaps that may be changed to some effect.
        best: the windows of the best state.
        changed: the windows that the move at hand replaced.
        totals: one record. `penalty` is seconds for each byte above `aim_bytes`, summed over stages; `best_seconds` is
            infinite until a state fits the budget; `dropped` counts the dropped gaps in `turning`.
    """

    turning: NDArray[np.int64]
    place: NDArray[np.int64]
    ordered: NDArray[np.int64]
    other: NDArray[np.int64]
    best: Table
    changed: Table
    totals: Table


def make_course(program: Program, seed: int) -> Course:
    """Return a fresh course within the program's budget: no best state yet."""
    gaps, storages = program.tables.gaps, program.tables.storages
    size = storages["size_bytes"][gaps["storage"]]
    useful = (gaps["rule"] != KEPT) & (gaps["end"] - gaps["start"] > 1) & (size > 0)
    turns = (gaps["start"] < program.backward_start) & (gaps["end"] >= program.backward_start)
    turning = np.flatnonzero(useful & turns)
    place = np.full(len(gaps), -1, np.int64)
    place[turning] = np.arange(len(turning))
    totals = np.zeros(1, _TOTALS)
    totals["random"] = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    totals["budget_bytes"] = program.budget_bytes
    totals["aim_bytes"] = program.budget_bytes
    totals["best_seconds"] = np.inf
    return Course(
        turning=turning,
        place=place,
        ordered=turning[np.argsort(gaps["start"][turning], kind="stable")],
        other=np.flatnonzero(useful & ~turns),
        best=np.zeros(len(gaps), _BEST),
        changed=np.zeros(MOST_CHANGES, _CHANGED),
        totals=totals,
    )


@compiled
def draw(course: Any) -> float:
    """Return a random number in [0, 1) (Marsaglia 2003, xorshift64)."""
    bits = course.totals[0].random
    bits ^= bits << np.uint64(13)
    bits ^= bits >> np.uint64(7)
    bits ^= bits << np.uint64(17)
    course.totals[0].random = bits
    return float(bits >> np.uint64(11)) / 9007199254740992.0


@compiled
def draw_turning(tables: Any, course: Any, first: int, end: int, over_peak: bool) -> int:
    """Return a random gap of `turning[first:end]`, or -1 where that is empty.

    One that lasts over the peak, where `over_peak` says so and a few draws find one.
    """
    if first >= end:
        return -1
    peak, gap = course.totals[0].peak_stage, -1
    for _ in range(_TRIES):
        gap = course.turning[first + int(draw(course) * (end - first))]
        if not over_peak or (tables.gaps[gap].start < peak and peak < tables.gaps[gap].end):
            break
    return gap


@compiled
def sort_turning(state: Any, course: Any) -> None:
    """Bring the dropped gaps of `turning` to its start."""
    totals = course.totals[0]
    totals.dropped = 0
    for index in range(len(course.turning)):
        file_gap(state, course, course.turning[index])


@compiled
def file_gap(state: Any, course: Any, gap: int) -> None:
    """Bring one gap to its side of `turning`, after its window has changed."""
    totals, place = course.totals[0], course.place[gap]
    if place < 0:
        return
    dropped = state.gaps[gap].release < state.gaps[gap].hold
    if dropped == (place < totals.dropped):
        return
    if not dropped:
        totals.dropped -= 1
    border = totals.dropped
    other = course.turning[border]
    course.turning[border] = gap
    course.turning[place] = other
    course.place[gap] = border
    course.place[other] = place
    if dropped:
        totals.dropped += 1
