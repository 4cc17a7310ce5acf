"""The undo log of a move: every kind of change with its inverse beside it, and the two ends of a move.

Between two commits, only the functions of this module that `_note` a row change an `IncrementalState`, and `take_back`
runs the inverses of these rows in reverse order. A row holds the kind of change, its place (`where`), and the two
numbers that the inverse needs.

| kind | `where` | `first`, `second` | change | inverse |
| --- | --- | --- | --- | --- |
| RETENTION | retention interval | release, hold | `set_retention` | both as they were |
| HOLDING | retention interval | held_until, regained_in | `set_holding` | both as they were |
| BEGINS | retention interval | begins_held | `set_begins_held` | as it was |
| WAITS | stage | waits | `set_waits` | as it was |
| ENTRIES | stage | start, length | `set_entries` | both as they were |
| INSERTED | op | stage | `insert_recomputation` | `_remove_entry` |
| REMOVED | op | stage | `remove_recomputation` | `_insert_entry` |
| LIVE | first stage | end, bytes | `add_live` | `_add_live_bytes` of as many less |
| WITHIN | stage | bytes | `set_within` | `_restore_within` |

`totals.seconds` and `totals.pool_top` have no rows: `take_back` restores their values of the last commit, so that sums
of seconds do not drift.
"""

from __future__ import annotations

import numpy as np

from memfit.planners.engine.retention.state import BUCKET_BITS, IncrementalState
from memfit.system.compiled import compiled, entry_point

# Not plain integers: numba would compile `_note` anew for each.
RETENTION, HOLDING, BEGINS, WAITS, ENTRIES, INSERTED, REMOVED, LIVE, WITHIN = np.arange(9)


@compiled
def _note(state: IncrementalState, kind: np.int_, where: int, first: int, second: int) -> None:
    """Append a row to the log."""
    row = state.undo[state.totals[0].undo_count]
    row.kind = kind
    row.where = where
    row.first = first
    row.second = second
    state.totals[0].undo_count += 1


@compiled
def set_retention(state: IncrementalState, interval: int, release: int, hold: int) -> None:
    """Replace the retention of an interval.

    Args:
        state: the simulated step; changed.
        interval: the retention interval.
        release: its first position without the storage.
        hold: one past the last such position.
    """
    row = state.intervals[interval]
    _note(state, RETENTION, interval, row.release, row.hold)
    row.release = release
    row.hold = hold


@compiled
def set_holding(state: IncrementalState, interval: int, held_until: int, regained_in: int) -> None:
    """Replace the stages in which the storage of an interval is held.

    Args:
        state: the simulated step; changed.
        interval: the retention interval.
        held_until: the last stage in which the storage is held from the start.
        regained_in: the stage after which it is held again.
    """
    row = state.intervals[interval]
    _note(state, HOLDING, interval, row.held_until, row.regained_in)
    row.held_until = held_until
    row.regained_in = regained_in


@compiled
def set_begins_held(state: IncrementalState, interval: int, begins_held: bool) -> None:
    """Replace whether the storage is held when an interval begins.

    Args:
        state: the simulated step; changed.
        interval: the retention interval.
        begins_held: whether it is held.
    """
    _note(state, BEGINS, interval, int(state.intervals[interval].begins_held), 0)
    state.intervals[interval].begins_held = begins_held


@compiled
def set_waits(state: IncrementalState, stage: int, waits: bool, op_seconds: float) -> None:
    """Replace whether the op of a stage waits; `op_seconds` are then not spent there.

    Args:
        state: the simulated step; changed.
        stage: the stage.
        waits: whether its op waits.
        op_seconds: seconds of one computation of the op.
    """
    _note(state, WAITS, stage, int(state.stages[stage].waits), 0)
    state.stages[stage].waits = waits
    state.totals[0].seconds += -op_seconds if waits else op_seconds


@compiled
def set_entries(state: IncrementalState, stage: int, start: int, length: int) -> None:
    """Replace the rows of `pool` that a stage recomputes.

    Args:
        state: the simulated step; changed.
        stage: the stage.
        start: the first row of `state.pool`.
        length: number of rows.
    """
    row = state.stages[stage]
    _note(state, ENTRIES, stage, row.start, row.length)
    row.start = start
    row.length = length


@compiled
def insert_recomputation(state: IncrementalState, op: int, stage: int, op_seconds: float) -> None:
    """Add a stage to those in which an op is recomputed.

    Args:
        state: the simulated step; changed.
        op: the op, by position.
        stage: in which it is recomputed from now on.
        op_seconds: seconds of one computation of the op.
    """
    _note(state, INSERTED, op, stage, 0)
    _insert_entry(state, op, stage)
    state.totals[0].seconds += op_seconds


@compiled
def _remove_entry(state: IncrementalState, op: int, stage: int) -> None:
    """Inverse of `insert_recomputation`."""
    place = 0
    while state.recomputed_in[op, place] != stage:
        place += 1
    state.stages[op].recompute_count -= 1
    for index in range(place, state.stages[op].recompute_count):
        state.recomputed_in[op, index] = state.recomputed_in[op, index + 1]


@compiled
def remove_recomputation(state: IncrementalState, op: int, stage: int, op_seconds: float) -> None:
    """Remove a stage from those in which an op is recomputed.

    Args:
        state: the simulated step; changed.
        op: the op, by position.
        stage: in which it is no longer recomputed.
        op_seconds: seconds of one computation of the op.
    """
    _note(state, REMOVED, op, stage, 0)
    _remove_entry(state, op, stage)
    state.totals[0].seconds -= op_seconds


