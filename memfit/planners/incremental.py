"""The incremental simulation: what one changed window changes, and nothing else; every change can be taken back.

The computations for the sake of position k are *stage* k: what must be computed again for it, in the order of
positions, and then its own op (unless that waits). A stage depends only on which storages are there when it starts, so
that a changed window is followed from stage to stage as far as it matters. Where a storage is within one gap takes two
numbers: it is there up to stage `gone_after`, and again from the stage after `back_after`.

Bytes are kept at the end of each stage (`live_after`); `within` is what a stage's peak has above that.

A move: `change` some windows, `stages.settle`, `spans.settle_bytes`; then `stages.commit` or `stages.take_back`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point
from memfit.planners.kernels import push
from memfit.planners.program import Program, Table

MOST_AGAIN = 32  # times that one op may be computed again; more is of no use, and rows of fixed length are fast
BUCKET_BITS = 6  # stages in a bucket, as a power of two
_POOL_PER_POSITION = 64  # room for stages: replaced ones stay until the next compaction
_UNDO_ROWS = 1 << 17
_SPAN_ROWS = 1 << 16

# Kinds of rows in `undo`; not plain integers, because numba compiles a function anew for each of those that it is
# given.
U_RELEASE, U_HOLD, U_GONE, U_BACK, U_BEGINS, U_WAITS, U_ADDED, U_REMOVED = np.arange(8)
U_START, U_LENGTH, U_LIVE, U_WITHIN = np.arange(8, 12)

_GAP_STATE = np.dtype(
    [
        ("release", np.int64),
        ("hold", np.int64),
        ("gone_after", np.int64),
        ("back_after", np.int64),
        ("begins_there", np.bool_),
    ],
    align=True,
)
_STAGE = np.dtype(
    [
        ("waits", np.bool_),
        ("queued", np.bool_),
        ("is_dirty", np.bool_),
        ("start", np.int64),
        ("length", np.int64),
        ("again_count", np.int64),
        ("mark", np.int64),
    ],
    align=True,
)
_STORAGE_STATE = np.dtype([("seen", np.int64), ("needed", np.bool_), ("is_touched", np.bool_)], align=True)
_WORK = np.dtype([("heap", np.int64), ("stack", np.int64), ("dirty", np.int64)], align=True)
_TOUCHED = np.dtype([("storage", np.int64), ("first_span", np.int64)], align=True)
_SPAN = np.dtype([("begin", np.int64), ("end", np.int64)], align=True)
_UNDO = np.dtype([("kind", np.int64), ("where", np.int64), ("was", np.int64), ("end", np.int64)], align=True)
_BUCKET = np.dtype(
    [
        ("added_bytes", np.int64),
        ("peak_bytes", np.int64),
        ("excess_bytes", np.int64),
        ("limit_bytes", np.int64),
        ("is_stale", np.bool_),
    ],
    align=True,
)
_TOTALS = np.dtype(
    [
        ("seconds", np.float64),
        ("seconds_committed", np.float64),
        ("stamp", np.int64),
        ("heap_count", np.int64),
        ("pool_top", np.int64),
        ("pool_committed", np.int64),
        ("undo_count", np.int64),
        ("touched_count", np.int64),
        ("span_count", np.int64),
        ("dirty_count", np.int64),
        ("blocked", np.int64),
        ("overflow", np.bool_),
    ],
    align=True,
)


class State(NamedTuple):
    """A simulated step, and the room to change it.

    Attributes:
        gaps: the window of each gap, where its storage is, and whether it is there when the gap begins.
        stages: of each position: whether its op waits to be wanted, its rows of `pool` (what is computed again for its
            sake), how often it is itself computed again; `mark` is a stamp.
        storages: scratch of each storage; `seen` is a stamp.
        again: of each position, the stages in which it is computed again, ascending.
        live_after, within: of each stage, bytes; what is live after a stage is `live_after` and its bucket's
            `added_bytes`.
        buckets: of so many stages each: bytes that are live after all of them; without these, the most that one holds,
            and the sum of what they hold above `limit_bytes` (or -1), which are out of date where `is_stale`.
        work: three lists of stages: the heap of those to look at again, a stack, those whose `within` is out of date.
        touched: the storages whose uses changed since the last commit, and where in `spans` they lived before that.
        undo: what to restore, since the last commit.
        totals: one record: the time of all computations, the lengths of all lists; `overflow` says that a move outgrew
        its
            room, `blocked` which position would have to be computed again and may not (or -1).
    """

    gaps: Table
    stages: Table
    storages: Table
    again: NDArray[np.int64]
    pool: NDArray[np.int64]
    live_after: NDArray[np.int64]
    within: NDArray[np.int64]
    buckets: Table
    work: Table
    touched: Table
    spans: Table
    undo: Table
    totals: Table


def make_state(program: Program) -> State:
    """Return room for a state; `memfit.planners.stages.rebuild` fills it."""
    positions, storages, gaps = (len(table) for table in (program.op_at, program.storage_of, program.tables.gaps))
    return State(
        gaps=np.zeros(gaps, _GAP_STATE),
        stages=np.zeros(positions, _STAGE),
        storages=np.zeros(storages, _STORAGE_STATE),
        again=np.zeros((positions, MOST_AGAIN), np.int64),
        pool=np.zeros((_POOL_PER_POSITION + 2) * positions, np.int64),
        live_after=np.zeros(positions, np.int64),
        within=np.zeros(positions, np.int64),
        buckets=np.zeros((positions >> BUCKET_BITS) + 1, _BUCKET),
        work=np.zeros(positions + 1, _WORK),
        touched=np.zeros(storages + 1, _TOUCHED),
        spans=np.zeros(_SPAN_ROWS + storages, _SPAN),
        undo=np.zeros(_UNDO_ROWS + 16 * positions + 16 * storages, _UNDO),
        totals=np.zeros(1, _TOTALS),
    )


@compiled
def note(state: Any, kind: Any, where: int, was: int) -> None:
    """Write down what a change replaced."""
    row = state.undo[state.totals[0].undo_count]
    row.kind = kind
    row.where = where
    row.was = was
    state.totals[0].undo_count += 1


@compiled
def enqueue(state: Any, position: int) -> None:
    """Have stage `position` looked at again."""
    if not state.stages[position].queued:
        state.stages[position].queued = True
        push(state.work, state.totals[0].heap_count, position)
        state.totals[0].heap_count += 1


@compiled
def gap_before(tables: Any, storage: int, position: int) -> int:
    """Return the gap of `storage` in which stage `position` stands: the last one that starts before it."""
    low, high = tables.storages[storage].first_gap, tables.storages[storage].last_gap
    while low < high:
        middle = (low + high + 1) // 2
        if tables.gaps[middle].start < position:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def reconsider(tables: Any, state: Any, gap: int) -> None:
    """Work out anew where the storage of `gap` is, and enqueue the stages for which that makes a difference."""
    fixed, row = tables.gaps[gap], state.gaps[gap]
    start, end, first = fixed.start, fixed.end, tables.storages[fixed.storage].first_gap
    writer = tables.gaps[first].start
    kept = row.release >= row.hold or start >= row.hold
    gone = start
    if row.begins_there:
        gone = end if kept else max(row.release, start)
    back = len(state.stages)
    for index in range(state.stages[writer].again_count):
        stage = state.again[writer, index]
        if stage > start and stage < end and (kept or stage >= row.hold):
            back = stage
            break
    old_gone, old_back = row.gone_after, row.back_after
    if gone == old_gone and back == old_back:
        return
    note(state, U_GONE, gap, old_gone)
    note(state, U_BACK, gap, old_back)
    row.gone_after = gone
    row.back_after = back
    for other in range(first, gap + 1):
        user = tables.gaps[other].start  # the writer, or a reader up to here
        for index in range(state.stages[user].again_count):
            stage = state.again[user, index]
            if stage > end:
                break
            if stage > start and (stage <= gone or stage > back) != (stage <= old_gone or stage > old_back):
                enqueue(state, stage)
    if fixed.closed and (end <= gone or end > back) != (end <= old_gone or end > old_back):
        enqueue(state, end)


@entry_point
def change(tables: Any, state: Any, gap: int, release: int, hold: int) -> None:
    """Give `gap` another window; `stages.settle` follows it up."""
    row = state.gaps[gap]
    note(state, U_RELEASE, gap, row.release)
    note(state, U_HOLD, gap, row.hold)
    row.release = release
    row.hold = hold
    writer = tables.storages[tables.gaps[gap].storage].writer
    is_first = tables.gaps[gap].start == writer
    if tables.positions[writer].waits_with_next or (is_first and tables.positions[writer].may_wait):
        enqueue(state, writer)
        while writer > 0 and tables.positions[writer - 1].waits_with_next:
            writer -= 1
            enqueue(state, writer)
    reconsider(tables, state, gap)
