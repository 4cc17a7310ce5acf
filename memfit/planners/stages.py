"""Stages: what is computed for the sake of each position, followed up from a changed window as far as it matters.

See `memfit.planners.incremental` for the words. `settle` brings all stages up to date, `take_back` undoes a move.
"""

from __future__ import annotations

from typing import Any

from memfit.compiled import compiled, entry_point
from memfit.planners.incremental import (
    BUCKET_BITS,
    MOST_AGAIN,
    U_ADDED,
    U_BACK,
    U_BEGINS,
    U_GONE,
    U_HOLD,
    U_LENGTH,
    U_LIVE,
    U_RELEASE,
    U_REMOVED,
    U_START,
    U_WAITS,
    U_WITHIN,
    gap_before,
    note,
    reconsider,
)
from memfit.planners.kernels import pop, sort
from memfit.planners.spans import add_live, make_dirty, settle_bytes, touch


@entry_point
def settle(tables: Any, state: Any) -> bool:
    """Bring every stage up to date; False where a computation is not allowed, or the move outgrows its room."""
    totals = state.totals[0]
    undo_room = len(state.undo) - 8 * len(state.stages) - 8 * len(state.storages)
    fine = True
    while totals.heap_count > 0:
        position = pop(state.work, totals.heap_count)
        totals.heap_count -= 1
        state.stages[position].queued = False
        fine = fine and look_again(tables, state, position) and not totals.overflow and totals.undo_count < undo_room
    return fine


@compiled
def look_again(tables: Any, state: Any, position: int) -> bool:
    """Work out one stage anew, and what follows from it for later stages."""
    op = tables.positions[position]
    waits = waits_at(tables, state, position)
    count = 0 if waits else collect(tables, state, position)
    if count < 0:
        return False
    if waits != state.stages[position].waits:
        touch_all(tables, state, position)
        note(state, U_WAITS, position, int(state.stages[position].waits))
        state.stages[position].waits = waits
        state.totals[0].seconds += -op.seconds if waits else op.seconds
        make_dirty(state, position)
    if not replace(tables, state, position, count):
        return False
    for slot in range(op.read_start, op.read_end + op.write_end - op.write_start):
        there = not waits
        if slot < op.read_end:
            gap = tables.reads[slot].gap
            before = state.gaps[gap - 1]
            there = there or position <= before.gone_after or position > before.back_after
        else:
            gap = tables.writes[op.write_start + slot - op.read_end].gap
        if state.gaps[gap].begins_there != there:
            note(state, U_BEGINS, gap, int(state.gaps[gap].begins_there))
            state.gaps[gap].begins_there = there
            reconsider(tables, state, gap)
    return True


@compiled
def waits_at(tables: Any, state: Any, position: int) -> bool:
    """Whether the first computation of an op waits until it is wanted: nothing that it writes is retained before, or
    the one op that reads it is next, waits in its turn, and leaves nothing of it behind.
    """
    while tables.positions[position].may_wait:
        op, waits, leaves = tables.positions[position], True, True
        for slot in range(op.write_start, op.write_end):
            gap = tables.writes[slot].gap
            window = state.gaps[gap]
            waits = waits and window.release <= position and window.hold > position
            if op.waits_with_next:
                after = state.gaps[gap + 1]
                leaves = leaves and after.release <= position + 1 and after.hold > position + 1
        if waits or not op.waits_with_next or not leaves:
            return waits
        position += 1
    return False


@compiled
def collect(tables: Any, state: Any, position: int) -> int:
    """Write behind the pool what must be computed again for `position`, in order; return how many, or -1."""
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
            gap = gap_before(tables, storage, position)
            row = state.gaps[gap]
            if position <= row.gone_after or position > row.back_after:
                if tables.gaps[gap].away_from <= position < tables.gaps[gap].away_until:
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
def replace(tables: Any, state: Any, position: int, count: int) -> bool:
    """Take the `count` entries behind the pool as the stage of `position`, and follow up what is new and what is
    gone.
    """
    pool, new, stage = state.pool, state.totals[0].pool_top, state.stages[position]
    old, old_end, new_end, changed = stage.start, stage.start + stage.length, new + count, 0
    while old < old_end or new < new_end:
        if new == new_end or (old < old_end and pool[old] < pool[new]):
            again, added = pool[old], False
            old += 1
        elif old == old_end or pool[new] < pool[old]:
            again, added = pool[new], True
            new += 1
        else:
            old += 1
            new += 1
            continue
        touch_all(tables, state, again)
        if added:
            if state.stages[again].again_count == MOST_AGAIN:
                return False
            add_again(tables, state, again, position)
        else:
            remove_again(tables, state, again, position)
        note(state, U_ADDED if added else U_REMOVED, again, position)
        state.work[changed].stack = again
        changed += 1
    if changed == 0:
        return True
    note(state, U_START, position, stage.start)
    note(state, U_LENGTH, position, stage.length)
    stage.start = state.totals[0].pool_top
    stage.length = count
    state.totals[0].pool_top = new_end
    state.totals[0].overflow = state.totals[0].overflow or new_end + len(state.stages) >= len(pool)
    make_dirty(state, position)
    for index in range(changed):
        op = tables.positions[state.work[index].stack]
        for slot in range(op.write_start, op.write_end):
            reconsider(tables, state, gap_before(tables, tables.writes[slot].storage, position))
    return True


