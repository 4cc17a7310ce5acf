"""Solving the retention model with CP-SAT, from a known schedule, with bounds in seconds."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.planners.engine.cpsat.model import RetentionModel
from memfit.planners.engine.cpsat.stages import Stages, build_stages
from memfit.planners.engine.retention.instance import Instance
from memfit.planners.engine.solver import make_solver
from memfit.schedule import Code, Schedule

_UNITS = float(1 << 30)  # of all ops once; rounding loses up to one unit for each computation
_REPORT_SECONDS = 0.1  # between two reports

Report = Callable[[float | None, float], None]
"""Takes the least seconds of recomputation so far (None before the first schedule), and the bound on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The schedule that CP-SAT found, and the bound that it proved.

    Attributes:
        sequence: positions in order of computation, the end included, of the fastest schedule found; None if none is
            at least as fast as the known one.
        recompute_seconds: a proved lower bound on the recomputation of every schedule of the model's family that fits;
            infinite if none fits and is as fast as the known one.
        interrupted: whether Ctrl-C ended the search.
    """

    sequence: tuple[int, ...] | None
    recompute_seconds: float
    interrupted: bool


def prove(
    instance: Instance,
    *,
    known: Schedule | None,
    known_recompute_seconds: float,
    recompute_bound_seconds: float,
    limit_seconds: float = math.inf,
    limit_work: float = math.inf,
    report: Report | None = None,
) -> Proof:
    """Search a schedule of the instance's family that is faster than `known`, or a proof that there is none.

    The search runs in one thread. It is deterministic for a seed if `limit_work` ends it; with `limit_seconds` the
    result depends on the machine's speed.

    Args:
        instance: its order of ops is the family's.
        known: a schedule that fits, of this family or not; None if there is none yet.
        known_recompute_seconds: its seconds of recomputation; infinite without one.
        recompute_bound_seconds: a lower bound on the recomputation of every schedule.
        limit_seconds: of solving.
        limit_work: in CP-SAT's deterministic units, about two seconds of one core each.
        report: called several times a second.
    """
    from ortools.sat.python import cp_model

    stages = build_stages(instance)
    once_seconds = float(instance.tables.positions["seconds"].sum())
    units_per_second = _UNITS / max(once_seconds, 1e-12)
    built = RetentionModel(instance, stages, units_per_second)
    start = None if known is None else stage_sequence(instance, stages, known)
    # Units are rounded down: up to one unit for each computation is subtracted from the bound.
    built.model.add(built.recompute_units >= int(recompute_bound_seconds * units_per_second) - len(built.computed))
    if start is not None:
        _hint(built, start)
        known_units = sum(built.units[position] for _, position in start) - sum(built.units)
        built.model.add(built.recompute_units <= known_units)
    elif known is not None:
        built.model.add(built.recompute_units <= int(known_recompute_seconds * units_per_second))
    solver = make_solver(limit_seconds=limit_seconds, limit_work=limit_work, seed=instance.problem.seed)
    status, interrupted = _solve(solver, built.model, report, units_per_second)
    if status == cp_model.INFEASIBLE:
        return Proof(sequence=None, recompute_seconds=float("inf"), interrupted=interrupted)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN), solver.status_name(status)
    bound_seconds = max(solver.best_objective_bound / units_per_second, recompute_bound_seconds)
    sequence = None
    if status != cp_model.UNKNOWN:
        sequence = tuple(position for (_, position), on in sorted(built.computed.items()) if solver.boolean_value(on))
    return Proof(sequence=sequence, recompute_seconds=bound_seconds, interrupted=interrupted)


def _solve(solver: Any, model: Any, report: Report | None, units_per_second: float) -> tuple[int, bool]:
    """Solve in another thread, so that this one can handle Ctrl-C; return the status, and whether there was one."""
    status: list[int] = []
    watch, interrupted = _watch(), False
    thread = threading.Thread(target=lambda: status.append(int(solver.solve(model, watch))), daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join(_REPORT_SECONDS)
            if report is not None:
                found = None if watch.objective == math.inf else watch.objective / units_per_second
                report(found, max(watch.bound, 0.0) / units_per_second)
        except KeyboardInterrupt:
            interrupted = True
            solver.stop_search()
    return status[0], interrupted


def _watch() -> Any:
    """Return a callback that stores CP-SAT's objective and bound at each schedule that it finds."""
    from ortools.sat.python import cp_model

    class Watch(cp_model.CpSolverSolutionCallback):
        objective, bound = float("inf"), 0.0

        def on_solution_callback(self) -> None:
            self.objective, self.bound = self.objective_value, self.best_objective_bound

    return Watch()


def stage_sequence(instance: Instance, stages: Stages, schedule: Schedule) -> tuple[tuple[int, int], ...] | None:
    """Return (stage, position) of all computations of `schedule`, or None if it is not in the family.

    A stage ends with a position that is higher than all computed before.

    Args:
        instance: gives the order of first computations.
        stages: of the instance.
        schedule: legal on its graph.
    """
    position_of = {op: position for position, op in enumerate(instance.op_at)}
    boundaries = {boundary: position for position, boundary in instance.boundary_at.items()}
    positions = [
        position_of[operand] if code == Code.COMPUTE else boundaries[operand]
        for code, operand in zip(schedule.codes.tolist(), schedule.operands.tolist(), strict=True)
        if code in (Code.COMPUTE, Code.BOUNDARY)
    ]
    found: list[tuple[int, int]] = []
    begun: list[int] = []
    latest = -1
    for position in [*positions, stages.last]:
        if begun and position <= begun[-1]:
            return None
        begun.append(position)
        if position > latest:
            found.extend((position, each) for each in begun)
            begun, latest = [], position
    return tuple(found)


def _hint(built: RetentionModel, sequence: Sequence[tuple[int, int]]) -> None:
    """Give CP-SAT a schedule as a hint: its computations, and, from the last stage back, the storages retained."""
    model, stages = built.model, built.stages
    done = set(sequence)
    for key, on in built.computed.items():
        model.add_hint(on, key in done)
    needed: set[int] = set()
    for stage in range(stages.last, -1, -1):
        for (at, storage), on in built.retained.items():
            if at == stage:
                model.add_hint(on, storage in needed)
        for position in range(stage, -1, -1):
            if (stage, position) in done:
                needed.difference_update(s for s in stages.writes[position] if not stages.has_departed(s, stage))
                needed.update(stages.reads[position])
            for storage in stages.reads[position]:
                if (stage, storage, position) in built.held:
                    model.add_hint(built.held[stage, storage, position], storage in needed)
