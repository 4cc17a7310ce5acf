"""The per-op recompute bound, exactly: the least recomputation that must follow the first computation of one op.

The proof of `memfit.planners.engine.bounds.bounds.least_recompute_seconds` considers the time at which an op t is
computed first, and the cheapest choice between storages kept then and ops recomputed later. Minimum cuts with a price
for bytes bound that choice from below, on graphs of every size. Here it is an integer program with one variable for
each ancestor of t and one for each storage that they write. CP-SAT solves it in milliseconds on a few dozen ops, and in
a fraction of a second on a thousand. It proves far more where storages are few and large. On large graphs it is solved
at one op, where the cuts prove most.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from memfit.plan import Problem
from memfit.planners.engine.bounds.bounds import op_room_bytes
from memfit.planners.engine.bounds.minimum_cuts import Bound, Cuts
from memfit.planners.engine.solver import make_model, solve

_UNITS = float(1 << 30)  # the seconds of all ops once; those of each op are rounded down
_MOST_OPS = 4000  # of a step for which the program of one op is solved; it is built in half a second
_WORK = 0.5  # CP-SAT's deterministic units for one op, a second or so


def least_recompute_seconds_at(problem: Problem, *, until_seconds: float = math.inf) -> dict[int, float]:
    """Return op -> seconds that every schedule within the budget recomputes after the op's first computation.

    The bounds hold in any order of ops, with any number of computations. Ops with a bound of 0 are left out. The result
    is empty if copies on the host are allowed. Ops are tried in their order, while the problem's clock is below
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
        >>> least_recompute_seconds_at(Problem(graph=graph, device=GENERIC, budget_bytes=300))
        {2: 1.0}

    Args:
        problem: its budget counts.
        until_seconds: the problem's clock at which no more ops are tried.
    """
    if problem.host_budget_bytes > 0:
        return {}
    cuts = Cuts(problem.graph, problem.device)
    least: dict[int, float] = {}
    for op in range(len(problem.graph.ops)):
        if problem.clock() < until_seconds:
            least[op] = _seconds_at(cuts, op, op_room_bytes(problem, cuts.resident_bytes, op))
    return {op: seconds for op, seconds in least.items() if seconds > 0}


def exact(problem: Problem, bound: Bound, *, limit_seconds: float = math.inf) -> Bound:
    """Return `bound` raised by the integer program at its op.

    `bound` itself is returned if it has no op, if copies on the host are allowed, or if the graph is so large that the
    program would take too long. The result is the same on any machine, unless `limit_seconds` ends the solving.

    Args:
        problem: its budget counts.
        bound: of the same problem, by minimum cuts.
        limit_seconds: of solving; by default only CP-SAT's deterministic work is limited.
    """
    op = bound.op
    if op is None or problem.host_budget_bytes > 0 or len(problem.graph.ops) > _MOST_OPS:
        return bound
    cuts = Cuts(problem.graph, problem.device)
    at_op = _seconds_at(cuts, op, op_room_bytes(problem, cuts.resident_bytes, op), limit_seconds)
    return Bound(op=op, seconds=max(bound.seconds, at_op))


class _Model:
    """The integer program of one op: its ancestors that are recomputed, and the storages kept while it runs."""

    def __init__(self, cuts: Cuts, op: int) -> None:
        self.model, self.weighted_sum = make_model()
        self.before, after = cuts.ancestors(op), cuts.descendants(op)
        self.cuts, self.own = cuts, {*cuts.reads[op], *cuts.writes[op]}
        self.recomputed = {
            int(each): self.model.new_bool_var(f"recomputed {each}")
            for each in np.flatnonzero(self.before)
            if not cuts.graph.ops[each].computed_once
        }
        self.kept: dict[int, Any] = {}
        needed = set(np.flatnonzero(cuts.at_end).tolist()) | set(cuts.read_storage[after[cuts.read_op]].tolist())
        for storage in sorted(needed):
            self._require(storage)
        for each, chosen in self.recomputed.items():
            for storage in cuts.reads[each]:
                self._require(storage, ~chosen)

    def _require(self, storage: int, *unless: Any) -> None:
        """Require that the storage is kept or its op recomputed, or that one of the literals `unless` holds."""
        writer = int(self.cuts.writer[storage])
        if writer >= 0 and self.before[writer] and storage not in self.own:
            if storage not in self.kept:
                self.kept[storage] = self.model.new_bool_var(f"kept {storage}")
            computed = [self.recomputed[writer]] if writer in self.recomputed else []
            self.model.add_bool_or([self.kept[storage], *computed, *unless])


def _seconds_at(cuts: Cuts, op: int, room_bytes: int, limit_seconds: float = math.inf) -> float:
    """Return the seconds proved at one op that leaves `room_bytes`; 0 if nothing is proved, or if nothing fits."""
    from ortools.sat.python import cp_model

    built = _Model(cuts, op)
    sizes = [int(cuts.sizes[storage]) for storage in built.kept]
    if sum(sizes) <= room_bytes:
        return 0.0
    units_per_second = _UNITS / max(float(cuts.seconds.sum()), 1e-12)
    built.model.add(built.weighted_sum(list(built.kept.values()), sizes) <= room_bytes)
    units = [int(cuts.seconds[each] * units_per_second) for each in built.recomputed]
    built.model.minimize(built.weighted_sum(list(built.recomputed.values()), units))
    solver, status = solve(built.model, limit_seconds=limit_seconds, limit_work=_WORK)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return 0.0
    return max(0.0, solver.best_objective_bound) / units_per_second
