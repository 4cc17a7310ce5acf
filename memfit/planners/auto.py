"""Planner `auto`, the default: planner `offload`'s plan, and on small graphs a proof that none is faster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from memfit.plan import Plan, Problem, Result, Status
from memfit.planners.engine.cpsat.prove import MOST_PROVABLE_OPS, prove_further
from memfit.planners.engine.parts import Parts
from memfit.planners.offload import OffloadPlanner
from memfit.planners.protocols import SearchOptions

_SEARCHING = 0.15  # of the time, where a proof follows: a few dozen ops need no more
_SEARCHING_COPIES = 0.85  # likewise with a host, where the search has more to decide
_MOVES_FOR_WORK = 50_000  # of the search: about as long as one deterministic unit of CP-SAT's


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPlanner(SearchOptions):
    """Search, decide between recomputation and copies to the host, and prove what can be proved.

    Without a host budget or a link the plan is planner `search`'s, with them planner `offload`'s. Its status is
    `optimal` where its seconds are those of the bound.

    On up to 64 ops CP-SAT continues from there. With a host it raises the bound, which holds in every order of ops (see
    `memfit.planners.engine.cpsat.moments`). Without a host it searches a faster plan, and a proof that there is none,
    among the plans that compute ops for the first time in the search's order (see
    `memfit.planners.engine.cpsat.model`). Then `optimal` is said of those plans, and `Bounds.overhead_in_order` is the
    proved bound.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "annealing from minimum cuts, with copies to the host; proofs by CP-SAT up to 64 ops"

    def plan(self, problem: Problem) -> Result:
        """See `SearchOptions.plan`."""
        started_seconds, parts = problem.clock(), Parts.without(self.without)
        planner = OffloadPlanner(iterations=self.iterations, threads=self.threads, without=self.without)
        is_provable = len(problem.graph.ops) <= MOST_PROVABLE_OPS and parts.cpsat_proof
        if not is_provable:
            return _renamed(planner.plan(problem))
        searching = _SEARCHING_COPIES if problem.may_copy else _SEARCHING
        share = replace(problem, time_limit_seconds=searching * problem.time_limit_seconds)
        found = planner.plan(share)
        if found.status is not Status.OPTIMAL and not found.interrupted:
            work = None if self.iterations is None else self.iterations / _MOVES_FOR_WORK
            found = prove_further(
                problem, found, planner=self.name, started_seconds=started_seconds, limit_work=work, parts=parts
            )
        return _renamed(found)


def _renamed(result: Result) -> Result:
    """Return the result with `auto` as the planner."""

    def named(plan: Plan | None) -> Plan | None:
        return None if plan is None else msgspec.structs.replace(plan, planner=AutoPlanner.name)

    return replace(result, plan=named(result.plan), leanest=named(result.leanest))
