"""The graph of the paper's section 4.2: rows of malloc, read, write and free, their neighbours, features and actions.

The rows are those of the unplanned step: at each position its mallocs, reads, writes and frees, in this order. An op
reads and writes from its start on, and its frees stand at its end. Storages that are on the device for the whole step,
and those without bytes, have no rows: nothing allocates them and nothing can be done with them.

Two rows are neighbours if they are consecutive or of one storage; the edge's weight is the time lag between them.
Storages with many rows have too many pairs of rows for a list of edges. Sums over neighbours are therefore taken
storage by storage (see `Neighbours`); the result is the same.

Where the paper is silent ("we use a heuristic method to decide which node can also represent an action"):
- A storage that an op mutates has a read row there.
- A *gap* is the time between two uses of a storage that follow one another, with a position in between.
- An offload of a gap is represented by the row of the use that opens it, be it a read or a write.
- The removal of a storage is represented by its free row. It belongs to the gap from forward to backward, and the
  storage's op may be recomputed at the end of it. A storage that is required at the end has no free row and is never
  removed.
- Only gaps that contain a position at which the unplanned step exceeds the budget count, and only storages of at least
  1/2000 of the bytes that it exceeds the budget by.
- The first row represents doing nothing. It is always a malloc, which represents no other action.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.retention.instance import FREE, Instance
from memfit.system.records import Flags, Integers

FEATURES = 6  # of x_v: size, transfer, recomputation, next visit, action type, validity
VALID = 5  # the feature that changes: whether the row's action is valid
_LEAST_SHARE = 5e-4  # of the excess: storages below it make no difference, but many more actions


class Kind(enum.IntEnum):
    """What a row does."""

    MALLOC = 0
    READ = 1
    WRITE = 2
    FREE = 3


class Act(enum.IntEnum):
    """The action that a row represents."""

    NOTHING = 0
    OFFLOAD = 1
    REMOVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """N(v) as sums: of all rows of v's storage, v included, and of the rows before and after v if of other storages.

    Attributes:
        storage: int64[rows], the number of each row's storage, from 0 on without holes.
        count: storages with rows.
        follows: float32[rows], 1 where the next row is of another storage, and so not counted with the storage's.
        lags: float32[rows], the sum of the weights of all edges of a row, in shares of the step.
    """

    storage: Integers
    count: int
    follows: NDArray[np.float32]
    lags: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All rows, in order of time; arrays have one entry for each.

    Attributes:
        kind: int8, a `Kind`.
        storage: int64, the managed storage's number in the instance.
        position: int64, of the instance.
        seconds: float64, when the row begins in the unplanned step.
        action: int8, the `Act` that the row represents.
        gap: int64, the retention interval of the action, or -1.
        features: float32[rows, 6], x_v with nothing valid.
        neighbours: N(v).
    """

    kind: NDArray[np.int8]
    storage: Integers
    position: Integers
    seconds: NDArray[np.float64]
    action: NDArray[np.int8]
    gap: Integers
    features: NDArray[np.float32]
    neighbours: Neighbours

    def __len__(self) -> int:
        return len(self.kind)


def make_rows(instance: Instance, exceeds: Flags, excess_bytes: int) -> Rows:
    """Return the rows of an instance.

    Args:
        instance: the problem as tables.
        exceeds: bool[positions], whether the unplanned step exceeds the budget there.
        excess_bytes: by how much at most.
    """
    listed = np.array(_listed(instance), np.int64).reshape(-1, 3)
    kind, storage, position = listed[:, 0].astype(np.int8), listed[:, 1], listed[:, 2]
    length = instance.tables.positions["seconds"]
    begins = np.cumsum(length) - length
    seconds = begins[position] + np.where(kind == Kind.FREE, length[position], 0.0)
    action, gap = _actions(instance, kind, storage, position, _offered(instance, exceeds, excess_bytes))
    step_seconds = max(float(length.sum()), 1e-12)
    return Rows(
        kind=kind,
        storage=storage,
        position=position,
        seconds=seconds,
        action=action,
        gap=gap,
        features=_features(instance, storage, seconds, action, step_seconds),
        neighbours=make_neighbours(storage.tolist(), seconds / step_seconds),
    )


def _listed(instance: Instance) -> list[tuple[Kind, int, int]]:
    """Return (kind, storage, position) of all rows."""
    sizes, count = instance.tables.storages["size_bytes"], len(instance.graph.storages)
    has_rows = [bool(size) and of < count for size, of in zip(sizes, instance.storage_of, strict=True)]
    end = len(instance.tables.positions) - 1
    uses = [instance.reads(p) + instance.writes(p) for p in range(end + 1)]
    last = {storage: position for position, here in enumerate(uses) for storage in here}
    rows: list[tuple[Kind, int, int]] = []
    for position in range(end):
        reads = [s for s in instance.reads(position) if has_rows[s]]
        writes = [s for s in instance.writes(position) if has_rows[s]]
        frees = [s for s in dict.fromkeys(reads + writes) if last[s] == position]
        each = (Kind.MALLOC, writes), (Kind.READ, reads), (Kind.WRITE, writes), (Kind.FREE, frees)
        rows += [(kind, storage, position) for kind, storages in each for storage in storages]
    return rows


