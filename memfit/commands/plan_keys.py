"""The JSON keys, and the rows, of a plan that several commands give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfit.plan import Bounds, Plan
from memfit.schedule import Code
from memfit.system.budget import format_bytes
from memfit.system.spill_file import spill_directory


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


def offloads_of(plans: Sequence[Plan], device_type: str, host_dir: Path | None) -> dict[str, dict[str, Any]]:
    """Return what a step copies to the host, and where to; no keys without a host budget.

    Args:
        plans: of all graphs of the step; of the bytes, the sums are given.
        device_type: that the step runs on: `cpu` or `cuda`.
        host_dir: as `memfit.fit` takes it.
    """
    hosts = [host_of(plan)["host"] for plan in plans if plan.host_budget_bytes]
    if not hosts:
        return {}
    is_disk = device_type == "cpu"
    offloaded = (plan.schedule.operands[plan.schedule.codes == Code.OFFLOAD] for plan in plans)
    return {
        "host": {
            **{name: sum(host[name] for host in hosts) for name in hosts[0]},
            "offloaded_storages": sum(len(set(storages.tolist())) for storages in offloaded),
            "tier": "disk" if is_disk else "pinned memory",
            "directory": str(spill_directory(host_dir)) if is_disk else None,
        }
    }


def offloads_row(host: dict[str, Any]) -> str:
    """Return in words what `offloads_of` gives."""
    where = f"a file in {host['directory']}" if host["directory"] else "pinned memory of the host"
    what = f"{host['offloaded_storages']} storages, {format_bytes(host['offloaded_bytes'])} in each step"
    return f"{what if host['offloaded_storages'] else 'nothing'}, to {where}"


def bounds_of(bounds: Bounds) -> dict[str, Any]:
    """Return the bounds of a plan, or of a step in several graphs."""
    names = ("least_budget_found_bytes", "least_budget_bound_bytes", "overhead", "overhead_in_order")
    return {name: getattr(bounds, name) for name in names}
