"""What is kept over the turning point, chosen by an integer program of the stages that are too full.

The program of `memfit.planners.moments` looks at one moment. What it keeps is often too much at another: where backward
computes the first ops again, say. Here each stage that the exact simulation finds above the budget becomes one more row
of the program, until what is kept fits or time is up. The family is that of kept sets (DESIGN.md, section 4): a storage
is kept or dropped over the turning point, and one that comes back is held to its last use. The answer is where a search
begins; it proves nothing.

Source: the rows of Checkmate (Jain et al., MLSys 2020), added as they are violated (cutting planes; Kelley 1960).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.planners.program import FREE, KEPT, Program
from memfit.planners.windows import Flags, Integers, Windows, held_bytes, keep_everything, keep_only, simulated

_MOST_ROUNDS = 16  # of solving and simulating; most graphs need five
_MOST_NEW = 4  # stages that one round adds, the fullest of each run of stages above the budget
_WORK = 0.5  # CP-SAT's deterministic units for one round, a second or so
_UNITS = float(1 << 30)  # the seconds of all ops once; those of each op are rounded
_FEWEST_SECONDS = 0.05  # for one round of solving
_MOST_POSITIONS, _SECONDS_PER_POSITION = 4000, 8e-4  # of a step; how long four rounds take, most of it to build rows


def kept_by_stages(program: Program, left_seconds: Callable[[], float] | None) -> list[Windows]:
    """Return the windows of each round, the last one first: it fits the budget where the rounds came to an end.

    Args:
        program: within its budget.
        left_seconds: how long this may still take; None: rounds and work are counted, the same on any machine. Nothing
            is returned where the step has too many ops for the time.
    """
    if len(program.op_at) > _MOST_POSITIONS:
        return []
    if left_seconds is not None and left_seconds() < _SECONDS_PER_POSITION * len(program.op_at):
        return []
    family = _Family.of(program)
    rows = _Rows(family)
    kept = np.ones(len(program.storage_of), np.bool_)
    windows = keep_everything(program)
    found: list[Windows] = []
    for _ in range(_MOST_ROUNDS):
        held = held_bytes(simulated(program, windows))
        full = _fullest(held, program.budget_bytes)
        if not full or (left_seconds is not None and left_seconds() < _FEWEST_SECONDS):
            break
        for stage in full:  # bytes there that no decision changes, as far as this round can tell, leave the room
            others_bytes = int(held[stage]) - family.counted_bytes(stage, kept)
            rows.limit(stage, program.budget_bytes - others_bytes)
        solved = rows.solve(left_seconds() if left_seconds else None)
        if solved is None:
            break
        kept = solved
        windows = keep_only(program, {program.storage_of[each] for each in np.flatnonzero(kept)})
        found.append(windows)
    return found[::-1]


def _fullest(held: Integers, budget_bytes: int) -> list[int]:
    """Return the fullest stage of each run of stages above the budget, of the fullest few runs."""
    over = np.concatenate([[False], held > budget_bytes, [False]])
    edges = np.flatnonzero(over[1:] != over[:-1]).reshape(-1, 2).tolist()
    fullest = [begin + int(held[begin:end].argmax()) for begin, end in edges]
    return sorted(fullest, key=lambda stage: -int(held[stage]))[:_MOST_NEW]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the rows are made of: of each managed storage that forward writes.

    Attributes:
        reads: position -> the forward's storages that it reads.
        writer, size_bytes: of each storage.
        last_forward: the last position of forward that writes or reads it.
        first_backward, last_backward: of the positions of backward that read it; one past the end, and -1, where none.
        last_wanted: the last stage in which it can be wanted, be it for something that is computed again.
        rule: of the gap that crosses the turning point.
    """

    program: Program
    reads: list[list[int]]
    writer: Integers
    size_bytes: Integers
    last_forward: Integers
    first_backward: Integers
    last_backward: Integers
    last_wanted: Integers
    rule: Integers

    @staticmethod
    def of(program: Program) -> _Family:
        """Return the family of a program."""
        tables, turn, end = program.tables, program.backward_start, len(program.op_at)
        writer: Integers = tables.storages["writer"].copy()
        reads: list[list[int]] = [[] for _ in range(end)]
        last_forward, last_backward = writer.copy(), np.full(len(writer), -1)
        first_backward = np.full(len(writer), end)
        for position, row in enumerate(tables.positions):
            for storage in tables.reads["storage"][int(row["read_start"]) : int(row["read_end"])].tolist():
                if writer[storage] >= turn:
                    continue
                reads[position].append(storage)
                if position < turn:
                    last_forward[storage] = max(last_forward[storage], position)
                else:
                    first_backward[storage] = min(first_backward[storage], position)
                    last_backward[storage] = max(last_backward[storage], position)
        rule = np.full(len(writer), KEPT)
        crossing = (tables.gaps["start"] < turn) & (tables.gaps["end"] >= turn)
        rule[tables.gaps["storage"][crossing]] = tables.gaps["rule"][crossing]
        return _Family(
            program=program,
            reads=reads,
            writer=writer,
            size_bytes=tables.storages["size_bytes"].copy(),
            last_forward=last_forward,
            first_backward=first_backward,
            last_backward=last_backward,
            last_wanted=_last_wanted(program, reads, first_backward, last_backward),
            rule=rule,
        )

    def writes(self, position: int) -> list[int]:
        """Return the storages that a position writes."""
        row = self.program.tables.positions[position]
        return self.program.tables.writes["storage"][int(row["write_start"]) : int(row["write_end"])].tolist()

    def is_counted(self, stage: int) -> Integers:
        """Return the storages that are there in a stage because they are kept over the turning point."""
        is_past = self.last_forward < min(stage, self.program.backward_start)
        return np.flatnonzero((self.writer < self.program.backward_start) & is_past & (self.last_wanted >= stage))

    def back_by(self, stage: int, kept: Flags) -> set[int]:
        """Return the positions that are computed again in a stage of backward, or before it, where `kept` is kept."""
        back: set[int] = set()
        for position in range(self.program.backward_start, stage + 1):
            wanted = [storage for storage in self.reads[position] if not kept[storage]]
            while wanted:
                writer = int(self.writer[wanted.pop()])
                if writer not in back:
                    back.add(writer)
                    wanted.extend(storage for storage in self.reads[writer] if not kept[storage])
        return back

    def counted_bytes(self, stage: int, kept: Flags) -> int:
        """Return the bytes that the row of a stage counts: of what is kept, and of what is back and wanted later."""
        chosen = self.is_counted(stage)
        total = int(self.size_bytes[chosen[kept[chosen]]].sum())
        if stage <= self.program.backward_start:
            return total
        back = self.back_by(stage, kept)
        held = (storage for position in back for storage in self.held(position, stage) if not kept[storage])
        return total + sum(int(self.size_bytes[storage]) for storage in held)

    def held(self, position: int, stage: int) -> list[int]:
        """Return what a position writes that is held in a stage of backward once it is back."""
        return [storage for storage in self.writes(position) if self.last_backward[storage] >= stage]


