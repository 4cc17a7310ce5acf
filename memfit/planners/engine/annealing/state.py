"""The state of an annealing: the intervals that it may change, its best state, and its random draws."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.parts import ALL_PARTS, Parts
from memfit.planners.engine.retention.instance import Instance, Tables
from memfit.planners.engine.retention.state import IncrementalState
from memfit.system.compiled import compiled
from memfit.system.records import Table, record

MOST_CHANGES = 64  # intervals changed by one move

# Of all moves, in percent; the rest toggles one, two or three intervals.
_EXCHANGE, _SHIFT, _RUN, _EVICT, _FORGET = 20, 10, 2, 10, 8
# Of all drops, in percent; the rest drops at once and holds once recomputed.
_FOR_EACH_READER, _FROM_LATER_STAGE = 5, 5
_TRIES = 8  # draws for an interval over the peak, before any other is taken
_BEST = record("release hold")
_CHANGED = record("interval release hold")
_TOTALS = record(
    "budget_bytes aim_bytes peak_bytes peak_stage best_peak_bytes dropped changes accepted tried",
    floats="temperature penalty cost excess best_seconds exchange_until shift_until run_until evict_until "
    "forget_until each_reader_until later_stage_until",
    flags="best_is_current oscillates",
    unsigned="random",
)


class AnnealingState(NamedTuple):
    """The arrays of an annealing, beside its `IncrementalState`.

    Attributes:
        crossing: int64[n], the intervals that cross the forward/backward boundary, where dropping pays; dropped ones
            first.
        place: int64[intervals], its place in `crossing`, or -1.
        ordered: int64[n], the same intervals by start.
        other: int64[m], all other intervals in which dropping saves bytes.
        best: record[intervals], the retention of the best state.
        changed: record[MOST_CHANGES], the retention that the current move has replaced.
        totals: one record. `penalty` is seconds for each byte above `aim_bytes`, summed over stages; `best_seconds` is
            infinite until a state fits the budget; `dropped` counts the dropped intervals in `crossing`. The fields
            `..._until` are cumulative shares of moves and of drops; `oscillates` says whether the penalty is adapted.
    """

    crossing: NDArray[np.int64]
    place: NDArray[np.int64]
    ordered: NDArray[np.int64]
    other: NDArray[np.int64]
    best: Table
    changed: Table
    totals: Table


def make_annealing_state(instance: Instance, seed: int, parts: Parts = ALL_PARTS) -> AnnealingState:
    """Return the state of a new annealing, without a best state; `parts` switches kinds of moves off.

    Args:
        instance: gives the intervals and the budget.
        seed: of the random numbers.
        parts: kinds of moves that are switched on.
    """
    intervals = instance.tables.intervals
    crossing = np.flatnonzero(instance.may_save & instance.crosses)
    place = np.full(len(intervals), -1, np.int64)
    place[crossing] = np.arange(len(crossing))
    totals = np.zeros(1, _TOTALS)
    totals["random"] = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    totals["budget_bytes"] = instance.budget_bytes
    totals["aim_bytes"] = instance.budget_bytes
    totals["best_seconds"] = np.inf
    _set_shares(totals, parts)
    return AnnealingState(
        crossing=crossing,
        place=place,
        ordered=crossing[np.argsort(intervals["start"][crossing], kind="stable")],
        other=np.flatnonzero(instance.may_save & ~instance.crosses),
        best=np.zeros(len(intervals), _BEST),
        changed=np.zeros(MOST_CHANGES, _CHANGED),
        totals=totals,
    )


def _set_shares(totals: Table, parts: Parts) -> None:
    """Set the cumulative shares of moves and of drops; the rest gets the share of a part that is switched off."""
    moves = (
        parts.exchange * _EXCHANGE,
        parts.shift * _SHIFT,
        parts.run * _RUN,
        parts.evict_at_peak * _EVICT,
        parts.forget_sources * _FORGET,
    )
    names = "exchange_until", "shift_until", "run_until", "evict_until", "forget_until"
    for name, percent in zip(names, itertools.accumulate(moves), strict=True):
        totals[name] = percent / 100
    if not parts.evict_at_peak:
        totals["evict_until"] = 0.0
    for_each_reader = parts.drop_for_each_reader * _FOR_EACH_READER
    totals["each_reader_until"] = for_each_reader / 100
    totals["later_stage_until"] = (for_each_reader + parts.hold_from_later_stage * _FROM_LATER_STAGE) / 100
    totals["oscillates"] = parts.penalty_oscillation


@compiled
def draw(totals: Table) -> float:
    """Return a random number in [0, 1), float64, from `totals.random` (Marsaglia 2003, xorshift64)."""
    bits = totals[0].random
    bits ^= bits << np.uint64(13)
    bits ^= bits >> np.uint64(7)
    bits ^= bits << np.uint64(17)
    totals[0].random = bits
    return float(bits >> np.uint64(11)) / 9007199254740992.0


@compiled
def draw_crossing(tables: Tables, annealing: AnnealingState, first: int, end: int, over_peak: bool) -> int:
    """Return a random interval of `crossing[first:end]`, or -1 if that is empty.

    With `over_peak`, an interval that contains the peak, if a few draws find one.

    Args:
        tables: of the instance.
        annealing: its random numbers advance.
        first: a place in `annealing.crossing`.
        end: one past the last place.
        over_peak: whether to prefer an interval that contains the peak.
    """
    if first >= end:
        return -1
    peak, interval = annealing.totals[0].peak_stage, -1
    for _ in range(_TRIES):
        interval = annealing.crossing[first + int(draw(annealing.totals) * (end - first))]
        if not over_peak or (tables.intervals[interval].start < peak and peak < tables.intervals[interval].end):
            break
    return interval


@compiled
def sort_crossing(state: IncrementalState, annealing: AnnealingState) -> None:
    """Move the dropped intervals of `crossing` to its start.

    Args:
        state: the current state.
        annealing: its `crossing` and `place` are changed.
    """
    totals = annealing.totals[0]
    totals.dropped = 0
    for index in range(len(annealing.crossing)):
        file_interval(state, annealing, annealing.crossing[index])


@compiled
def file_interval(state: IncrementalState, annealing: AnnealingState, interval: int) -> None:
    """Move an interval to its side of `crossing` after its retention has changed.

    Args:
        state: the current state.
        annealing: its `crossing` and `place` are changed.
        interval: the retention interval.
    """
    totals, place = annealing.totals[0], annealing.place[interval]
    if place < 0:
        return
    dropped = state.intervals[interval].release < state.intervals[interval].hold
    if dropped == (place < totals.dropped):
        return
    if not dropped:
        totals.dropped -= 1
    border = totals.dropped
    other = annealing.crossing[border]
    annealing.crossing[border] = interval
    annealing.crossing[place] = other
    annealing.place[interval] = border
    annealing.place[other] = place
    if dropped:
        totals.dropped += 1
