"""Live bytes of the incremental simulation: the stages over which storages live, and the bytes of each stage.

A storage computed in stage c, and used last in stage u before it is recomputed, is live after the stages c to u - 1:
its *span*.
See `memfit.planners.engine.retention.state` for the words.
"""

from __future__ import annotations

from memfit.planners.engine.retention.instance import Tables
from memfit.planners.engine.retention.state import BUCKET_BITS, MOST_RECOMPUTATIONS, IncrementalState
from memfit.planners.engine.retention.undo import add_live, set_within
from memfit.system.compiled import compiled, entry_point
from memfit.system.records import Table


@compiled
def touch(tables: Tables, state: IncrementalState, storage: int) -> None:
    """Write down the spans of a storage, before its computations or uses change for the first time in a move.

    Args:
        tables: of the instance.
        state: the simulated step; changed.
        storage: the managed storage.
    """
    if state.storages[storage].is_touched or tables.storages[storage].size_bytes == 0:
        return
    totals = state.totals[0]
    state.storages[storage].is_touched = True
    state.touched[totals.touched_count].storage = storage
    state.touched[totals.touched_count].first_span = totals.span_count
    totals.touched_count += 1
    totals.span_count = _write_spans(tables, state, storage, totals.span_count)


@compiled
def _write_spans(tables: Tables, state: IncrementalState, storage: int, row: int) -> int:
    """Write the spans of `storage` to `state.spans` from `row` on; return the row after the last."""
    if row + MOST_RECOMPUTATIONS + 2 >= len(state.spans):
        state.totals[0].overflow = True
        return row
    writer = tables.storages[storage].writer
    count = state.stages[writer].recompute_count
    for index in range(0 if state.stages[writer].waits else -1, count):
        begin = writer if index < 0 else state.recomputed_in[writer, index]
        following = state.recomputed_in[writer, index + 1] if index + 1 < count else len(state.stages)
        end = _last_use(tables, state, storage, begin, following)
        if end > begin:
            state.spans[row].begin = begin
            state.spans[row].end = end
            row += 1
    return row


@compiled
def _last_use(tables: Tables, state: IncrementalState, storage: int, low: int, high: int) -> int:
    """Return the last stage in [low, high) that uses `storage`, or -1."""
    last = -1
    for interval in range(tables.storages[storage].first_interval + 1, tables.storages[storage].last_interval + 1):
        reader = tables.intervals[interval].start
        if reader >= high:
            break
        stage = state.stages[reader]
        if not stage.waits and reader >= low:
            last = max(last, reader)
        index = stage.recompute_count - 1
        while index >= 0 and state.recomputed_in[reader, index] >= high:
            index -= 1
        if index >= 0 and state.recomputed_in[reader, index] >= low:
            last = max(last, int(state.recomputed_in[reader, index]))
    return last


@compiled
def _lives_on(tables: Tables, state: IncrementalState, storage: int, stage: int) -> bool:
    """Return whether `storage`, as held in `stage`, is used after that stage."""
    writer = tables.storages[storage].writer
    following = len(state.stages)
    index = state.stages[writer].recompute_count - 1
    while index >= 0 and state.recomputed_in[writer, index] > stage:
        following = int(state.recomputed_in[writer, index])
        index -= 1
    return _last_use(tables, state, storage, stage + 1, following) > stage


@compiled
def make_dirty(state: IncrementalState, stage: int) -> None:
    """Have `settle_bytes` update `within` of `stage`.

    Args:
        state: the simulated step; changed.
        stage: the stage.
    """
    if not state.stages[stage].is_dirty:
        state.stages[stage].is_dirty = True
        state.work[state.totals[0].dirty_count].dirty = stage
        state.totals[0].dirty_count += 1


@entry_point
def settle_bytes(tables: Tables, state: IncrementalState) -> bool:
    """Update `live_after` and `within` to the stages; return False if the move outgrows its room.

    Args:
        tables: of the instance.
        state: the simulated step; changed.
    """
    totals, spans = state.totals[0], state.spans
    state.touched[totals.touched_count].first_span = totals.span_count
    for index in range(totals.touched_count):
        storage, old = state.touched[index].storage, state.touched[index].first_span
        old_end = state.touched[index + 1].first_span
        size, new = tables.storages[storage].size_bytes, totals.span_count
        new_end = _write_spans(tables, state, storage, new)
        while old < old_end or new < new_end:
            if new == new_end or (old < old_end and spans[old].begin < spans[new].begin):
                _shift_span(state, old, -size)
                old += 1
            elif old == old_end or spans[new].begin < spans[old].begin:
                _shift_span(state, new, size)
                new += 1
            else:
                if spans[old].end != spans[new].end:
                    _shift_span(state, old, -size)
                    _shift_span(state, new, size)
                old += 1
                new += 1
        if totals.undo_count + 4 * MOST_RECOMPUTATIONS + len(state.stages) >= len(state.undo):
            totals.overflow = True
        if totals.overflow:
            return False
    for index in range(totals.dirty_count):
        stage = state.work[index].dirty
        set_within(state, stage, _bytes_within(tables, state, stage))
    return True


