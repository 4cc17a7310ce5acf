"""The sentences that page and plain text share: how planning ended, its bounds, the next GiB, the least budget."""

from __future__ import annotations

from memfit.graph import Op
from memfit.plan import Plan, Status
from memfit.report.formatting import change_text, count_text
from memfit.report.least_budget import HoldingOp, LeastBudget
from memfit.report.more_memory import MoreMemory
from memfit.system.budget import format_bytes
from memfit.system.lines import printable

_NAMED = 3  # storages and ops named in a sentence; the rest is counted
_LEAST_SHOWN = 0.0005  # a bound below this prints as +0.0%


def status_meaning(plan: Plan) -> str:
    """Return in words how planning ended, and for which plans a proof holds."""
    if plan.status is not Status.OPTIMAL:
        return "feasible: the best plan found in the time given; a longer time limit may find a faster one"
    if plan.is_optimal_in_every_order:
        return "optimal: proved that no plan within this budget is faster"
    return "optimal in its order of operations: proved that no such plan within this budget is faster"


def least_overhead(plan: Plan) -> str:
    """Return in words the proved bounds on the extra time, each with its scope; empty where they are zero."""
    every, in_order = plan.bounds.overhead, plan.bounds.overhead_in_order or 0.0
    parts = [f"{change_text(every)} in any order"] if every >= _LEAST_SHOWN else []
    if in_order >= max(_LEAST_SHOWN, every * (1 + 1e-9)):
        parts.append(f"{change_text(in_order)} in this plan's order")
    return ", or ".join(parts)


def more_lines(more: MoreMemory) -> list[str]:
    """Return what the larger budget buys: by the best plan found for it, and by the bound for all plans."""
    lines: list[str] = []
    if more.found_overhead is not None and more.found_overhead >= more.overhead:
        lines.append("a search found no faster plan for that budget")
    elif more.found_overhead is not None:
        lines.append(f"{_left_text(more, more.found_overhead)} with the best plan that a search found for that budget")
    if more.bound_overhead >= _LEAST_SHOWN:
        lines.append(f"{_left_text(more, more.bound_overhead)} at most: proved for every plan within that budget")
    if not lines:
        lines.append(f"at most the {change_text(more.overhead)} time of this plan; a trade-off curve says how much")
    return lines


def _left_text(more: MoreMemory, overhead: float) -> str:
    fewer = max(0.0, more.overhead - overhead) * 100
    return f"{change_text(overhead)} time in place of {change_text(more.overhead)}, {fewer:.1f} percentage points less,"


def least_lines(plan: Plan, least: LeastBudget) -> list[str]:
    """Return what makes the least budget: the residents, and the ops beside them.

    Args:
        plan: names the ops and storages.
        least: the parts of its least budget, in bytes.
    """
    outside = f" and {format_bytes(least.outside_bytes)} outside of the graph" if least.outside_bytes else ""
    always = f"{format_bytes(least.resident_bytes)} always there{outside}"
    if not least.ops:
        if least.is_held_by_the_end:
            handed = f"{format_bytes(least.at_end_bytes)} that the step hands over at its end (gradients, outputs)"
            return [f"{handed}, beside {always}; an optimizer that is part of the step takes gradients one by one"]
        return [f"what is handed over at a boundary, beside {always}"]
    lines = [f"{_holding_text(plan, holding)}, beside {always}" for holding in least.ops[:_NAMED]]
    if len(least.ops) > _NAMED:
        lines.append(f"and {count_text(len(least.ops) - _NAMED, 'more op')} of the same need")
    return lines


def _holding_text(plan: Plan, holding: HoldingOp) -> str:
    """Return the bytes of one op: `conv1 [net.conv1] needs 3 MiB at once: reads x (1 MiB), writes y (2 MiB)`."""
    op = plan.graph.ops[holding.op]
    parts = [
        f"{verb} {_storages_text(plan, storages)}"
        for verb, storages in (("reads", holding.reads), ("writes", holding.writes))
        if storages
    ]
    if holding.workspace_bytes is None:
        parts.append("workspace unknown")
    elif holding.workspace_bytes:
        parts.append(f"workspace {format_bytes(holding.workspace_bytes)}")
    if holding.written_over_bytes:
        parts.append(f"less {format_bytes(holding.written_over_bytes)} written over")
    needs = f"{printable(op.name)}{_module(op)} needs {format_bytes(holding.total_bytes)} at once"
    needs = f"{needs}: {', '.join(parts)}" if parts else needs
    kept = f"; with {format_bytes(holding.kept_bytes)} kept for the end of the step" if holding.kept_bytes else ""
    return needs + kept


def _module(op: Op) -> str:
    return f" [{printable(op.module)}]" if op.module else ""


def _storages_text(plan: Plan, storages: tuple[int, ...]) -> str:
    named = [plan.graph.storages[storage] for storage in storages[:_NAMED]]
    text = ", ".join(f"{printable(storage.name)} ({format_bytes(storage.bytes)})" for storage in named)
    rest_bytes = sum(plan.graph.storages[storage].bytes for storage in storages[_NAMED:])
    return f"{text} and {format_bytes(rest_bytes)} more" if rest_bytes else text
