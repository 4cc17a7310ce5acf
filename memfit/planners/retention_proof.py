"""Solving the retention model with CP-SAT, from a plan that is there already; and what its bound means in seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.planners.program import Program
from memfit.planners.retention_model import RetentionModel
from memfit.planners.retention_stages import Stages, build_stages
from memfit.schedule import Code, Schedule

_UNITS = float(1 << 30)  # all ops once; one unit a computation is lost to rounding
_SEED_MODULUS = 1 << 31
_LOOK_SECONDS = 0.1  # between looks at the solver

Report = Callable[[float | None, float], None]
"""Takes the least seconds of computing again so far (None before the first schedule), and the bound on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What CP-SAT found and proved of the retention model.

    Attributes:
        sequence: positions in order of computation, the end included, of the best schedule that it found; None where it
            found none that is at least as fast as the one it began with.
        again_seconds: every schedule of the model's family that fits spends at least so much on computing ops again, by
            all that was proved until the time was up. Infinite where none fits, or only such as are slower than the
            schedule it began with.
        interrupted: Ctrl-C ended it.
    """

    sequence: tuple[int, ...] | None
    again_seconds: float
    interrupted: bool


def prove(
    program: Program,
    *,
    known: Schedule | None,
    known_again_seconds: float,
    again_bound_seconds: float,
    limit_seconds: float | None = None,
    limit_work: float | None = None,
    report: Report | None = None,
) -> Proof:
    """Look for a faster schedule of the program's family than `known`, or a proof that there is none.

    The same answer for a seed, on any machine, where `limit_work` ends the search; what `limit_seconds` leaves depends
    on the machine's speed. One thread works, whose search is the same each time.

    Args:
        program: its order of ops is the family's.
        known: a schedule that fits, of this family or not; None if there is none yet.
        known_again_seconds: what it spends on computing ops again; infinite without one.
        again_bound_seconds: what every schedule spends so at least, as is known.
        limit_seconds: of solving.
        limit_work: in CP-SAT's deterministic units, about two seconds of one core each.
        report: called now and then.
    """
    from ortools.sat.python import cp_model

    stages = build_stages(program)
    once_seconds = float(program.tables.positions["seconds"].sum())
    units_per_second = _UNITS / max(once_seconds, 1e-12)
    built = RetentionModel(program, stages, units_per_second)
    start = None if known is None else stage_sequence(program, stages, known)
    # One unit a computation may be lost below what the bound says, for units are rounded down.
    built.model.add(built.again_units >= int(again_bound_seconds * units_per_second) - len(built.computed))
    if start is not None:
        _hint(built, start)
        built.model.add(built.again_units <= _again_units(built, start))
    elif known is not None:
        built.model.add(built.again_units <= int(known_again_seconds * units_per_second))
    solver: Any = cp_model.CpSolver()
    _set_parameters(solver, program.problem.seed, limit_seconds, limit_work)
    status, interrupted = _solve(solver, built.model, _in_seconds(report, units_per_second))
    if status == cp_model.INFEASIBLE:
        return Proof(sequence=None, again_seconds=float("inf"), interrupted=interrupted)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN), solver.status_name(status)
    bound_seconds = max(solver.best_objective_bound / units_per_second, again_bound_seconds)
    sequence = None
    if status != cp_model.UNKNOWN:
        sequence = tuple(position for (_, position), on in sorted(built.computed.items()) if solver.boolean_value(on))
    return Proof(sequence=sequence, again_seconds=bound_seconds, interrupted=interrupted)


def _set_parameters(solver: Any, seed: int, limit_seconds: float | None, limit_work: float | None) -> None:
    parameters = solver.parameters
    parameters.num_workers = 1  # several would race, and the answer depend on who wins
    parameters.linearization_level = 2  # all clauses in the linear relaxation: without them hardly anything is proved
    parameters.random_seed = seed % _SEED_MODULUS
    parameters.catch_sigint_signal = False
    if limit_seconds is not None:
        parameters.max_time_in_seconds = max(limit_seconds, 0.01)
    if limit_work is not None:
        parameters.max_deterministic_time = limit_work


def _solve(solver: Any, model: Any, report: Callable[[float, float], None]) -> tuple[int, bool]:
    """Solve in a thread of its own, so that Ctrl-C is heard here; return the status, and whether it was."""
    status: list[int] = []
    watch, interrupted = _watch(), False
    thread = threading.Thread(target=lambda: status.append(int(solver.solve(model, watch))), daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join(_LOOK_SECONDS)
            report(watch.objective, watch.bound)
        except KeyboardInterrupt:
            interrupted = True
            solver.stop_search()
    return status[0], interrupted


def _watch() -> Any:
    """Return what CP-SAT tells of each schedule that it finds."""
    from ortools.sat.python import cp_model

    class Watch(cp_model.CpSolverSolutionCallback):
        objective, bound = float("inf"), 0.0

        def on_solution_callback(self) -> None:
            self.objective, self.bound = self.objective_value, self.best_objective_bound

    return Watch()


def _in_seconds(report: Report | None, units_per_second: float) -> Callable[[float, float], None]:
    def hear(objective: float, bound: float) -> None:
        if report is not None:
            again = None if objective == float("inf") else objective / units_per_second
            report(again, max(bound, 0.0) / units_per_second)

    return hear


def stage_sequence(program: Program, stages: Stages, schedule: Schedule) -> tuple[tuple[int, int], ...] | None:
    """Return (stage, position) of all computations of `schedule`, or None where it is not of the family.

    A stage ends with each position that is computed for the first time after all before it have been, or wait.
    """
    position_of = {op: position for position, op in enumerate(program.op_at)}
    boundaries = {boundary: position for position, boundary in program.boundary_at.items()}
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


def _again_units(built: RetentionModel, sequence: Sequence[tuple[int, int]]) -> int:
    return sum(built.units[position] for _, position in sequence) - sum(built.units)


def _hint(built: RetentionModel, sequence: Sequence[tuple[int, int]]) -> None:
    """Tell CP-SAT of a schedule: what is computed, and from that, backwards, what is on the device."""
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
