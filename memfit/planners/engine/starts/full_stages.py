"""Full stages: a kept set by an integer program with a row for each stage that is above the budget.

The program of `memfit.planners.engine.bounds.per_op` considers one op. The storages that it keeps often do not fit
beside another op, for example where backward recomputes the first ops. Here each stage that the exact simulation finds
above the budget becomes one more row of the program, until the kept set fits or time is up. Plans are kept sets: a
storage is kept or dropped over the forward/backward boundary, and a recomputed one is held to its last use. The result
is a starting point of a search; it proves nothing.

Source: the rows of Checkmate (Jain et al., MLSys 2020), each added when it is violated (cutting planes; Kelley 1960).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.planners.engine.retention.decisions import Retention, held_bytes, keep_everything, keep_only, simulated
from memfit.planners.engine.retention.instance import FREE, KEPT, Instance
from memfit.planners.engine.solver import make_model, solve
from memfit.system.records import Flags, Integers

_MOST_ROUNDS = 16  # of solving and simulating; most graphs need five
_MOST_NEW = 4  # stages that one round adds, the fullest of each run of stages above the budget
_WORK = 0.5  # CP-SAT's deterministic units for one round, a second or so
_UNITS = float(1 << 30)  # the seconds of all ops once; those of each op are rounded
_FEWEST_SECONDS = 0.05  # for one round of solving
_MOST_POSITIONS, _SECONDS_PER_POSITION = 4000, 8e-4  # of a step; how long four rounds take, most of it to build rows


def kept_by_stages(instance: Instance, until_seconds: float = math.inf) -> list[Retention]:
    """Return the retention of each round, the last one first; the last one fits unless rounds or time ran out.

    Args:
        instance: gives the budget.
        until_seconds: the problem's clock at which the last round begins; by default, rounds and work alone are
            limited, the same on any machine. The result is empty if the step has too many ops for the time.
    """
    if len(instance.op_at) > _MOST_POSITIONS:
        return []
    clock = instance.problem.clock
    if until_seconds - clock() < _SECONDS_PER_POSITION * len(instance.op_at):
        return []
    family = _Family.of(instance)
    rows = _Rows(family)
    kept = np.ones(len(instance.storage_of), np.bool_)
    retention = keep_everything(instance)
    found: list[Retention] = []
    for _ in range(_MOST_ROUNDS):
        held = held_bytes(simulated(instance, retention))
        full = _fullest(held, instance.budget_bytes)
        if not full or until_seconds - clock() < _FEWEST_SECONDS:
            break
        for stage in full:  # bytes that the row does not count are assumed not to change in this round
            others_bytes = int(held[stage]) - family.counted_bytes(stage, kept)
            rows.limit(stage, instance.budget_bytes - others_bytes)
        solved = rows.solve(until_seconds - clock())
        if solved is None:
            break
        kept = solved
        retention = keep_only(instance, {instance.storage_of[each] for each in np.flatnonzero(kept)})
        found.append(retention)
    return found[::-1]


def _fullest(held: Integers, budget_bytes: int) -> list[int]:
    """Return the fullest stage of each run of stages above the budget, of the fullest few runs."""
    over = np.concatenate([[False], held > budget_bytes, [False]])
    edges = np.flatnonzero(over[1:] != over[:-1]).reshape(-1, 2).tolist()
    fullest = [begin + int(held[begin:end].argmax()) for begin, end in edges]
    return sorted(fullest, key=lambda stage: -int(held[stage]))[:_MOST_NEW]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The uses of the managed storages that forward writes, from which the rows are built.

    Attributes:
        reads: position -> the forward's storages that it reads.
        writer, size_bytes: of each storage.
        last_forward: the last position of forward that writes or reads it.
        last_backward: the last position of backward that reads it; -1 if none does.
        last_needed: the last stage in which backward, or a recomputed op, may read it.
        rule: of the interval that crosses the forward/backward boundary.
    """

    instance: Instance
    reads: list[list[int]]
    writer: Integers
    size_bytes: Integers
    last_forward: Integers
    last_backward: Integers
    last_needed: Integers
    rule: Integers

    @staticmethod
    def of(instance: Instance) -> _Family:
        """Return the family of an instance."""
        tables, start, end = instance.tables, instance.backward_start, len(instance.op_at)
        writer: Integers = tables.storages["writer"].copy()
        reads = [[s for s in instance.reads(position) if writer[s] < start] for position in range(end)]
        last_forward, last_backward = writer.copy(), np.full(len(writer), -1)
        for position, here in enumerate(reads):
            (last_forward if position < start else last_backward)[here] = position
        rule = np.full(len(writer), KEPT)
        rule[tables.intervals["storage"][instance.crosses]] = tables.intervals["rule"][instance.crosses]
        return _Family(
            instance=instance,
            reads=reads,
            writer=writer,
            size_bytes=tables.storages["size_bytes"].copy(),
            last_forward=last_forward,
            last_backward=last_backward,
            last_needed=_last_needed(instance, reads, last_backward),
            rule=rule,
        )

    def is_counted(self, stage: int) -> Integers:
        """Return the storages that are on the device in a stage if they are kept over the forward/backward boundary."""
        is_past = self.last_forward < min(stage, self.instance.backward_start)
        return np.flatnonzero((self.writer < self.instance.backward_start) & is_past & (self.last_needed >= stage))

    def back_by(self, stage: int, kept: Flags) -> set[int]:
        """Return the positions that are recomputed in a stage of backward, or before it, with `kept` kept.

        Args:
            stage: the stage.
            kept: bool[managed storages].
        """
        back: set[int] = set()
        for position in range(self.instance.backward_start, stage + 1):
            missing = [storage for storage in self.reads[position] if not kept[storage]]
            while missing:
                writer = int(self.writer[missing.pop()])
                if writer not in back:
                    back.add(writer)
                    missing.extend(storage for storage in self.reads[writer] if not kept[storage])
        return back

    def counted_bytes(self, stage: int, kept: Flags) -> int:
        """Return the bytes in the row of a stage: of kept storages, and of recomputed ones that are read later.

        Args:
            stage: the stage.
            kept: bool[managed storages].
        """
        chosen = self.is_counted(stage)
        total = int(self.size_bytes[chosen[kept[chosen]]].sum())
        if stage <= self.instance.backward_start:
            return total
        back = self.back_by(stage, kept)
        held = (storage for position in back for storage in self.held(position, stage) if not kept[storage])
        return total + sum(int(self.size_bytes[storage]) for storage in held)

    def held(self, position: int, stage: int) -> list[int]:
        """Return the writes of a position that are held in a stage of backward once it is recomputed.

        Args:
            position: the position.
            stage: of backward.
        """
        return [storage for storage in self.instance.writes(position) if self.last_backward[storage] >= stage]


