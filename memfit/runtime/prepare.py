"""From a captured step to a program: the ops are measured, the step is planned, the plan is compiled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Value
from memfit.capture import Captured, finish
from memfit.capture.generators import all_states, set_state
from memfit.cost.calibration import local_device
from memfit.cost.measurement import measure
from memfit.errors import PlanMismatchError, UnsupportedStepError
from memfit.plan import Plan
from memfit.planning import Settings, make_plan
from memfit.runtime.program import Program, make_program
from memfit.system.budget import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step that is ready to run, and the seconds that each stage of its preparation took."""

    captured: Captured
    plan: Plan
    program: Program
    seconds: Mapping[str, float]


def prepare(
    captured: Captured,
    settings: Settings,
    *,
    outputs: Sequence[Sequence[Value]],
    plan: Plan | None = None,
    bytes_outside: int = 0,
) -> Prepared:
    """Return the program of a captured step within the settings' budget.

    Args:
        captured: a whole step, or the joint graph of a compiled model.
        settings: for `make_plan`.
        outputs: for each half of the program, the values that it returns to the user.
        plan: a plan made before, used instead of asking a planner.
        bytes_outside: bytes on the device that are not the graph's (see `Problem`).

    Raises:
        InfeasibleBudgetError, TimeLimitError: no plan was found.
        InvalidBudgetError, InvalidOptionError: a setting that cannot be read.
        PlanMismatchError: `plan` is for another graph, or another torch.
        UnsupportedStepError: a host budget for a step that cannot use one.
    """
    started = time.perf_counter()
    captured = replace(with_costs(captured, settings), stream=None)  # compared by the caller, and large
    measured = time.perf_counter()
    if plan is None:
        require_use_of_host(captured, settings.host_budget_bytes)
        device = settings.device or local_device(captured.binding.device)
        plan = make_plan(captured.graph, device, settings, bytes_outside)
    else:
        _require_usable(plan, captured)
    seconds = {"measure": measured - started, "plan": time.perf_counter() - measured}
    program = make_program(captured, plan.schedule, outputs)
    return Prepared(captured=captured, plan=plan, program=program, seconds=seconds)


def with_costs(captured: Captured, settings: Settings) -> Captured:
    """Return a captured step, finished on its device, with the seconds and the workspace of each op.

    Args:
        captured: a whole step, or the joint graph of a compiled model.
        settings: hear of the stage.

    Raises:
        WrongFakesError, CaptureError: see `memfit.capture.finish`.
    """
    settings.on_stage("measuring each op")
    states = all_states()  # a step that is planned in the middle of training leaves the generators where they are
    try:
        captured = finish(captured)
        return replace(captured, graph=measure(captured.graph, captured.binding, captured.observed))
    finally:
        for name, state in states.items():
            set_state(name, state)


def require_use_of_host(captured: Captured, host_budget_bytes: int) -> None:
    """Refuse a host budget where host copies would free nothing, or could not be brought back.

    Args:
        captured: of the step.
        host_budget_bytes: 0 if nothing may be offloaded.
    """
    if host_budget_bytes == 0:
        return
    if captured.binding.device.type == "cpu":
        raise UnsupportedStepError(
            f"a host budget of {format_bytes(host_budget_bytes)} for a step on the CPU, whose memory is the host's: a "
            "copy there frees nothing; leave it out, or plan for another device with `memfit plan --device-profile`"
        )
    if captured.graph.boundaries:
        raise UnsupportedStepError(
            f"a host budget of {format_bytes(host_budget_bytes)} for a model that is compiled in two halves: a host "
            "copy made in the forward half cannot be handed to the backward half; leave it out, or use memfit.fit on "
            "a step without graph breaks"
        )


def _require_usable(plan: Plan, captured: Captured) -> None:
    """Raise PlanMismatchError unless `plan` was made for this graph and this torch."""
    plan.require_graph(captured.graph)
    made_with = plan.versions.get("torch", "").partition("+")[0]
    here: Any = torch.__version__.partition("+")[0]
    if made_with and made_with != here:
        raise PlanMismatchError(f"plan was made with torch {made_with}, this is torch {here}; plan again")
