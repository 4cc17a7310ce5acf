"""All that is told about a plan, worked out once: for the page, for plain text, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.errors import InvalidScheduleError
from memfit.graph import Graph
from memfit.plan import Plan
from memfit.report.edits import Edits
from memfit.report.fates import Fate, fates
from memfit.report.figures import Curve, CurvePoint, curve_points
from memfit.report.least_budget import HoldingOp, LeastBudget, least_budget
from memfit.report.live import LiveRange, Run, play
from memfit.report.more_memory import MoreMemory, more_memory
from memfit.report.prices import Change, Price, price_all
from memfit.report.words import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan, its run, and why.

    Attributes:
        run: the plan's schedule, simulated and taken apart.
        fates: of each storage, in order of id.
        stays: for each storage, when it is on the device.
        prices: by storage; none for residents, nor for the smallest storages of a very long step.
        more_memory: what a larger budget would buy; None where it buys nothing, or nothing is known of times.
        least_budget: what makes it what it is.
        points: of the trade-off curve, by budget.
    """

    plan: Plan
    run: Run
    fates: Sequence[Fate]
    stays: Sequence[Sequence[LiveRange]]
    prices: Mapping[int, Price]
    more_memory: MoreMemory | None
    least_budget: LeastBudget
    points: Sequence[CurvePoint]

    def dearest_first(self, members: Sequence[Fate]) -> list[Fate]:
        """Return storages in the order in which they matter: by what their fate costs, then by size."""
        sizes = self.plan.graph.storages
        return sorted(members, key=lambda fate: (-self.paid_seconds(fate), -sizes[fate.storage].bytes, fate.storage))

    def paid_seconds(self, fate: Fate) -> float:
        """Return what the step would save if the storage were kept; 0 where it is, or where that is not known."""
        price = self.prices.get(fate.storage)
        return max(0.0, -price.keep.seconds) if price and price.keep else 0.0


def explained(plan: Plan, curve: Curve = ()) -> Explanation:
    """Return the explanation of a plan.

    Args:
        plan: checked.
        curve: points (budget in bytes, predicted overhead or None, status) of the trade-off curve.

    Raises:
        InvalidOptionError: a malformed point of the curve.
    """
    points = curve_points(curve)
    run = play(plan.graph, plan.schedule, plan.device)
    of_storage = fates(run)
    stays: list[list[LiveRange]] = [[] for _ in plan.graph.storages]
    for stay in run.ranges:
        stays[stay.storage].append(stay)
    try:
        edits = Edits(plan)
    except InvalidScheduleError:  # it depends on where its drops are: no planner makes such a one
        edits = None
    prices = price_all(edits, of_storage) if edits else {}
    return Explanation(
        plan=plan,
        run=run,
        fates=of_storage,
        stays=stays,
        prices=prices,
        more_memory=more_memory(plan, edits, prices, points),
        least_budget=least_budget(plan),
        points=points,
    )


def explanation_keys(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as one JSON object; storages stand dearest first, then by size."""
    more, graph = explanation.more_memory, explanation.plan.graph
    position = explanation.run.timeline.peak_position
    return {
        "peak": {
            "instruction": position,
            "op": explanation.run.op_at(position),
            "storages": explanation.run.live_at(position),
        },
        "storages": [_storage(explanation, fate) for fate in explanation.dearest_first(explanation.fates)],
        "more_memory": None if more is None else _more(more),
        "least_budget": _least(explanation.least_budget, graph),
    }


def _storage(explanation: Explanation, fate: Fate) -> dict[str, Any]:
    graph = explanation.plan.graph
    storage, writer = graph.storages[fate.storage], graph.writer_of.get(fate.storage)
    price = explanation.prices.get(fate.storage)
    clock = explanation.run.clock_seconds
    return {
        "id": storage.id,
        "name": printable(storage.name),
        "module": "" if writer is None else printable(graph.ops[writer].module),
        "role": storage.role,
        "bytes": storage.bytes,
        "fate": fate.kind,
        "rematerialized": fate.rematerialized,
        "offloaded": fate.offloaded,
        "why": printable(fate.why),
        "live": [
            {
                "instructions": [stay.first, stay.last],
                "seconds": [float(clock[stay.first]), float(clock[stay.last])],
            }
            for stay in explanation.stays[storage.id]
        ],
        "price": None if price is None else _price(price),
    }


def _price(price: Price) -> dict[str, Any]:
    return {
        "at_peak": price.at_peak,
        "keep": _change(price.keep, price.why_not_keep),
        "again": _change(price.again, price.why_not_again),
        "offload": _change(price.offload, price.why_not_offload),
        "link_seconds": price.link_seconds,
    }


def _change(change: Change | None, why_not: str) -> dict[str, Any]:
    if change is None:
        return {"why_not": why_not}
    return {
        "seconds": change.seconds,
        "computations": change.computations,
        "peak_bytes": change.peak_bytes,
        "peak_op": change.peak_op,
        "at_peak_bytes": change.at_peak_bytes,
    }


def _more(more: MoreMemory) -> dict[str, Any]:
    return {
        "step_bytes": more.step_bytes,
        "budget_bytes": more.budget_bytes,
        "overhead": more.overhead,
        "kept": more.kept,
        "kept_overhead": more.kept_overhead,
        "found_overhead": more.found.overhead if more.found else None,
        "bound_overhead": more.bound_overhead,
    }


def _least(least: LeastBudget, graph: Graph) -> dict[str, Any]:
    return {
        "bound_bytes": least.bound_bytes,
        "resident_bytes": least.resident_bytes,
        "outside_bytes": least.outside_bytes,
        "at_end_bytes": least.at_end_bytes,
        "ops": [_holding(op, graph) for op in least.ops],
    }


def _holding(holding: HoldingOp, graph: Graph) -> dict[str, Any]:
    op = graph.ops[holding.op]
    return {
        "id": op.id,
        "name": printable(op.name),
        "module": printable(op.module),
        "reads": [{"id": s, "bytes": graph.storages[s].bytes} for s in holding.reads],
        "writes": [{"id": s, "bytes": graph.storages[s].bytes} for s in holding.writes],
        "workspace_bytes": holding.workspace_bytes,
        "written_over_bytes": holding.written_over_bytes,
        "total_bytes": holding.total_bytes,
        "kept_bytes": holding.kept_bytes,
    }