@compiled
def _shift_span(state: IncrementalState, row: int, size_bytes: int) -> None:
    """Add bytes over a span, or subtract them if they are negative, and have its two end stages updated."""
    begin, end = state.spans[row].begin, state.spans[row].end
    add_live(state, begin, end, size_bytes)
    make_dirty(state, begin)
    make_dirty(state, end)


@compiled
def _bytes_within(tables: Tables, state: IncrementalState, stage: int) -> int:
    """Return the peak of a stage above the bytes live after it.

    The walk goes backward; a storage is freed after its last use, or reused in place by a write.
    """
    state.totals[0].stamp += 1
    first, length = state.stages[stage].start, state.stages[stage].length
    live, peak = 0, 0
    for index in range(length, -1, -1):
        position = int(state.pool[first + index]) if index < length else stage
        if position == stage and state.stages[stage].waits:
            continue
        op = tables.positions[position]
        for slot in range(op.write_start, op.write_end):
            _look_ahead(tables, state, tables.writes[slot].storage, stage)
        for slot in range(op.read_start, op.read_end):
            _look_ahead(tables, state, tables.reads[slot].storage, stage)
        live, held = step_back(tables, state.storages, position, live)
        peak = max(peak, held)
    return peak


@compiled
def step_back(tables: Tables, storages: Table, position: int, live: int) -> tuple[int, int]:
    """Step backward over the op of a position; a storage is freed after its last use, or reused in place by a write.

    Args:
        tables: of the instance.
        storages: record[managed storages], `needed` says which are used later; updated.
        position: of the op.
        live: bytes that are live after the op.

    Returns:
        The bytes that are live before the op, and those that are held while it runs.
    """
    op, reused_bytes = tables.positions[position], 0
    for slot in range(op.reuse_start, op.reuse_end):
        storage = tables.reuses[slot].read
        if not storages[storage].needed:
            reused_bytes = max(reused_bytes, tables.storages[storage].size_bytes)
    held = live + op.workspace_bytes - reused_bytes
    for slot in range(op.write_start, op.write_end):
        storage = tables.writes[slot].storage
        if storages[storage].needed:
            live -= tables.storages[storage].size_bytes
            storages[storage].needed = False
        else:
            held += tables.storages[storage].size_bytes
    for slot in range(op.read_start, op.read_end):
        storage = tables.reads[slot].storage
        if not storages[storage].needed:
            live += tables.storages[storage].size_bytes
            held += tables.storages[storage].size_bytes
            storages[storage].needed = True
    return live, held


@compiled
def _look_ahead(tables: Tables, state: IncrementalState, storage: int, stage: int) -> None:
    """Set whether `storage` is needed after `stage`, the first time that the walk meets it."""
    row = state.storages[storage]
    if row.seen != state.totals[0].stamp:
        row.seen = state.totals[0].stamp
        row.needed = tables.storages[storage].size_bytes > 0 and _lives_on(tables, state, storage, stage)


@entry_point
def weigh(state: IncrementalState, budget_bytes: int) -> tuple[int, float]:
    """Return (peak bytes, sum over the stages of the bytes above the budget).

    Args:
        state: simulated; its buckets are brought up to date.
        budget_bytes: without residents.
    """
    peak, excess = -1, 0
    for index in range(len(state.buckets)):
        bucket = state.buckets[index]
        if bucket.is_stale:
            _refresh(state, index)
        held = bucket.peak_bytes + bucket.added_bytes
        peak = max(peak, held)
        if held > budget_bytes:
            limit = budget_bytes - bucket.added_bytes
            if bucket.excess_bytes < 0 or bucket.limit_bytes != limit:
                bucket.excess_bytes = _excess_above(state, index, limit)
                bucket.limit_bytes = limit
            excess += bucket.excess_bytes
    return peak, float(excess)


@compiled
def _refresh(state: IncrementalState, index: int) -> None:
    """Update a bucket's peak."""
    peak = -(1 << 62)
    for stage in range(index << BUCKET_BITS, min(len(state.within), (index + 1) << BUCKET_BITS)):
        peak = max(peak, state.live_after[stage] + state.within[stage])
    state.buckets[index].peak_bytes = peak
    state.buckets[index].excess_bytes = -1
    state.buckets[index].is_stale = False


@compiled
def _excess_above(state: IncrementalState, index: int, limit_bytes: int) -> int:
    """Return the bytes of a bucket's stages above a limit, summed; without the bucket's `added_bytes`."""
    excess = 0
    for stage in range(index << BUCKET_BITS, min(len(state.within), (index + 1) << BUCKET_BITS)):
        excess += max(0, state.live_after[stage] + state.within[stage] - limit_bytes)
    return excess


@compiled
def held_in(state: IncrementalState, stage: int) -> int:
    """Return the peak bytes of a stage.

    Args:
        state: simulated.
        stage: the stage.
    """
    return state.live_after[stage] + state.within[stage] + state.buckets[stage >> BUCKET_BITS].added_bytes


@compiled
def peak_stage(state: IncrementalState, peak_bytes: int) -> int:
    """Return the first stage with this peak; no bucket may be stale.

    Args:
        state: weighed.
        peak_bytes: as `weigh` returned it.
    """
    index = 0
    while state.buckets[index].peak_bytes + state.buckets[index].added_bytes != peak_bytes:
        index += 1
    stage = index << BUCKET_BITS
    while held_in(state, stage) != peak_bytes:
        stage += 1
    return stage