@compiled
def touch_all(tables: Any, state: Any, position: int) -> None:
    """Note where everything lives that `position` reads and writes, before its computations change."""
    op = tables.positions[position]
    for slot in range(op.read_start, op.read_end + op.write_end - op.write_start):
        if slot < op.read_end:
            storage = tables.reads[slot].storage
        else:
            storage = tables.writes[op.write_start + slot - op.read_end].storage
        touch(tables, state, storage)


@compiled
def add_again(tables: Any, state: Any, again: int, stage: int) -> None:
    """Enter that `again` is computed again in `stage`."""
    place = state.stages[again].again_count
    while place > 0 and state.again[again, place - 1] > stage:
        state.again[again, place] = state.again[again, place - 1]
        place -= 1
    state.again[again, place] = stage
    state.stages[again].again_count += 1
    state.totals[0].seconds += tables.positions[again].seconds


@compiled
def remove_again(tables: Any, state: Any, again: int, stage: int) -> None:
    """Strike out that `again` is computed again in `stage`."""
    place = 0
    while state.again[again, place] != stage:
        place += 1
    state.stages[again].again_count -= 1
    for index in range(place, state.stages[again].again_count):
        state.again[again, index] = state.again[again, index + 1]
    state.totals[0].seconds -= tables.positions[again].seconds


@entry_point
def take_back(tables: Any, state: Any) -> None:
    """Undo everything since the last commit."""
    totals = state.totals[0]
    for index in range(totals.undo_count - 1, -1, -1):
        row = state.undo[index]
        kind, where, was = row.kind, row.where, row.was
        if kind == U_GONE:
            state.gaps[where].gone_after = was
        elif kind == U_BACK:
            state.gaps[where].back_after = was
        elif kind == U_ADDED:
            remove_again(tables, state, where, was)
        elif kind == U_REMOVED:
            add_again(tables, state, where, was)
        elif kind == U_START:
            state.stages[where].start = was
        elif kind == U_LENGTH:
            state.stages[where].length = was
        elif kind == U_LIVE:
            add_live(state, where, row.end, was)
        elif kind == U_WITHIN:
            state.within[where] = was
            state.buckets[where >> BUCKET_BITS].is_stale = True
        elif kind == U_BEGINS:
            state.gaps[where].begins_there = was != 0
        elif kind == U_WAITS:
            state.stages[where].waits = was != 0
        elif kind == U_RELEASE:
            state.gaps[where].release = was
        elif kind == U_HOLD:
            state.gaps[where].hold = was
    totals.seconds = totals.seconds_committed
    totals.pool_top = totals.pool_committed
    totals.overflow = False
    forget(state)


@compiled
def forget(state: Any) -> None:
    """Clear the notes of a move."""
    totals = state.totals[0]
    for index in range(totals.touched_count):
        state.storages[state.touched[index].storage].is_touched = False
    for index in range(totals.dirty_count):
        state.stages[state.work[index].dirty].is_dirty = False
    totals.touched_count = 0
    totals.span_count = 0
    totals.dirty_count = 0
    totals.undo_count = 0


@entry_point
def commit(state: Any) -> None:
    """Make the move final."""
    forget(state)
    totals = state.totals[0]
    totals.seconds_committed = totals.seconds
    if totals.pool_top > len(state.pool) // 2:
        compact(state)
    totals.pool_committed = totals.pool_top


@compiled
def compact(state: Any) -> None:
    """Move all stages to the start of the pool: first to its free end, in order, then down."""
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


@entry_point
def rebuild(tables: Any, state: Any) -> bool:
    """Simulate the windows in `state.gaps` from nothing; False where they ask for what is not allowed."""
    clear(tables, state)
    for storage in range(len(state.storages)):
        touch(tables, state, storage)
    state.totals[0].span_count = 0
    for index in range(state.totals[0].touched_count):
        state.touched[index].first_span = 0
    for position in range(len(state.stages)):
        if not look_again(tables, state, position) or state.totals[0].overflow:
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
def clear(tables: Any, state: Any) -> None:
    """Bring `state` to where nothing is computed again and nothing is live."""
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
        stage.again_count = 0
        state.live_after[position] = -tables.positions[position].away_bytes
        state.within[position] = 0
        totals.seconds += tables.positions[position].seconds
    for bucket in range(len(state.buckets)):
        state.buckets[bucket].added_bytes = 0
        state.buckets[bucket].is_stale = True
    for gap in range(len(state.gaps)):
        fixed, row = tables.gaps[gap], state.gaps[gap]
        row.begins_there = True
        row.back_after = len(state.stages)
        kept = row.release >= row.hold or fixed.start >= row.hold
        row.gone_after = fixed.end if kept else max(row.release, fixed.start)
    for storage in range(len(state.storages)):
        state.storages[storage].is_touched = False
    forget(state)
