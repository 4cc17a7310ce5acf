"""The state of an incremental simulation beside a fresh simulation of its retention, field by field."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.retention.instance import Tables
from memfit.planners.engine.retention.live_bytes import weigh
from memfit.planners.engine.retention.stages import rebuild
from memfit.planners.engine.retention.state import BUCKET_BITS, IncrementalState, empty_state
from memfit.system.records import Integers

_ROUNDING = 1e-9  # relative, for sums of seconds in different orders


def audit(tables: Tables, state: IncrementalState) -> None:
    """Compare `state`, between two moves, with a fresh simulation of its retention; change neither.

    Args:
        tables: of the instance.
        state: of the same instance.

    Raises:
        AssertionError: a field differs, or something of a move is left over; names the field.
    """
    fresh = empty_state(tables)
    fresh.intervals["release"], fresh.intervals["hold"] = state.intervals["release"], state.intervals["hold"]
    assert rebuild(tables, fresh), "the retention of a state between two moves is allowed"
    for name in ("held_until", "regained_in", "begins_held"):
        _compare(f"intervals.{name}", state.intervals[name], fresh.intervals[name])
    for name in ("waits", "length", "recompute_count"):
        _compare(f"stages.{name}", state.stages[name], fresh.stages[name])
    for position, stage in enumerate(fresh.stages):
        _compare(f"the entries of stage {position}", _entries(state, position), _entries(fresh, position))
        count = int(stage["recompute_count"])
        found, expected = state.recomputed_in[position, :count], fresh.recomputed_in[position, :count]
        _compare(f"recomputed_in[{position}]", found, expected)
    _compare("live_after", _live_bytes(state), _live_bytes(fresh))
    _compare("within", state.within, fresh.within)
    for budget_bytes in (0, int(_live_bytes(fresh).max(initial=0))):
        assert weigh(state, budget_bytes) == weigh(fresh, budget_bytes), "the buckets' peak or excess differs"
    _audit_totals(state, fresh)


def _audit_totals(state: IncrementalState, fresh: IncrementalState) -> None:
    totals, expected = state.totals[0], fresh.totals[0]
    for name in ("seconds", "seconds_committed"):
        assert np.isclose(totals[name], expected["seconds"], rtol=_ROUNDING, atol=0.0), f"totals.{name} differs"
    for name in ("heap_count", "undo_count", "touched_count", "span_count", "dirty_count", "overflow"):
        assert not totals[name], f"totals.{name} is left over from a move"
    assert totals["pool_top"] == totals["pool_committed"], "the pool has entries of a move"
    for table, name in ((state.stages, "queued"), (state.stages, "is_dirty"), (state.storages, "is_touched")):
        assert not table[name].any(), f"{name} is left over from a move"


def _entries(state: IncrementalState, position: int) -> Integers:
    start = int(state.stages["start"][position])
    return state.pool[start : start + int(state.stages["length"][position])]


def _live_bytes(state: IncrementalState) -> Integers:
    return state.live_after + state.buckets["added_bytes"][np.arange(len(state.live_after)) >> BUCKET_BITS]


def _compare(name: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
    differ = np.flatnonzero(found != expected) if found.shape == expected.shape else np.array([0])
    if len(differ):
        at = int(differ[0])
        raise AssertionError(f"{name} differs first at {at}: {found[at : at + 3]}, expected {expected[at : at + 3]}")
