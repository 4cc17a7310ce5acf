"""Program: a problem as flat arrays for the compiled kernels, in one fixed order of first computations.

A *position* is a place in that order. Beside the ops, two kinds of positions are there that compute nothing: one for each
boundary (it reads its departures, writes its arrivals and what user code holds), and a last one that reads all that is
required at the end. Residents are always there, so that only the other, *managed* storages appear.

Every use of a managed storage (its write, then each position that reads it) opens a *gap* that lasts to the next use, or to
the end. A gap has a *window* `[release, hold)` of positions at whose ends the storage is not retained:

- kept through the gap: the window is empty;
- dropped at once, and held once some op has wanted it rematerialized: the window is the gap's first position;
- rematerialized anew for each op that wants it: the window is the whole gap.

Decisions are one window for each gap, and nothing else.

Source: the stages and retention variables of Checkmate (Jain et al., MLSys 2020), with one window for each gap in place of
one bit for each stage and storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Phase
from memfit.plan import Problem

Integers = NDArray[np.int32]
Sizes = NDArray[np.int64]
Flags = NDArray[np.bool_]

NOT_AN_OP = -1
FREE, KEPT, DROPPED = 0, 1, 2  # a gap's rule: the planner decides; its window is empty; its window is not empty


class Arrays(NamedTuple):
    """What the kernels read. `xs[x_start[i]:x_start[i + 1]]` are the xs of position i.

    Attributes:
        read_start, reads, read_gap: managed storages read, and the gap that each read opens.
        write_start, writes, write_gap: managed storages written, and the gap that each write opens.
        reuse_start, reuse_reads, reuse_writes: pairs whose memory may be taken over.
        seconds, workspace_bytes: of each position.
        last_rematerialization: the last position at which the op may be computed again.
        may_wait: whether the op's first computation may wait until something reads what it writes.
        size_bytes, writer: of each managed storage, aligned; `writer` is a position.
        gap_storage, gap_start, gap_end, gap_rule: of each gap; `gap_end` is the last position where no use follows.
    """

    read_start: Integers
    reads: Integers
    read_gap: Integers
    write_start: Integers
    writes: Integers
    write_gap: Integers
    reuse_start: Integers
    reuse_reads: Integers
    reuse_writes: Integers
    seconds: NDArray[np.float64]
    workspace_bytes: Sizes
    last_rematerialization: Integers
    may_wait: Flags
    size_bytes: Sizes
    writer: Integers
    gap_storage: Integers
    gap_start: Integers
    gap_end: Integers
    gap_rule: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The arrays, and what leads back from them to the graph.

    Attributes:
        base_bytes: aligned bytes of the residents, and of what user code holds where no boundary says from when on.
        op_at: position -> op id, or NOT_AN_OP.
        boundary_at: position -> boundary number, for the positions that are one.
        storage_of: managed storage -> storage id; one past the last id for the bytes that user code holds.
        backward_start: the first position that is no longer forward.
    """

    problem: Problem
    arrays: Arrays
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
        """What managed storages and workspace may take together; negative where the residents alone exceed the budget."""
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
        arrays=_to_arrays(problem, rows, slots, managed, number, last, may_wait, rules),
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
    gaps = _Gaps()
    open_gap: dict[int, int] = {}

    def use(storage: int, position: int) -> int:
        if storage in open_gap:
            gaps.end[open_gap[storage]] = position
            gaps.closed[open_gap[storage]] = True
        open_gap[storage] = len(gaps.storage)
        gaps.storage.append(number[storage])
        gaps.start.append(position)
        gaps.end.append(len(rows) - 1)
        gaps.closed.append(False)
        return open_gap[storage]

    for position, row in enumerate(rows):
        gaps.read_gap.extend(use(storage, position) for storage in row.reads)
        gaps.write_gap.extend(use(storage, position) for storage in row.writes)
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
        if writer is None or pin is True or start >= departed_at.get(storage, len(rows)):
            rules.append(KEPT)
        elif graph.ops[writer].computed_once or any(graph.last_version[s] for s in graph.ops[writer].writes):
            rules.append(KEPT)
        else:
            rules.append(DROPPED if pin is False and crosses else FREE)
    return rules


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


def _starts(counts: list[int]) -> Integers:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _to_arrays(
    problem: Problem,
    rows: list[_Row],
    gaps: _Gaps,
    managed: list[int],
    number: dict[int, int],
    last: list[int],
    may_wait: list[bool],
    rules: list[int],
) -> Arrays:
    ops = [None if row.op == NOT_AN_OP else problem.graph.ops[row.op] for row in rows]
    reuses = [[(r, w) for r, w in op.reuses if r in number] if op and not op.mutates else [] for op in ops]
    storages = problem.graph.storages
    sizes = [problem.device.aligned(storages[s].bytes) if s < len(storages) else problem.bytes_outside for s in managed]
    writer = {number[s]: position for position, row in enumerate(rows) for s in row.writes}
    return Arrays(
        read_start=_starts([len(row.reads) for row in rows]),
        reads=np.array([number[s] for row in rows for s in row.reads], np.int32),
        read_gap=np.array(gaps.read_gap, np.int32),
        write_start=_starts([len(row.writes) for row in rows]),
        writes=np.array([number[s] for row in rows for s in row.writes], np.int32),
        write_gap=np.array(gaps.write_gap, np.int32),
        reuse_start=_starts([len(pairs) for pairs in reuses]),
        reuse_reads=np.array([number[r] for pairs in reuses for r, _ in pairs], np.int32),
        reuse_writes=np.array([number[w] for pairs in reuses for _, w in pairs], np.int32),
        seconds=np.array([op.seconds if op else 0.0 for op in ops]),
        workspace_bytes=np.array([(op.workspace_bytes or 0) if op else 0 for op in ops], np.int64),
        last_rematerialization=np.array(last, np.int32),
        may_wait=np.array(may_wait, np.bool_),
        size_bytes=np.array(sizes, np.int64),
        writer=np.array([writer[index] for index in range(len(managed))], np.int32),
        gap_storage=np.array(gaps.storage, np.int32),
        gap_start=np.array(gaps.start, np.int32),
        gap_end=np.array(gaps.end, np.int32),
        gap_rule=np.array(rules, np.int32),
    )
