"""Lower bounds that hold for every legal schedule, in any order, with any number of rematerializations."""

from __future__ import annotations

from memfit.device import Device
from memfit.graph import Graph, Op
from memfit.plan import Bounds, Problem


def prove_bounds(problem: Problem, *, least_found_bytes: int | None, unplanned_seconds: float) -> Bounds:
    """Return the bounds for a problem's least budget and for its overhead."""
    least_bytes, holding_ops = least_budget_bound(problem)
    del unplanned_seconds
    return Bounds(
        least_budget_found_bytes=least_found_bytes,
        least_budget_bound_bytes=least_bytes,
        overhead=0.0,
        holding_ops=holding_ops,
    )


def least_budget_bound(problem: Problem) -> tuple[int, tuple[int, ...]]:
    """Return (bytes, ops that hold them): no legal schedule has a lower peak.

    Proof. Every op is computed at least once. While it runs, the device holds all residents, what the op reads, mutates
    and writes, and its workspace; one read may die into a write where `reuses` allows it, which saves that read's
    bytes. At the end the device holds all residents and all that is required then. At a boundary it holds the
    departures and the arrivals, and what user code holds from then on.
    """
    graph, device = problem.graph, problem.device
    resident_bytes = sum(device.aligned(storage.bytes) for storage in graph.storages if storage.resident)
    needs = {op.id: resident_bytes + op_bytes(graph, device, op) for op in graph.ops}
    at_end = resident_bytes + sum(
        device.aligned(s.bytes) for s in graph.storages if s.required_at_end and not s.resident
    )
    outside = 0
    least = max([at_end, *needs.values()], default=0)
    for boundary in graph.boundaries:
        there = set(boundary.departures + boundary.arrivals)
        outside = problem.bytes_outside
        held = sum(device.aligned(graph.storages[s].bytes) for s in there if not graph.storages[s].resident)
        least = max(least, resident_bytes + held + outside)
    least = max(least, at_end + problem.bytes_outside)
    if not graph.boundaries:
        least = max(least, max(needs.values(), default=0) + problem.bytes_outside)
    return least, tuple(op for op, needed in needs.items() if needed >= least)


def op_bytes(graph: Graph, device: Device, op: Op) -> int:
    """Return the aligned bytes that `op` itself needs beside the residents: reads, writes, workspace, less one
    takeover.
    """
    touched = {s for s, _ in graph.read_versions[op.id]} | set(op.writes)
    managed = [s for s in touched if not graph.storages[s].resident]
    saved = max((device.aligned(graph.storages[r].bytes) for r, _ in op.reuses if r in managed), default=0)
    return sum(device.aligned(graph.storages[s].bytes) for s in managed) + (op.workspace_bytes or 0) - saved
