"""CP-SAT as the integer programs of the engine use it: one thread, so that the result is the same each time."""

from __future__ import annotations

import math
from typing import Any

_LEAST_SECONDS = 0.01  # of one solution, where no time is left


def make_solver(*, limit_seconds: float = math.inf, limit_work: float = math.inf) -> Any:
    """Return a solver of CP-SAT.

    Args:
        limit_seconds: of one solution.
        limit_work: in CP-SAT's deterministic units, about two seconds of one core each.
    """
    from ortools.sat.python import cp_model  # importing it takes longer than importing memfit

    solver: Any = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1  # several would make the result depend on their timing
    parameters.linearization_level = 2  # all clauses in the linear relaxation: proofs need them
    parameters.catch_sigint_signal = False
    parameters.max_time_in_seconds = max(limit_seconds, _LEAST_SECONDS)
    parameters.max_deterministic_time = limit_work
    return solver
