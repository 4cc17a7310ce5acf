"""The explanation of a plan, made once for the page, for plain text, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memfit.graph import Graph
from memfit.plan import Plan
from memfit.report.curve import Curve, CurvePoint, curve_points, with_plan
from memfit.report.formatting import module_text
from memfit.report.least_budget import HoldingOp, LeastBudget, least_budget
from memfit.report.live import Run, play
from memfit.report.more_memory import MoreMemory, more_memory
from memfit.report.storage_fates import Fate, fates
from memfit.system.lines import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan, its run, and the reasons.

    Attributes:
        plan: the plan.
        run: its schedule, simulated, with its live ranges.
        fates: of each storage, in order of id.
        more_memory: what a larger budget buys; None where it buys nothing, or ops have no times.
        least_budget: the bound on the budget, and the ops that set it.
        points: of the trade-off curve, by budget.
    """

    plan: Plan
    run: Run
    fates: Sequence[Fate]
    more_memory: MoreMemory | None
    least_budget: LeastBudget
    points: Sequence[CurvePoint]

    def dearest_first(self, members: Sequence[Fate]) -> list[Fate]:
        """Return fates by the seconds that recomputing costs, then by size, the largest first."""
        sizes = self.plan.graph.storages
        return sorted(members, key=lambda fate: (-fate.extra_seconds, -sizes[fate.storage].bytes, fate.storage))


def explained(plan: Plan, curve: Curve = ()) -> Explanation:
    """Return the explanation of a plan.

    Args:
        plan: checked.
        curve: points (budget in bytes, predicted overhead or None, status) of the trade-off curve, planned by the
            caller.

    Raises:
        InvalidOptionError: a malformed point of the curve.
    """
    points = with_plan(curve_points(curve), plan)
    run = play(plan.graph, plan.schedule, plan.device)
    return Explanation(
        plan=plan,
        run=run,
        fates=fates(run),
        more_memory=more_memory(plan, points),
        least_budget=least_budget(plan),
        points=points,
    )


def explanation_keys(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as one JSON object; storages are ordered as in `Explanation.dearest_first`."""
    more, graph = explanation.more_memory, explanation.plan.graph
    position = explanation.run.timeline.peak_position
    return {
        "peak": {
            "instruction": position,
            "op": explanation.run.op_at(position),
            "storages": explanation.run.live_at(position),
        },
        "storages": [_storage(explanation, fate) for fate in explanation.dearest_first(explanation.fates)],
        "more_memory": None if more is None else asdict(more),
        "least_budget": {
            **asdict(explanation.least_budget),
            "ops": [_holding(op, graph) for op in explanation.least_budget.ops],
        },
    }


def _storage(explanation: Explanation, fate: Fate) -> dict[str, Any]:
    graph = explanation.plan.graph
    storage = graph.storages[fate.storage]
    clock = explanation.run.clock_seconds
    return {
        "id": storage.id,
        "name": printable(storage.name),
        "module": module_text(graph, storage.id),
        "role": storage.role,
        "bytes": storage.bytes,
        "fate": fate.kind,
        "rematerialized": fate.rematerialized,
        "offloaded": fate.offloaded,
        "extra_seconds": fate.extra_seconds,
        "why": printable(fate.why),
        "live": [
            {
                "instructions": [stay.first, stay.last],
                "seconds": [float(clock[stay.first]), float(clock[stay.last])],
            }
            for stay in explanation.run.stays[storage.id]
        ],
    }


def _holding(holding: HoldingOp, graph: Graph) -> dict[str, Any]:
    keys = asdict(holding)
    del keys["op"]
    op = graph.ops[holding.op]
    for side, storages in (("reads", holding.reads), ("writes", holding.writes)):
        keys[side] = [{"id": storage, "bytes": graph.storages[storage].bytes} for storage in storages]
    return {"id": op.id, "name": printable(op.name), "module": printable(op.module), **keys}
