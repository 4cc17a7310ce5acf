"""Annealing over retention: the compiled loop that accepts moves or takes them back.

See `memfit.planners.search` for its use, and `memfit.planners.engine.retention.state` for the words.
"""

from __future__ import annotations

import numpy as np

from memfit.planners.engine.annealing.moves import propose
from memfit.planners.engine.annealing.state import AnnealingState, draw, file_interval, sort_crossing
from memfit.planners.engine.retention.instance import Tables
from memfit.planners.engine.retention.live_bytes import held_in, peak_stage, settle_bytes, weigh
from memfit.planners.engine.retention.stages import settle
from memfit.planners.engine.retention.state import IncrementalState
from memfit.planners.engine.retention.undo import commit, take_back
from memfit.system.compiled import compiled, entry_point

_ADAPT_EVERY = 100  # moves between two changes of the penalty
_STIFFER, _SOFTER = 1.02, 0.98  # its factor if the current state is above the aim, or within it


@entry_point
def anneal(tables: Tables, state: IncrementalState, annealing: AnnealingState, moves: int, cooling: float) -> None:
    """Try `moves` moves; after each, the temperature is multiplied by `cooling`.

    The penalty grows while the state is above `aim_bytes` (in the end, the budget) and falls while it fits, so that the
    search stays near the border, where the best states are (strategic oscillation; Glover 1989).

    Args:
        tables: of the instance.
        state: the current state; changed.
        annealing: its best state, totals and random state; changed.
        moves: how many to try.
        cooling: factor of the temperature.
    """
    _begin(state, annealing)
    totals = annealing.totals[0]
    for _ in range(moves):
        totals.tried += 1
        totals.changes = 0
        propose(tables, state, annealing)
        if totals.changes > 0 and _judge(tables, state, annealing):
            totals.accepted += 1
        totals.temperature *= cooling
        if totals.oscillates and totals.tried % _ADAPT_EVERY == 0:
            totals.penalty *= _SOFTER if totals.peak_bytes <= totals.aim_bytes else _STIFFER
            totals.cost = state.totals[0].seconds + totals.penalty * totals.excess
    _finish(state, annealing)


@compiled
def _begin(state: IncrementalState, annealing: AnnealingState) -> None:
    """Compute the cost of the current state under the current aim and penalty."""
    totals = annealing.totals[0]
    totals.changes = 0
    totals.peak_bytes, totals.excess = weigh(state, totals.aim_bytes)
    totals.peak_stage = peak_stage(state, totals.peak_bytes)
    totals.cost = state.totals[0].seconds + totals.penalty * totals.excess
    sort_crossing(state, annealing)
    if totals.peak_bytes <= totals.budget_bytes and state.totals[0].seconds < totals.best_seconds:
        totals.best_seconds = state.totals[0].seconds
        totals.best_peak_bytes = totals.peak_bytes
        totals.best_is_current = True


@compiled
def _finish(state: IncrementalState, annealing: AnnealingState) -> None:
    """Copy the best retention to `annealing.best`, if it is the current one."""
    annealing.totals[0].changes = 0
    if annealing.totals[0].best_is_current:
        _keep_best(state, annealing)
        annealing.totals[0].best_is_current = True


@compiled
def _judge(tables: Tables, state: IncrementalState, annealing: AnnealingState) -> bool:
    """Settle the current move; accept it or take it back. Return whether it is accepted."""
    totals = annealing.totals[0]
    limit = totals.cost - totals.temperature * np.log(draw(annealing.totals) + 1e-300)
    if not settle(tables, state) or state.totals[0].seconds > limit or not settle_bytes(tables, state):
        take_back(state)
        return False
    peak, excess = weigh(state, totals.aim_bytes)
    cost = state.totals[0].seconds + totals.penalty * excess
    if cost > limit:
        take_back(state)
        return False
    better = peak <= totals.budget_bytes and state.totals[0].seconds < totals.best_seconds
    if totals.best_is_current and not better:
        _keep_best(state, annealing)
    commit(state)
    for index in range(totals.changes):
        file_interval(state, annealing, annealing.changed[index].interval)
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
def _keep_best(state: IncrementalState, annealing: AnnealingState) -> None:
    """Copy the retention before the current move, which is the best state's, to `annealing.best`."""
    for interval in range(len(annealing.best)):
        annealing.best[interval].release = state.intervals[interval].release
        annealing.best[interval].hold = state.intervals[interval].hold
    for index in range(annealing.totals[0].changes - 1, -1, -1):
        changed = annealing.changed[index]
        annealing.best[changed.interval].release = changed.release
        annealing.best[changed.interval].hold = changed.hold
    annealing.totals[0].best_is_current = False
