"""Spans: the stages over which storages live, and the bytes that follow from them, kept up to date from move to move.

A storage computed in stage c, and used last in stage u before it is computed anew, is live after the stages c to u - 1.
See `memfit.planners.incremental` for the words.
"""

from __future__ import annotations

from typing import Any

from memfit.compiled import compiled, entry_point
from memfit.planners.incremental import BUCKET_BITS, MOST_AGAIN, U_LIVE, U_WITHIN, note


@compiled
def touch(tables: Any, state: Any, storage: int) -> None:
    """Note the spans of a storage, before its computations or its uses change for the first time in a move."""
    if state.storages[storage].is_touched or tables.storages[storage].size_bytes == 0:
        return
    totals = state.totals[0]
    state.storages[storage].is_touched = True
    state.touched[totals.touched_count].storage = storage
    state.touched[totals.touched_count].first_span = totals.span_count
    totals.touched_count += 1
    totals.span_count = write_spans(tables, state, storage, totals.span_count)


@compiled
def write_spans(tables: Any, state: Any, storage: int, row: int) -> int:
    """Write the spans of `storage` to `state.spans` from `row` on; return the row after the last."""
    if row + MOST_AGAIN + 2 >= len(state.spans):
        state.totals[0].overflow = True
        return row
    writer = tables.storages[storage].writer
    count = state.stages[writer].again_count
    for index in range(0 if state.stages[writer].waits else -1, count):
        begin = writer if index < 0 else state.again[writer, index]
        following = state.again[writer, index + 1] if index + 1 < count else len(state.stages)
        end = last_use(tables, state, storage, begin, following)
        if end > begin:
            state.spans[row].begin = begin
            state.spans[row].end = end
            row += 1
    return row


@compiled
def last_use(tables: Any, state: Any, storage: int, low: int, high: int) -> int:
    """Return the last stage in [low, high) that uses `storage`, or -1."""
    last = -1
    for gap in range(tables.storages[storage].first_gap + 1, tables.storages[storage].last_gap + 1):
        reader = tables.gaps[gap].start
        if reader >= high:
            break
        stage = state.stages[reader]
        if not stage.waits and reader >= low:
            last = max(last, reader)
        index = stage.again_count - 1
        while index >= 0 and state.again[reader, index] >= high:
            index -= 1
        if index >= 0 and state.again[reader, index] >= low:
            last = max(last, state.again[reader, index])
    return last


@compiled
def lives_on(tables: Any, state: Any, storage: int, stage: int) -> bool:
    """Return whether what is there of `storage` in `stage` is used after it."""
    writer = tables.storages[storage].writer
    following = len(state.stages)
    index = state.stages[writer].again_count - 1
    while index >= 0 and state.again[writer, index] > stage:
        following = state.again[writer, index]
        index -= 1
    return last_use(tables, state, storage, stage + 1, following) > stage


@compiled
def make_dirty(state: Any, stage: int) -> None:
    """Have the bytes within `stage` worked out anew."""
    if not state.stages[stage].is_dirty:
        state.stages[stage].is_dirty = True
        state.work[state.totals[0].dirty_count].dirty = stage
        state.totals[0].dirty_count += 1


@compiled
def add_live(state: Any, begin: int, end: int, size_bytes: int) -> None:
    """Add bytes after the stages from `begin` to `end - 1`: to whole buckets at once."""
    first, last = begin >> BUCKET_BITS, end >> BUCKET_BITS
    if first == last:
        add_within(state, first, begin, end, size_bytes)
        return
    add_within(state, first, begin, (first + 1) << BUCKET_BITS, size_bytes)
    for bucket in range(first + 1, last):
        state.buckets[bucket].added_bytes += size_bytes
    add_within(state, last, last << BUCKET_BITS, end, size_bytes)


@compiled
def add_within(state: Any, bucket: int, begin: int, end: int, size_bytes: int) -> None:
    """Add bytes after some stages of one bucket."""
    state.buckets[bucket].is_stale = True
    for stage in range(begin, end):
        state.live_after[stage] += size_bytes


@entry_point
def settle_bytes(tables: Any, state: Any) -> bool:
    """Bring `live_after` and `within` up to date with the stages; False where the move outgrows its room."""
    totals, spans = state.totals[0], state.spans
    state.touched[totals.touched_count].first_span = totals.span_count
    for index in range(totals.touched_count):
        storage, old, old_end = (
            state.touched[index].storage,
            state.touched[index].first_span,
            state.touched[index + 1].first_span,
        )
        size, new = tables.storages[storage].size_bytes, totals.span_count
        new_end = write_spans(tables, state, storage, new)
        while old < old_end or new < new_end:
            if new == new_end or (old < old_end and spans[old].begin < spans[new].begin):
                shift_span(state, old, -size)
                old += 1
            elif old == old_end or spans[new].begin < spans[old].begin:
                shift_span(state, new, size)
                new += 1
            else:
                if spans[old].end != spans[new].end:
                    shift_span(state, old, -size)
                    shift_span(state, new, size)
                old += 1
                new += 1
        if totals.undo_count + 4 * MOST_AGAIN + len(state.stages) >= len(state.undo):
            totals.overflow = True
        if totals.overflow:
            return False
    for index in range(totals.dirty_count):
        stage = state.work[index].dirty
        note(state, U_WITHIN, stage, state.within[stage])
        state.within[stage] = bytes_within(tables, state, stage)
        state.buckets[stage >> BUCKET_BITS].is_stale = True
    return True


