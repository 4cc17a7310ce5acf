"""The ops that set the least budget, with the bytes that each of them holds."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.graph import Graph
from memfit.plan import Plan
from memfit.planners.engine.bounds.bounds import op_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingOp:
    """The bytes on the device while one op runs, residents left out; aligned.

    Attributes:
        op: its id.
        reads, writes: storages that are not resident, largest first.
        workspace_bytes: memory that the op needs only while it runs; None if it is not known.
        written_over_bytes: saved by in-place reuse of a read.
        total_bytes: reads, writes and workspace together, less `written_over_bytes`.
        kept_bytes: on the device beside that because the end of the step needs them, if that is part of the bound.
    """

    op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace_bytes: int | None
    written_over_bytes: int
    total_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The bound on the budget, and its parts.

    Attributes:
        bound_bytes: no plan needs less.
        resident_bytes: on the device for the whole step.
        outside_bytes: of user code, for the whole step.
        at_end_bytes: handed over at the end of the step.
        ops: those that need the most beside the residents. Empty if storages that are handed over set the bound: at the
            end of the step, or else at a boundary.
    """

    bound_bytes: int
    resident_bytes: int
    outside_bytes: int
    at_end_bytes: int
    ops: tuple[HoldingOp, ...]

    @property
    def is_held_by_the_end(self) -> bool:
        """Whether the storages that the step hands over at its end set the bound."""
        return self.resident_bytes + self.outside_bytes + self.at_end_bytes >= self.bound_bytes


def least_budget(plan: Plan) -> LeastBudget:
    """Return the parts of the plan's `least_budget_bound_bytes`, from the ops that its bounds name."""
    graph, device = plan.graph, plan.device
    resident_bytes = device.resident_bytes(graph)
    at_end = [storage for storage in graph.storages if storage.required_at_end and not storage.resident]
    bound_bytes = plan.bounds.least_budget_bound_bytes
    holding = plan.bounds.holding_ops
    return LeastBudget(
        bound_bytes=bound_bytes,
        resident_bytes=resident_bytes,
        outside_bytes=plan.always_outside_bytes,
        at_end_bytes=sum(device.aligned(storage.bytes) for storage in at_end),
        ops=tuple(_holding(plan, op, bound_bytes - resident_bytes) for op in holding if op < len(graph.ops)),
    )


def _holding(plan: Plan, op_id: int, bound_bytes: int) -> HoldingOp:
    graph, device = plan.graph, plan.device
    op = graph.ops[op_id]
    reads = _largest_first(graph, {storage for storage, _ in graph.read_versions[op_id]})
    writes = _largest_first(graph, set(op.writes) - set(reads))
    total_bytes = op_bytes(graph, device, op)
    apart_bytes = sum(device.aligned(graph.storages[s].bytes) for s in reads + writes) + (op.workspace_bytes or 0)
    is_outside = not graph.boundaries or graph.boundaries[0].position <= op_id
    return HoldingOp(
        op=op_id,
        reads=reads,
        writes=writes,
        workspace_bytes=op.workspace_bytes,
        written_over_bytes=apart_bytes - total_bytes,
        total_bytes=total_bytes,
        kept_bytes=max(0, bound_bytes - (plan.bytes_outside if is_outside else 0) - total_bytes),
    )


def _largest_first(graph: Graph, storages: set[int]) -> tuple[int, ...]:
    managed = [storage for storage in storages if not graph.storages[storage].resident]
    return tuple(sorted(managed, key=lambda storage: (-graph.storages[storage].bytes, storage)))
