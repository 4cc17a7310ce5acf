"""`memfit fit` of a step that is no graph, and runs under `memfit.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
from rich.text import Text

from memfit.commands.answer import Answer, columns_table, rows_table
from memfit.commands.work import Work
from memfit.errors import InvalidOptionError, VerificationError
from memfit.memory.contract import FIRM
from memfit.plan import Status
from memfit.report.formatting import change_text, seconds_text
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically

if TYPE_CHECKING:
    from memfit.checkpointing.step import CheckpointedStep
    from memfit.step.step import PlannedStep

PLANNER = "checkpoint"


def is_of_graph(planned: PlannedStep | CheckpointedStep) -> TypeGuard[PlannedStep]:
    """Return whether a step was captured as a graph, and has a plan."""
    from memfit.step.step import PlannedStep

    return isinstance(planned, PlannedStep)


def answer_without_graph(
    target: str,
    planned: PlannedStep | CheckpointedStep,
    repeats: int,
    work: Work,
    save: Path | None,
    report: Path | None,
) -> Answer:
    """Verify and measure a step that runs under `memfit.checkpoint`, and return what is to be told.

    Args:
        target: as given.
        planned: the step.
        repeats: how many steps are measured.
        work: tells its stages.
        save: where its policy is written.
        report: is refused.

    Raises:
        InvalidOptionError: a report is asked for.
        VerificationError: the bits differ, or the measured peak is over the budget.
    """
    from memfit.checkpointing.step import CheckpointedStep

    assert isinstance(planned, CheckpointedStep)
    if report is not None:
        raise InvalidOptionError(f"{planned.why}: it is no graph, of which --report would draw the plan; leave it out")
    work.stage("verifying against eager, bit by bit")
    planned.verify()
    work.stage("measuring eager and planned steps")
    measured = planned.measure(repeats=repeats)
    budget_bytes = planned.budget_bytes
    if measured.peak_bytes > budget_bytes and planned.settings.budget_is == FIRM:
        raise VerificationError(
            f"the measured peak is {measured.peak_bytes} bytes, the budget is {budget_bytes} bytes; lower the "
            "budget by the difference"
        )
    if save is not None:
        write_atomically(save, msgspec.json.format(msgspec.json.encode(planned.policy()), indent=1) + b"\n")
    size = planned.report().sizes[0]
    keys: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "resident_bytes": measured.resident_bytes,
        "planner": PLANNER,
        "status": Status.FEASIBLE,
        "why": planned.why,
        "line": planned.line,
        "plan_seconds": planned.plan_seconds,
        "baseline": {"peak_bytes": measured.baseline_peak_bytes, "step_seconds": measured.baseline_step_seconds},
        "predicted": {"peak_bytes": size.planned.predicted_bytes, "step_seconds": None},
        "measured": {"peak_bytes": measured.peak_bytes, "step_seconds": measured.step_seconds},
        "overhead": measured.overhead,
        "bitwise_equal": True,
        "policy": planned.policy(),
        "bounds": {
            "least_budget_found_bytes": measured.peak_bytes,
            "least_budget_bound_bytes": measured.resident_bytes,
            "overhead": None,
        },
    }
    rows = {
        "budget": f"{format_bytes(budget_bytes)}, {format_bytes(measured.resident_bytes)} of it resident",
        "same bits as eager": "loss, gradients, parameters, buffers, optimizer state, generators",
        "overhead": f"{change_text(measured.overhead)} (measured, against eager)",
        "no graph": f"{planned.why}; the step runs under memfit.checkpoint",
        "kept": size.kinds_text(),
        **({"policy file": str(save)} if save else {}),
    }
    sides = (keys["baseline"], keys["measured"], keys["predicted"])
    texts = {"peak": ("peak_bytes", format_bytes), "step": ("step_seconds", seconds_text)}
    cells = [
        (name, *("-" if side[key] is None else text(side[key]) for side in sides))
        for name, (key, text) in texts.items()
    ]
    columns = ("", "eager, measured", "planned, measured", "planned, predicted")
    parts = (rows_table(rows), Text(), columns_table(columns, cells))
    return Answer(target=target, device=str(planned.device), keys=keys, parts=parts)