@compiled
def shift_span(state: Any, row: int, size_bytes: int) -> None:
    """Add a span's bytes, or take them away, and have its two ends looked at."""
    begin, end = state.spans[row].begin, state.spans[row].end
    add_live(state, begin, end, size_bytes)
    state.undo[state.totals[0].undo_count].end = end
    note(state, U_LIVE, begin, -size_bytes)
    make_dirty(state, begin)
    make_dirty(state, end)


@compiled
def bytes_within(tables: Any, state: Any, stage: int) -> int:
    """Return the peak within a stage, less what is live after it: walked backward, everything freed after its
    last use.
    """
    state.totals[0].stamp += 1
    first, length = state.stages[stage].start, state.stages[stage].length
    live, peak = 0, 0
    for index in range(length, -1, -1):
        position = state.pool[first + index] if index < length else stage
        if position == stage and state.stages[stage].waits:
            continue
        op = tables.positions[position]
        for slot in range(op.write_start, op.write_end):
            look_ahead(tables, state, tables.writes[slot].storage, stage)
        for slot in range(op.read_start, op.read_end):
            look_ahead(tables, state, tables.reads[slot].storage, stage)
        taken_over = 0
        for slot in range(op.reuse_start, op.reuse_end):
            storage = tables.reuses[slot].read
            if not state.storages[storage].needed:
                taken_over = max(taken_over, tables.storages[storage].size_bytes)
        held = live + op.workspace_bytes - taken_over
        for slot in range(op.write_start, op.write_end):
            storage = tables.writes[slot].storage
            if state.storages[storage].needed:
                live -= tables.storages[storage].size_bytes
                state.storages[storage].needed = False
            else:
                held += tables.storages[storage].size_bytes
        for slot in range(op.read_start, op.read_end):
            storage = tables.reads[slot].storage
            if not state.storages[storage].needed:
                live += tables.storages[storage].size_bytes
                held += tables.storages[storage].size_bytes
                state.storages[storage].needed = True
        peak = max(peak, held)
    return peak


@compiled
def look_ahead(tables: Any, state: Any, storage: int, stage: int) -> None:
    """Set whether `storage` is needed after `stage`, when it is first met there."""
    row = state.storages[storage]
    if row.seen != state.totals[0].stamp:
        row.seen = state.totals[0].stamp
        row.needed = tables.storages[storage].size_bytes > 0 and lives_on(tables, state, storage, stage)


@entry_point
def weigh(state: Any, budget_bytes: int) -> tuple[int, float]:
    """Return (peak bytes, sum over the stages of the bytes above the budget)."""
    peak, excess = -1, 0
    for index in range(len(state.buckets)):
        bucket = state.buckets[index]
        if bucket.is_stale:
            refresh(state, index)
        held = bucket.peak_bytes + bucket.added_bytes
        peak = max(peak, held)
        if held > budget_bytes:
            limit = budget_bytes - bucket.added_bytes
            if bucket.excess_bytes < 0 or bucket.limit_bytes != limit:
                bucket.excess_bytes = excess_above(state, index, limit)
                bucket.limit_bytes = limit
            excess += bucket.excess_bytes
    return peak, float(excess)


@compiled
def refresh(state: Any, index: int) -> None:
    """Work out a bucket anew."""
    peak = -(1 << 62)
    for stage in range(index << BUCKET_BITS, min(len(state.within), (index + 1) << BUCKET_BITS)):
        peak = max(peak, state.live_after[stage] + state.within[stage])
    state.buckets[index].peak_bytes = peak
    state.buckets[index].excess_bytes = -1
    state.buckets[index].is_stale = False


@compiled
def excess_above(state: Any, index: int, limit_bytes: int) -> int:
    """Return the sum of what a bucket's stages hold above a limit, the bucket's own bytes left out."""
    excess = 0
    for stage in range(index << BUCKET_BITS, min(len(state.within), (index + 1) << BUCKET_BITS)):
        excess += max(0, state.live_after[stage] + state.within[stage] - limit_bytes)
    return excess


@compiled
def held_in(state: Any, stage: int) -> int:
    """Return the most that a stage holds."""
    return state.live_after[stage] + state.within[stage] + state.buckets[stage >> BUCKET_BITS].added_bytes


@compiled
def peak_stage(state: Any, peak_bytes: int) -> int:
    """Return the first stage that holds `peak_bytes`; all buckets are up to date."""
    index = 0
    while state.buckets[index].peak_bytes + state.buckets[index].added_bytes != peak_bytes:
        index += 1
    stage = index << BUCKET_BITS
    while held_in(state, stage) != peak_bytes:
        stage += 1
    return stage
