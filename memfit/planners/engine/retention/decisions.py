"""Retentions: made from kept sets, simulated, and changed where an op must not be recomputed.

See `memfit.planners.engine.retention.instance` for what a retention is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.planners.engine.retention.instance import DROPPED, FREE, KEPT, Instance
from memfit.planners.engine.retention.live_bytes import weigh
from memfit.planners.engine.retention.stages import rebuild
from memfit.planners.engine.retention.state import BUCKET_BITS, IncrementalState, empty_state
from memfit.system.records import Flags, Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Positions `[release, hold)` of each interval of an instance: release int64[intervals], hold int64[intervals]."""

    release: Integers
    hold: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A simulated retention: all positions in the order of computation, seconds, peak bytes with residents."""

    sequence: tuple[int, ...]
    seconds: float
    peak_bytes: int


def keep_everything(instance: Instance) -> Retention:
    """Return the retention that keeps every storage to its last use, except those pinned to be recomputed."""
    nothing = np.zeros(len(instance.tables.intervals), np.int64)
    return drop_at(instance, Retention(release=nothing, hold=nothing), instance.tables.intervals["rule"] == DROPPED)


def keep_only(instance: Instance, kept: Collection[int]) -> Retention:
    """Return the retention of a kept set: forward storages (by id) that are not in `kept` are recomputed in backward.

    A storage that is not kept is dropped after its last forward use, recomputed when a backward op reads it, and then
    kept to its last use. Pins are honoured. `simulated` keeps more where an op must not be recomputed.

    Args:
        instance: the tables of the graph.
        kept: storages, by id.

    Source: Chen 2016, Algorithm 2, with mirror counts of 0 and 1.
    """
    dropped = np.array([storage not in kept for storage in instance.storage_of], np.bool_)
    dropped = dropped[instance.tables.intervals["storage"]]
    return drop_at(instance, keep_everything(instance), dropped & instance.crosses)


def waiting(instance: Instance, retention: Retention, least_bytes: int) -> Retention:
    """Return `retention` with backward ops of a single reader computed only when that reader is.

    Gradients that add up, as those of a weight that every step of a recurrent network uses, are then computed when
    their sum is read, after forward storages have been freed. Nothing is recomputed for that.

    Args:
        instance: the tables of the graph.
        retention: applies to all other storages.
        least_bytes: aligned bytes that a storage must have.
    """
    storages, positions = instance.tables.storages, instance.tables.positions
    first, writer = storages["first_interval"], storages["writer"]
    is_single = positions["write_end"][writer] == positions["write_start"][writer] + 1
    chosen = (storages["last_interval"] == first + 1) & (storages["size_bytes"] >= least_bytes) & is_single
    chosen &= (writer >= instance.backward_start) & positions["may_wait"][writer]
    found = np.zeros(len(instance.tables.intervals), np.bool_)
    found[first[chosen]] = True
    return drop_at(instance, retention, found)


def drop_at(instance: Instance, retention: Retention, chosen: Flags) -> Retention:
    """Return `retention` with the storages of some intervals dropped at once, and kept after their recomputation.

    Args:
        instance: the tables of the graph.
        retention: applies to all other intervals.
        chosen: bool[intervals]; those that must be kept are kept.
    """
    intervals = instance.tables.intervals
    dropped = chosen & (intervals["rule"] != KEPT)
    return Retention(
        release=np.where(dropped, intervals["start"], retention.release).astype(np.int64),
        hold=np.where(dropped, intervals["start"] + 1, retention.hold).astype(np.int64),
    )


def simulated(instance: Instance, retention: Retention) -> IncrementalState:
    """Return the simulated state of `retention`; storages whose recomputation is not allowed are kept.

    Args:
        instance: the tables of the graph.
        retention: of all intervals.

    Raises:
        InvalidOptionError: a pin asks for that recomputation.
    """
    tables = instance.tables
    state = empty_state(tables)
    state.intervals["release"] = retention.release
    state.intervals["hold"] = retention.hold
    while not rebuild(tables, state):
        blocked = int(state.totals[0]["blocked"])
        if blocked < 0:  # no room: an op is recomputed too often
            choice = (state.intervals["hold"] > tables.intervals["start"] + 1) & (tables.intervals["rule"] == FREE)
            assert choice.any(), "a retention of one position recomputes no op so often"
            state.intervals["hold"][choice] = tables.intervals["start"][choice] + 1
            continue
        op = instance.graph.ops[instance.op_at[blocked]]
        written = np.isin(
            tables.intervals["storage"], [s for s, number in enumerate(instance.storage_of) if number in op.writes]
        )
        if (tables.intervals["rule"][written] == DROPPED).any():
            raise InvalidOptionError(
                f"pinned asks for op {op.id} {op.name!r} to be rematerialized, but one of its inputs is mutated before "
                f"its results are needed again; expected a pin of True, or none"
            )
        assert (tables.intervals["rule"][written] == FREE).any(), (
            "storages that may never be recomputed are always kept"
        )
        state.intervals["release"][written] = 0
        state.intervals["hold"][written] = 0
    return state


def retention_of(state: IncrementalState) -> Retention:
    """Return a copy of the retention in `state`."""
    return Retention(release=state.intervals["release"].copy(), hold=state.intervals["hold"].copy())


def evaluate(instance: Instance, state: IncrementalState) -> Evaluation:
    """Return the sequence, seconds and peak of a state.

    Args:
        instance: the tables of the graph.
        state: simulated.
    """
    peak_bytes, _ = weigh(state, 0)
    return Evaluation(
        sequence=tuple(_sequence(state)),
        seconds=float(state.totals[0]["seconds"]),
        peak_bytes=int(peak_bytes) + instance.base_bytes,
    )


def held_bytes(state: IncrementalState) -> Integers:
    """Return int64[positions], the peak bytes of each stage without residents."""
    bucket = np.arange(len(state.within)) >> BUCKET_BITS
    return state.live_after + state.within + state.buckets["added_bytes"][bucket]


def stage_seconds(instance: Instance, state: IncrementalState) -> NDArray[np.float64]:
    """Return float64[positions], the seconds of all computations in each stage.

    Args:
        instance: the tables of the graph.
        state: simulated.
    """
    seconds, length = instance.tables.positions["seconds"], state.stages["length"]
    begins = np.cumsum(length) - length
    entries = np.arange(int(length.sum())) + np.repeat(state.stages["start"] - begins, length)
    total = np.where(state.stages["waits"], 0.0, seconds)
    np.add.at(total, np.repeat(np.arange(len(length)), length), seconds[state.pool[entries]])
    return total


def _sequence(state: IncrementalState) -> list[int]:
    sequence: list[int] = []
    for position, stage in enumerate(state.stages):
        start = int(stage["start"])
        sequence.extend(state.pool[start : start + int(stage["length"])].tolist())
        if not stage["waits"]:
            sequence.append(position)
    return sequence
