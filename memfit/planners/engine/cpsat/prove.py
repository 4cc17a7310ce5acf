"""Proofs after a search on a graph of a few dozen ops: bounds for every order of ops, then a proof in one order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memfit.plan import PROVED_TO, Problem, Progress, Result
from memfit.planners.engine.bounds.bounds import Proofs
from memfit.planners.engine.bounds.minimum_cuts import Bound
from memfit.planners.engine.bounds.per_op import least_recompute_seconds_at
from memfit.planners.engine.cpsat.moments import least_seconds_with_copies
from memfit.planners.engine.cpsat.solve import Proof, prove
from memfit.planners.engine.parts import ALL_PARTS, Parts
from memfit.planners.engine.peak_reducing_order import search_order
from memfit.planners.engine.results import Ending, make_result, predict
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import Instance, build_instance

MOST_PROVABLE_OPS = 64
"""The most ops of a graph that is proved: the model grows with their square, the time for a proof faster."""


def prove_further(
    problem: Problem,
    found: Result,
    *,
    planner: str,
    started_seconds: float,
    limit_work: float | None,
    parts: Parts = ALL_PARTS,
) -> Result:
    """Return the faster of a search's plan and of CP-SAT's plan in the search's order, with the proved bounds.

    There are two bounds: one for every order of ops (`memfit.planners.engine.bounds.per_op`), and one for the search's
    order, from the retention model. A plan is optimal where it meets either. If copies are allowed, there is only one,
    for every order of ops (`memfit.planners.engine.cpsat.moments`). Ctrl-C keeps the best plan so far.

    Args:
        problem: its time limit counts from `started_seconds`.
        found: the search's answer.
        planner: name of the planner for the result.
        started_seconds: `problem.clock()` when planning began.
        limit_work: of CP-SAT in its deterministic units, in place of the time limit: the same result on any machine.
        parts: the search's; they determine the order of ops.
    """
    ends_seconds = started_seconds + problem.time_limit_seconds if limit_work is None else math.inf
    once_seconds = problem.graph.compute_seconds
    recompute_seconds = found.plan.predicted.seconds - once_seconds if found.plan else math.inf
    at: dict[int, float] = {}
    with_copies_seconds = 0.0
    try:
        if problem.may_copy and found.plan:
            with_copies_seconds = least_seconds_with_copies(
                problem,
                enough_seconds=recompute_seconds - PROVED_TO / 2 * once_seconds,
                limit_seconds=ends_seconds - problem.clock(),
                limit_work=math.inf if limit_work is None else limit_work,
            )
        elif parts.exact_per_op:
            at = least_recompute_seconds_at(problem, until_seconds=ends_seconds)
    except KeyboardInterrupt:
        return replace(found, interrupted=True)
    recompute_bound = max([0.0, found.bounds.overhead * once_seconds, with_copies_seconds, *at.values()])
    instance = build_instance(problem, search_order(problem.graph, problem.device, parts))
    proof = Proof(sequence=None, recompute_seconds=recompute_bound, interrupted=False)
    if recompute_seconds > recompute_bound + PROVED_TO * once_seconds and not problem.may_copy:
        proof = prove(
            instance,
            known=found.plan.schedule if found.plan else None,
            known_recompute_seconds=recompute_seconds,
            recompute_bound_seconds=recompute_bound,
            limit_seconds=ends_seconds - problem.clock(),
            limit_work=math.inf if limit_work is None else limit_work,
            report=_reporter(problem, found, once_seconds, started_seconds),
        )
    return _with_proof(instance, found, proof, Bound(op=None, seconds=recompute_bound), planner, started_seconds)


def _reporter(
    problem: Problem, found: Result, once_seconds: float, started_seconds: float
) -> Callable[[float | None, float], None]:
    """Return a function that reports progress, given the least recompute seconds so far and the bound on them."""
    share = 1.0 / once_seconds if once_seconds > 0 else 0.0

    def report(recompute_seconds: float | None, bound_seconds: float) -> None:
        overheads = [found.plan.overhead] if found.plan else []
        overheads += [] if recompute_seconds is None else [recompute_seconds * share]
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
    instance: Instance, found: Result, proof: Proof, recompute: Bound, planner: str, started_seconds: float
) -> Result:
    """Return a Result with the faster schedule of the two, and with the bounds that were proved."""
    problem = instance.problem
    schedules = [] if found.plan is None else [found.plan.schedule]
    schedules += [] if proof.sequence is None else [emit(instance, proof.sequence)]
    if not schedules:
        return replace(found, interrupted=proof.interrupted)
    schedule = min(schedules, key=lambda each: predict(problem, each).seconds)
    once_seconds = problem.graph.compute_seconds
    most_seconds = predict(problem, schedule).seconds - once_seconds + PROVED_TO * once_seconds
    # A plan faster than the bound for this order has another order, for which that bound proves nothing.
    is_in_order = proof.recompute_seconds <= most_seconds and not problem.may_copy
    in_order = proof.recompute_seconds if is_in_order else None
    ending = Ending(
        planner=planner,
        started_seconds=started_seconds,
        schedule=schedule,
        least_found_bytes=found.bounds.least_budget_found_bytes,
        interrupted=proof.interrupted,
        proofs=Proofs(
            least_budget=(found.bounds.least_budget_bound_bytes, found.bounds.holding_ops),
            recompute=recompute,
            recompute_in_order_seconds=in_order,
        ),
        stats=found.stats,
    )
    return make_result(problem, ending)
