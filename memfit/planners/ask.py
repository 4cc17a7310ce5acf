"""Asking a planner: a budget as text in, a plan out, and the error that says what can be done where there is none."""

from __future__ import annotations

from memfit.budget import format_bytes
from memfit.device import Device
from memfit.errors import InfeasibleBudgetError, InvalidOptionError, TimeLimitError
from memfit.graph import Graph
from memfit.plan import Plan, Problem, Result, Status
from memfit.planners.result import predict, unplanned_schedule

_NO_LIMIT_BYTES = 1 << 62
_MOST_HOLDING_OPS = 3  # in a message: the ops that set the least budget


def unplanned_peak_bytes(graph: Graph, device: Device, bytes_outside: int = 0) -> int:
    """Return the predicted peak of the step as it stands: everything kept to its last use."""
    problem = Problem(graph=graph, device=device, budget_bytes=_NO_LIMIT_BYTES, bytes_outside=bytes_outside)
    return predict(problem, unplanned_schedule(problem)).peak_bytes


def require_link(device: Device, host_budget_bytes: int) -> None:
    """Refuse a host budget for a device that has no link to its host.

    Raises:
        InvalidOptionError: names the device.
    """
    if host_budget_bytes > 0 and not device.has_link:
        raise InvalidOptionError(
            f"a host budget of {format_bytes(host_budget_bytes)} is of no use on device {device.name!r}, which has no "
            "link to its host; leave it out, or name a device with a link (see `memfit devices`)"
        )


def require_plan(result: Result, problem: Problem, planner: str) -> Plan:
    """Return the plan of `result`, the answer of `planner` to `problem`, or raise what its status means.

    Raises:
        InfeasibleBudgetError: no plan fits; carries the least budget found and the least that any plan could reach.
        TimeLimitError: time was up with no plan.
    """
    if result.plan is not None and result.status is not Status.INFEASIBLE:
        return result.plan
    if result.status is Status.TIMED_OUT:
        raise TimeLimitError(
            f"planner {planner!r} found no plan within {format_bytes(problem.budget_bytes)} before its time was up: "
            "raise the time limit or the budget"
        )
    bounds, budget_bytes = result.bounds, problem.budget_bytes
    holding = [ascii(problem.graph.ops[op].name)[1:-1] for op in bounds.holding_ops[:_MOST_HOLDING_OPS]]
    more = len(bounds.holding_ops) - len(holding)
    held_up = f", held up by {', '.join(holding)}{f' and {more} more' if more else ''}" if holding else ""
    found = bounds.least_budget_found_bytes
    reached = f"planner {planner!r} reached {format_bytes(found)} ({found} bytes)" if found else "none was reached"
    without_host = problem.device.has_link and problem.host_budget_bytes == 0
    offload = ", give a host budget for storages to go to," if without_host else ""
    raise InfeasibleBudgetError(
        f"no plan fits {format_bytes(budget_bytes)} ({budget_bytes} bytes): {reached}, and no plan can go below "
        f"{format_bytes(bounds.least_budget_bound_bytes)} ({bounds.least_budget_bound_bytes} bytes){held_up}; raise "
        f"the budget{offload} or make the batch smaller",
        least_budget_found_bytes=found,
        least_budget_bound_bytes=bounds.least_budget_bound_bytes,
    )