def _last_needed(instance: Instance, reads: list[list[int]], last_backward: Integers) -> Integers:
    """Return of each storage the last stage in which backward reads it, or recomputes a reader of it."""
    start, first, last = instance.backward_start, last_backward.copy(), last_backward.copy()
    for position in range(len(reads) - 1, start - 1, -1):
        first[reads[position]] = position
    for position in range(start - 1, -1, -1):
        written = instance.writes(position)
        later = np.where(last_backward[written] < 0, last[written], first[written]).max(initial=-1)
        last[reads[position]] = np.maximum(last[reads[position]], later)
    return last


class _Rows:
    """The integer program: kept storages, recomputed positions, and a row for each full stage."""

    def __init__(self, family: _Family) -> None:
        self.family = family
        self.model, self.sum = make_model()
        self.rows: dict[int, tuple[list[Any], list[int]]] = {}
        positions, start = family.instance.tables.positions, family.instance.backward_start
        self.kept: dict[int, Any] = {}
        for storage in np.flatnonzero(family.writer < start).tolist():
            self.kept[storage] = self.model.new_bool_var("")
            if family.rule[storage] != FREE:
                self.model.add(self.kept[storage] == int(family.rule[storage] == KEPT))
        may = positions["last_rematerialization"] >= start
        self.recomputed: dict[int, Any] = {each: self.model.new_bool_var("") for each in range(start) if may[each]}
        self._require_all(len(family.reads), self.recomputed)
        units = _UNITS / max(float(positions["seconds"].sum()), 1e-12)
        costs = [round(float(positions["seconds"][position]) * units) for position in self.recomputed]
        self.model.minimize(self.sum(list(self.recomputed.values()), costs))

    def limit(self, stage: int, room_bytes: int) -> None:
        """Limit the bytes that the row of a stage counts; of several limits the least holds.

        Args:
            stage: the stage's position.
            room_bytes: the limit.
        """
        if stage not in self.rows:
            self.rows[stage] = self._row(stage)
        variables, sizes = self.rows[stage]
        self.model.add(self.sum(variables, sizes) <= room_bytes)

    def solve(self, limit_seconds: float) -> Flags | None:
        """Return bool[managed storages]: the kept ones; None if nothing was found."""
        from ortools.sat.python import cp_model

        solver, status = solve(self.model, limit_seconds=limit_seconds, limit_work=_WORK)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        kept = np.zeros(len(self.family.writer), np.bool_)
        for storage, variable in self.kept.items():
            kept[storage] = solver.boolean_value(variable)
        return kept

    def _row(self, stage: int) -> tuple[list[Any], list[int]]:
        """Return the literals of a stage's row and their bytes: kept storages, and recomputed ones read later."""
        family, start = self.family, self.family.instance.backward_start
        chosen: list[int] = family.is_counted(stage).tolist()
        variables = [self.kept[storage] for storage in chosen]
        if stage > start:
            back = {position: self.model.new_bool_var("") for position in self.recomputed}
            self._require_all(stage + 1, back)
            for position, computed in back.items():
                for storage in family.held(position, stage):
                    held = self.model.new_bool_var("")  # a kept storage is not counted twice
                    self.model.add_bool_or([held, self.kept[storage], ~computed])
                    variables.append(held)
                    chosen.append(storage)
        return variables, [int(family.size_bytes[storage]) for storage in chosen]

    def _require_all(self, end: int, back: dict[int, Any]) -> None:
        """Require that the reads of backward before `end`, and of recomputed positions, are kept or recomputed."""
        for position in range(self.family.instance.backward_start, end):
            self._require(position, back)
        for position, computed in back.items():
            self._require(position, back, ~computed)

    def _require(self, position: int, back: dict[int, Any], *unless: Any) -> None:
        for storage in self.family.reads[position]:
            writer = int(self.family.writer[storage])
            computed = [back[writer]] if writer in back else []
            self.model.add_bool_or([self.kept[storage], *computed, *unless])
