"""Program: a problem as flat tables for the compiled kernels, in one fixed order of first computations.

A *position* is a place in that order. Beside the ops, two kinds of positions are there that compute nothing: one for
each boundary (it reads its departures, writes its arrivals and what user code holds), and a last one that reads all
that is required at the end. Residents are always there, so that only the other, *managed* storages appear.

Every use of a managed storage (its write, then each position that reads it) opens a *gap* that lasts to the next use,
or to the end. A gap has a *window* `[release, hold)` of positions at whose ends the storage is not retained:

- kept through the gap: the window is empty;
- dropped at once, and held once some op has wanted it rematerialized: the window is the gap's first position;
- rematerialized anew for each op that wants it: the window is the whole gap.

Decisions are one window for each gap, and nothing else.

Source: the stages and retention variables of Checkmate (Jain et al., MLSys 2020), with one window for each gap in
place of one bit for each stage and storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Op, Phase
from memfit.in_place import takes_over
from memfit.plan import Problem

Table = NDArray[np.void]

NOT_AN_OP = -1
FREE, KEPT, DROPPED = 0, 1, 2  # a gap's rule: the planner decides; its window is empty; its window is not empty

_POSITION = np.dtype(
    [
        ("read_start", np.int64),
        ("read_end", np.int64),
        ("write_start", np.int64),
        ("write_end", np.int64),
        ("reuse_start", np.int64),
        ("reuse_end", np.int64),
        ("last_rematerialization", np.int64),
        ("may_wait", np.bool_),
        ("waits_with_next", np.bool_),
        ("workspace_bytes", np.int64),
        ("away_bytes", np.int64),
        ("seconds", np.float64),
    ],
    align=True,
)
_USE = np.dtype([("storage", np.int64), ("gap", np.int64)], align=True)
_REUSE = np.dtype([("read", np.int64), ("write", np.int64)], align=True)
_STORAGE = np.dtype(
    [("size_bytes", np.int64), ("writer", np.int64), ("first_gap", np.int64), ("last_gap", np.int64)], align=True
)
_GAP = np.dtype(
    [
        ("storage", np.int64),
        ("start", np.int64),
        ("end", np.int64),
        ("rule", np.int64),
        ("closed", np.bool_),
        ("away_from", np.int64),
        ("away_until", np.int64),
    ],
    align=True,
)


class Tables(NamedTuple):
    """What the compiled code reads: a few tables of records, because each array that it is handed costs time to
    compile.

    Attributes:
        positions: what each reads, writes and may take over (rows of the next three); `last_rematerialization`, the
            last position at which its op may be computed again; `may_wait`, whether its op's first computation may wait
            until something reads what it writes; `waits_with_next`, whether it may with that of the next position,
            which alone reads what it writes; `away_bytes`, what is on the host for its whole stage though kept.
        reads, writes: the managed storage, and the gap that this use opens.
        reuses: a read whose memory may be taken over by a write.
        storages: aligned size, position of the writer, and its gaps in order: the first opens at its write.
        gaps: from `start` to `end`, the next use; where none follows (not `closed`), the last position. The storage is
            on the host in the stages `[away_from, away_until)`, which are none unless a planner says so.
    """

    positions: Table
    reads: Table
    writes: Table
    reuses: Table
    storages: Table
    gaps: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The tables, and what leads back from them to the graph.

    Attributes:
        base_bytes: aligned bytes of the residents, and of what user code holds where no boundary says from when on.
        op_at: position -> op id, or NOT_AN_OP.
        boundary_at: position -> boundary number, for the positions that are one.
        storage_of: managed storage -> storage id; one past the last id for the bytes that user code holds.
        backward_start: the first position that is no longer forward.
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
        """What managed storages and workspace may take together; negative where the residents alone exceed the
        budget.
        """
        return self.problem.budget_bytes - self.base_bytes


def build_program(problem: Problem, order: Sequence[int]) -> Program:
    """Return the program of `problem` with first computations in `order` (op ids; see `memfit.planners.order`).

    Raises:
        InvalidOptionError: `problem.pinned` names an op that is not there, or wants one rematerialized that cannot be.
    """
    rows = _rows(problem, order)
    managed = [storage.id for storage in problem.graph.storages if not storage.resident]
    if any(row.holds_outside for row in rows):
        managed.append(len(problem.graph.storages))
    number = {storage: index for index, storage in enumerate(managed)}
    boundary_at = {position: row.boundary for position, row in enumerate(rows) if row.boundary is not None}
    backward_start = _backward_start(problem.graph, rows, boundary_at)
    last = _last_rematerializations(problem.graph, rows)
    slots = _number_gaps(rows, number)
    rules = _gap_rules(problem, rows, slots, managed, backward_start)
    may_wait = _may_wait(problem.graph, rows, slots, boundary_at)
    resident_bytes = sum(problem.device.aligned(s.bytes) for s in problem.graph.storages if s.resident)
    return Program(
        problem=problem,
        tables=_to_tables(problem, rows, slots, managed, number, last, may_wait, rules),
        base_bytes=resident_bytes + (0 if boundary_at else problem.bytes_outside),
        op_at=tuple(row.op for row in rows),
        boundary_at=boundary_at,
        storage_of=tuple(managed),
        backward_start=backward_start,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A position while the program is built; storages by id, managed ones only."""

    op: int = NOT_AN_OP
    boundary: int | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    holds_outside: bool = False


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The gaps of all storages, and the gap that each read and write opens, in the order of rows and their slots."""

    read_gap: list[int] = field(default_factory=list[int])
    write_gap: list[int] = field(default_factory=list[int])
    first: list[int] = field(default_factory=list[int])
    storage: list[int] = field(default_factory=list[int])
    start: list[int] = field(default_factory=list[int])
    end: list[int] = field(default_factory=list[int])
    closed: list[bool] = field(default_factory=list[bool])  # whether a use follows


def _rows(problem: Problem, order: Sequence[int]) -> list[_Row]:
    graph = problem.graph
    outside = len(graph.storages)
    rows: list[_Row] = []
    waiting = list(enumerate(graph.boundaries))

    def add_boundary() -> None:
        index, boundary = waiting.pop(0)
        holds = index == 0 and problem.bytes_outside > 0
        departures = tuple(s for s in dict.fromkeys(boundary.departures) if not graph.storages[s].resident)
        arrivals = boundary.arrivals + ((outside,) if holds else ())
        rows.append(_Row(boundary=index, reads=departures, writes=arrivals, holds_outside=holds))

    for op_id in order:
        while waiting and waiting[0][1].position <= op_id:
            add_boundary()
        reads = tuple(s for s, _ in graph.read_versions[op_id] if not graph.storages[s].resident)
        rows.append(_Row(op=op_id, reads=reads, writes=graph.ops[op_id].writes))
    while waiting:
        add_boundary()
    required = tuple(s.id for s in graph.storages if s.required_at_end and not s.resident)
    rows.append(_Row(reads=required + ((outside,) if any(row.holds_outside for row in rows) else ())))
    return rows


def _backward_start(graph: Graph, rows: list[_Row], boundary_at: dict[int, int]) -> int:
    if boundary_at:
        return min(boundary_at) + 1
    later = (p for p, row in enumerate(rows) if row.op == NOT_AN_OP or graph.ops[row.op].phase != Phase.FORWARD)
    return next(later)


def _last_rematerializations(graph: Graph, rows: list[_Row]) -> list[int]:
    """For each position, the last one at which its op may be computed again: what it reads is mutated right there.

    An op that is computed once, or that writes what the step mutates later, may never be: its own position.
    """
    mutated_at: dict[tuple[int, int], int] = {}
    for position, row in enumerate(rows):
        if row.op != NOT_AN_OP:
            versions = dict(graph.read_versions[row.op])
            for storage in graph.ops[row.op].mutates:
                mutated_at[storage, versions[storage]] = position
    lasts: list[int] = []
    for position, row in enumerate(rows):
        once = row.op == NOT_AN_OP or graph.ops[row.op].computed_once or any(graph.last_version[s] for s in row.writes)
        needs = () if once else graph.read_versions[row.op]
        lasts.append(position if once else min((mutated_at.get(need, len(rows)) for need in needs), default=len(rows)))
    return lasts


def _number_gaps(rows: list[_Row], number: dict[int, int]) -> _Gaps:
    uses: list[list[int]] = [[] for _ in number]
    for position, row in enumerate(rows):
        for storage in row.reads + row.writes:
            uses[number[storage]].append(position)
    gaps = _Gaps()
    gap_at: dict[tuple[int, int], int] = {}
    for index, positions in enumerate(uses):
        gaps.first.append(len(gaps.storage))
        for start, end in zip(positions, [*positions[1:], None], strict=True):
            gap_at[index, start] = len(gaps.storage)
            gaps.storage.append(index)
            gaps.start.append(start)
            gaps.end.append(len(rows) - 1 if end is None else end)
            gaps.closed.append(end is not None)
    gaps.first.append(len(gaps.storage))
    for position, row in enumerate(rows):
        gaps.read_gap.extend(gap_at[number[storage], position] for storage in row.reads)
        gaps.write_gap.extend(gap_at[number[storage], position] for storage in row.writes)
    return gaps


def _gap_rules(problem: Problem, rows: list[_Row], gaps: _Gaps, managed: list[int], backward_start: int) -> list[int]:
    graph = problem.graph
    _check_pins(problem)
    departed_at = {s: p for p, row in enumerate(rows) if row.boundary is not None for s in row.reads}
    rules: list[int] = []
    for index, start, end, closed in zip(gaps.storage, gaps.start, gaps.end, gaps.closed, strict=True):
        storage = managed[index]
        writer = graph.writer_of.get(storage)
        crosses = closed and start < backward_start <= end
        pin = None if writer is None else problem.pinned.get(writer)
        stays = pin is True or start >= departed_at.get(storage, len(rows))
        if writer is None or stays or graph.ops[writer].computed_once or _is_mutated(graph, graph.ops[writer]):
            rules.append(KEPT)
        else:
            rules.append(DROPPED if pin is False and crosses else FREE)
    return rules


def _is_mutated(graph: Graph, op: Op) -> bool:
    """Whether something that `op` writes is mutated later: computed again, it would be at another version."""
    return any(graph.last_version[storage] for storage in op.writes)


def _check_pins(problem: Problem) -> None:
    graph = problem.graph
    for op_id, keep in problem.pinned.items():
        if not 0 <= op_id < len(graph.ops):
            raise InvalidOptionError(f"pinned names op {op_id}, expected 0 to {len(graph.ops) - 1}; remove it")
        op = graph.ops[op_id]
        if not keep and (op.computed_once or any(graph.last_version[s] for s in op.writes)):
            why = (
                "it mutates"
                if op.mutates
                else "it is not recomputable"
                if op.computed_once
                else "its result is mutated"
            )
            raise InvalidOptionError(
                f"pinned wants op {op_id} {op.name!r} rematerialized, but {why}; expected a pin of True, or none"
            )


def _may_wait(graph: Graph, rows: list[_Row], gaps: _Gaps, boundary_at: dict[int, int]) -> list[bool]:
    """Whether each first computation may be put off until its first reader wants it, this side of the next boundary."""
    fences = [*sorted(boundary_at), len(rows)]
    waits: list[bool] = []
    slot = 0
    for position, row in enumerate(rows):
        opened = range(slot, slot + len(row.writes))
        slot += len(row.writes)
        if row.op == NOT_AN_OP:
            waits.append(False)
            continue
        op = graph.ops[row.op]
        fence = next(f for f in fences if f > position)
        read_soon = any(gaps.closed[gaps.write_gap[i]] and gaps.end[gaps.write_gap[i]] < fence for i in opened)
        touched = [storage for storage, _ in graph.read_versions[row.op]] + list(op.writes)
        ordered = op.random is not None or any(graph.last_version[storage] for storage in touched)
        waits.append(read_soon and not ordered and not op.computed_once)
    return waits


def _to_tables(
    problem: Problem,
    rows: list[_Row],
    gaps: _Gaps,
    managed: list[int],
    number: dict[int, int],
    last: list[int],
    may_wait: list[bool],
    rules: list[int],
) -> Tables:
    ops = [None if row.op == NOT_AN_OP else problem.graph.ops[row.op] for row in rows]
    reuses = [[(r, w) for r, w in op.reuses if r in number] if op and takes_over(op) else [] for op in ops]
    storages = problem.graph.storages
    sizes = [problem.device.aligned(storages[s].bytes) if s < len(storages) else problem.bytes_outside for s in managed]
    writer = {number[s]: position for position, row in enumerate(rows) for s in row.writes}
    never = [0] * len(gaps.storage)
    read_at: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        for storage in row.reads:
            read_at.setdefault(storage, []).append(position)
    positions = np.zeros(len(rows), _POSITION)
    for field_name, counts in (
        ("read", [len(row.reads) for row in rows]),
        ("write", [len(row.writes) for row in rows]),
        ("reuse", [len(pairs) for pairs in reuses]),
    ):
        positions[f"{field_name}_end"] = np.cumsum(counts)
        positions[f"{field_name}_start"] = np.cumsum(counts) - counts
    positions["last_rematerialization"] = last
    positions["may_wait"] = may_wait
    positions["waits_with_next"] = [
        wait and bool(row.writes) and all(read_at.get(storage) == [position + 1] for storage in row.writes)
        for position, (wait, row) in enumerate(zip(may_wait, rows, strict=True))
    ]
    positions["workspace_bytes"] = [(op.workspace_bytes or 0) if op else 0 for op in ops]
    positions["seconds"] = [op.seconds if op else 0.0 for op in ops]
    return Tables(
        positions=positions,
        reads=_table(_USE, [number[s] for row in rows for s in row.reads], gaps.read_gap),
        writes=_table(_USE, [number[s] for row in rows for s in row.writes], gaps.write_gap),
        reuses=_table(
            _REUSE, [number[r] for pairs in reuses for r, _ in pairs], [number[w] for pairs in reuses for _, w in pairs]
        ),
        storages=_table(
            _STORAGE,
            sizes,
            [writer[index] for index in range(len(managed))],
            gaps.first[:-1],
            [following - 1 for following in gaps.first[1:]],
        ),
        gaps=_table(_GAP, gaps.storage, gaps.start, gaps.end, rules, gaps.closed, never, never),
    )


def _table(kind: np.dtype[np.void], *columns: Sequence[int]) -> Table:
    table = np.zeros(len(columns[0]), kind)
    for name, column in zip(kind.names or (), columns, strict=True):
        table[name] = column
    return table
