"""The report on copies: when they ran, when compute waited, predicted and measured on one scale of time."""

from __future__ import annotations

from typing import Any

from memfit.plan import Plan
from memfit.report.formatting import seconds_text, share_text
from memfit.simulate import simulate
from memfit.simulate.overlap import Transfers, simulated_transfers
from memfit.step.measured import Measured
from memfit.system.budget import format_bytes


def copies_text(plan: Plan, measured: Measured | None) -> str:
    """Return what copies cost, in words; empty for a plan that copies nothing.

    Args:
        plan: checked.
        measured: figures of a run, or None.
    """
    sides = _sides(plan, measured)
    sentences = [_sentence(name, *side) for name, side in sides.items()]
    lead = f"Each step copies {format_bytes(plan.offloaded_bytes)} away from the device, and back."
    return " ".join([lead, *sentences]) if sides else ""


def copies_spans(plan: Plan, measured: Measured | None) -> dict[str, Any]:
    """Return the spans in seconds of each kind of copy, and of waiting, as the page draws them: side -> kind -> spans.

    Args:
        plan: checked.
        measured: figures of a run, or None.
    """
    return {
        name: {"to the host": copies.to_host, "from the host": copies.to_device, "compute waits": copies.stalls}
        for name, (copies, _) in _sides(plan, measured).items()
    }


def _sides(plan: Plan, measured: Measured | None) -> dict[str, tuple[Transfers, float]]:
    """Return the copies and the seconds of the predicted and of the measured step; none for a plan without copies."""
    if plan.offloaded_bytes == 0 or not plan.unplanned.seconds:
        return {}
    timeline = simulate(plan.graph, plan.schedule, plan.device)
    sides = {"predicted": (simulated_transfers(timeline, plan.graph, plan.schedule), timeline.makespan_seconds)}
    if measured is not None and measured.transfers is not None:
        sides["measured"] = (measured.transfers, measured.step_seconds)
    return sides


def _sentence(name: str, transfers: Transfers, step_seconds: float) -> str:
    stalled, beside = transfers.stall_seconds, transfers.overlap_seconds
    return (
        f"{name.capitalize()}: compute waits for {seconds_text(stalled)} "
        f"({share_text(stalled, step_seconds)} of the step), and works beside copies for {seconds_text(beside)} "
        f"({share_text(beside, step_seconds)})."
    )
