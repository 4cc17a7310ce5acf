"""Planner `auto`, the default: the proved optimum where a graph is small, the search everywhere else, with trips to the
host where there is a host budget and a link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec

from memfit.plan import INTERRUPTED, ROUNDING, Plan, Problem, Result, Status
from memfit.planners.cuts import Bound
from memfit.planners.emit import emit
from memfit.planners.offload import Offload, has_link
from memfit.planners.order import original_order
from memfit.planners.program import build_program
from memfit.planners.proving import MOST_PROVABLE_OPS, prove_further
from memfit.planners.result import make_result
from memfit.planners.search import Search, Searched
from memfit.planners.shortest_path import Fastest, fastest_schedule, is_small
from memfit.planners.shortest_path_host import fastest_with_host
from memfit.planners.windows import Windows
from memfit.schedule import Schedule

_FEW_MOVES = 10_000  # of the search, where a proof has the plan already
_SEARCHING = 0.15  # of the time, where a proof follows: a few dozen ops need no more
_MOVES_FOR_WORK = 50_000  # of the search: about as long as one deterministic unit of CP-SAT's


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Prove the fastest schedule of a graph of a few ops; anneal from minimum cuts, with a bound, on any other.

    On up to 12 ops the plan is a shortest path over all states of the step, in any order of ops (see
    `memfit.planners.shortest_path`), and its status `optimal`. On larger graphs it is planner `search`'s, or planner
    `offload`'s where there is a host budget and a link; its status is `optimal` where its time is the bound's.

    With a host budget and a link, the plan is proved to be the fastest, or it is not slower than planner `search`'s
    without the host, from the same seed, in a fifth of the moves, or of the time: of all of it, or on up to 12 ops of
    what trying to prove it has left, about half at least (see `memfit.planners.offload`).

    On up to 64 ops and without a host budget, CP-SAT goes on from there: it looks for a faster plan, and for a proof
    that there is none, among those that keep to the search's order of ops as `memfit.planners.retention_model` has it.
    Then `optimal` is said of these, and `Bounds.overhead_in_order` is the bound that was proved.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "a shortest path over all states for a few ops; else annealing from minimum cuts"

    iterations: int | None = field(
        default=None, metadata={"help": "moves to try in all, in place of the time limit: the same plan on any machine"}
    )
    threads: int = field(default=2, metadata={"help": "runs at a time; they are part of what a seed determines"})

    def plan(self, problem: Problem) -> Result:
        """Return the best plan found within the problem's time limit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        return self.plan_from(problem).result

    def plan_from(self, problem: Problem, warm: Sequence[Windows] = ()) -> Searched:
        """Return the best plan found, and windows for a neighbouring budget to start from."""
        started_seconds = problem.clock()
        if has_link(problem):
            return self._with_host(problem, warm, started_seconds)
        try:
            fastest = fastest_schedule(problem, until_seconds=self._proving_until(problem))
        except KeyboardInterrupt:
            searched = self._search(_FEW_MOVES).plan_from(problem, warm)
            interrupted = replace(searched.result, stats={**searched.result.stats, INTERRUPTED: 1.0})
            return replace(searched, result=_renamed(interrupted))
        if fastest is None:
            return self._searched(problem, warm, started_seconds)
        searched = self._search(_FEW_MOVES).plan_from(problem, warm)  # for the least budget, and windows to start from
        return replace(searched, result=_renamed(_proved(problem, fastest, searched.result, started_seconds)))

    def _searched(self, problem: Problem, warm: Sequence[Windows], started_seconds: float) -> Searched:
        """Search; where the graph is small enough, for a share of the time, and then prove."""
        if len(problem.graph.ops) > MOST_PROVABLE_OPS:
            searched = self._search(self.iterations).plan_from(problem, warm)
            return replace(searched, result=_renamed(searched.result))
        share = replace(problem, time_limit_seconds=_SEARCHING * problem.time_limit_seconds)
        searched = self._search(self.iterations).plan_from(share, warm)
        found = searched.result
        if found.status is not Status.OPTIMAL and INTERRUPTED not in found.stats:
            work = None if self.iterations is None else self.iterations / _MOVES_FOR_WORK
            found = prove_further(problem, found, planner=self.name, started_seconds=started_seconds, limit_work=work)
        return replace(searched, result=_renamed(found))

    def _with_host(self, problem: Problem, warm: Sequence[Windows], started_seconds: float) -> Searched:
        """Plan with trips to the host; on a small graph briefly, and then look for anything faster."""
        planner = Offload(iterations=self.iterations, threads=self.threads)
        if not is_small(problem):
            searched = planner.plan_from(problem, warm)
            return replace(searched, result=_renamed(searched.result))
        searched = replace(planner, iterations=_FEW_MOVES).plan_from(problem, warm)
        found = searched.result
        if INTERRUPTED in found.stats:
            return replace(searched, result=_renamed(found))
        found_seconds = found.plan.predicted.seconds if found.plan else math.inf
        try:
            fastest = fastest_with_host(
                problem, below_seconds=found_seconds * (1 - ROUNDING), until_seconds=self._proving_until(problem)
            )
        except KeyboardInterrupt:
            interrupted = replace(found, stats={**found.stats, INTERRUPTED: 1.0})
            return replace(searched, result=_renamed(interrupted))
        if fastest is None:
            left_seconds = problem.time_limit_seconds - (problem.clock() - started_seconds)
            longer = planner.plan_from(replace(problem, time_limit_seconds=max(left_seconds, 0.0)), warm)
            better = longer.result.plan is not None and longer.result.plan.predicted.seconds <= found_seconds
            chosen = longer if better or found.plan is None else searched
            return replace(chosen, result=_renamed(chosen.result))
        schedule = fastest.schedule or (found.plan.schedule if found.plan else None)
        least_seconds = min(found_seconds, fastest.seconds) if fastest.schedule else found_seconds
        return replace(searched, result=_fastest(problem, schedule, least_seconds, found, started_seconds))

    def _search(self, iterations: int | None) -> Search:
        return Search(iterations=iterations, threads=self.threads)

    def _proving_until(self, problem: Problem) -> float:
        """Half of the time at most; where moves are counted, a proof does not depend on the clock."""
        share = 0.5 * problem.time_limit_seconds
        return math.inf if self.iterations is not None else problem.clock() + share


