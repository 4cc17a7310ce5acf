"""The JSON keys, and the rows, of a plan that several commands give."""

from __future__ import annotations

from typing import Any

from memfit.plan import Bounds, Plan
from memfit.schedule import Code


def counts_of(plan: Plan) -> dict[str, int]:
    """Return the number of instructions of each kind; `rematerialized` counts computations beyond the first."""
    per_code = {code: int((plan.schedule.codes == code).sum()) for code in Code}
    return {
        "computed": per_code[Code.COMPUTE],
        "rematerialized": per_code[Code.COMPUTE] - len(plan.graph.ops),
        "offloaded": per_code[Code.OFFLOAD],
        "dropped": per_code[Code.DROP],
    }


def host_of(plan: Plan) -> dict[str, dict[str, int]]:
    """Return the bytes that the plan copies to the host; no keys for a plan without a host budget."""
    if plan.host_budget_bytes == 0:
        return {}
    return {
        "host": {
            "budget_bytes": plan.host_budget_bytes,
            "peak_bytes": plan.predicted.host_peak_bytes,
            "offloaded_bytes": plan.offloaded_bytes,
        }
    }


def bounds_of(bounds: Bounds) -> dict[str, Any]:
    """Return the bounds of a plan, or of a step in several graphs."""
    names = ("least_budget_found_bytes", "least_budget_bound_bytes", "overhead", "overhead_in_order")
    return {name: getattr(bounds, name) for name in names}
