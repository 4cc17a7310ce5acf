"""Instance: a problem as flat tables for the compiled kernels, in one fixed order of first computations.

A *position* is a place in that order. Most positions are ops. The others are the boundaries (each reads its departures,
and writes its arrivals and the bytes that user code holds), and a last one that reads all storages required at the end.
Residents are always on the device, so that only the other, *managed* storages are in the tables.

Every use of a managed storage (its write, then each position that reads it) opens a *retention interval* that lasts to
the next use, or to the end. A `Retention` gives for each interval the positions `[release, hold)` at whose ends the
storage is not retained:

- kept through the interval: no position;
- dropped at once, and kept after its recomputation: the interval's first position;
- recomputed for each op that reads it: all positions of the interval.

Source: the stages and retention variables of Checkmate (Jain et al., MLSys 2020), with one pair of positions for each
interval in place of one bit for each stage and storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Op, Phase
from memfit.plan import Problem
from memfit.simulate.in_place import may_reuse_in_place
from memfit.system.records import Flags, Integers, Table, record

NOT_AN_OP = -1
FREE, KEPT, DROPPED = 0, 1, 2  # an interval's rule: the planner decides; it must be kept; it must be dropped

_POSITION = record(
    "read_start read_end write_start write_end reuse_start reuse_end last_rematerialization workspace_bytes host_bytes",
    floats="seconds",
    flags="may_wait waits_with_next",
)
_USE = record("storage interval")
_REUSE = record("read write")
_STORAGE = record("size_bytes writer first_interval last_interval")
_INTERVAL = record("storage start end rule host_from host_until", flags="closed")


class Tables(NamedTuple):
    """The tables of an instance: few, because compiled functions take longer to compile with each array passed.

    Attributes:
        positions: record[positions]: its rows of the next three tables; `last_rematerialization`, the last position at
            which its op may be recomputed; `may_wait`, whether the op's first computation may wait until a result is
            read; `waits_with_next`, whether it may wait with that of the next position, the only reader of its
            results; `workspace_bytes` and `seconds` of the op; `host_bytes`, bytes that are on the host for the whole
            stage although they are retained.
        reads, writes: record[uses]: the managed storage, and the interval that this use opens.
        reuses: record[pairs]: a read whose memory a write may reuse in place.
        storages: record[managed storages]: aligned bytes, position of the writer, first and last interval; the first
            opens at the write.
        intervals: record[intervals]: the storage; `start`, and `end`, the next use, or the last position if there is
            none (not `closed`); `rule`; the storage is on the host in the stages `[host_from, host_until)`, none by
            default.
    """

    positions: Table
    reads: Table
    writes: Table
    reuses: Table
    storages: Table
    intervals: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """The tables of a problem, and the numbers that lead back to its graph.

    Attributes:
        problem: the problem.
        tables: see `Tables`.
        base_bytes: aligned bytes of the residents; without boundaries, also the bytes that user code holds.
        op_at: position -> op id, or NOT_AN_OP.
        boundary_at: position -> boundary number, for the boundaries.
        storage_of: managed storage -> storage id; one past the last id for the bytes that user code holds.
        backward_start: the first position after the forward/backward boundary.
    """

    problem: Problem
    tables: Tables
    base_bytes: int
    op_at: tuple[int, ...]
    boundary_at: dict[int, int]
    storage_of: tuple[int, ...]
    backward_start: int

    @property
    def graph(self) -> Graph:
        """The problem's graph."""
        return self.problem.graph

    @property
    def budget_bytes(self) -> int:
        """Bytes for managed storages and workspaces; negative if the residents alone exceed the budget."""
        return self.problem.budget_bytes - self.base_bytes

    @property
    def crosses(self) -> Flags:
        """bool[intervals]: those that cross the forward/backward boundary."""
        intervals, start = self.tables.intervals, self.backward_start
        return (intervals["start"] < start) & (intervals["end"] >= start)

    @property
    def may_save(self) -> Flags:
        """bool[intervals]: those in which dropping may save bytes."""
        intervals = self.tables.intervals
        size = self.tables.storages["size_bytes"][intervals["storage"]]
        return (intervals["rule"] != KEPT) & (intervals["end"] - intervals["start"] > 1) & (size > 0)

    @property
    def departed_at(self) -> dict[int, int]:
        """Managed storage -> the position of the boundary from which on it belongs to the user."""
        found: dict[int, int] = {}
        for position in sorted(self.boundary_at):
            found |= {storage: position for storage in self.reads(position) if storage not in found}
        return found

    def reads(self, position: int) -> list[int]:
        """Return the managed storages that a position reads."""
        row = self.tables.positions[position]
        return self.tables.reads["storage"][row["read_start"] : row["read_end"]].tolist()

    def writes(self, position: int) -> list[int]:
        """Return the managed storages that a position writes."""
        row = self.tables.positions[position]
        return self.tables.writes["storage"][row["write_start"] : row["write_end"]].tolist()