def _last_wanted(
    program: Program, reads: list[list[int]], first_backward: Integers, last_backward: Integers
) -> Integers:
    """Return of each storage the last stage in which backward reads it, or computes again what reads it."""
    last = np.maximum(last_backward, -1)
    tables = program.tables
    for position in range(program.backward_start - 1, -1, -1):
        row = tables.positions[position]
        written = tables.writes["storage"][int(row["write_start"]) : int(row["write_end"])]
        first = np.where(first_backward[written] < len(program.op_at), first_backward[written], -1)
        later = int(np.maximum(first, np.where(last_backward[written] < 0, last[written], -1)).max(initial=-1))
        for storage in reads[position]:
            last[storage] = max(last[storage], later)
    return last


class _Rows:
    """The integer program: what is kept, what is computed again, and a row for each full stage."""

    def __init__(self, family: _Family) -> None:
        from ortools.sat.python import cp_model  # it takes longer to import than all of memfit

        self.family = family
        self.model: Any = cp_model.CpModel()
        expression: Any = cp_model.LinearExpr
        self.sum: Any = expression.weighted_sum
        self.rows: dict[int, tuple[list[Any], list[int]]] = {}
        positions, turn = family.program.tables.positions, family.program.backward_start
        self.kept: dict[int, Any] = {}
        for storage in np.flatnonzero(family.writer < turn).tolist():
            self.kept[storage] = self.model.new_bool_var("")
            if family.rule[storage] != FREE:
                self.model.add(self.kept[storage] == int(family.rule[storage] == KEPT))
        may = positions["last_rematerialization"] >= turn
        self.again: dict[int, Any] = {each: self.model.new_bool_var("") for each in range(turn) if may[each]}
        self._want_all(len(family.reads), self.again)
        units = _UNITS / max(float(positions["seconds"].sum()), 1e-12)
        self.model.minimize(
            self.sum(list(self.again.values()), [round(float(positions["seconds"][p]) * units) for p in self.again])
        )

    def limit(self, stage: int, room_bytes: int) -> None:
        """What the row of a stage counts fits into so many bytes; of several such limits the least holds."""
        if stage not in self.rows:
            self.rows[stage] = self._row(stage)
        variables, sizes = self.rows[stage]
        self.model.add(self.sum(variables, sizes) <= room_bytes)

    def solve(self, limit_seconds: float | None) -> Flags | None:
        """Return bool[managed storages], what is kept; None where nothing fits or was found."""
        from ortools.sat.python import cp_model

        solver: Any = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = _WORK
        solver.parameters.catch_sigint_signal = False
        if limit_seconds is not None:
            solver.parameters.max_time_in_seconds = max(limit_seconds, _FEWEST_SECONDS)
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        kept = np.zeros(len(self.family.writer), np.bool_)
        for storage, variable in self.kept.items():
            kept[storage] = solver.boolean_value(variable)
        return kept

    def _row(self, stage: int) -> tuple[list[Any], list[int]]:
        """Return what takes bytes in a stage, and how many: what is kept for later, and what is back by then."""
        family, turn = self.family, self.family.program.backward_start
        chosen: list[int] = family.is_counted(stage).tolist()
        variables = [self.kept[storage] for storage in chosen]
        if stage > turn:
            back = {position: self.model.new_bool_var("") for position in self.again}
            self._want_all(stage + 1, back)
            for position, computed in back.items():
                for storage in family.held(position, stage):
                    held = self.model.new_bool_var("")  # once, where it is kept as well
                    self.model.add_bool_or([held, self.kept[storage], ~computed])
                    variables.append(held)
                    chosen.append(storage)
        return variables, [int(family.size_bytes[storage]) for storage in chosen]

    def _want_all(self, end: int, back: dict[int, Any]) -> None:
        """Have all be kept, or be back, that stages of backward before `end` read, and what is back in turn."""
        for position in range(self.family.program.backward_start, end):
            self._want(position, back)
        for position, computed in back.items():
            self._want(position, back, ~computed)

    def _want(self, position: int, back: dict[int, Any], *unless: Any) -> None:
        for storage in self.family.reads[position]:
            writer = int(self.family.writer[storage])
            computed = [back[writer]] if writer in back else []
            self.model.add_bool_or([self.kept[storage], *computed, *unless])