@compiled
def _insert_entry(state: IncrementalState, op: int, stage: int) -> None:
    """Inverse of `remove_recomputation`; the stages stay ascending."""
    place = state.stages[op].recompute_count
    while place > 0 and state.recomputed_in[op, place - 1] > stage:
        state.recomputed_in[op, place] = state.recomputed_in[op, place - 1]
        place -= 1
    state.recomputed_in[op, place] = stage
    state.stages[op].recompute_count += 1


@compiled
def add_live(state: IncrementalState, begin: int, end: int, size_bytes: int) -> None:
    """Add bytes that are live after the stages from `begin` to `end - 1`.

    Args:
        state: the simulated step; changed.
        begin: the first stage.
        end: one past the last stage.
        size_bytes: negative to subtract.
    """
    _note(state, LIVE, begin, end, size_bytes)
    _add_live_bytes(state, begin, end, size_bytes)


@compiled
def _add_live_bytes(state: IncrementalState, begin: int, end: int, size_bytes: int) -> None:
    """Inverse of `add_live`, given its bytes negated; whole buckets are added to at once."""
    first, last = begin >> BUCKET_BITS, end >> BUCKET_BITS
    if first == last:
        _add_within_bucket(state, first, begin, end, size_bytes)
        return
    _add_within_bucket(state, first, begin, (first + 1) << BUCKET_BITS, size_bytes)
    for bucket in range(first + 1, last):
        state.buckets[bucket].added_bytes += size_bytes
    _add_within_bucket(state, last, last << BUCKET_BITS, end, size_bytes)


@compiled
def _add_within_bucket(state: IncrementalState, bucket: int, begin: int, end: int, size_bytes: int) -> None:
    """Add bytes after some stages of one bucket."""
    state.buckets[bucket].is_stale = True
    for stage in range(begin, end):
        state.live_after[stage] += size_bytes


@compiled
def set_within(state: IncrementalState, stage: int, within_bytes: int) -> None:
    """Replace the bytes of a stage's peak above those live after it.

    Args:
        state: the simulated step; changed.
        stage: the stage.
        within_bytes: the new value.
    """
    _note(state, WITHIN, stage, state.within[stage], 0)
    _restore_within(state, stage, within_bytes)


@compiled
def _restore_within(state: IncrementalState, stage: int, within_bytes: int) -> None:
    """Inverse of `set_within`."""
    state.within[stage] = within_bytes
    state.buckets[stage >> BUCKET_BITS].is_stale = True


@entry_point
def take_back(state: IncrementalState) -> None:
    """Undo every change since the last commit."""
    totals = state.totals[0]
    for index in range(totals.undo_count - 1, -1, -1):
        row = state.undo[index]
        if row.kind == HOLDING:
            state.intervals[row.where].held_until = row.first
            state.intervals[row.where].regained_in = row.second
        elif row.kind == INSERTED:
            _remove_entry(state, row.where, row.first)
        elif row.kind == REMOVED:
            _insert_entry(state, row.where, row.first)
        elif row.kind == ENTRIES:
            state.stages[row.where].start = row.first
            state.stages[row.where].length = row.second
        elif row.kind == LIVE:
            _add_live_bytes(state, row.where, row.first, -row.second)
        elif row.kind == WITHIN:
            _restore_within(state, row.where, row.first)
        elif row.kind == BEGINS:
            state.intervals[row.where].begins_held = row.first != 0
        elif row.kind == WAITS:
            state.stages[row.where].waits = row.first != 0
        elif row.kind == RETENTION:
            state.intervals[row.where].release = row.first
            state.intervals[row.where].hold = row.second
    totals.seconds = totals.seconds_committed
    totals.pool_top = totals.pool_committed
    totals.overflow = False
    clear_log(state)


@entry_point
def commit(state: IncrementalState) -> None:
    """Make every change since the last commit final."""
    clear_log(state)
    totals = state.totals[0]
    totals.seconds_committed = totals.seconds
    if totals.pool_top > len(state.pool) // 2:
        _compact(state)
    totals.pool_committed = totals.pool_top


@compiled
def clear_log(state: IncrementalState) -> None:
    """Empty the log, and the lists of touched storages and of stages with stale bytes."""
    totals = state.totals[0]
    for index in range(totals.touched_count):
        state.storages[state.touched[index].storage].is_touched = False
    for index in range(totals.dirty_count):
        state.stages[state.work[index].dirty].is_dirty = False
    totals.touched_count = 0
    totals.span_count = 0
    totals.dirty_count = 0
    totals.undo_count = 0


@compiled
def _compact(state: IncrementalState) -> None:
    """Move the entries of all stages to the start of the pool: first to its free end, in order, then down."""
    top, total = state.totals[0].pool_top, 0
    for position in range(len(state.stages)):
        total += state.stages[position].length
    if top + total >= len(state.pool):
        return
    place = top
    for position in range(len(state.stages)):
        stage = state.stages[position]
        for index in range(stage.length):
            state.pool[place + index] = state.pool[stage.start + index]
        stage.start = place - top
        place += stage.length
    for index in range(total):
        state.pool[index] = state.pool[top + index]
    state.totals[0].pool_top = total
