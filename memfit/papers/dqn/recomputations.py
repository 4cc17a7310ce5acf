"""When removed storages are recomputed: the rule of section 4.5 for the second phase of recomputation.

The paper recomputes as it prefetches: the earliest reused first, as soon as it exceeds nothing. Recomputation and all
other ops share one stream, so that recomputing before the reuse saves time only where compute would wait for a copy. A
recomputation therefore stands right before the op that reads its result, unless compute waits at an earlier stop of
backward: then it is moved ahead to that stop, the earliest reused first, as many as the wait has room for. The move is
kept if the step is faster for it and exceeds nothing that it did not exceed before.

A *run* is what is recomputed for one op, in order. A run may be moved if no op mutates what it reads, and if all of it
has been computed by then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.retention.instance import NOT_AN_OP, Instance
from memfit.system.records import Integers


def moved_ahead(
    instance: Instance, sequence: Integers, waits: NDArray[np.float64], held_bytes: Integers, limit_bytes: int
) -> Integers | None:
    """Return the sequence with runs of recomputation moved ahead to where compute waits; None if none is moved.

    Args:
        instance: the tables of the graph.
        sequence: int64[computations], positions in order of computation.
        waits: float64[stops], how long compute waits for copies before each.
        held_bytes: int64[stops], on the device at each.
        limit_bytes: most bytes on the device.
    """
    first = np.full(len(instance.op_at), len(sequence), np.int64)
    first[sequence[::-1]] = np.arange(len(sequence))[::-1]
    again = first[sequence] < np.arange(len(sequence))
    runs = _runs(again)
    seconds, held_bytes = instance.tables.positions["seconds"], held_bytes.copy()
    places = np.arange(len(sequence), dtype=np.float64)
    moved, next_run = False, 0
    for stop in np.flatnonzero(waits > 0).tolist():
        if stop >= len(sequence) or sequence[stop] < instance.backward_start or again[stop]:
            continue
        left = float(waits[stop])
        while next_run < len(runs) and runs[next_run][0] <= stop:
            next_run += 1
        while next_run < len(runs) and left > 0:
            begin, end = runs[next_run]
            added_bytes = _written_bytes(instance, sequence[begin:end])
            exceeds = int(held_bytes[stop:begin].max()) + added_bytes > limit_bytes
            if exceeds or not _may_move(instance, sequence[begin:end], first, stop):
                break
            held_bytes[stop:begin] += added_bytes
            left -= float(seconds[sequence[begin:end]].sum())
            # Between the stop before and this one, behind runs that were moved there before.
            places[begin:end] = stop - 1 + 0.5 * (1 + np.arange(begin, end) / len(sequence))
            moved, next_run = True, next_run + 1
    return sequence[np.argsort(places, kind="stable")] if moved else None


def _runs(again: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, one past the last) of each unbroken run of recomputations."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], again, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _written_bytes(instance: Instance, run: Integers) -> int:
    """Return the bytes that a run writes, and its largest workspace."""
    storages = [storage for position in run.tolist() for storage in instance.writes(position)]
    written = instance.tables.storages["size_bytes"][storages].sum() if storages else 0
    return int(written) + int(instance.tables.positions["workspace_bytes"][run].max())


def _may_move(instance: Instance, run: Integers, first: Integers, stop: int) -> bool:
    """Return whether all that a run reads is unchanged in the whole step, and there before a stop."""
    graph, writers = instance.graph, instance.tables.storages["writer"]
    positions: list[int] = run.tolist()
    for position in positions:
        op = instance.op_at[position]
        if op == NOT_AN_OP or any(graph.last_version[s] for s, _ in graph.read_versions[op]):
            return False
        if any(first[writers[storage]] >= stop for storage in instance.reads(position)):
            return False
    return True