def _offered(instance: Instance, exceeds: Flags, excess_bytes: int) -> Flags:
    """Return bool[intervals]: the gaps in which having less on the device helps."""
    intervals = instance.tables.intervals
    before = np.concatenate([[0], np.cumsum(exceeds)])
    inside = before[intervals["end"]] > before[np.minimum(intervals["start"] + 1, intervals["end"])]
    size = instance.tables.storages["size_bytes"][intervals["storage"]]
    there = np.array([storage < len(instance.graph.storages) for storage in instance.storage_of], np.bool_)
    large = (size > 0) & (size >= _LEAST_SHARE * excess_bytes) & there[intervals["storage"]]
    departed = instance.departed_at
    stays = [start >= departed.get(s, start + 1) for s, start in intervals[["storage", "start"]].tolist()]
    return intervals["closed"] & inside & large & ~np.array(stays, np.bool_)


def _actions(
    instance: Instance, kind: NDArray[np.int8], storage: Integers, position: Integers, offered: Flags
) -> tuple[NDArray[np.int8], Integers]:
    """Return the action of each row, and its gap."""
    tables, count = instance.tables, len(kind)
    action, gap = np.zeros(count, np.int8), np.full(count, -1, np.int64)
    gap_at = {(int(g["storage"]), int(g["start"])): number for number, g in enumerate(tables.intervals)}
    last = tables.positions["last_rematerialization"][tables.storages["writer"]]
    crosses = instance.crosses & (tables.intervals["rule"] == FREE)
    links = instance.problem.may_copy
    removed_in = {int(tables.intervals[n]["storage"]): int(n) for n in np.flatnonzero(crosses & offered)}
    for row in range(count):
        owner = int(storage[row])
        if kind[row] in (Kind.READ, Kind.WRITE) and links:
            number = gap_at[owner, int(position[row])]
            if offered[number]:
                action[row], gap[row] = Act.OFFLOAD, number
        elif kind[row] == Kind.FREE and owner in removed_in:
            number = removed_in[owner]
            if last[owner] >= tables.intervals[number]["end"]:
                action[row], gap[row] = Act.REMOVE, number
    return action, gap


def _features(
    instance: Instance,
    storage: Integers,
    seconds: NDArray[np.float64],
    action: NDArray[np.int8],
    step_seconds: float,
) -> NDArray[np.float32]:
    """Return x_v: bytes in shares of the largest storage, seconds in shares of the step, -1 for a removal."""
    tables, device = instance.tables, instance.problem.device
    sizes = tables.storages["size_bytes"].astype(np.float64)
    features = np.zeros((len(storage), FEATURES), np.float32)
    features[:, 0] = (sizes / max(1.0, sizes.max(initial=0.0)))[storage]
    features[:, 1] = sizes[storage] / (device.to_host_bytes_per_second or np.inf) / step_seconds
    features[:, 2] = tables.positions["seconds"][tables.storages["writer"][storage]] / step_seconds
    following: dict[int, float] = {}
    for row in range(len(storage) - 1, -1, -1):
        owner = int(storage[row])
        features[row, 3] = (following.get(owner, float(seconds[row])) - seconds[row]) / step_seconds
        following[owner] = float(seconds[row])
    features[:, 4] = np.where(action == Act.OFFLOAD, 1.0, np.where(action == Act.REMOVE, -1.0, 0.0))
    return features


def make_neighbours(storage: Sequence[int], seconds: NDArray[np.float64]) -> Neighbours:
    """Return N(v) and the sums of the edges' weights.

    Args:
        storage: of each row.
        seconds: of each row, ascending.
    """
    names, compact = np.unique(np.array(storage, np.int64), return_inverse=True)
    follows = np.zeros(len(storage), np.float32)
    follows[:-1] = compact[1:] != compact[:-1]
    lags = np.zeros(len(storage))
    steps = np.diff(seconds) * follows[:-1]
    lags[:-1] += steps
    lags[1:] += steps
    for name in range(len(names)):
        rows = np.flatnonzero(compact == name)
        own, order = seconds[rows], np.arange(len(rows))
        below = np.cumsum(own) - own
        lags[rows] += own * order - below + (own.sum() - below - own) - own * (len(rows) - 1 - order)
    return Neighbours(storage=compact.astype(np.int64), count=len(names), follows=follows, lags=lags.astype(np.float32))
