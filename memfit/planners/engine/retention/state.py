"""The incremental simulation of a retention: what a move changes is recomputed, and nothing else.

The computations for the sake of position k are *stage* k: the ops recomputed for it, in the order of positions, and
then its own op, unless that *waits* until its result is needed. A stage depends only on which storages are held when it
starts, so that a changed retention is followed from stage to stage as far as it matters. Where a storage is held within
one interval takes two numbers: up to stage `held_until`, and again in the stages after `regained_in`.

Bytes are kept at the end of each stage (`live_after`); `within` is how much the stage's peak exceeds them.

A move: `stages.change` for some retention, `stages.settle`, `live_bytes.settle_bytes`; then `undo.commit` or
`undo.take_back`. This module holds the arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.retention.instance import Tables
from memfit.system.compiled import compiled
from memfit.system.records import Table, record

MOST_RECOMPUTATIONS = 32  # of one op; more are never useful, and rows of fixed length are fast
BUCKET_BITS = 6  # stages in a bucket, as a power of two
_POOL_PER_POSITION = 64  # entries of replaced stages stay until the pool is compacted
_UNDO_ROWS = 1 << 17
_SPAN_ROWS = 1 << 16

_INTERVAL_STATE = record("release hold held_until regained_in", flags="begins_held")
_STAGE = record("start length recompute_count mark", flags="waits queued is_dirty")
STORAGE_STATE = record("seen", flags="needed is_touched")
_WORK = record("heap stack dirty")
_TOUCHED = record("storage first_span")
_SPAN = record("begin end")
_UNDO = record("kind where first second")
_BUCKET = record("added_bytes peak_bytes excess_bytes limit_bytes", flags="is_stale")
_TOTALS = record(
    "stamp heap_count pool_top pool_committed undo_count touched_count span_count dirty_count blocked",
    floats="seconds seconds_committed",
    flags="overflow",
)


class IncrementalState(NamedTuple):
    """A simulated step, and the room to change it.

    Attributes:
        intervals: record[intervals]: the retention, the stages in which the storage is held, and whether it is held
            when the interval begins.
        stages: record[positions]: whether the op waits, its entries of `pool` (`start`, `length`), how often its own op
            is recomputed; `mark` is a stamp, `queued` and `is_dirty` say in which lists of `work` the stage is.
        storages: record[storages], scratch; `seen` is a stamp.
        recomputed_in: int64[positions, MOST_RECOMPUTATIONS], the stages in which each op is recomputed, ascending.
        pool: int64[entries], the ops that stages recompute.
        live_after, within: int64[positions], bytes; the bytes live after a stage are `live_after` and `added_bytes` of
            its bucket.
        buckets: record[buckets] of 2 ** BUCKET_BITS stages: bytes that are live after all of them; without these, the
            peak, and the sum of the bytes above `limit_bytes` (or -1), which are out of date if `is_stale`.
        work: three lists of stages: the heap of those to update, a stack, those whose `within` is out of date.
        touched: the storages whose uses changed since the last commit, and where in `spans` their old spans begin.
        spans: the stages over which touched storages are live.
        undo: rows of `memfit.planners.engine.retention.undo`, since the last commit.
        totals: one record: the seconds of all computations, the lengths of all lists; `overflow` says that a move
            outgrew its room; `blocked` is the position that would have to be recomputed and must not be (or -1).
    """

    intervals: Table
    stages: Table
    storages: Table
    recomputed_in: NDArray[np.int64]
    pool: NDArray[np.int64]
    live_after: NDArray[np.int64]
    within: NDArray[np.int64]
    buckets: Table
    work: Table
    touched: Table
    spans: Table
    undo: Table
    totals: Table


def empty_state(tables: Tables) -> IncrementalState:
    """Return the arrays of a state for these tables, all zero; `stages.rebuild` simulates the retention in them."""
    positions, storages, intervals = len(tables.positions), len(tables.storages), len(tables.intervals)
    return IncrementalState(
        intervals=np.zeros(intervals, _INTERVAL_STATE),
        stages=np.zeros(positions, _STAGE),
        storages=np.zeros(storages, STORAGE_STATE),
        recomputed_in=np.zeros((positions, MOST_RECOMPUTATIONS), np.int64),
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
def interval_before(tables: Tables, storage: int, position: int) -> int:
    """Return the last interval of `storage` that starts before `position`.

    Args:
        tables: of the instance.
        storage: the managed storage.
        position: after the first use of the storage.
    """
    low, high = tables.storages[storage].first_interval, tables.storages[storage].last_interval
    while low < high:
        middle = (low + high + 1) // 2
        if tables.intervals[middle].start < position:
            low = middle
        else:
            high = middle - 1
    return low