def build_instance(problem: Problem, order: Sequence[int]) -> Instance:
    """Return the instance of `problem` with first computations in `order`.

    Args:
        problem: its graph, device, budget, pins and bytes outside.
        order: op ids, each once, in a legal order (see `memfit.planners.engine.order`).

    Raises:
        InvalidOptionError: `problem.pinned` names an op that does not exist, or asks to recompute one that cannot be.
    """
    _check_pins(problem)
    graph, rows = problem.graph, _rows(problem, order)
    managed = [storage.id for storage in graph.storages if not storage.resident]
    if len(graph.storages) in rows[-1].reads:  # the bytes that user code holds
        managed.append(len(graph.storages))
    boundary_at = {position: row.boundary for position, row in enumerate(rows) if row.boundary is not None}
    backward_start = _backward_start(rows)
    return Instance(
        problem=problem,
        tables=_tables(problem, rows, managed, backward_start),
        base_bytes=problem.device.resident_bytes(graph) + (0 if boundary_at else problem.bytes_outside),
        op_at=tuple(NOT_AN_OP if row.op is None else row.op.id for row in rows),
        boundary_at=boundary_at,
        storage_of=tuple(managed),
        backward_start=backward_start,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A position: an op, a boundary (by number), or the end; what it reads and writes, managed storages only, by id."""

    op: Op | None = None
    boundary: int | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


def _rows(problem: Problem, order: Sequence[int]) -> list[_Row]:
    graph = problem.graph
    outside = (len(graph.storages),) if graph.boundaries and problem.bytes_outside > 0 else ()
    rows: list[_Row] = []
    waiting = list(enumerate(graph.boundaries))

    def add_boundary() -> None:
        index, boundary = waiting.pop(0)
        departures = tuple(s for s in dict.fromkeys(boundary.departures) if not graph.storages[s].resident)
        arrivals = boundary.arrivals + (outside if index == 0 else ())
        rows.append(_Row(boundary=index, reads=departures, writes=arrivals))

    for op_id in order:
        while waiting and waiting[0][1].position <= op_id:
            add_boundary()
        reads = tuple(s for s, _ in graph.read_versions[op_id] if not graph.storages[s].resident)
        rows.append(_Row(op=graph.ops[op_id], reads=reads, writes=graph.ops[op_id].writes))
    while waiting:
        add_boundary()
    required = tuple(s.id for s in graph.storages if s.required_at_end and not s.resident)
    rows.append(_Row(reads=required + outside))
    return rows


def _backward_start(rows: list[_Row]) -> int:
    boundaries = [position for position, row in enumerate(rows) if row.boundary is not None]
    if boundaries:
        return boundaries[0] + 1
    return next(position for position, row in enumerate(rows) if row.op is None or row.op.phase != Phase.FORWARD)


def _tables(problem: Problem, rows: list[_Row], managed: list[int], backward_start: int) -> Tables:
    number = {storage: index for index, storage in enumerate(managed)}
    reads = _uses([row.reads for row in rows], number)
    writes = _uses([row.writes for row in rows], number)
    uses = np.concatenate([reads, writes])
    in_order = np.lexsort((uses[:, 1], uses[:, 0]))  # by storage, then by position
    interval_of = np.argsort(in_order)
    intervals = np.zeros(len(uses), _INTERVAL)
    intervals["storage"], intervals["start"] = uses[in_order].T
    intervals["closed"][:-1] = intervals["storage"][1:] == intervals["storage"][:-1]
    intervals["end"] = np.where(intervals["closed"], np.roll(intervals["start"], -1), len(rows) - 1)
    intervals["rule"] = _rules(problem, rows, managed, intervals, backward_start)
    reuses = [
        [(number[r], number[w]) for r, w in row.op.reuses if r in number]
        if row.op is not None and may_reuse_in_place(row.op)
        else []
        for row in rows
    ]
    pairs = [pair for each in reuses for pair in each]
    return Tables(
        positions=_positions(problem, rows, [len(each) for each in reuses]),
        reads=_table(_USE, reads[:, 0], interval_of[: len(reads)]),
        writes=_table(_USE, writes[:, 0], interval_of[len(reads) :]),
        reuses=_table(_REUSE, [read for read, _ in pairs], [write for _, write in pairs]),
        storages=_storages(problem, managed, writes, intervals["storage"]),
        intervals=intervals,
    )


def _uses(storages: list[tuple[int, ...]], number: dict[int, int]) -> Integers:
    """Return int64[uses, 2]: managed storage and position, given the storages (by id) that each position uses."""
    found = [(number[storage], position) for position, here in enumerate(storages) for storage in here]
    return np.array(found, np.int64).reshape(-1, 2)


def _rules(problem: Problem, rows: list[_Row], managed: list[int], intervals: Table, backward_start: int) -> list[int]:
    """Return the rule of each interval: of the writer's pin, and of storages that must be kept."""
    graph = problem.graph
    departed_at = {s: p for p, row in enumerate(rows) if row.boundary is not None for s in row.reads}
    rules: list[int] = []
    spans: list[tuple[int, int, int, bool]] = intervals[["storage", "start", "end", "closed"]].tolist()
    for index, start, end, closed in spans:
        writer = graph.writer_of.get(managed[index])
        pin = None if writer is None else problem.pinned.get(writer)
        departed = start >= departed_at.get(managed[index], len(rows))
        if writer is None or pin is True or departed or not _may_be_recomputed(graph, graph.ops[writer]):
            rules.append(KEPT)
        else:
            rules.append(DROPPED if pin is False and closed and start < backward_start <= end else FREE)
    return rules


def _may_be_recomputed(graph: Graph, op: Op) -> bool:
    """Return whether `op` may be recomputed: a result that is mutated later would be at a wrong version."""
    return not op.computed_once and not any(graph.last_version[storage] for storage in op.writes)


def _check_pins(problem: Problem) -> None:
    graph = problem.graph
    for op_id, keep in problem.pinned.items():
        if not 0 <= op_id < len(graph.ops):
            raise InvalidOptionError(f"pinned names op {op_id}, expected 0 to {len(graph.ops) - 1}; remove it")
        op = graph.ops[op_id]
        if keep or _may_be_recomputed(graph, op):
            continue
        why = "it mutates" if op.mutates else "it is not recomputable" if op.computed_once else "its result is mutated"
        raise InvalidOptionError(
            f"pinned asks for op {op_id} {op.name!r} to be rematerialized, but {why}; expected a pin of True, or none"
        )


def _positions(problem: Problem, rows: list[_Row], reuse_counts: list[int]) -> Table:
    table = np.zeros(len(rows), _POSITION)
    counts = ("read", [len(row.reads) for row in rows]), ("write", [len(row.writes) for row in rows])
    for name, each in (*counts, ("reuse", reuse_counts)):
        table[f"{name}_end"] = np.cumsum(each)
        table[f"{name}_start"] = np.cumsum(each) - each
    table["last_rematerialization"] = _last_rematerializations(problem.graph, rows)
    table["may_wait"], table["waits_with_next"] = zip(*_waits(problem.graph, rows), strict=True)
    table["workspace_bytes"] = [(row.op.workspace_bytes or 0) if row.op else 0 for row in rows]
    table["seconds"] = [_seconds(row.op, problem.gather_weight) if row.op else 0.0 for row in rows]
    return table


def _seconds(op: Op, gather_weight: float) -> float:
    return gather_weight * op.seconds if op.is_gather else op.compute_seconds


def _last_rematerializations(graph: Graph, rows: list[_Row]) -> list[int]:
    """Return for each position the last one at which its op may be recomputed: before its reads are mutated.

    An op that is computed once, or that writes a storage which is mutated later, has its own position.
    """
    mutated_at: dict[tuple[int, int], int] = {}
    for position, row in enumerate(rows):
        if row.op is not None:
            versions = dict(graph.read_versions[row.op.id])
            mutated_at.update({(storage, versions[storage]): position for storage in row.op.mutates})
    lasts: list[int] = []
    for position, row in enumerate(rows):
        if row.op is None or not _may_be_recomputed(graph, row.op):
            lasts.append(position)
        else:
            needs = graph.read_versions[row.op.id]
            lasts.append(min((mutated_at.get(need, len(rows)) for need in needs), default=len(rows)))
    return lasts


def _waits(graph: Graph, rows: list[_Row]) -> Iterator[tuple[bool, bool]]:
    """Yield whether each first computation may wait until its result is read, before the next boundary.

    Also whether only the next position reads its results then.
    """
    fences = [*(position for position, row in enumerate(rows) if row.boundary is not None), len(rows)]
    read_at: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        for storage in row.reads:
            read_at.setdefault(storage, []).append(position)
    for position, row in enumerate(rows):
        op, fence = row.op, next(fence for fence in fences if fence > position)
        waits = False
        if op is not None and not op.computed_once and not op.kept_in_order:
            touched = [storage for storage, _ in graph.read_versions[op.id]] + list(op.writes)
            read_soon = any(read_at[storage][0] < fence for storage in row.writes if storage in read_at)
            waits = read_soon and not any(graph.last_version[storage] for storage in touched)
        yield waits, waits and all(read_at.get(storage) == [position + 1] for storage in row.writes)


def _storages(problem: Problem, managed: list[int], writes: Integers, interval_storage: Integers) -> Table:
    storages, every = problem.graph.storages, np.arange(len(managed))
    sizes = [problem.device.aligned(storages[s].bytes) if s < len(storages) else problem.bytes_outside for s in managed]
    writer = np.zeros(len(managed), np.int64)
    writer[writes[:, 0]] = writes[:, 1]
    first = np.searchsorted(interval_storage, every)
    last = np.searchsorted(interval_storage, every, side="right") - 1
    return _table(_STORAGE, sizes, writer, first, last)


def _table(kind: np.dtype[np.void], *columns: Sequence[int] | Integers) -> Table:
    table = np.zeros(len(columns[0]), kind)
    for name, column in zip(kind.names or (), columns, strict=True):
        table[name] = column
    return table
