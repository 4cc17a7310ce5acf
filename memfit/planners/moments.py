"""What must be computed again once some op runs: the least of it, exactly.

The proof of `memfit.planners.bounds.least_seconds_again` looks at the moment at which an op t is computed for the first
time, and asks for the cheapest choice of what is on the device then and what is computed again later. Minimum cuts with
a price for bytes answer that from below, for graphs of every size. Here the question is an integer program of one
variable for each ancestor of t and one for each storage that these write, which CP-SAT answers in milliseconds on a few
dozen ops and in a fraction of a second on a thousand; where storages are few and large, it proves far more. On large
graphs one op is asked, the one at which the cuts prove most: what is kept there is where the search begins, and often
proved to be the best there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.plan import Problem
from memfit.planners.bounds import op_room_bytes
from memfit.planners.cuts import Bound, Cut, Cuts

_UNITS = float(1 << 30)  # the seconds of all ops once; those of each op are rounded down
_MOST_OPS = 4000  # of a step of which one op is asked: the program is built in half a second
_WORK = 0.5  # CP-SAT's deterministic units for one op, a second or so


def least_seconds_again_at(problem: Problem, *, until_seconds: float = math.inf) -> dict[int, float]:
    """Return op -> what every schedule within the budget computes again of its ancestors, after its first computation.

    In any order of ops, with any number of computations. An op of which this says nothing is left out. No bound is
    given where copies on the host are allowed. Ops are asked in their order, while the problem's clock is below
    `until_seconds`.

        >>> from memfit.device import GENERIC
        >>> from memfit.graph import Graph, Op, Phase, Role, Storage
        >>> sizes, reads = [100, 100, 100, 4, 100], [(0,), (1,), (2,), (3, 1)]
        >>> roles = [Role.INPUT, Role.ACTIVATION, Role.ACTIVATION, Role.ACTIVATION, Role.OUTPUT]
        >>> graph = Graph.build(
        ...     name="skip",
        ...     storages=[Storage(id=i, name=f"s{i}", bytes=sizes[i], role=roles[i]) for i in range(5)],
        ...     ops=[
        ...         Op(id=i, name=f"op{i}", phase=Phase.FORWARD, reads=reads[i], writes=(i + 1,), seconds=1.0)
        ...         for i in range(4)
        ...     ],
        ... )
        >>> least_seconds_again_at(Problem(graph=graph, device=GENERIC, budget_bytes=300))
        {2: 1.0}
    """
    if problem.host_budget_bytes > 0:
        return {}
    cuts = Cuts(problem.graph, problem.device)
    least: dict[int, float] = {}
    for op in range(len(problem.graph.ops)):
        if problem.clock() < until_seconds:
            least[op] = _at(cuts, op, op_room_bytes(problem, cuts.resident_bytes, op)).seconds
    return {op: seconds for op, seconds in least.items() if seconds > 0}


def exact(problem: Problem, bound: Bound, *, limit_seconds: float | None = None) -> Bound:
    """Return `bound` as the integer program has it at the bound's op, with what that keeps as the first of the cuts.

    `bound` itself comes back where the program proves no more and finds nothing, where copies on the host are allowed,
    and on graphs so large that the program would take too long. The same answer on any machine, unless
    `limit_seconds` ends the solving.
    """
    op = bound.op
    if op is None or problem.host_budget_bytes > 0 or len(problem.graph.ops) > _MOST_OPS:
        return bound
    cuts = Cuts(problem.graph, problem.device)
    moment = _at(cuts, op, op_room_bytes(problem, cuts.resident_bytes, op), limit_seconds)
    made = bound.cuts if moment.cut is None else (moment.cut, *bound.cuts)
    return Bound(op=op, seconds=max(bound.seconds, moment.seconds), cuts=made)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The seconds that are proved at one op, and the best choice of what is kept there, if one was found."""

    seconds: float
    cut: Cut | None = None


class _Model:
    """The integer program of one op: which of its ancestors are computed again, and what is kept while it runs."""

    def __init__(self, cuts: Cuts, op: int) -> None:
        from ortools.sat.python import cp_model  # it takes longer to import than all of memfit

        self.model: Any = cp_model.CpModel()
        self.before, after = cuts.ancestors(op), cuts.descendants(op)
        self.cuts, self.own = cuts, {*cuts.reads[op], *cuts.writes[op]}
        self.again = {
            int(each): self.model.new_bool_var(f"again {each}")
            for each in np.flatnonzero(self.before)
            if not cuts.graph.ops[each].computed_once
        }
        self.kept: dict[int, Any] = {}
        wanted = set(np.flatnonzero(cuts.at_end).tolist()) | set(cuts.read_storage[after[cuts.read_op]].tolist())
        for storage in sorted(wanted):
            self._require(storage)
        for each, chosen in self.again.items():
            for storage in cuts.reads[each]:
                self._require(storage, ~chosen)

    def _require(self, storage: int, *unless: Any) -> None:
        """The storage is on the device, or its op is computed again."""
        writer = int(self.cuts.writer[storage])
        if writer >= 0 and self.before[writer] and storage not in self.own:
            if storage not in self.kept:
                self.kept[storage] = self.model.new_bool_var(f"kept {storage}")
            computed = [self.again[writer]] if writer in self.again else []
            self.model.add_bool_or([self.kept[storage], *computed, *unless])


def _at(cuts: Cuts, op: int, room_bytes: int, limit_seconds: float | None = None) -> _Moment:
    """Return the bound at one op that leaves so much room; 0 where there is none, or nothing fits."""
    from ortools.sat.python import cp_model

    built = _Model(cuts, op)
    sizes = [int(cuts.sizes[storage]) for storage in built.kept]
    if sum(sizes) <= room_bytes:
        return _Moment(seconds=0.0)
    expression: Any = cp_model.LinearExpr
    units_per_second = _UNITS / max(float(cuts.seconds.sum()), 1e-12)
    built.model.add(expression.weighted_sum(list(built.kept.values()), sizes) <= room_bytes)
    units = [int(cuts.seconds[each] * units_per_second) for each in built.again]
    built.model.minimize(expression.weighted_sum(list(built.again.values()), units))
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2  # all clauses in the relaxation, which is nearly integral with them
    solver.parameters.max_deterministic_time = _WORK
    solver.parameters.catch_sigint_signal = False
    if limit_seconds is not None:
        solver.parameters.max_time_in_seconds = max(limit_seconds, 0.01)
    status = solver.solve(built.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return _Moment(seconds=0.0)
    seconds = max(0.0, solver.best_objective_bound) / units_per_second
    if status == cp_model.UNKNOWN:
        return _Moment(seconds=seconds)
    again_seconds = sum(float(cuts.seconds[each]) for each, on in built.again.items() if solver.boolean_value(on))
    kept = tuple(sorted(storage for storage, on in built.kept.items() if solver.boolean_value(on)))
    cut = Cut(
        op=op,
        kept=kept,
        kept_bytes=int(cuts.sizes[list(kept)].sum()),
        again_seconds=again_seconds,
        cost_seconds=again_seconds,
        past=cuts.at(op).past,
    )
    return _Moment(seconds=seconds, cut=cut)
