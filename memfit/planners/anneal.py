"""Annealing over windows: the compiled loop that follows moves up, and keeps them or takes them back.

See `memfit.planners.search` for what is asked of it, and `memfit.planners.incremental` for the words.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.compiled import compiled, entry_point
from memfit.planners.course import draw, file_gap, sort_turning
from memfit.planners.moves import propose
from memfit.planners.spans import held_in, peak_stage, settle_bytes, weigh
from memfit.planners.stages import commit, settle, take_back

_ADAPT_EVERY = 100  # moves between two changes of the penalty
_STIFFER, _SOFTER = 1.02, 0.98  # its factor when the state at hand is above the budget, or within it


@entry_point
def anneal(tables: Any, state: Any, course: Any, moves: int, cooling: float) -> None:
    """Try `moves` moves; after each, the temperature is multiplied by `cooling`.

    The penalty follows the state: it grows while that is above what is aimed at (in the end, the budget) and falls
    while it fits, so that the search stays near the border, where the best states are (strategic oscillation; Glover
    1989).
    """
    begin(state, course)
    totals = course.totals[0]
    for _ in range(moves):
        totals.tried += 1
        totals.changes = 0
        propose(tables, state, course)
        if totals.changes > 0 and judge(tables, state, course):
            totals.accepted += 1
        totals.temperature *= cooling
        if totals.tried % _ADAPT_EVERY == 0:
            totals.penalty *= _SOFTER if totals.peak_bytes <= totals.aim_bytes else _STIFFER
            totals.cost = state.totals[0].seconds + totals.penalty * totals.excess
    finish(state, course)


@compiled
def begin(state: Any, course: Any) -> None:
    """Weigh the state at hand, under the budget and the penalty that the course has now."""
    totals = course.totals[0]
    totals.changes = 0
    totals.peak_bytes, totals.excess = weigh(state, totals.aim_bytes)
    totals.peak_stage = peak_stage(state, totals.peak_bytes)
    totals.cost = state.totals[0].seconds + totals.penalty * totals.excess
    sort_turning(state, course)
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


@compiled
def judge(tables: Any, state: Any, course: Any) -> bool:
    """Follow up the move at hand, and keep it or take it back."""
    totals = course.totals[0]
    limit = totals.cost - totals.temperature * np.log(draw(course) + 1e-300)
    if not settle(tables, state) or state.totals[0].seconds > limit or not settle_bytes(tables, state):
        take_back(tables, state)
        return False
    peak, excess = weigh(state, totals.aim_bytes)
    cost = state.totals[0].seconds + totals.penalty * excess
    if cost > limit:
        take_back(tables, state)
        return False
    better = peak <= totals.budget_bytes and state.totals[0].seconds < totals.best_seconds
    if totals.best_is_current and not better:
        keep_best(state, course)
    commit(state)
    for index in range(totals.changes):
        file_gap(state, course, course.changed[index].gap)
    totals.cost = cost
    totals.excess = excess
    if peak != totals.peak_bytes or held_in(state, totals.peak_stage) != peak:
        totals.peak_bytes = peak
        totals.peak_stage = peak_stage(state, peak)
    if better:
        totals.best_seconds = state.totals[0].seconds
        totals.best_peak_bytes = peak
        totals.best_is_current = True
    return True


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
