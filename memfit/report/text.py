"""A plan in plain text: the summary for terminals, and the explanation of `plan.explain()`."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import InvalidOptionError
from memfit.plan import Plan
from memfit.report.curve import Curve, CurvePoint
from memfit.report.explanation import Explanation, explained
from memfit.report.formatting import age_text, change_text, count_text, module_text, seconds_text, status_text
from memfit.report.least_budget import LeastBudget
from memfit.report.live import Run, play
from memfit.report.more_memory import MoreMemory
from memfit.report.sentences import least_lines, least_overhead, more_lines, status_meaning
from memfit.report.storage_fates import MEANING, Fate, Kind, Total, fates, totals
from memfit.report.taken import is_for_gpu, taken_of
from memfit.system.budget import format_bytes
from memfit.system.lines import printable

_STORAGES_IN_SUMMARY = 5
_STORAGES_AT_PEAK = 10
_MODULE_WIDTH = 40
_ORDER = (Kind.REMATERIALIZED, Kind.OFFLOADED, Kind.KEPT, Kind.FREED, Kind.RESIDENT)  # the decisions of the plan first


def text_summary(plan: Plan) -> str:
    """Return the key figures of a plan, its peak and the largest storages there, as a few lines of plain text.

    Times and bytes are predictions, and the text says so.

    Args:
        plan: checked.
    """
    run = play(plan.graph, plan.schedule, plan.device)
    lines = [*_key_figures(plan), *_peak_lines(run, _STORAGES_IN_SUMMARY), "all storages, by what happens to them:"]
    lines += [
        f"  {format_bytes(total.bytes):>10}  {total.kind}: {count_text(total.count, 'storage')}"
        for total in totals(fates(run), plan.graph)
    ]
    return "\n".join(lines)


def explain(plan: Plan, *, curve: Curve = (), storages_per_fate: int | None = 10) -> str:
    """Return the peak, the fate of each storage and its reason, and the effect of other budgets, as plain text.

    Args:
        plan: checked.
        curve: points (budget in bytes, predicted overhead or None, status) of a trade-off curve that the caller has
            planned; without them the text has no prices of other budgets.
        storages_per_fate: how many storages of each fate are listed: those first whose recomputation costs the most,
            then the largest. None lists all.

    Raises:
        InvalidOptionError: a malformed point of the curve, or a negative `storages_per_fate`.
    """
    if storages_per_fate is not None and storages_per_fate < 0:
        raise InvalidOptionError(f"storages_per_fate is {storages_per_fate}, expected 0 or more, or None for all")
    return explanation_text(explained(plan, curve), storages_per_fate)


def explanation_text(explanation: Explanation, storages_per_fate: int | None = 10) -> str:
    """Return the text of `explain`, from an explanation that is at hand.

    Args:
        explanation: of a plan.
        storages_per_fate: as in `explain`.
    """
    plan, run, of_storage, points = explanation.plan, explanation.run, explanation.fates, explanation.points
    lines = [*_key_figures(plan), *_taken_lines(plan), "", *_peak_lines(run, _STORAGES_AT_PEAK)]
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
        lines.append("  host memory: not used, for no host budget was given; with one, storages can be offloaded")
    found, bound = plan.bounds.least_budget_found_bytes, plan.bounds.least_budget_bound_bytes
    reached = f"least budget reached by a plan {format_bytes(found)}, " if found is not None else ""
    lines.append(f"  limits: {reached}no plan at all below {format_bytes(bound)}")
    if least := least_overhead(plan):
        lines.append(f"  no plan within this budget adds less than {least}")
    how = f"planner {printable(plan.planner)} in {seconds_text(plan.plan_seconds)}{age_text(plan.age_seconds)}"
    lines.append(f"  {how}: {status_meaning(plan)}")
    unknown = sum(op.workspace_bytes is None for op in graph.ops)
    if unknown:
        lines.append(f"  workspace of {count_text(unknown, 'op')} is unknown and counted as 0: the peak may be higher")
    return lines


def _taken_lines(plan: Plan) -> list[str]:
    """Return a line for each part of what the budget covers on a GPU; elsewhere that is the peak."""
    taken = taken_of(plan) if is_for_gpu(plan) else None
    return ["what the budget covers:", *(f"  {part}: {size}" for part, size in taken.rows().items())] if taken else []


def _peak_lines(run: Run, most: int) -> list[str]:
    timeline, graph = run.timeline, run.graph
    position = timeline.peak_position
    where = [f"instruction {position} of {len(run.schedule)}", run.doing_at(position)]
    lines = [f"at the peak, {', '.join(part for part in where if part)}:"]
    live = run.live_at(position)
    sizes = [run.device.aligned(graph.storages[storage].bytes) for storage in live]
    lines += [_storage_line(run, storage) for storage in live[:most]]
    if rest := sum(sizes[most:]):
        lines.append(f"  {format_bytes(rest):>10}  in {count_text(len(live) - most, 'more storage')}")
    if not_storages := timeline.peak_bytes - sum(sizes):
        lines.append(f"  {format_bytes(not_storages):>10}  workspace, second copies, and what is outside the graph")
    return lines


def _storage_line(run: Run, storage: int) -> str:
    held = run.graph.storages[storage]
    module = module_text(run.graph, storage)
    module = module if len(module) <= _MODULE_WIDTH else module[: _MODULE_WIDTH - 1] + "…"
    name = f"{printable(held.name)} [{module}]" if module else printable(held.name)
    return f"  {format_bytes(held.bytes):>10}  {held.role:<10}  {name}"


def _fate_lines(explanation: Explanation, total: Total, members: list[Fate], most: int | None) -> list[str]:
    run, sizes = explanation.run, explanation.run.graph.storages
    lines = [
        f"{total.kind}: {count_text(total.count, 'storage')}, {format_bytes(total.bytes)} together "
        f"({MEANING[total.kind]})"
    ]
    for fate in members[:most]:
        how_often = f"{fate.text}; " if fate.rematerialized or fate.offloaded else ""
        lines.append(f"{_storage_line(run, fate.storage)}: {how_often}{printable(fate.why)}")
    if left := members[len(members[:most]) :]:
        bytes_left = sum(sizes[fate.storage].bytes for fate in left)
        lines.append(f"  {format_bytes(bytes_left):>10}  in {count_text(len(left), 'more storage')}")
    return lines


def _more_lines(plan: Plan, more: MoreMemory | None) -> list[str]:
    if more is None:
        known = plan.unplanned.seconds > 0
        nothing = "nothing: this plan is as fast as the unplanned step"
        return ["what more memory buys:", f"  {nothing if known else 'unknown: the graph carries no times'}"]
    return [f"what the next {format_bytes(more.step_bytes)} buys:", *(f"  {line}" for line in more_lines(more))]


def _least_lines(plan: Plan, least: LeastBudget) -> list[str]:
    lines = [f"  {line}" for line in least_lines(plan, least)]
    return [f"why no plan needs less than {format_bytes(least.bound_bytes)}:", *lines]


def _buys_lines(plan: Plan, points: Sequence[CurvePoint]) -> list[str]:
    lines = [f"the cost of other budgets (this plan: {change_text(plan.overhead)}):"]
    for point in points:
        difference = point.budget_bytes - plan.budget_bytes
        if not difference:
            continue
        step = f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"
        if point.overhead is None:
            lines.append(f"  {step} ({format_bytes(point.budget_bytes)}): no plan ({status_text(point.status)})")
            continue
        gained = (point.overhead - plan.overhead) * 100
        change = f"{abs(gained):.1f} percentage points {'more' if gained > 0 else 'less'}"
        change = change if abs(gained) >= 0.05 else "the same"
        lines.append(f"  {step} ({format_bytes(point.budget_bytes)}): {change_text(point.overhead)}, {change}")
    return lines
