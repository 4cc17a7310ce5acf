"""The sections of the report's page that are words and tables, as HTML with every name escaped."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.device import GENERIC
from memfit.plan import Plan
from memfit.report.copies import copies_text
from memfit.report.explanation import Explanation
from memfit.report.formatting import change_text, count_text, seconds_text, share_text
from memfit.report.html_template import as_html
from memfit.report.sentences import least_lines, least_overhead, more_lines, status_meaning
from memfit.report.storage_fates import MEANING, Fate, Kind, totals
from memfit.report.taken import Taken, taken_of
from memfit.step.measured import Measured
from memfit.system.budget import format_bytes


def sections(explanation: Explanation, measured: Measured | None) -> dict[str, str]:
    """Return the HTML of each place of the page.

    Args:
        explanation: of the plan.
        measured: figures of a run, or None.
    """
    plan, of_storage = explanation.plan, explanation.fates
    taken = taken_of(plan)
    return {
        "lead": _lead(plan, of_storage, measured),
        "key_figures": _key_figures(plan, measured)
        + _figures_table(plan, measured, taken)
        + _taken_section(taken, plan.budget_bytes)
        + _copies_section(plan, measured),
        "more": _more_section(explanation),
        "least": _least_section(explanation),
        "curve": _curve_section(explanation),
        "fates": _fates_rows(plan, of_storage),
        "made": _made(plan),
    }


def _lead(plan: Plan, of_storage: Sequence[Fate], measured: Measured | None) -> str:
    """Return the opening paragraphs: what was measured, the budget, the plan, and how it fits."""
    planned, unplanned = plan.predicted, plan.unplanned
    device = "" if plan.device == GENERIC else f" on <b>{as_html(plan.device.name)}</b>"
    took = f" and takes {seconds_text(unplanned.seconds)}" if unplanned.seconds else ""
    asked = (
        f"One training step of <b>{as_html(plan.graph.name)}</b>{device} needs {_size(unplanned.peak_bytes)} of memory "
        f"at its peak{took} when nothing is planned. It was asked to stay within <b>{_size(plan.budget_bytes)}</b>."
    )
    share = f" ({share_text(planned.peak_bytes, unplanned.peak_bytes)} of the unplanned peak)"
    needs = f"<b>{_size(planned.peak_bytes)}</b>{share if planned != unplanned else ''}"
    came_out = f"The plan in this report needs {needs} {_price(plan)}"
    if measured is None:
        return f'<p class="lead">{asked} {came_out}.</p>\n<p>{_means(plan, of_storage)}</p>'
    return f'<p class="lead">{_found(plan, measured)}</p>\n<p>{asked} {came_out}. {_means(plan, of_storage)}</p>'


def _found(plan: Plan, measured: Measured) -> str:
    """Return what was measured, in a sentence or two."""
    within = "within" if measured.peak_bytes <= plan.budget_bytes else "<b>more than</b>"
    took = (
        f"Measured, a step took <b>{_size(measured.peak_bytes)}</b>, {within} its budget of {_size(plan.budget_bytes)}"
    )
    if measured.baseline_peak_bytes is None:
        return f"{took}, and {seconds_text(measured.step_seconds)}."
    return (
        f"{took}, where eager PyTorch took {_size(measured.baseline_peak_bytes)}. It ran for "
        f"{seconds_text(measured.step_seconds)}, <b>{measured.overhead_text}</b> against eager&#x27;s "
        f"{seconds_text(measured.baseline_step_seconds)}."
    )


def _price(plan: Plan) -> str:
    if not plan.unplanned.seconds:
        return "at an unknown price in time: the graph carries no times of its operations"
    if plan.overhead < 0.0005:
        return "and is predicted to take no longer"
    return f"and is predicted to take {seconds_text(plan.predicted.seconds)}: <b>{plan.overhead:.1%} longer</b>"


_WAYS = {
    Kind.REMATERIALIZED: "dropped early and recomputed when needed",
    Kind.OFFLOADED: "copied to the host's memory and back",
}


def _means(plan: Plan, of_storage: Sequence[Fate]) -> str:
    done = [
        f"{count_text(total.count, 'storage')} ({_size(total.bytes)}) {_WAYS[total.kind]}"
        for total in totals(of_storage, plan.graph)
        if total.kind in _WAYS
    ]
    how = "; ".join(done) if done else "nothing is computed twice, and everything is dropped after its last use"
    return f"How: {how}. The same operations run on the same values; only the times at which memory is held change."


def _key_figures(plan: Plan, measured: Measured | None) -> str:
    """Return the tiles and the bar chart of sizes; measurements stand before predictions."""
    bounds = plan.bounds
    found = (
        f"a plan was found down to {_size(bounds.least_budget_found_bytes)}"
        if bounds.least_budget_found_bytes is not None
        else "no plan was found"
    )
    time = seconds_text(plan.predicted.seconds) if plan.unplanned.seconds else "unknown"
    bound = least_overhead(plan)
    least = f"no plan within this budget adds less than {bound}" if bound else ""
    tiles = [
        ("Budget", _size(plan.budget_bytes), f"{plan.budget_bytes:,} bytes, everything included"),
        *(_measured_tiles(plan, measured, time) if measured else _predicted_tiles(plan, time, least)),
        ("Always there", _size(plan.graph.resident_bytes), "parameters, optimizer state, inputs: part of every peak"),
        ("Proved impossible below", _size(bounds.least_budget_bound_bytes), found),
    ]
    if plan.predicted.host_peak_bytes:
        tiles.append(("Host memory, predicted", _size(plan.predicted.host_peak_bytes), "for offloaded storages"))
    rows = "".join(
        f'<div class="tile"><dt>{title}</dt><dd>{figure}</dd><dd class="small">{note}</dd></div>'
        for title, figure, note in tiles
    )
    columns = "tiles six" if len(tiles) == 6 else "tiles"
    body = f'<dl class="{columns}">{rows}</dl>{_scale(plan, measured)}{_unknown(plan)}'
    return f'<section class="full figures">{body}</section>'


def _predicted_tiles(plan: Plan, time: str, least: str) -> list[tuple[str, str, str]]:
    return [
        ("Peak memory, predicted", _size(plan.predicted.peak_bytes), f"{plan.predicted.peak_bytes:,} bytes"),
        ("Step time, predicted", time, _against(plan, least)),
    ]


def _measured_tiles(plan: Plan, measured: Measured, time: str) -> list[tuple[str, str, str]]:
    eager = seconds_text(measured.baseline_step_seconds)
    against = (
        f"{measured.overhead_text} against eager, {eager}" if measured.overhead is not None else "no eager beside it"
    )
    predicted = f"predicted {time}, {change_text(plan.overhead)} against unplanned" if plan.unplanned.seconds else ""
    return [
        ("Peak memory, measured", _size(measured.peak_bytes), f"{_size(plan.predicted.peak_bytes)} predicted"),
        ("Step time, measured", seconds_text(measured.step_seconds), "; ".join(filter(None, [against, predicted]))),
    ]


def _unknown(plan: Plan) -> str:
    count = sum(op.workspace_bytes is None for op in plan.graph.ops)
    if not count:
        return ""
    what = f"The workspace of {count_text(count, 'operation')} is not known and counted as 0"
    return f'<p class="note">{what}: the peaks may be higher than this says.</p>'


def _against(plan: Plan, least: str) -> str:
    if not plan.unplanned.seconds:
        return "the graph carries no times of its operations"
    against = f"{change_text(plan.overhead)} against {seconds_text(plan.unplanned.seconds)} unplanned"
    return f"{against}; {least}" if least else against


def _scale(plan: Plan, measured: Measured | None) -> str:
    """Return the bars of unplanned, planned and least memory, with the budget as a line across them."""
    eager_bytes = measured.baseline_peak_bytes if measured else None
    rows = [
        ("Eager, measured", eager_bytes, "") if eager_bytes else ("Unplanned", plan.unplanned.peak_bytes, ""),
        ("Plan, measured", measured.peak_bytes, "plan")
        if measured
        else ("With this plan", plan.predicted.peak_bytes, "plan"),
        ("No plan below", plan.bounds.least_budget_bound_bytes, "bound"),
    ]
    whole = max(*(size for _, size, _ in rows), plan.budget_bytes, 1)
    bars = "".join(
        f'<div class="row {kind}"><span>{title}</span><div class="track">'
        f'<div class="fill" style="width:{100 * size / whole:.2f}%"></div></div>'
        f'<span class="number">{_size(size)}</span></div>'
        for title, size, kind in rows
    )
    return f'<div class="scale">{bars}{_budget_mark(plan.budget_bytes, whole)}</div>'


def _budget_mark(budget_bytes: int, whole: int) -> str:
    """Return the budget as a line across bars that are `whole` bytes wide."""
    place = 100 * budget_bytes / whole
    side = "right" if place > 85 else "left" if place < 15 else ""
    budget = f"<span>budget {format_bytes(budget_bytes)}</span>"
    return f'<div class="over"><div class="mark {side}" style="left:{place:.2f}%">{budget}</div></div>'


def _figures_table(plan: Plan, measured: Measured | None, taken: Taken | None) -> str:
    """Return the table of predicted and measured figures, or a note that nothing was measured."""
    if measured is None:
        return '<p class="note full">These are predictions of a simulation; nothing was run for this report.</p>'
    unplanned, predicted, is_timed = plan.unplanned, plan.predicted, plan.unplanned.seconds > 0
    sizes = (unplanned.peak_bytes, predicted.peak_bytes, measured.baseline_peak_bytes, measured.peak_bytes)
    predicted_seconds = (seconds_text(p.seconds) if is_timed else "unknown" for p in (unplanned, predicted))
    measured_seconds = (seconds_text(s) for s in (measured.baseline_step_seconds, measured.step_seconds))
    extra = change_text(plan.overhead) if is_timed else "unknown"
    reserved = measured.reserved_bytes
    rows = [
        ("Peak memory", *map(_size, sizes)),
        *([("Reserved", "–", _size(taken.reserved_bytes) if taken else "–", "–", _size(reserved))] if reserved else []),
        ("Step time", *predicted_seconds, *measured_seconds),
        ("Extra time", "–", extra, "–", measured.overhead_text),
    ]
    machine = f", on {as_html(measured.machine)}" if measured.machine else ""
    head = (
        f'<tr class="group"><td></td><th colspan="2" scope="colgroup">measured{machine}</th>'
        '<th colspan="2" scope="colgroup" class="measured">predicted by simulation</th></tr><tr><td></td>'
        '<th class="number" scope="col">eager PyTorch</th><th class="number" scope="col">this plan</th>'
        '<th class="number measured" scope="col">unplanned</th><th class="number" scope="col">this plan</th></tr>'
    )
    body = "".join(
        f'<tr><th scope="row">{title}</th><td class="number">{eager}</td><td class="number">{run}</td>'
        f'<td class="number measured">{unplanned}</td><td class="number">{planned}</td></tr>'
        for title, unplanned, planned, eager, run in rows
    )
    table = f'<div class="scroll"><table id="figures"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    bits = {
        True: "Outputs, gradients and buffers were the same bits as those of the unplanned step.",
        False: "<b>Outputs, gradients or buffers differed</b> from those of the unplanned step.",
        None: "The results were not compared bit by bit with the unplanned step's.",
    }[measured.bitwise_equal]
    note = f'<p class="note">{as_html(measured.note)}</p>' if measured.note else ""
    title = "<h2>Predicted and measured</h2>"
    return f'<section class="full">{title}{table}<p class="note" id="bits">{bits}</p>{note}</section>'


def _fates_rows(plan: Plan, of_storage: Sequence[Fate]) -> str:
    """Return the rows of the table of fates: the count and bytes of the storages of each, and its meaning."""
    return "".join(
        f'<tr><th scope="row">{total.kind}</th><td class="number">{total.count:,}</td><td class="number">'
        f'{_size(total.bytes)}</td><td class="why">{MEANING[total.kind]}</td></tr>'
        for total in totals(of_storage, plan.graph)
    )


def _more_section(explanation: Explanation) -> str:
    """Return the section on the next GiB; empty where it buys nothing, or ops have no times."""
    more = explanation.more_memory
    if more is None:
        return ""
    step, budget = format_bytes(more.step_bytes), format_bytes(more.budget_bytes)
    note = f"Extra time with {step} more, which is a budget of {budget}:"
    return _section("more", f"What the next {step} buys", note, _list(more_lines(more)))


_TAKEN = ("", "second", "third", "fourth")  # classes of the parts, in order


def _taken_section(taken: Taken | None, budget_bytes: int) -> str:
    """Return the section on what fills the budget, as one bar of its parts; empty for a part of a step."""
    if taken is None:
        return ""
    parts = [(name, size, kind) for (name, size), kind in zip(taken.parts().items(), _TAKEN, strict=True) if size]
    whole = max(budget_bytes, taken.reserved_bytes, 1)
    fills, before = "", 0
    for _, size, kind in parts:
        left, width = 100 * before / whole, 100 * size / whole
        fills += f'<div class="fill {kind}" style="left:{left:.2f}%;right:auto;width:{width:.2f}%"></div>'
        before += size
    bar = f'<div class="row"><span>the step</span><div class="track">{fills}</div>'
    bar += f'<span class="number">{_size(taken.reserved_bytes)}</span></div>'
    legend = "".join(f'<li><span class="fill {kind}"></span>{name} {_size(size)}</li>' for name, size, kind in parts)
    where = ", where an arena serves it (memfit.fit's default on CUDA)" if taken.by_mode else ""
    note = f"All that the step takes of the device, predicted{where}. Outside of the budget: {taken.outside}."
    others = _list([f"{size} {mode}" for mode, size in taken.other_modes().items()]) if taken.by_mode else ""
    body = f'<div class="scale">{bar}{_budget_mark(budget_bytes, whole)}</div><ul class="parts">{legend}</ul>{others}'
    return _section("taken", "What fills the budget", note, body)


def _least_section(explanation: Explanation) -> str:
    """Return the section on the least budget: the ops that set it."""
    least = explanation.least_budget
    note = (
        "Each operation is computed at least once. Then all that it reads and writes is on the device, beside the "
        "storages that are always there; the results of the step are on the device at its end. No plan needs less than "
        f"{_size(least.bound_bytes)}, because of:"
    )
    return _section("least", "Why no plan can go lower", note, _list(least_lines(explanation.plan, least)))


def _copies_section(plan: Plan, measured: Measured | None) -> str:
    """Return the place in which the page draws when copies ran; empty for a plan that copies nothing."""
    note = copies_text(plan, measured)
    return _section("copies", "Copies", note, '<div class="chart" id="copies"></div>') if note else ""


def _curve_section(explanation: Explanation) -> str:
    """Return the place in which the page draws the trade-off curve; empty where there is none."""
    if not explanation.points:
        return ""
    note = (
        "Each point is a budget: the less memory, the more time. A plan for one budget also fits every larger one, so "
        "the curve never rises to the right."
    )
    chart = '<div class="chart" id="curve" role="img" aria-label="Predicted extra time against budget"></div>'
    return _section("curve", "The cost of other budgets", note, chart)


def _section(name: str, title: str, note: str, body: str) -> str:
    return f'<section class="full" id="{name}-section"><h2>{title}</h2><p class="note">{note}</p>{body}</section>'


def _list(lines: Sequence[str]) -> str:
    return f'<ul class="said">{"".join(f"<li>{as_html(line)}</li>" for line in lines)}</ul>'


def _made(plan: Plan) -> str:
    """Return how the plan was made, as definitions."""
    rows = [
        ("planner", f"{as_html(plan.planner)}, seed {plan.seed}, {seconds_text(plan.plan_seconds)}"),
        ("outcome", status_meaning(plan)),
        ("schedule", _counts(plan)),
        ("device", _sentences(plan.device.name, plan.device.source)),
        ("graph", _sentences(f"{plan.graph.name}, fingerprint {plan.fingerprint}", plan.graph.source)),
        ("versions", as_html(", ".join(f"{name} {version}" for name, version in sorted(plan.versions.items())))),
    ]
    if plan.graph.notes:
        rows.append(("notes", as_html(plan.graph.notes)))
    if plan.bytes_outside:
        rows.append(("outside the graph", f"{_size(plan.bytes_outside)} that user code holds; the budget covers it"))
    return "".join(f"<dt>{word}</dt><dd>{what}</dd>" for word, what in rows)


def _sentences(*parts: str) -> str:
    return ". ".join(as_html(part) for part in parts if part)


def _counts(plan: Plan) -> str:
    computed = int((plan.schedule.codes == 0).sum())
    return (
        f"{count_text(len(plan.schedule), 'instruction')}: {count_text(computed, 'computation')} of "
        f"{count_text(len(plan.graph.ops), 'operation')}, {computed - len(plan.graph.ops):,} of them recomputations"
    )


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "–"
    return f'<span title="{size_bytes:,} bytes">{format_bytes(size_bytes)}</span>'
