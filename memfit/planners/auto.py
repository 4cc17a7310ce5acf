"""Planner `auto`, the default: the proved optimum where a graph is small, the search everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from memfit.plan import Plan, Problem, Result
from memfit.planners.cuts import Bound
from memfit.planners.emit import emit
from memfit.planners.order import original_order
from memfit.planners.program import build_program
from memfit.planners.result import make_result
from memfit.planners.search import Search, Searched
from memfit.planners.shortest_path import fastest_schedule
from memfit.planners.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Prove the fastest schedule of a graph of a few ops; anneal from minimum cuts, with a bound, on any other.

    On up to 12 ops the plan is a shortest path over all states of the step, in any order of ops (see
    `memfit.planners.shortest_path`), and its status `optimal`. On larger graphs it is planner `search`'s; its status is
    `optimal` where its time is the bound's.
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
        searched = Search(iterations=self.iterations, threads=self.threads).plan_from(problem, warm)
        proved = _proved(problem, searched.result, started_seconds)
        plan = proved.plan
        if plan is not None:
            proved = Result(
                status=proved.status, plan=_renamed(plan, self.name), bounds=proved.bounds, stats=proved.stats
            )
        return Searched(result=proved, windows=searched.windows)


def _renamed(plan: Plan, planner: str) -> Plan:
    return msgspec.structs.replace(plan, planner=planner)


def _proved(problem: Problem, found: Result, started_seconds: float) -> Result:
    """Return the proved optimum where the graph is small enough, else what was found."""
    fastest = fastest_schedule(problem)
    if fastest is None:
        return found
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
        planner="auto",
        started_seconds=started_seconds,
        least_found_bytes=found.bounds.least_budget_found_bytes,
        again=Bound(op=None, seconds=max(0.0, fastest.seconds - once_seconds), cuts=()),
        stats=found.stats,
    )
