"""Stages: the computations for the sake of each position, followed from a changed retention as far as it matters.

See `memfit.planners.engine.retention.state` for the words. `change` starts a move, `settle` updates all stages,
`rebuild` simulates a retention from nothing.
"""

from __future__ import annotations

from memfit.planners.engine.retention.instance import Tables
from memfit.planners.engine.retention.live_bytes import make_dirty, settle_bytes, touch
from memfit.planners.engine.retention.sorting import pop, push, sort
from memfit.planners.engine.retention.state import MOST_RECOMPUTATIONS, IncrementalState, interval_before
from memfit.planners.engine.retention.undo import (
    clear_log,
    commit,
    insert_recomputation,
    remove_recomputation,
    set_begins_held,
    set_entries,
    set_holding,
    set_retention,
    set_waits,
)
from memfit.system.compiled import compiled, entry_point


@entry_point
def change(tables: Tables, state: IncrementalState, interval: int, release: int, hold: int) -> None:
    """Give `interval` the retention `[release, hold)`, and enqueue the stages to update; `settle` updates them.

    Args:
        tables: of the instance.
        state: the simulated step; changed.
        interval: the retention interval.
        release: the first position at whose end the storage is not retained.
        hold: the position from which it is retained again.
    """
    set_retention(state, interval, release, hold)
    writer = tables.storages[tables.intervals[interval].storage].writer
    is_first = tables.intervals[interval].start == writer
    if tables.positions[writer].waits_with_next or (is_first and tables.positions[writer].may_wait):
        _enqueue(state, writer)
        while writer > 0 and tables.positions[writer - 1].waits_with_next:
            writer -= 1
            _enqueue(state, writer)
    _reconsider(tables, state, interval)


@entry_point
def settle(tables: Tables, state: IncrementalState) -> bool:
    """Update every enqueued stage; return False if a computation is not allowed, or the move outgrows its room.

    Args:
        tables: of the instance.
        state: the simulated step; changed.
    """
    totals = state.totals[0]
    undo_room = len(state.undo) - 8 * len(state.stages) - 8 * len(state.storages)
    fine = True
    while totals.heap_count > 0:
        position = pop(state.work, totals.heap_count)
        totals.heap_count -= 1
        state.stages[position].queued = False
        fine = fine and _update_stage(tables, state, position) and not totals.overflow and totals.undo_count < undo_room
    return fine


@compiled
def _enqueue(state: IncrementalState, position: int) -> None:
    """Have stage `position` updated."""
    if not state.stages[position].queued:
        state.stages[position].queued = True
        push(state.work, state.totals[0].heap_count, position)
        state.totals[0].heap_count += 1


@compiled
def _reconsider(tables: Tables, state: IncrementalState, interval: int) -> None:
    """Update in which stages the storage of `interval` is held; enqueue the stages that this affects."""
    fixed, row = tables.intervals[interval], state.intervals[interval]
    start, end, first = fixed.start, fixed.end, tables.storages[fixed.storage].first_interval
    writer = tables.intervals[first].start
    kept = row.release >= row.hold or start >= row.hold
    until = start
    if row.begins_held:
        until = end if kept else max(row.release, start)
    regained = len(state.stages)
    for index in range(state.stages[writer].recompute_count):
        stage = state.recomputed_in[writer, index]
        if stage > start and stage < end and (kept or stage >= row.hold):
            regained = stage
            break
    old_until, old_regained = row.held_until, row.regained_in
    if until == old_until and regained == old_regained:
        return
    set_holding(state, interval, until, regained)
    for other in range(first, interval + 1):
        user = tables.intervals[other].start  # the writer, or a reader up to here
        for index in range(state.stages[user].recompute_count):
            stage = state.recomputed_in[user, index]
            if stage > end:
                break
            was_held = stage <= old_until or stage > old_regained
            if stage > start and (stage <= until or stage > regained) != was_held:
                _enqueue(state, stage)
    if fixed.closed and (end <= until or end > regained) != (end <= old_until or end > old_regained):
        _enqueue(state, end)


@compiled
def _update_stage(tables: Tables, state: IncrementalState, position: int) -> bool:
    """Update one stage, and enqueue the later stages that this affects; return False if that is not allowed."""
    op = tables.positions[position]
    waits = _waits_at(tables, state, position)
    count = 0 if waits else _collect(tables, state, position)
    if count < 0:
        return False
    if waits != state.stages[position].waits:
        _touch_all(tables, state, position)
        set_waits(state, position, waits, op.seconds)
        make_dirty(state, position)
    if not _replace(tables, state, position, count):
        return False
    for slot in range(op.read_start, op.read_end + op.write_end - op.write_start):
        held = not waits
        if slot < op.read_end:
            interval = tables.reads[slot].interval
            before = state.intervals[interval - 1]
            held = held or position <= before.held_until or position > before.regained_in
        else:
            interval = tables.writes[op.write_start + slot - op.read_end].interval
        if state.intervals[interval].begins_held != held:
            set_begins_held(state, interval, held)
            _reconsider(tables, state, interval)
    return True


@compiled
def _waits_at(tables: Tables, state: IncrementalState, position: int) -> bool:
    """Return whether the first computation of an op waits.

    It does if no write of it is retained at its position; or if its only reader is the next position, waits too, and
    the writes are not retained after that.
    """
    while tables.positions[position].may_wait:
        op, waits, leaves = tables.positions[position], True, True
        for slot in range(op.write_start, op.write_end):
            interval = tables.writes[slot].interval
            retention = state.intervals[interval]
            waits = waits and retention.release <= position and retention.hold > position
            if op.waits_with_next:
                after = state.intervals[interval + 1]
                leaves = leaves and after.release <= position + 1 and after.hold > position + 1
        if waits or not op.waits_with_next or not leaves:
            return waits
        position += 1
    return False