def _renamed(result: Result) -> Result:
    """Say that it was `auto` that planned."""

    def named(plan: Plan | None) -> Plan | None:
        return None if plan is None else msgspec.structs.replace(plan, planner=Auto.name)

    return replace(result, plan=named(result.plan), leanest=named(result.leanest))


def _proved(problem: Problem, fastest: Fastest, found: Result, started_seconds: float) -> Result:
    """Return the proved optimum, or that there is none."""
    if fastest.ops is None:
        assert found.plan is None, "a checked plan fits where a proof says that none does"
        return found
    program = build_program(problem, original_order(problem.graph))
    position_of = {op: position for position, op in enumerate(program.op_at)}
    sequence = [*(position_of[op] for op in fastest.ops), len(program.op_at) - 1]
    return _fastest(problem, emit(program, sequence), fastest.seconds, found, started_seconds)


def _fastest(
    problem: Problem, schedule: Schedule | None, seconds: float, found: Result, started_seconds: float
) -> Result:
    """Return the Result of a schedule that is proved to be the fastest, or of none where none fits."""
    if schedule is None:
        return _renamed(found)
    once_seconds = sum(op.seconds for op in problem.graph.ops)
    return make_result(
        problem,
        schedule,
        planner=Auto.name,
        started_seconds=started_seconds,
        least_found_bytes=found.bounds.least_budget_found_bytes,
        again=Bound(op=None, seconds=max(0.0, seconds - once_seconds), cuts=()),
        stats=found.stats,
    )
