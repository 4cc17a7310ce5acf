"""Prices, what more memory buys and what holds the least budget, in words: the same on the page and in plain text."""

from __future__ import annotations

from memfit.budget import format_bytes
from memfit.graph import Op
from memfit.plan import Plan
from memfit.report.fates import Fate, Kind
from memfit.report.least_budget import HoldingOp, LeastBudget
from memfit.report.more_memory import MoreMemory
from memfit.report.prices import Change, Price
from memfit.report.words import change_text, count_text, printable, seconds_text

_NAMED = 3  # storages and ops; the rest is counted
_NOTHING_SECONDS = 1e-12  # sums of the same seconds in another order


def keep_text(plan: Plan, fate: Fate, price: Price) -> str:
    """Say what keeping a storage would save, and where there is no room for it; or that it is kept."""
    if price.keep is None:
        return f"no price: {price.why_not_keep}"
    if fate.kind in (Kind.KEPT, Kind.FREED):
        size_bytes = plan.device.aligned(plan.graph.storages[fate.storage].bytes)
        return f"it is kept: {format_bytes(size_bytes)} of the peak" if price.at_peak else "it is kept: not at the peak"
    saved = -price.keep.seconds
    if saved > _NOTHING_SECONDS:
        gain = f"saves {seconds_text(saved)}"
    else:
        gain = "saves nothing" if saved > -_NOTHING_SECONDS else f"costs {seconds_text(-saved)}"
    if plan.unplanned.seconds <= 0:
        gain = f"saves {count_text(-price.keep.computations, 'computation')}"
    return f"{gain}, {_room_text(plan, price.keep)}"


def again_text(plan: Plan, fate: Fate, price: Price) -> str:
    """Say what computing a storage again costs, or would cost, and what that frees."""
    if price.again is None:
        return f"no: {price.why_not_again}"
    count = count_text(price.again.computations, "op")
    seconds = f"{seconds_text(price.again.seconds)} ({count})" if plan.unplanned.seconds > 0 else count
    if fate.kind == Kind.REMATERIALIZED:
        return f"costs {seconds} now, {_freed_text(price.again)}"
    if price.again.seconds < -_NOTHING_SECONDS:
        seconds = f"{seconds_text(-price.again.seconds)} less than now ({count})"
    return f"would cost {seconds}{_freed_instead(fate, price.again)}{_risen_text(plan, price.again)}"


def offload_text(plan: Plan, fate: Fate, price: Price) -> str:
    """Say what having a storage on the host for a while costs, or would cost, and whether the copies are hidden."""
    if price.offload is None or price.link_seconds is None:
        return f"no: {price.why_not_offload}"
    out, back = (seconds_text(seconds) for seconds in price.link_seconds)
    change = price.offload
    if abs(change.seconds) <= _NOTHING_SECONDS:
        cost = "no longer than now" if fate.kind == Kind.REMATERIALIZED else "hidden behind other ops"
    elif fate.kind == Kind.REMATERIALIZED:
        cost = f"{seconds_text(abs(change.seconds))} {'more' if change.seconds > 0 else 'less'} than now"
    else:
        verb = "takes" if fate.kind == Kind.OFFLOADED else "would take"
        cost = f"for which the step {verb} {seconds_text(abs(change.seconds))} longer"
    link = f"{out} out and {back} back over the link"
    if fate.kind == Kind.OFFLOADED:
        return f"takes {link}, {cost}, {_freed_text(change)}"
    return f"would take {link}, {cost}{_freed_instead(fate, change)}{_risen_text(plan, change)}"


def _room_text(plan: Plan, change: Change) -> str:
    over_bytes = change.peak_bytes - plan.budget_bytes
    if over_bytes <= 0:
        return "and the budget has room for it"
    if change.peak_op is None:
        return f"{format_bytes(over_bytes)} over the budget"
    op = plan.graph.ops[change.peak_op]
    return f"{format_bytes(over_bytes)} over the budget while {printable(op.name)}{_module(op)} runs"


def _module(op: Op) -> str:
    return f" [{printable(op.module)}]" if op.module else ""


def _freed_text(change: Change) -> str:
    if change.at_peak_bytes > 0:
        return f"puts {format_bytes(change.at_peak_bytes)} more at the peak"
    return (
        f"frees {format_bytes(-change.at_peak_bytes)} at the peak"
        if change.at_peak_bytes
        else "frees nothing at the peak"
    )


def _freed_instead(fate: Fate, change: Change) -> str:
    """Say what another fate frees; nothing where the storage is away in either."""
    is_away = fate.kind in (Kind.REMATERIALIZED, Kind.OFFLOADED)
    return "" if is_away and not change.at_peak_bytes else f", {_freed_text(change)}"


def _risen_text(plan: Plan, change: Change) -> str:
    over_bytes = change.peak_bytes - plan.budget_bytes
    return f", {_room_text(plan, change)}" if over_bytes > 0 else ""


def more_lines(plan: Plan, more: MoreMemory) -> list[str]:
    """Say what extra time is left with more memory: by what is at hand, and the least there can be."""
    lines: list[str] = []
    names = [printable(plan.graph.storages[storage].name) for storage in more.kept]
    if names:
        rest = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        lines.append(
            f"{_left_text(more, more.kept_overhead)} at least: this plan would have room to keep "
            f"{', '.join(names[:_NAMED])}{rest} (simulated)"
        )
    if more.found is not None and more.found.overhead is not None:
        lines.append(f"{_left_text(more, more.found.overhead)} with the best plan that a search found for that budget")
    if more.bound_overhead is not None:
        lines.append(f"{_left_text(more, more.bound_overhead)} at most: proved for every plan within that budget")
    return lines or ["unknown: nothing more can be kept, and no bound was asked for"]


def _left_text(more: MoreMemory, overhead: float) -> str:
    fewer = max(0.0, more.overhead - overhead) * 100
    return f"{change_text(overhead)} time in place of {change_text(more.overhead)}, {fewer:.1f} percentage points less,"


def least_lines(plan: Plan, least: LeastBudget) -> list[str]:
    """Say in sentences what makes the least budget what it is: the residents, and the ops beside them."""
    outside = f" and {format_bytes(least.outside_bytes)} outside of the graph" if least.outside_bytes else ""
    always = f"{format_bytes(least.resident_bytes)} always there{outside}"
    if not least.ops:
        if least.is_held_by_the_end:
            handed = f"{format_bytes(least.at_end_bytes)} that the step hands over at its end (gradients, outputs)"
            return [f"{handed}, beside {always}; an optimizer that is part of the step takes gradients one by one"]
        return [f"what is handed over at a boundary, beside {always}"]
    lines = [f"{holding_text(plan, holding)}, beside {always}" for holding in least.ops[:_NAMED]]
    if len(least.ops) > _NAMED:
        lines.append(f"and {count_text(len(least.ops) - _NAMED, 'more op')} of the same need")
    return lines


def holding_text(plan: Plan, holding: HoldingOp) -> str:
    """Say what one op needs at once: `conv1 [net.conv1] holds 3 MiB at once: reads x (1 MiB), writes y (2 MiB)`."""
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


def _storages_text(plan: Plan, storages: tuple[int, ...]) -> str:
    named = [plan.graph.storages[storage] for storage in storages[:_NAMED]]
    text = ", ".join(f"{printable(storage.name)} ({format_bytes(storage.bytes)})" for storage in named)
    rest_bytes = sum(plan.graph.storages[storage].bytes for storage in storages[_NAMED:])
    return f"{text} and {format_bytes(rest_bytes)} more" if rest_bytes else text
