"""The moves of an annealing: small random changes of the retention of some intervals.

See `memfit.planners.engine.retention.instance` for the words.
"""

from __future__ import annotations

from memfit.planners.engine.annealing.state import MOST_CHANGES, AnnealingState, draw, draw_crossing
from memfit.planners.engine.retention.instance import DROPPED, KEPT, Tables
from memfit.planners.engine.retention.stages import change
from memfit.planners.engine.retention.state import IncrementalState, interval_before
from memfit.system.compiled import compiled

_OTHER = 0.3  # share of toggles of intervals that do not cross the forward/backward boundary
_LONGEST_RUN = 24
_TRIES = 24  # draws for an interval whose storage is held at the peak
_LATER = 0.5  # share of storages dropped at the peak that are dropped for longer than the peak
_KEPT = 0.5  # share of dropped storages that are kept together with a change of their sources
_DRAWN = 0.5  # share of changes of sources in which each of them is drawn
_MOST_EXCHANGED = 6  # storages kept in place of a dropped one, or dropped in place of a kept one


@compiled
def propose(tables: Tables, state: IncrementalState, annealing: AnnealingState) -> None:
    """Make a random move.

    Args:
        tables: of the instance.
        state: the simulated step; changed.
        annealing: its best state, totals and random numbers; changed.
    """
    kind, over_peak = draw(annealing.totals), draw(annealing.totals) < 0.5
    count = len(annealing.crossing)
    if count > 0 and kind < annealing.totals[0].exchange_until:
        _exchange(tables, state, annealing, over_peak)
    elif count > 0 and kind < annealing.totals[0].shift_until:
        _shift(tables, state, annealing, draw_crossing(tables, annealing, 0, count, over_peak))
    elif count > 0 and kind < annealing.totals[0].run_until:
        _run(tables, state, annealing)
    elif kind < annealing.totals[0].evict_until and annealing.totals[0].excess > 0:
        _drop_at_peak(tables, state, annealing)
    elif count > 0 and annealing.totals[0].evict_until <= kind < annealing.totals[0].forget_until:
        _forget_sources(tables, state, annealing, draw_crossing(tables, annealing, 0, count, over_peak))
    else:
        more = draw(annealing.totals)
        for _ in range(1 if more < 0.6 else 2 if more < 0.9 else 3):
            if count > 0 and (len(annealing.other) == 0 or draw(annealing.totals) > _OTHER):
                _toggle(tables, state, annealing, draw_crossing(tables, annealing, 0, count, over_peak))
            else:
                _toggle(tables, state, annealing, annealing.other[int(draw(annealing.totals) * len(annealing.other))])
            over_peak = draw(annealing.totals) < 0.5


@compiled
def _give(
    tables: Tables, state: IncrementalState, annealing: AnnealingState, interval: int, release: int, hold: int
) -> None:
    """Change the retention of an interval as part of the current move, if its rule allows it."""
    totals = annealing.totals[0]
    rule, row = tables.intervals[interval].rule, state.intervals[interval]
    if rule == KEPT or (rule == DROPPED and release >= hold) or totals.changes == MOST_CHANGES:
        return
    if row.release == release and row.hold == hold:
        return
    changed = annealing.changed[totals.changes]
    changed.interval = interval
    changed.release = row.release
    changed.hold = row.hold
    totals.changes += 1
    change(tables, state, interval, release, hold)


@compiled
def _drop(tables: Tables, state: IncrementalState, annealing: AnnealingState, interval: int) -> None:
    """Drop a storage at the start of an interval.

    Mostly it is kept once recomputed. A few drops recompute it for each reader, or drop it over a random part of the
    interval.
    """
    start, end = tables.intervals[interval].start, tables.intervals[interval].end
    kind, release, hold = draw(annealing.totals), start, start + 1
    if kind < annealing.totals[0].each_reader_until:
        hold = end
    elif kind < annealing.totals[0].later_stage_until:
        if draw(annealing.totals) < 0.3:
            release = start + int(draw(annealing.totals) * (end - start))
        hold = release + 1 + int(draw(annealing.totals) * (end - release))
    _give(tables, state, annealing, interval, release, hold)


@compiled
def _flip(tables: Tables, state: IncrementalState, annealing: AnnealingState, interval: int, keep: bool) -> None:
    """Keep the storage of an interval, or drop it."""
    if keep:
        _give(tables, state, annealing, interval, 0, 0)
    else:
        _drop(tables, state, annealing, interval)


@compiled
def _toggle(tables: Tables, state: IncrementalState, annealing: AnnealingState, interval: int) -> None:
    """Keep a dropped storage or drop a kept one; one in ten dropped storages is dropped in another way."""
    dropped = state.intervals[interval].release < state.intervals[interval].hold
    _flip(tables, state, annealing, interval, dropped and draw(annealing.totals) < 0.9)