@compiled
def _collect(tables: Tables, state: IncrementalState, position: int) -> int:
    """Write the ops to recompute for `position` behind the pool, ascending; return how many, or -1 if not allowed."""
    totals, pool, work = state.totals[0], state.pool, state.work
    totals.stamp += 1
    start, top, count, reader = totals.pool_top, 0, 0, position
    while True:
        op = tables.positions[reader]
        for slot in range(op.read_start, op.read_end):
            storage = tables.reads[slot].storage
            writer = tables.storages[storage].writer
            if state.stages[writer].mark == totals.stamp:
                continue
            interval = interval_before(tables, storage, position)
            row = state.intervals[interval]
            if position <= row.held_until or position > row.regained_in:
                if tables.intervals[interval].host_from <= position < tables.intervals[interval].host_until:
                    totals.blocked = writer
                    return -1
                continue
            if tables.positions[writer].last_rematerialization < position:
                totals.blocked = writer
                return -1
            state.stages[writer].mark = totals.stamp
            work[top].stack = writer
            top += 1
        if top == 0:
            break
        top -= 1
        reader = work[top].stack
        pool[start + count] = reader
        count += 1
    sort(pool, start, start + count)
    return count


@compiled
def _replace(tables: Tables, state: IncrementalState, position: int, count: int) -> bool:
    """Make the `count` entries behind the pool the stage of `position`; return False if an op is recomputed too often.

    Ops that the stage newly recomputes, or no longer recomputes, change where their storages are held.
    """
    pool, new, stage = state.pool, state.totals[0].pool_top, state.stages[position]
    old, old_end, new_end, changed = stage.start, stage.start + stage.length, new + count, 0
    while old < old_end or new < new_end:
        if new == new_end or (old < old_end and pool[old] < pool[new]):
            op, added = int(pool[old]), False
            old += 1
        elif old == old_end or pool[new] < pool[old]:
            op, added = int(pool[new]), True
            new += 1
        else:
            old += 1
            new += 1
            continue
        _touch_all(tables, state, op)
        if added:
            if state.stages[op].recompute_count == MOST_RECOMPUTATIONS:
                return False
            insert_recomputation(state, op, position, tables.positions[op].seconds)
        else:
            remove_recomputation(state, op, position, tables.positions[op].seconds)
        state.work[changed].stack = op
        changed += 1
    if changed == 0:
        return True
    set_entries(state, position, state.totals[0].pool_top, count)
    state.totals[0].pool_top = new_end
    state.totals[0].overflow = state.totals[0].overflow or new_end + len(state.stages) >= len(pool)
    make_dirty(state, position)
    for index in range(changed):
        row = tables.positions[state.work[index].stack]
        for slot in range(row.write_start, row.write_end):
            _reconsider(tables, state, interval_before(tables, tables.writes[slot].storage, position))
    return True


@compiled
def _touch_all(tables: Tables, state: IncrementalState, position: int) -> None:
    """Touch all storages that the op at `position` reads and writes, before its computations change."""
    op = tables.positions[position]
    for slot in range(op.read_start, op.read_end + op.write_end - op.write_start):
        if slot < op.read_end:
            storage = tables.reads[slot].storage
        else:
            storage = tables.writes[op.write_start + slot - op.read_end].storage
        touch(tables, state, storage)


@entry_point
def rebuild(tables: Tables, state: IncrementalState) -> bool:
    """Simulate the retention in `state.intervals` from nothing; return False if a computation is not allowed.

    Args:
        tables: of the instance.
        state: its retention is read; all else is overwritten.
    """
    _clear(tables, state)
    for storage in range(len(state.storages)):
        touch(tables, state, storage)
    state.totals[0].span_count = 0
    for index in range(state.totals[0].touched_count):
        state.touched[index].first_span = 0
    for position in range(len(state.stages)):
        if not _update_stage(tables, state, position) or state.totals[0].overflow:
            return False
        state.totals[0].undo_count = 0
        make_dirty(state, position)
    for position in range(len(state.stages)):
        state.stages[position].queued = False
    state.totals[0].heap_count = 0
    if not settle_bytes(tables, state):
        return False
    commit(state)
    return True


@compiled
def _clear(tables: Tables, state: IncrementalState) -> None:
    """Reset `state`: nothing is recomputed, and nothing is live."""
    totals = state.totals[0]
    totals.seconds = 0.0
    totals.heap_count = 0
    totals.pool_top = 0
    totals.overflow = False
    totals.blocked = -1
    for position in range(len(state.stages)):
        stage = state.stages[position]
        stage.waits = False
        stage.queued = False
        stage.is_dirty = False
        stage.length = 0
        stage.recompute_count = 0
        state.live_after[position] = -tables.positions[position].host_bytes
        state.within[position] = 0
        totals.seconds += tables.positions[position].seconds
    for bucket in range(len(state.buckets)):
        state.buckets[bucket].added_bytes = 0
        state.buckets[bucket].is_stale = True
    for interval in range(len(state.intervals)):
        fixed, row = tables.intervals[interval], state.intervals[interval]
        row.begins_held = True
        row.regained_in = len(state.stages)
        kept = row.release >= row.hold or fixed.start >= row.hold
        row.held_until = fixed.end if kept else max(row.release, fixed.start)
    for storage in range(len(state.storages)):
        state.storages[storage].is_touched = False
    clear_log(state)
