"""What follows a search on a graph of a few dozen ops: bounds for every order of ops, then a proof in one order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memfit.plan import INTERRUPTED, PROVED_TO, Problem, Progress, Result
from memfit.planners.cuts import Bound
from memfit.planners.emit import emit
from memfit.planners.lean_order import lean_order
from memfit.planners.moments import least_seconds_again_at
from memfit.planners.program import Program, build_program
from memfit.planners.result import make_result, predict
from memfit.planners.retention_proof import Proof, prove

MOST_PROVABLE_OPS = 64
"""Of the retention model: its size grows with their square, and the time for a proof faster."""


def prove_further(
    problem: Problem, found: Result, *, planner: str, started_seconds: float, limit_work: float | None
) -> Result:
    """Return the faster of what a search has found and what CP-SAT finds in the search's order, with what was proved.

    Two bounds: one for every order of ops (`memfit.planners.moments`), and one for the searches' order, from the
    retention model. A plan is optimal where it meets either. Ctrl-C keeps what is there.

    Args:
        problem: its time limit counts from `started_seconds`.
        found: the search's answer.
        planner: who planned.
        started_seconds: `problem.clock()` when planning began.
        limit_work: of CP-SAT in its deterministic units, in place of the time limit: the same answer on any machine.
    """
    ends_seconds = started_seconds + problem.time_limit_seconds if limit_work is None else math.inf
    once_seconds = sum(op.seconds for op in problem.graph.ops)
    try:
        at = least_seconds_again_at(problem, until_seconds=ends_seconds)
    except KeyboardInterrupt:
        return replace(found, stats={**found.stats, INTERRUPTED: 1.0})
    again_bound = max([found.bounds.overhead * once_seconds, *at.values()])
    program = build_program(problem, lean_order(problem.graph, problem.device))
    again_seconds = found.plan.predicted.seconds - once_seconds if found.plan else math.inf
    proof = Proof(sequence=None, again_seconds=again_bound, interrupted=False)
    if again_seconds > again_bound + _rounding(problem):
        proof = prove(
            program,
            known=found.plan.schedule if found.plan else None,
            known_again_seconds=again_seconds,
            again_bound_seconds=again_bound,
            limit_seconds=ends_seconds - problem.clock() if limit_work is None else None,
            limit_work=limit_work,
            report=_reporter(problem, found, once_seconds, started_seconds),
        )
    return _with_proof(program, found, proof, Bound(op=None, seconds=again_bound, cuts=()), planner, started_seconds)


def _rounding(problem: Problem) -> float:
    return PROVED_TO * sum(op.seconds for op in problem.graph.ops)


def _reporter(
    problem: Problem, found: Result, once_seconds: float, started_seconds: float
) -> Callable[[float | None, float], None]:
    """Return what takes the least seconds of computing again so far and the bound on them, and reports progress."""
    share = 1.0 / once_seconds if once_seconds > 0 else 0.0

    def report(again_seconds: float | None, bound_seconds: float) -> None:
        overheads = [found.plan.overhead] if found.plan else []
        overheads += [] if again_seconds is None else [again_seconds * share]
        problem.progress(
            Progress(
                elapsed_seconds=problem.clock() - started_seconds,
                best_overhead=min(overheads, default=None),
                best_peak_bytes=found.plan.predicted.peak_bytes if found.plan else None,
                bound_overhead=bound_seconds * share,
                message="proving, in this order of ops",
            )
        )

    return report


def _with_proof(
    program: Program, found: Result, proof: Proof, again: Bound, planner: str, started_seconds: float
) -> Result:
    """Return a Result with the faster schedule of the two, and with what was proved."""
    problem = program.problem
    stats = {**found.stats, INTERRUPTED: 1.0} if proof.interrupted else found.stats
    schedules = [] if found.plan is None else [found.plan.schedule]
    schedules += [] if proof.sequence is None else [emit(program, proof.sequence)]
    if not schedules:
        return replace(found, stats=stats)
    schedule = min(schedules, key=lambda each: predict(problem, each).seconds)
    again_seconds = predict(problem, schedule).seconds - sum(op.seconds for op in problem.graph.ops)
    # What is faster than all in this order keeps to another, of which the proof says nothing.
    in_order = proof.again_seconds if proof.again_seconds <= again_seconds + _rounding(problem) else None
    return make_result(
        problem,
        schedule,
        planner=planner,
        started_seconds=started_seconds,
        least_found_bytes=found.bounds.least_budget_found_bytes,
        again=again,
        again_in_order_seconds=in_order,
        stats=stats,
    )
