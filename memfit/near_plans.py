"""Plans of a step on a batch of a new size, from the plans of other sizes.

A schedule that is legal on one graph is legal on every graph of the same structure, and its peak and seconds on that
graph are found by checking and simulating it there. That takes milliseconds, where a search takes seconds. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from memfit.device import Device
from memfit.graph import Graph
from memfit.plan import Plan, Problem
from memfit.plan_cache import kept_near, read_near
from memfit.planners import make_planner
from memfit.planners.engine.carried import CARRIED, carry_over
from memfit.planners.protocols import Planner
from memfit.planning import Settings, make_plan, make_problem

SEARCHED_SHORTLY = "searched shortly"
"""The planner of a plan that a search of a fraction of a second has found, because no plan of another size fitted."""
PROVISIONAL = (CARRIED, SEARCHED_SHORTLY)
"""The planners of plans that a longer search may improve."""

_SHORT_SECONDS = 0.2
_LARGER, _SMALLER = 2, 1  # known sizes whose schedules are tried: a larger one fits, a smaller one is faster if it does
_SEARCHING = ("auto", "search", "offload")  # planners whose plans may be carried over: others are asked for their own


def is_carried(settings: Settings) -> bool:
    """Return whether plans by these settings may come from other sizes.

    Args:
        settings: the planner, its options, and what the user allows.
    """
    return (
        settings.carry_over
        and settings.planner in _SEARCHING
        and settings.is_in_bytes
        and settings.reads_kept_plans
        and "mirror" not in settings.options
    )


def make_near_plan(graph: Graph, device: Device, settings: Settings, bytes_outside: int, known: Sequence[Plan]) -> Plan:
    """Return a checked plan of `graph` within the settings' budget, at once if a plan of another size gives one.

    If the step fits as it is, nothing is recomputed. Otherwise the schedules of the next larger sizes and of the next
    smaller one are tried, of this process and of those that are kept on disk, and the fastest that fits is taken. If
    none fits, a short search follows, and then a whole one.

    Args:
        graph, device, settings, bytes_outside: as for `make_plan`.
        known: plans of graphs of the same structure.

    Raises:
        MemfitError, KeyboardInterrupt: as `make_plan`.
    """
    problem = make_problem(graph, device, settings, bytes_outside)
    planner = make_planner(settings.planner, **settings.options)
    started_seconds = problem.clock()
    tried = _nearest(problem, planner, known)
    result = carry_over(problem, [plan.schedule for plan in tried], started_seconds)
    if result.plan is not None:
        searched = next((plan.planner for plan in tried if _is_of(plan, problem)), CARRIED)
        return msgspec.structs.replace(result.plan, planner=searched)
    short_seconds = min(_SHORT_SECONDS, settings.time_limit_seconds)
    result = planner.plan(replace(problem, time_limit_seconds=short_seconds))
    if result.interrupted and settings.stops_on_interrupt:
        raise KeyboardInterrupt
    if result.plan is not None:
        return msgspec.structs.replace(result.plan, planner=SEARCHED_SHORTLY)
    return make_plan(graph, device, settings, bytes_outside)


def _nearest(problem: Problem, planner: Planner, known: Sequence[Plan]) -> list[Plan]:
    """Return the plans of the nearest sizes, the next larger one first."""
    sources: dict[int, Plan | Path] = {**kept_near(problem, planner)}
    sources |= {plan.graph.all_bytes: plan for plan in known}
    larger = sorted(size for size in sources if size >= problem.graph.all_bytes)
    smaller = sorted((size for size in sources if size < problem.graph.all_bytes), reverse=True)
    near = [sources[size] for size in (*larger[:_LARGER], *smaller[:_SMALLER])]
    plans = [read_near(source) if isinstance(source, Path) else source for source in near]
    return [plan for plan in plans if plan is not None]


def _is_of(plan: Plan, problem: Problem) -> bool:
    """Return whether a plan was searched for this very problem, but for the seconds of its ops."""
    return (
        plan.planner not in PROVISIONAL
        and plan.fingerprint == problem.graph.fingerprint
        and (plan.budget_bytes, plan.host_budget_bytes) == (problem.budget_bytes, problem.host_budget_bytes)
    )
