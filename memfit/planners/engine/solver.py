"""CP-SAT as the integer programs of the engine use it: one thread, so that the result is the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from memfit.system.worker import run_aside

_SEED_MODULUS = 1 << 31  # CP-SAT's seeds have 31 bits
_LEAST_SECONDS = 0.01  # of one solution, where no time is left


def make_model() -> tuple[Any, Callable[[Sequence[Any], Sequence[int]], Any]]:
    """Return an empty model of CP-SAT, and the function that sums literals times factors."""
    from ortools.sat.python import cp_model

    expression: Any = cp_model.LinearExpr
    return cp_model.CpModel(), expression.weighted_sum


def solve(
    model: Any, *, limit_seconds: float = math.inf, limit_work: float = math.inf, seed: int | None = None
) -> tuple[Any, int]:
    """Solve a model in a way that Ctrl-C can end; return the solver, and its status.

    Args:
        model: of CP-SAT.
        limit_seconds, limit_work, seed: as for `make_solver`.
    """
    solver = make_solver(limit_seconds=limit_seconds, limit_work=limit_work, seed=seed)
    return solver, run_aside(lambda: solver.solve(model), solver.stop_search)


def make_solver(*, limit_seconds: float = math.inf, limit_work: float = math.inf, seed: int | None = None) -> Any:
    """Return a solver of CP-SAT.

    Args:
        limit_seconds: of one solution.
        limit_work: in CP-SAT's deterministic units, about two seconds of one core each.
        seed: of its random choices; None leaves CP-SAT's own.
    """
    from ortools.sat.python import cp_model  # importing it takes longer than importing memfit

    solver: Any = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1  # several would make the result depend on their timing
    parameters.linearization_level = 2  # all clauses in the linear relaxation: proofs need them
    parameters.catch_sigint_signal = False
    parameters.max_time_in_seconds = max(limit_seconds, _LEAST_SECONDS)
    parameters.max_deterministic_time = limit_work
    if seed is not None:
        parameters.random_seed = seed % _SEED_MODULUS
    return solver
