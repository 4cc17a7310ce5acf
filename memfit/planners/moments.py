"""What must be computed again once some op runs: the least of it, exactly, for graphs of a few dozen ops.

The proof of `memfit.planners.bounds.least_seconds_again` looks at the moment at which an op t is computed for the first
time, and asks for the cheapest choice of what is on the device then and what is computed again later. Minimum cuts with
a price for bytes answer that from below, for graphs of every size. Here the question is an integer program of one
variable for each ancestor of t and one for each storage that these write, which CP-SAT answers in milliseconds; where
storages are few and large, it proves far more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from memfit.plan import Problem
from memfit.planners.bounds import op_room_bytes
from memfit.planners.cuts import Cuts

_UNITS = float(1 << 30)  # the seconds of all ops once; those of each op are rounded down
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
            least[op] = _at(cuts, op, op_room_bytes(problem, cuts.resident_bytes, op))
    return {op: seconds for op, seconds in least.items() if seconds > 0}


def _at(cuts: Cuts, op: int, room_bytes: int) -> float:
    """Return the bound at one op that leaves so much room; 0 where there is none, or nothing fits."""
    from ortools.sat.python import cp_model  # it takes longer to import than all of memfit

    model: Any = cp_model.CpModel()
    expression: Any = cp_model.LinearExpr
    before, after = cuts.ancestors(op), cuts.descendants(op)
    own = {*cuts.reads[op], *cuts.writes[op]}
    again = {
        int(each): model.new_bool_var(f"again {each}")
        for each in np.flatnonzero(before)
        if not cuts.graph.ops[each].computed_once
    }
    kept: dict[int, Any] = {}

    def require(storage: int, *unless: Any) -> None:
        """The storage is on the device, or its op is computed again."""
        writer = int(cuts.writer[storage])
        if writer >= 0 and before[writer] and storage not in own:
            if storage not in kept:
                kept[storage] = model.new_bool_var(f"kept {storage}")
            model.add_bool_or([kept[storage], *([again[writer]] if writer in again else []), *unless])

    wanted = set(np.flatnonzero(cuts.at_end).tolist()) | set(cuts.read_storage[after[cuts.read_op]].tolist())
    for storage in sorted(wanted):
        require(storage)
    for each, chosen in again.items():
        for storage in cuts.reads[each]:
            require(storage, ~chosen)
    sizes = [int(cuts.sizes[storage]) for storage in kept]
    if sum(sizes) <= room_bytes:
        return 0.0
    units_per_second = _UNITS / max(float(cuts.seconds.sum()), 1e-12)
    model.add(expression.weighted_sum(list(kept.values()), sizes) <= room_bytes)
    units = [int(cuts.seconds[each] * units_per_second) for each in again]
    model.minimize(expression.weighted_sum(list(again.values()), units))
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _WORK
    solver.parameters.catch_sigint_signal = False
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return 0.0
    return max(0.0, solver.best_objective_bound) / units_per_second
