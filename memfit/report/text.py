"""A plan in plain text: a summary for terminals, and the explanation behind `plan.explain()`."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.budget import format_bytes
from memfit.errors import InvalidOptionError
from memfit.plan import Plan
from memfit.report.explanation import Explanation, explained
from memfit.report.fates import MEANING, Fate, Kind, Total, fates, totals
from memfit.report.figures import Curve, CurvePoint, least_overhead, status_meaning
from memfit.report.least_budget import LeastBudget
from memfit.report.live import Run, play
from memfit.report.more_memory import MoreMemory
from memfit.report.price_words import again_text, keep_text, least_lines, more_lines, offload_text
from memfit.report.words import change_text, count_text, printable, seconds_text

_STORAGES_IN_SUMMARY = 5
_STORAGES_AT_PEAK = 10
_MODULE_WIDTH = 40
_ORDER = (Kind.REMATERIALIZED, Kind.OFFLOADED, Kind.KEPT, Kind.FREED, Kind.RESIDENT)  # what the plan did comes first


def text_summary(plan: Plan) -> str:
    """Return a plan's key figures, its peak and the largest storages at it, as a few lines of plain text.

    Times and bytes are predictions, and the text says so.
    """
    run = play(plan.graph, plan.schedule, plan.device)
    lines = [*_key_figures(plan), *_peak_lines(run, _STORAGES_IN_SUMMARY), "all storages, by what happens to them:"]
    return "\n".join([*lines, *(_total_line(total) for total in totals(fates(run), plan.graph))])


def explain(plan: Plan, *, curve: Curve = (), storages_per_fate: int | None = 10) -> str:
    """Return what holds the peak, each storage's fate, why, its prices, and what more memory would buy, as plain text.

    Args:
        curve: points (budget in bytes, predicted overhead or None, status), for what more memory would buy.
        storages_per_fate: how many storages of each fate are listed, the dearest and then the largest first; None lists
            all.

    Raises:
        InvalidOptionError: a malformed point of the curve, or a negative `storages_per_fate`.
    """
    if storages_per_fate is not None and storages_per_fate < 0:
        raise InvalidOptionError(f"storages_per_fate is {storages_per_fate}, expected 0 or more, or None for all")
    return explanation_text(explained(plan, curve), storages_per_fate)


def explanation_text(explanation: Explanation, storages_per_fate: int | None = 10) -> str:
    """Return what `explain` does, of an explanation that was worked out before."""
    plan, run, of_storage, points = explanation.plan, explanation.run, explanation.fates, explanation.points
    lines = [*_key_figures(plan), "", *_peak_lines(run, _STORAGES_AT_PEAK)]
    by_kind = {total.kind: total for total in totals(of_storage, plan.graph)}
    for kind in _ORDER:
        if kind in by_kind:
            members = explanation.dearest_first([fate for fate in of_storage if fate.kind == kind])
            lines += ["", *_fate_lines(explanation, by_kind[kind], members, storages_per_fate)]
    lines += ["", *_more_lines(plan, explanation.more_memory)]
    lines += ["", *_least_lines(plan, explanation.least_budget)]
    if any(point.budget_bytes != plan.budget_bytes for point in points):
        lines += ["", *_buys_lines(plan, points)]
    return "\n".join(lines)


def _key_figures(plan: Plan) -> list[str]:
    graph, unplanned, predicted = plan.graph, plan.unplanned, plan.predicted
    lines = [
        f"{printable(graph.name)}: predicted peak {format_bytes(predicted.peak_bytes)} of a budget of "
        f"{format_bytes(plan.budget_bytes)} (unplanned {format_bytes(unplanned.peak_bytes)})",
    ]
    if unplanned.seconds:
        lines.append(
            f"  predicted time: {seconds_text(predicted.seconds)} a step, {change_text(plan.overhead)} against "
            f"{seconds_text(unplanned.seconds)} unplanned"
        )
    else:
        lines.append("  predicted time: unknown, for the graph carries no times of its ops")
    if plan.bytes_outside:
        lines.append(f"  outside the graph: {format_bytes(plan.bytes_outside)}, which the budget covers as well")
    if predicted.host_peak_bytes:
        lines.append(
            f"  host memory: predicted peak {format_bytes(predicted.host_peak_bytes)} of a budget of "
            f"{format_bytes(plan.host_budget_bytes)}; {format_bytes(plan.offloaded_bytes)} are copied there"
        )
    elif plan.host_budget_bytes == 0 and plan.device.has_link and plan.overhead > 0:
        lines.append("  host memory: not used, for no host budget was given; with one, storages may go there instead")
    found, bound = plan.bounds.least_budget_found_bytes, plan.bounds.least_budget_bound_bytes
    reached = f"least budget reached by a plan {format_bytes(found)}, " if found is not None else ""
    lines.append(f"  limits: {reached}no plan at all below {format_bytes(bound)}")
    if least := least_overhead(plan):
        lines.append(f"  no plan within this budget adds less than {least}")
    how = f"planner {printable(plan.planner)} in {seconds_text(plan.plan_seconds)}"
    lines.append(f"  {how}: {status_meaning(plan)}")
    unknown = sum(op.workspace_bytes is None for op in graph.ops)
    if unknown:
        lines.append(f"  workspace of {count_text(unknown, 'op')} is unknown and counted as 0: the peak may be higher")
    return lines


def _peak_lines(run: Run, most: int) -> list[str]:
    timeline, graph = run.timeline, run.graph
    position = timeline.peak_position
    where = [f"instruction {position} of {len(run.schedule)}", run.doing_at(position)]
    lines = [f"at the peak, {', '.join(part for part in where if part)}:"]
    live = run.live_at(position)
    for storage in live[:most]:
        lines.append(_storage_line(run, storage))
    rest = sum(run.device.aligned(graph.storages[storage].bytes) for storage in live[most:])
    if rest:
        lines.append(f"  {format_bytes(rest):>10}  in {count_text(len(live) - most, 'more storage')}")
    not_storages = timeline.peak_bytes - sum(run.device.aligned(graph.storages[storage].bytes) for storage in live)
    if not_storages:
        lines.append(f"  {format_bytes(not_storages):>10}  workspace, second copies, and what is outside the graph")
    return lines


def _storage_line(run: Run, storage: int) -> str:
    held = run.graph.storages[storage]
    return f"  {format_bytes(held.bytes):>10}  {held.role:<10}  {printable(held.name)}{_module(run, storage)}"


def _module(run: Run, storage: int) -> str:
    """Return the module whose op writes the storage, in brackets, its end cut off where it is long."""
    writer = run.graph.writer_of.get(storage)
    module = printable(run.graph.ops[writer].module) if writer is not None else ""
    return f" [{module if len(module) <= _MODULE_WIDTH else module[: _MODULE_WIDTH - 1] + '…'}]" if module else ""


def _total_line(total: Total) -> str:
    return f"  {format_bytes(total.bytes):>10}  {total.kind}: {count_text(total.count, 'storage')}"


def _fate_lines(explanation: Explanation, total: Total, members: list[Fate], most: int | None) -> list[str]:
    run, sizes = explanation.run, explanation.run.graph.storages
    lines = [
        f"{total.kind}: {count_text(total.count, 'storage')}, {format_bytes(total.bytes)} together "
        f"({MEANING[total.kind]})"
    ]
    shown = members[:most]
    for fate in shown:
        how_often = f"{fate.text}; " if fate.rematerialized or fate.offloaded else ""
        lines.append(f"{_storage_line(run, fate.storage)}: {how_often}{printable(fate.why)}")
        lines += _price_lines(explanation, fate)
    left = members[len(shown) :]
    if left:
        bytes_left = sum(sizes[fate.storage].bytes for fate in left)
        lines.append(f"  {format_bytes(bytes_left):>10}  in {count_text(len(left), 'more storage')}")
    return lines


def _price_lines(explanation: Explanation, fate: Fate) -> list[str]:
    plan, price = explanation.plan, explanation.prices.get(fate.storage)
    if price is None or (fate.kind == Kind.FREED and not price.at_peak):
        return []  # no other fate of it would lower the peak
    said = [("keep", keep_text(plan, fate, price)), ("compute again", again_text(plan, fate, price))]
    if plan.device.has_link:
        said.append(("offload", offload_text(plan, fate, price)))
    return [f"{'':>14}{title}: {text}" for title, text in said]


def _more_lines(plan: Plan, more: MoreMemory | None) -> list[str]:
    if more is None:
        known = plan.unplanned.seconds > 0
        nothing = "nothing: no plan is faster than the unplanned step, and this one is as fast"
        return ["what more memory would buy:", f"  {nothing if known else 'unknown: the graph carries no times'}"]
    lines = more_lines(plan, more)
    return [f"what the next {format_bytes(more.step_bytes)} would buy:", *(f"  {line}" for line in lines)]


def _least_lines(plan: Plan, least: LeastBudget) -> list[str]:
    lines = [f"  {line}" for line in least_lines(plan, least)]
    return [f"what makes {format_bytes(least.bound_bytes)} the least that any plan needs:", *lines]


def _buys_lines(plan: Plan, points: Sequence[CurvePoint]) -> list[str]:
    lines = [f"what another budget would cost (this plan: {change_text(plan.overhead)}):"]
    for point in points:
        difference = point.budget_bytes - plan.budget_bytes
        if not difference:
            continue
        step = f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"
        if point.overhead is None:
            lines.append(f"  {step} ({format_bytes(point.budget_bytes)}): no plan ({point.status.replace('_', ' ')})")
            continue
        gained = (point.overhead - plan.overhead) * 100
        lines.append(
            f"  {step} ({format_bytes(point.budget_bytes)}): {change_text(point.overhead)}, "
            f"{abs(gained):.1f} percentage points {'more' if gained > 0 else 'less'}"
        )
    return lines
