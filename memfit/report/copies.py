"""The report's section on copies: when they ran, when compute waited, predicted and measured on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.plan import Plan
from memfit.report.formatting import seconds_text, share_text
from memfit.simulate import simulate
from memfit.simulate.overlap import Span, Transfers, simulated_transfers
from memfit.step.measured import Measured
from memfit.system.budget import format_bytes

_WIDTH, _LANE, _LABEL = 1000, 16, 170  # of the picture; units of its view box
_LEAST_WIDTH = 0.6  # of a span
_LANES = (("to the host", "var(--accent)"), ("from the host", "var(--good)"), ("compute waits", "var(--bad)"))


def copies_section(plan: Plan, measured: Measured | None) -> str:
    """Return the section, or nothing for a plan that copies nothing.

    Args:
        plan: checked.
        measured: figures of a run, or None.
    """
    if plan.offloaded_bytes == 0 or not plan.unplanned.seconds:
        return ""
    timeline = simulate(plan.graph, plan.schedule, plan.device)
    sides = {"predicted": (simulated_transfers(timeline, plan.graph, plan.schedule), timeline.makespan_seconds)}
    if measured is not None and measured.transfers is not None:
        sides["measured"] = (measured.transfers, measured.step_seconds)
    whole_seconds = max(seconds for _, seconds in sides.values())
    sentences = " ".join(_sentence(name, *side) for name, side in sides.items())
    picture = _picture({name: transfers for name, (transfers, _) in sides.items()}, whole_seconds)
    lead = f"Each step copies {format_bytes(plan.offloaded_bytes)} away from the device, and back."
    return f'<section class="full" id="copies"><h2>Copies</h2><p>{lead} {sentences}</p>{picture}</section>'


def _sentence(name: str, transfers: Transfers, step_seconds: float) -> str:
    stalled, beside = transfers.stall_seconds, transfers.overlap_seconds
    return (
        f"{name.capitalize()}: compute waits for {seconds_text(stalled)} "
        f"({share_text(stalled, step_seconds)} of the step), and works beside copies for {seconds_text(beside)} "
        f"({share_text(beside, step_seconds)})."
    )


def _picture(sides: dict[str, Transfers], whole_seconds: float) -> str:
    """Return lanes for each side, over one scale of seconds."""
    drawn: list[str] = []
    top = 0
    for name, transfers in sides.items():
        drawn.append(f'<text x="0" y="{top + 13}" font-weight="600">{name}</text>')
        spans = (transfers.to_host, transfers.to_device, transfers.stalls)
        for (title, color), of_lane in zip(_LANES, spans, strict=True):
            top += _LANE + 4
            drawn.append(f'<text x="12" y="{top + 12}">{title}</text>{_lane(of_lane, top, color, whole_seconds)}')
        top += _LANE + 14
    scale = f"one step, {seconds_text(whole_seconds)}"
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {top}" width="100%" font-size="12" fill="var(--ink-2)" role="img" '
        f'aria-label="copies and waiting within {scale}">{"".join(drawn)}</svg>'
    )
    return f'{picture}<p class="note">Left to right: {scale}.</p>'


def _lane(spans: Sequence[Span], top: int, color: str, whole_seconds: float) -> str:
    scale = (_WIDTH - _LABEL) / whole_seconds
    back = f'<rect x="{_LABEL}" y="{top}" width="{_WIDTH - _LABEL}" height="{_LANE}" fill="var(--panel)"/>'
    return back + "".join(
        f'<rect x="{_LABEL + start * scale:.1f}" y="{top}" width="{max(_LEAST_WIDTH, (end - start) * scale):.1f}" '
        f'height="{_LANE}" fill="{color}"/>'
        for start, end in spans
    )
