"""A bound on the seconds of a step with copies on the host, by an integer program of the moments of all ops.

The proof of `memfit.planners.engine.bounds.bounds` considers the time at which one op is computed first. Here all ops
are considered at once, and what has to happen between them. The bound holds for every legal schedule, in any order of
ops, with any number of computations and copies.

Let T[t] be the clock of compute when op t is computed first, and F the end of the step. Op t *precedes* op u if every
schedule computes it first before u: it is an ancestor, or before a boundary that u is behind. A storage is *needed* at
t if an op that precedes t writes it, and the step requires it at its end, or an op reads it that t precedes. For each
needed storage that t itself does not touch, one of three holds:

- kept[t, s]: it is on the device;
- away[t, s]: it is not, and is there next by a copy from the host. Its copy to the host has then ended before t, for
  else it could not have been dropped, and that back starts after t, for it takes memory from its start on;
- or it is there next because its op is recomputed after t. Then the same holds for what that op reads; these ops
  are again[t, e].

At each t, the storages that are kept fit beside those of t into the budget, and those that are away into the host's.

Compute is serial, and so are the copies in each direction. A copy takes its latency and its bytes at the rate that its
direction has alone, or longer, and takes a share of compute's rate away meanwhile. While compute stands still, all of
its rate is lost, which is more than both shares together. Therefore, where t precedes u:

- T[u] - T[t] is at least the seconds of t, of the ops between them, of the ops recomputed in between, which are
  those of storages that are neither kept nor away at t and are read by u or by an op between, and what is lost to the
  copies of storages that are away at t and are so read;
- T[u] - T[t] is at least the seconds of t and of these copies;
- T[u] - T[t] is at least the seconds of t, and of the copies to the host of what is away at u and is written by t or
  by an op that t precedes; also of t, of the ops between, and what is lost to these copies.

F is to T[t] as if it were an op that all others precede, and that reads what the step requires at its end. And F is at
least the seconds of all ops, of those recomputed, and what is lost to a copy in each direction of all storages that
are ever away.

The program minimizes F. Times are rounded down to whole units wherever they bound T or F from below, so that its value
is a bound. There is no large constant in it: its linear relaxation is a bound, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from memfit.plan import Problem
from memfit.planners.engine.bounds.bounds import op_room_bytes
from memfit.planners.engine.bounds.minimum_cuts import Cuts
from memfit.planners.engine.solver import make_model, solve
from memfit.simulate.arrays import link_of
from memfit.system.records import Flags

_UNITS = float(1 << 34)  # the seconds of all ops once; each term loses up to one unit by rounding
_MOST_UNITS = 1 << 40  # a copy of 64 steps takes long enough

Term = tuple[Any, int]  # a variable of CP-SAT and its factor; ortools leaves its types out


def least_seconds_with_copies(
    problem: Problem, *, enough_seconds: float, limit_seconds: float = math.inf, limit_work: float = math.inf
) -> float:
    """Return a bound on the seconds that every schedule within the budgets takes beyond computing each op once.

    Args:
        problem: with a link and a host budget, of a few dozen ops.
        enough_seconds: no higher bound is searched: the seconds of a known plan, beyond each op once.
        limit_seconds: of solving.
        limit_work: in CP-SAT's deterministic units, about two seconds of one core each.
    """
    from ortools.sat.python import cp_model

    program = _Program(problem)
    once_seconds = float(program.seconds.sum())
    most_units = int(min((once_seconds + enough_seconds) * program.units_per_second, _MOST_UNITS << 10))
    # Whether a schedule is faster is easier to decide than how much faster the fastest is.
    program.model.add(program.end <= most_units - 1)
    solver, status = solve(program.model, limit_seconds=limit_seconds, limit_work=limit_work, seed=problem.seed)
    assert status != cp_model.MODEL_INVALID, program.model.validate()
    units = most_units if status == cp_model.INFEASIBLE else min(most_units, solver.best_objective_bound)
    return max(0.0, units / program.units_per_second - once_seconds)


class _Program:
    """The integer program of a problem.

    Attributes:
        model: a `CpModel` of ortools.
        end: F, in units, which is minimized.
        seconds: of each op.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.cuts = cuts = Cuts(problem.graph, problem.device)
        self.seconds = cuts.seconds
        self.units_per_second = _UNITS / max(float(self.seconds.sum()), 1e-12)
        self.precedes = self._precedes()
        self.readers = [
            frozenset[int](cuts.read_op[cuts.read_storage == storage].tolist())
            for storage in range(len(self.graph.storages))
        ]
        link = link_of(problem.device)
        alone = [[link.latency_seconds + s.bytes / rate for s in self.graph.storages] for rate in link.rates]
        self.copying = [[self._units(each) for each in direction] for direction in alone]
        self.lost = [
            [self._units(load * each) for each in direction] for load, direction in zip(link.loads, alone, strict=True)
        ]
        self.model, self.weighted_sum = make_model()
        ops = range(len(self.graph.ops))
        self.at = [self.model.new_int_var(0, _MOST_UNITS << 10, f"at {op}") for op in ops]
        self.end: Any = self.model.new_int_var(0, _MOST_UNITS << 10, "end")
        self.ever_again: dict[int, Any] = {}
        self.ever_away: dict[int, Any] = {}
        moments = [_Moment(self, op) for op in ops]
        for moment in moments:
            self._times(moment, moments)
        lost = [(on, self.lost[0][s] + self.lost[1][s]) for s, on in self.ever_away.items()]
        again = [(on, self.op_units([op])) for op, on in self.ever_again.items()]
        self._at_least(self.end, 0, self.op_units(ops), [*again, *lost])
        self.model.minimize(self.end)

    def _units(self, seconds: float) -> int:
        return min(int(seconds * self.units_per_second), _MOST_UNITS)

    def op_units(self, ops: Iterable[int]) -> int:
        """Return the units of some ops, once each."""
        return self._units(float(self.seconds[list(ops)].sum()))

    def _precedes(self) -> Flags:
        """Return bool[ops, ops]: whether the first precedes the second."""
        ops = range(len(self.graph.ops))
        return np.array([self.cuts.descendants(op) for op in ops]) | np.array([self.cuts.ancestors(op) for op in ops]).T

    def _at_least(self, later: Any, earlier: Any, units: int, terms: Iterable[Term] = ()) -> None:
        """Require that a time is so many units after another one, and the units of the terms that hold."""
        found = [(on, factor) for on, factor in terms if factor]
        more = self.weighted_sum([on for on, _ in found], [factor for _, factor in found]) if found else 0
        self.model.add(later >= earlier + units + more)

    def _times(self, moment: _Moment, moments: list[_Moment]) -> None:
        """Relate the time of an op to those of the ops that it precedes, and to the end."""
        op = moment.op
        own = self.op_units([op])
        self._at_least(self.at[op], 0, self.op_units(np.flatnonzero(self.precedes[:, op]).tolist()))
        ends: list[tuple[Any, list[int], _Moment | None]] = [
            (self.at[later], np.flatnonzero(self.precedes[op] & self.precedes[:, later]).tolist(), moments[later])
            for later in np.flatnonzero(self.precedes[op]).tolist()
        ]
        for later, between, other in [*ends, (self.end, np.flatnonzero(self.precedes[op]).tolist(), None)]:
            computed = self.op_units([op, *between])
            readers = {*between, other.op} if other else {*between}
            read = [
                s for s in moment.kept if readers & self.readers[s] or (other is None and bool(self.cuts.at_end[s]))
            ]
            back = [(moment.away[s], s) for s in read if s in moment.away]
            again, units = self._computed_again(moment, read, is_end=other is None)
            lost = [(on, self.lost[1][s]) for on, s in back]
            self._at_least(later, self.at[op], computed + units, [*again, *lost])
            if back:
                self._at_least(later, self.at[op], own, [(on, self.copying[1][s]) for on, s in back])
            gone = [] if other is None else [(on, s) for s, on in other.away.items() if self._is_from(op, s)]
            if gone:
                self._at_least(later, self.at[op], own, [(on, self.copying[0][s]) for on, s in gone])
                self._at_least(later, self.at[op], computed, [(on, self.lost[0][s]) for on, s in gone])

    def _is_from(self, op: int, storage: int) -> bool:
        """Return whether a storage is written by an op or after it."""
        writer = int(self.cuts.writer[storage])
        return writer == op or bool(self.precedes[op, writer])

    def _computed_again(self, moment: _Moment, read: list[int], *, is_end: bool) -> tuple[list[Term], int]:
        """Return the seconds of recomputing, after a moment, the storages that are read; as terms and a constant.

        Up to the end, these are all ops recomputed. Else one storage of each op stands for it.
        """
        if is_end:
            return [(on, self.op_units([op])) for op, on in moment.again.items()], 0
        storage_of = {int(self.cuts.writer[s]): s for s in read if int(self.cuts.writer[s]) in moment.again}
        terms: list[Term] = []
        for op, storage in storage_of.items():
            there = [moment.kept[storage], *([moment.away[storage]] if storage in moment.away else [])]
            terms += [(on, -self.op_units([op])) for on in there]
        return terms, sum(self.op_units([op]) for op in storage_of)


