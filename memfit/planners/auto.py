"""Planner `auto`, the default: the proved optimum where a graph is small, the search everywhere else, with trips to the
host where there is a host budget and a link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec

from memfit.plan import INTERRUPTED, Problem, Result
from memfit.planners.cuts import Bound
from memfit.planners.emit import emit
from memfit.planners.offload import Offload, has_link
from memfit.planners.order import original_order
from memfit.planners.program import build_program
from memfit.planners.result import make_result
from memfit.planners.search import Search, Searched
from memfit.planners.shortest_path import Fastest, fastest_schedule
from memfit.planners.windows import Windows

_FEW_MOVES = 10_000  # of the search, where a proof has the plan already


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Prove the fastest schedule of a graph of a few ops; anneal from minimum cuts, with a bound, on any other.

    On up to 12 ops the plan is a shortest path over all states of the step, in any order of ops (see
    `memfit.planners.shortest_path`), and its status `optimal`. On larger graphs it is planner `search`'s, or planner
    `offload`'s where there is a host budget and a link; its status is `optimal` where its time is the bound's.
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
        try:
            fastest = fastest_schedule(problem, until_seconds=self._proving_until(problem))
        except KeyboardInterrupt:
            searched = self._search(_FEW_MOVES, problem).plan_from(problem, warm)
            interrupted = replace(searched.result, stats={**searched.result.stats, INTERRUPTED: 1.0})
            return replace(searched, result=_renamed(interrupted))
        if fastest is None:
            searched = self._search(self.iterations, problem).plan_from(problem, warm)
            return replace(searched, result=_renamed(searched.result))
        # Searched for the least budget, and for windows to start from.
        searched = self._search(_FEW_MOVES, problem).plan_from(problem, warm)
        return replace(searched, result=_renamed(_proved(problem, fastest, searched.result, started_seconds)))

    def _search(self, iterations: int | None, problem: Problem) -> Search | Offload:
        kind = Offload if has_link(problem) else Search
        return kind(iterations=iterations, threads=self.threads)

    def _proving_until(self, problem: Problem) -> float:
        """Half of the time at most; where moves are counted, a proof does not depend on the clock."""
        share = 0.5 * problem.time_limit_seconds
        return math.inf if self.iterations is not None else problem.clock() + share


def _renamed(result: Result) -> Result:
    """Say that it was `auto` that planned."""
    plan = result.plan
    return replace(result, plan=None if plan is None else msgspec.structs.replace(plan, planner=Auto.name))


def _proved(problem: Problem, fastest: Fastest, found: Result, started_seconds: float) -> Result:
    """Return the proved optimum, or that there is none."""
    if fastest.ops is None:
        assert found.plan is None, "a checked plan fits where a proof says that none does"
        return found
    program = build_program(problem, original_order(problem.graph))
    position_of = {op: position for position, op in enumerate(program.op_at)}
    sequence = [*(position_of[op] for op in fastest.ops), len(program.op_at) - 1]
    once_seconds = sum(op.seconds for op in problem.graph.ops)
    return make_result(
        problem,
        emit(program, sequence),
        planner=Auto.name,
        started_seconds=started_seconds,
        least_found_bytes=found.bounds.least_budget_found_bytes,
        again=Bound(op=None, seconds=max(0.0, fastest.seconds - once_seconds), cuts=()),
        stats=found.stats,
    )
