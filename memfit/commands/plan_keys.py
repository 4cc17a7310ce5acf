"""The JSON keys, and the rows, of a plan that several commands give."""

from __future__ import annotations

from typing import Any

from memfit.plan import Bounds, Plan
from memfit.schedule import Code
from memfit.simulate.cuda_allocator import CUDA_ALIGNMENT_BYTES, AllocatorSettings
from memfit.simulate.reserved import reserved
from memfit.system.budget import format_bytes


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


def reserved_of(plan: Plan) -> dict[str, dict[str, int]]:
    """Return what torch's CUDA allocator takes for the plan, without an arena; no keys for a device that is no GPU."""
    if plan.device.alignment_bytes != CUDA_ALIGNMENT_BYTES:
        return {}
    modes = [AllocatorSettings(expandable_segments=each) for each in (False, True)]
    default, expandable = (reserved(plan.graph, plan.schedule, each).peak_bytes for each in modes)
    residents = sum(plan.device.aligned(storage.bytes) for storage in plan.graph.storages if storage.resident)
    return {
        "reserved": {
            "resident_bytes": residents,
            "plan_bytes": plan.predicted.peak_bytes - plan.bytes_outside - residents,
            "fragmentation_bytes": default - (plan.predicted.peak_bytes - plan.bytes_outside),
            "reserved_bytes": default,
            "expandable_segments_bytes": expandable,
        }
    }


def reserved_rows(taken: dict[str, int]) -> dict[str, str]:
    """Return what a budget has to cover without an arena, by part.

    Args:
        taken: what `reserved_of` found, under `reserved`.
    """
    whole, expandable = format_bytes(taken["reserved_bytes"]), format_bytes(taken["expandable_segments_bytes"])
    return {
        "residents": format_bytes(taken["resident_bytes"]),
        "plan": format_bytes(taken["plan_bytes"]),
        "fragmentation": f"{format_bytes(taken['fragmentation_bytes'])} by torch's allocator",
        "reserved": f"{whole}, or {expandable} with expandable segments",
        "not in these": "workspaces of libraries, where no op was measured, and the CUDA context",
    }


def bounds_of(bounds: Bounds) -> dict[str, Any]:
    """Return the bounds of a plan, or of a step in several graphs."""
    names = ("least_budget_found_bytes", "least_budget_bound_bytes", "overhead", "overhead_in_order")
    return {name: getattr(bounds, name) for name in names}