@compiled
def _drop_at_peak(tables: Tables, state: IncrementalState, annealing: AnnealingState) -> None:
    """Drop a storage that is held at the peak and not used in that stage."""
    peak, count = annealing.totals[0].peak_stage, len(annealing.crossing) + len(annealing.other)
    for _ in range(_TRIES):
        index = int(draw(annealing.totals) * count)
        is_crossing = index < len(annealing.crossing)
        interval = annealing.crossing[index] if is_crossing else annealing.other[index - len(annealing.crossing)]
        fixed, row = tables.intervals[interval], state.intervals[interval]
        if fixed.start < peak < fixed.end and (peak <= row.held_until or peak > row.regained_in):
            release = row.release if row.release < row.hold else fixed.start
            release = max(fixed.start, min(release, peak - 1))
            hold = peak + 1
            if draw(annealing.totals) < _LATER:
                hold += int(draw(annealing.totals) * (fixed.end - peak))
            _give(tables, state, annealing, interval, release, hold)
            return


@compiled
def _exchange(tables: Tables, state: IncrementalState, annealing: AnnealingState, over_peak: bool) -> None:
    """Keep a storage over the forward/backward boundary and drop others in its place, or the reverse."""
    dropped, count = annealing.totals[0].dropped, len(annealing.crossing)
    keeps = draw(annealing.totals) < 0.5
    first, end = (0, dropped) if keeps else (dropped, count)
    interval = draw_crossing(tables, annealing, first, end, over_peak)
    if interval < 0:
        return
    _flip(tables, state, annealing, interval, keeps)
    size_bytes = tables.storages[tables.intervals[interval].storage].size_bytes
    first, end = (dropped, count) if keeps else (0, dropped)
    for _ in range(1 + int(draw(annealing.totals) * _MOST_EXCHANGED)):
        other = draw_crossing(tables, annealing, first, end, over_peak)
        if other < 0 or size_bytes <= 0:
            return
        other_bytes = tables.storages[tables.intervals[other].storage].size_bytes
        if keeps or other_bytes <= size_bytes:
            _flip(tables, state, annealing, other, not keeps)
            size_bytes -= other_bytes


@compiled
def _shift(tables: Tables, state: IncrementalState, annealing: AnnealingState, interval: int) -> None:
    """Move a checkpoint by one op: swap the retention of a read and a write of that op."""
    storage = tables.storages[tables.intervals[interval].storage]
    other = -1
    if draw(annealing.totals) < 0.5 and storage.last_interval > storage.first_interval:
        readers = storage.last_interval - storage.first_interval
        op = tables.positions[
            tables.intervals[storage.first_interval + 1 + int(draw(annealing.totals) * readers)].start
        ]
        if op.write_end > op.write_start:
            other = tables.writes[
                op.write_start + int(draw(annealing.totals) * (op.write_end - op.write_start))
            ].storage
    else:
        op = tables.positions[storage.writer]
        if op.read_end > op.read_start:
            other = tables.reads[op.read_start + int(draw(annealing.totals) * (op.read_end - op.read_start))].storage
    if other < 0:
        return
    around = interval_before(tables, other, tables.intervals[interval].end)
    kept = state.intervals[interval].release >= state.intervals[interval].hold
    if tables.intervals[around].end - tables.intervals[around].start > 1:
        _flip(tables, state, annealing, interval, not kept)
        _flip(tables, state, annealing, around, kept)


@compiled
def _forget_sources(tables: Tables, state: IncrementalState, annealing: AnnealingState, interval: int) -> None:
    """Drop a storage without holding on to what is recomputed for it; or keep it, and hold on to that.

    What is recomputed on the way to a storage is mostly held to its own later uses. Where it is dropped again at once,
    and recomputed for those, the peak between is lower. Both changes together may pay where neither does alone. In half
    of these moves it is drawn for each of these sources whether it is held.
    """
    fixed, row = tables.intervals[interval], state.intervals[interval]
    keeps = row.release < row.hold and draw(annealing.totals) < _KEPT
    _give(tables, state, annealing, interval, 0 if keeps else fixed.start, 0 if keeps else fixed.start + 1)
    held = 0.5 if draw(annealing.totals) < _DRAWN else 1.0 if keeps else 0.0
    totals, stage, top = state.totals[0], fixed.end, 1
    totals.stamp += 1
    state.work[0].stack = tables.storages[fixed.storage].writer
    while top > 0:
        top -= 1
        op = tables.positions[state.work[top].stack]
        for slot in range(op.read_start, op.read_end):
            storage = tables.reads[slot].storage
            writer = tables.storages[storage].writer
            around = interval_before(tables, storage, stage)
            source, start = state.intervals[around], tables.intervals[around].start
            if state.stages[writer].mark == totals.stamp or source.release >= source.hold:
                continue
            state.stages[writer].mark = totals.stamp
            state.work[top].stack = writer
            top += 1
            if tables.intervals[around].end > stage:
                hold = start + 1 if draw(annealing.totals) < held else stage + 1
                _give(tables, state, annealing, around, min(source.release, hold - 1), hold)


@compiled
def _run(tables: Tables, state: IncrementalState, annealing: AnnealingState) -> None:
    """Keep or drop a run of storages that are written one after the other."""
    count = len(annealing.ordered)
    length = 2 + int(draw(annealing.totals) * draw(annealing.totals) * _LONGEST_RUN)
    first = int(draw(annealing.totals) * count)
    keeps = draw(annealing.totals) < 0.5
    for index in range(first, min(count, first + length)):
        interval = annealing.ordered[index]
        if keeps:
            _give(tables, state, annealing, interval, 0, 0)
        elif state.intervals[interval].release >= state.intervals[interval].hold:
            start = tables.intervals[interval].start
            _give(tables, state, annealing, interval, start, start + 1)
