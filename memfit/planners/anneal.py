"""Annealing over windows: the compiled loop that proposes moves, follows them up, and keeps or takes them back.

See `memfit.planners.search` for what is asked of it, and `memfit.planners.incremental` for the words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.planners.incremental import change, gap_before
from memfit.planners.kernels import compiled, entry_point
from memfit.planners.program import DROPPED, KEPT, Program, Table
from memfit.planners.spans import peak_stage, settle_bytes, weigh
from memfit.planners.stages import commit, settle, take_back

MOST_CHANGES = 32  # windows changed by one move

_TRIES = 16  # draws for a gap over the peak before any gap will do
_BEST = np.dtype([("release", np.int64), ("hold", np.int64)], align=True)
_CHANGED = np.dtype([("gap", np.int64), ("release", np.int64), ("hold", np.int64)], align=True)
_COURSE = np.dtype(
    [
        ("random", np.uint64),
        ("budget_bytes", np.int64),
        ("temperature", np.float64),
        ("penalty", np.float64),
        ("cost", np.float64),
        ("excess", np.float64),
        ("peak_bytes", np.int64),
        ("peak_stage", np.int64),
        ("best_seconds", np.float64),
        ("best_peak_bytes", np.int64),
        ("best_is_current", np.bool_),
        ("changes", np.int64),
        ("accepted", np.int64),
    ],
    align=True,
)


class Course(NamedTuple):
    """What annealing remembers.

    Attributes:
        candidates: gaps that may be changed to some effect.
        weights: their cumulative weights: how likely each is drawn.
        best: the windows of the best state.
        changed: the windows that the move at hand replaced.
        totals: one record. `penalty` is seconds for each byte above the budget, summed over stages; `best_seconds` is
            infinite until a state fits.
    """

    candidates: NDArray[np.int64]
    weights: NDArray[np.float64]
    best: Table
    changed: Table
    totals: Table


def make_course(program: Program, seed: int) -> Course:
    """Return a fresh course: no best state yet."""
    gaps, storages = program.tables.gaps, program.tables.storages
    span = gaps["end"] - gaps["start"]
    size = storages["size_bytes"][gaps["storage"]]
    useful = (gaps["rule"] != KEPT) & (span > 1) & (size > 0)
    candidates = np.flatnonzero(useful)
    totals = np.zeros(1, _COURSE)
    totals["random"] = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    totals["best_seconds"] = np.inf
    return Course(
        candidates=candidates,
        weights=np.cumsum(np.sqrt(size[candidates].astype(np.float64) * span[candidates])),
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
def draw_gap(tables: Any, course: Any, over_peak: bool) -> int:
    """Return a random candidate; one that lasts over the peak, where `over_peak` says so and a few draws find one."""
    peak, gap = course.totals[0].peak_stage, 0
    last = len(course.weights) - 1
    for _ in range(_TRIES):
        wanted = draw(course) * course.weights[last]
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if course.weights[middle] > wanted:
                high = middle
            else:
                low = middle + 1
        gap = course.candidates[low]
        if not over_peak or (tables.gaps[gap].start < peak and peak < tables.gaps[gap].end):
            break
    return gap


@compiled
def give(tables: Any, state: Any, course: Any, gap: int, release: int, hold: int) -> None:
    """Change a window as part of the move at hand, if its rule allows it."""
    totals = course.totals[0]
    rule, row = tables.gaps[gap].rule, state.gaps[gap]
    if rule == KEPT or (rule == DROPPED and release >= hold) or totals.changes == MOST_CHANGES:
        return
    if row.release == release and row.hold == hold:
        return
    changed = course.changed[totals.changes]
    changed.gap = gap
    changed.release = row.release
    changed.hold = row.hold
    totals.changes += 1
    change(tables, state, gap, release, hold)


@compiled
def toggle(tables: Any, state: Any, course: Any, gap: int) -> None:
    """Keep what is dropped, or drop it: held once it is back, at times anew for each op, at times from some stage
    on.
    """
    start, end = tables.gaps[gap].start, tables.gaps[gap].end
    kind = draw(course)
    if kind < 0.05:
        give(tables, state, course, gap, start, end)
    elif kind < 0.1:
        release = start if draw(course) < 0.7 else start + int(draw(course) * (end - start))
        give(tables, state, course, gap, release, release + 1 + int(draw(course) * (end - release)))
    elif state.gaps[gap].release < state.gaps[gap].hold:
        give(tables, state, course, gap, 0, 0)
    else:
        give(tables, state, course, gap, start, start + 1)


@compiled
def shift(tables: Any, state: Any, course: Any, gap: int) -> None:
    """Swap the windows of two storages one op apart that live over the same stage: a checkpoint moves."""
    storage, end = tables.gaps[gap].storage, tables.gaps[gap].end
    first, last = tables.storages[storage].first_gap, tables.storages[storage].last_gap
    other = -1
    if draw(course) < 0.5 and last > first:
        op = tables.positions[tables.gaps[first + 1 + int(draw(course) * (last - first))].start]
        if op.write_end > op.write_start:
            other = tables.writes[op.write_start + int(draw(course) * (op.write_end - op.write_start))].storage
    else:
        op = tables.positions[tables.storages[storage].writer]
        if op.read_end > op.read_start:
            other = tables.reads[op.read_start + int(draw(course) * (op.read_end - op.read_start))].storage
    if other < 0:
        return
    around = gap_before(tables, other, end)
    kept = state.gaps[gap].release >= state.gaps[gap].hold
    if tables.gaps[around].end - tables.gaps[around].start < 2:
        return
    if kept:
        give(tables, state, course, gap, tables.gaps[gap].start, tables.gaps[gap].start + 1)
        give(tables, state, course, around, 0, 0)
    else:
        give(tables, state, course, gap, 0, 0)
        give(tables, state, course, around, tables.gaps[around].start, tables.gaps[around].start + 1)


@compiled
def propose(tables: Any, state: Any, course: Any) -> None:
    """Make a random move."""
    kind = draw(course)
    over_peak = draw(course) < 0.5
    if kind < 0.15:
        shift(tables, state, course, draw_gap(tables, course, over_peak))
        return
    changes = 1 if kind < 0.7 else 2 if kind < 0.95 else 3
    for _ in range(changes):
        toggle(tables, state, course, draw_gap(tables, course, over_peak))
        over_peak = draw(course) < 0.5


@compiled
def keep_best(state: Any, course: Any) -> None:
    """Copy the windows as they were before the move at hand, which is the best state."""
    for gap in range(len(course.best)):
        course.best[gap].release = state.gaps[gap].release
        course.best[gap].hold = state.gaps[gap].hold
    for index in range(course.totals[0].changes - 1, -1, -1):
        changed = course.changed[index]
        course.best[changed.gap].release = changed.release
        course.best[changed.gap].hold = changed.hold
    course.totals[0].best_is_current = False


@compiled
def judge(tables: Any, state: Any, course: Any) -> bool:
    """Follow up the move at hand, and keep it or take it back."""
    totals = course.totals[0]
    limit = totals.cost - totals.temperature * np.log(draw(course) + 1e-300)
    if not settle(tables, state) or state.totals[0].seconds > limit or not settle_bytes(tables, state):
        take_back(tables, state)
        return False
    peak, excess = weigh(state, totals.budget_bytes)
    cost = state.totals[0].seconds + totals.penalty * excess
    if cost > limit:
        take_back(tables, state)
        return False
    better = peak <= totals.budget_bytes and state.totals[0].seconds < totals.best_seconds
    if totals.best_is_current and not better:
        keep_best(state, course)
    commit(state)
    totals.cost = cost
    totals.excess = excess
    if peak != totals.peak_bytes or state.live_after[totals.peak_stage] + state.within[totals.peak_stage] != peak:
        totals.peak_bytes = peak
        totals.peak_stage = peak_stage(state, peak)
    if better:
        totals.best_seconds = state.totals[0].seconds
        totals.best_peak_bytes = peak
        totals.best_is_current = True
    return True


@compiled
def begin(state: Any, course: Any) -> None:
    """Weigh the state at hand, under the budget and the penalty that the course has now."""
    totals = course.totals[0]
    totals.changes = 0
    totals.peak_bytes, totals.excess = weigh(state, totals.budget_bytes)
    totals.peak_stage = peak_stage(state, totals.peak_bytes)
    totals.cost = state.totals[0].seconds + totals.penalty * totals.excess
    if totals.peak_bytes <= totals.budget_bytes and state.totals[0].seconds < totals.best_seconds:
        totals.best_seconds = state.totals[0].seconds
        totals.best_peak_bytes = totals.peak_bytes
        totals.best_is_current = True


@compiled
def finish(state: Any, course: Any) -> None:
    """Leave the best windows where they can be read."""
    course.totals[0].changes = 0
    if course.totals[0].best_is_current:
        keep_best(state, course)
        course.totals[0].best_is_current = True


@entry_point
def sweep(tables: Any, state: Any, course: Any, gaps: Any) -> None:
    """Toggle each of `gaps` in turn, and keep what lowers the cost: a descent at one price for bytes."""
    begin(state, course)
    totals = course.totals[0]
    totals.temperature = 0.0
    for index in range(len(gaps)):
        gap = gaps[index]
        totals.changes = 0
        if state.gaps[gap].release < state.gaps[gap].hold:
            give(tables, state, course, gap, 0, 0)
        else:
            give(tables, state, course, gap, tables.gaps[gap].start, tables.gaps[gap].start + 1)
        if totals.changes > 0 and judge(tables, state, course):
            totals.accepted += 1
    finish(state, course)


@entry_point
def anneal(tables: Any, state: Any, course: Any, moves: int, cooling: float, stiffening: float) -> None:
    """Try `moves` moves; after each, temperature and penalty are multiplied by `cooling` and `stiffening`."""
    begin(state, course)
    totals = course.totals[0]
    for _ in range(moves):
        totals.changes = 0
        propose(tables, state, course)
        if totals.changes > 0 and judge(tables, state, course):
            totals.accepted += 1
        totals.temperature *= cooling
        totals.penalty *= stiffening
        totals.cost = state.totals[0].seconds + totals.penalty * totals.excess
    finish(state, course)
