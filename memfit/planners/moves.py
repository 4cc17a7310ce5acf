"""The moves of an annealing: small random changes of windows. See `memfit.planners.program` for what a window is."""

from __future__ import annotations

from typing import Any

from memfit.compiled import compiled
from memfit.planners.course import MOST_CHANGES, draw, draw_turning
from memfit.planners.incremental import change, gap_before
from memfit.planners.program import DROPPED, KEPT

# Cumulative shares of moves; the rest toggles one, two or three windows.
_EXCHANGE, _SHIFT, _RUN, _EVICT = 0.2, 0.3, 0.32, 0.42
_OTHER = 0.3  # share of toggled windows that are not over the turning point
_LONGEST_RUN = 24
_TRIES = 24  # draws for a gap that is there at the peak
_LATER = 0.5  # share of storages dropped at the peak that stay away for longer than the peak
_MOST_EXCHANGED = 6  # storages kept in the place of one that is dropped, or the other way round


@compiled
def propose(tables: Any, state: Any, course: Any) -> None:
    """Make a random move."""
    kind, over_peak = draw(course), draw(course) < 0.5
    count = len(course.turning)
    if count > 0 and kind < _EXCHANGE:
        exchange(tables, state, course, over_peak)
    elif count > 0 and kind < _SHIFT:
        shift(tables, state, course, draw_turning(tables, course, 0, count, over_peak))
    elif count > 0 and kind < _RUN:
        run(tables, state, course)
    elif kind < _EVICT and course.totals[0].excess > 0:
        drop_at_peak(tables, state, course)
    else:
        more = draw(course)
        for _ in range(1 if more < 0.6 else 2 if more < 0.9 else 3):
            if count > 0 and (len(course.other) == 0 or draw(course) > _OTHER):
                toggle(tables, state, course, draw_turning(tables, course, 0, count, over_peak))
            else:
                toggle(tables, state, course, course.other[int(draw(course) * len(course.other))])
            over_peak = draw(course) < 0.5


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
def drop(tables: Any, state: Any, course: Any, gap: int) -> None:
    """Drop a storage at the start of a gap; held once it is back, at times anew for each op, at times from a
    stage on.
    """
    start, end = tables.gaps[gap].start, tables.gaps[gap].end
    kind, release, hold = draw(course), start, start + 1
    if kind < 0.05:
        hold = end
    elif kind < 0.1:
        if draw(course) < 0.3:
            release = start + int(draw(course) * (end - start))
        hold = release + 1 + int(draw(course) * (end - release))
    give(tables, state, course, gap, release, hold)


@compiled
def toggle(tables: Any, state: Any, course: Any, gap: int) -> None:
    """Keep what is dropped, or drop it, or drop it in another way."""
    if state.gaps[gap].release < state.gaps[gap].hold and draw(course) < 0.9:
        give(tables, state, course, gap, 0, 0)
    else:
        drop(tables, state, course, gap)


@compiled
def drop_at_peak(tables: Any, state: Any, course: Any) -> None:
    """Have a storage that is there at the peak, and not used in that stage, not be there."""
    peak, count = course.totals[0].peak_stage, len(course.turning) + len(course.other)
    for _ in range(_TRIES):
        index = int(draw(course) * count)
        gap = course.turning[index] if index < len(course.turning) else course.other[index - len(course.turning)]
        fixed, row = tables.gaps[gap], state.gaps[gap]
        if fixed.start < peak < fixed.end and (peak <= row.gone_after or peak > row.back_after):
            release = row.release if row.release < row.hold else fixed.start
            release = max(fixed.start, min(release, peak - 1))
            hold = peak + 1
            if draw(course) < _LATER:
                hold += int(draw(course) * (fixed.end - peak))
            give(tables, state, course, gap, release, hold)
            return


@compiled
def exchange(tables: Any, state: Any, course: Any, over_peak: bool) -> None:
    """Drop a storage that is kept over the turning point and keep dropped ones in its place, or the other way round."""
    dropped, count = course.totals[0].dropped, len(course.turning)
    keeps = draw(course) < 0.5
    first, end = (0, dropped) if keeps else (dropped, count)
    gap = draw_turning(tables, course, first, end, over_peak)
    if gap < 0:
        return
    flip(tables, state, course, gap, keeps)
    size_bytes = tables.storages[tables.gaps[gap].storage].size_bytes
    first, end = (dropped, count) if keeps else (0, dropped)
    for _ in range(1 + int(draw(course) * _MOST_EXCHANGED)):
        other = draw_turning(tables, course, first, end, over_peak)
        if other < 0 or size_bytes <= 0:
            return
        other_bytes = tables.storages[tables.gaps[other].storage].size_bytes
        if keeps or other_bytes <= size_bytes:
            flip(tables, state, course, other, not keeps)
            size_bytes -= other_bytes


@compiled
def flip(tables: Any, state: Any, course: Any, gap: int, keep: bool) -> None:
    """Keep, or drop."""
    if keep:
        give(tables, state, course, gap, 0, 0)
    else:
        drop(tables, state, course, gap)


@compiled
def shift(tables: Any, state: Any, course: Any, gap: int) -> None:
    """Swap the windows of two storages one op apart: a checkpoint moves."""
    storage = tables.storages[tables.gaps[gap].storage]
    other = -1
    if draw(course) < 0.5 and storage.last_gap > storage.first_gap:
        readers = storage.last_gap - storage.first_gap
        op = tables.positions[tables.gaps[storage.first_gap + 1 + int(draw(course) * readers)].start]
        if op.write_end > op.write_start:
            other = tables.writes[op.write_start + int(draw(course) * (op.write_end - op.write_start))].storage
    else:
        op = tables.positions[storage.writer]
        if op.read_end > op.read_start:
            other = tables.reads[op.read_start + int(draw(course) * (op.read_end - op.read_start))].storage
    if other < 0:
        return
    around = gap_before(tables, other, tables.gaps[gap].end)
    kept = state.gaps[gap].release >= state.gaps[gap].hold
    if tables.gaps[around].end - tables.gaps[around].start > 1:
        if kept:
            drop(tables, state, course, gap)
            give(tables, state, course, around, 0, 0)
        else:
            give(tables, state, course, gap, 0, 0)
            drop(tables, state, course, around)


@compiled
def run(tables: Any, state: Any, course: Any) -> None:
    """Keep, or drop, a run of storages that are written one after the other."""
    count = len(course.ordered)
    length = 2 + int(draw(course) * draw(course) * _LONGEST_RUN)
    first = int(draw(course) * count)
    keeps = draw(course) < 0.5
    for index in range(first, min(count, first + length)):
        gap = course.ordered[index]
        if keeps:
            give(tables, state, course, gap, 0, 0)
        elif state.gaps[gap].release >= state.gaps[gap].hold:
            give(tables, state, course, gap, tables.gaps[gap].start, tables.gaps[gap].start + 1)