class _Moment:
    """What is on the device, away, and recomputed, at the first computation of an op.

    Where everything that may be needed fits, there are no variables: all of it is kept.

    Attributes:
        op: its id.
        kept, away: by storage; that of each storage that may be needed, and of those that fit on the host.
        again: by op; those that may be recomputed for a storage that may be needed.
    """

    def __init__(self, program: _Program, op: int) -> None:
        self.program, self.op = program, op
        self.kept: dict[int, Any] = {}
        self.away: dict[int, Any] = {}
        self.again: dict[int, Any] = {}
        problem, cuts = program.problem, program.cuts
        self.before, after = program.precedes[:, op], program.precedes[op]
        self.own = {*cuts.reads[op], *cuts.writes[op]}
        needed = set(np.flatnonzero(cuts.at_end).tolist()) | set(cuts.read_storage[after[cuts.read_op]].tolist())
        needed = {s for s in needed if self._may_be_needed(s)}
        room_bytes = op_room_bytes(problem, cuts.resident_bytes, op)
        if sum(int(cuts.sizes[s]) for s in needed) <= room_bytes:
            return
        self.host_bytes = problem.host_budget_bytes
        for storage in sorted(needed):
            self._require(storage)
        self._limit(self.kept, [int(cuts.sizes[s]) for s in self.kept], room_bytes)
        self._limit(self.away, [program.graph.storages[s].bytes for s in self.away], self.host_bytes)

    def _may_be_needed(self, storage: int) -> bool:
        writer = int(self.program.cuts.writer[storage])
        return writer >= 0 and bool(self.before[writer]) and storage not in self.own

    def _require(self, storage: int, *unless: Any) -> None:
        """Require that a storage is kept, away or recomputed, or that one of the literals `unless` holds."""
        program = self.program
        if not self._may_be_needed(storage):
            return
        writer = int(program.cuts.writer[storage])
        if storage not in self.kept:
            self.kept[storage] = program.model.new_bool_var(f"kept {self.op} {storage}")
            if program.graph.storages[storage].bytes <= self.host_bytes:
                self.away[storage] = self._ever(program.ever_away, storage, "away")
                program.model.add_at_most_one([self.kept[storage], self.away[storage]])
        if writer not in self.again and not program.graph.ops[writer].computed_once:
            self.again[writer] = self._ever(program.ever_again, writer, "again")
            for read in program.cuts.reads[writer]:
                self._require(read, ~self.again[writer])
        away = [self.away[storage]] if storage in self.away else []
        again = [self.again[writer]] if writer in self.again else []
        program.model.add_bool_or([self.kept[storage], *away, *again, *unless])

    def _ever(self, ever: dict[int, Any], number: int, name: str) -> Any:
        """Return a new variable that implies the one of all moments."""
        model = self.program.model
        if number not in ever:
            ever[number] = model.new_bool_var(f"{name} {number}")
        on = model.new_bool_var(f"{name} {self.op} {number}")
        model.add_implication(on, ever[number])
        return on

    def _limit(self, chosen: dict[int, Any], sizes: list[int], most_bytes: int) -> None:
        if sum(sizes) > most_bytes:
            self.program.model.add(self.program.weighted_sum(list(chosen.values()), sizes) <= most_bytes)
