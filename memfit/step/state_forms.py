"""Programs of a step whose optimizer's state is on the device all the time, or on the host between steps."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from memfit.capture import Captured, TrainingStep
from memfit.cost.calibration import linked_device
from memfit.errors import NoPlanError, PlanMismatchError
from memfit.memory.host.store import HostStore
from memfit.plan import Plan, Problem
from memfit.planners.engine.results import predict, unplanned_schedule
from memfit.planning import Settings
from memfit.step.host_states import SHARES, with_states_on_host
from memfit.step.prepare import AS_IT_IS, Planning
from memfit.step.step_program import StepProgram, bytes_outside, make_step_program
from memfit.step.update_parts import with_update_in_parts


def make_program_of_forms(
    step: TrainingStep,
    captured: Captured,
    settings: Settings,
    plan: Plan | None,
    store: HostStore,
    planning: Planning,
) -> StepProgram:
    """Return the fastest program of a step within its budget, by its plan: as captured, or with state on the host.

    A step that fits as it is, at no cost, is not tried in another form. The unplanned figures are those of the step as
    captured, and so is the whole that a budget in percent is a share of.

    Args:
        step: with an optimizer.
        captured: the step.
        settings: the budget, a host budget, and how each form is searched.
        plan: made before, for any of the forms; None searches one.
        store: for host copies.
        planning: where the costs of the step as captured come from, and its plan.

    Raises:
        InfeasibleBudgetError, TimeLimitError: no form has a plan; the error of the one that came closest.
        HostMemoryError, PlanMismatchError: as `make_step_program`.
    """
    found: list[StepProgram] = []
    errors: list[NoPlanError | PlanMismatchError] = []
    try:
        found.append(make_step_program(step, captured, settings, plan, store, planning))
        if plan is not None or (found[0].plan.overhead <= 0 and _fits(found[0])):
            return found[0]
        captured = found[0].prepared.captured
        settings = settings.within(found[0].plan.budget_bytes)
    except (NoPlanError, PlanMismatchError) as error:
        errors.append(error)
        captured = replace(planning.with_costs(captured, settings), stream=None)
    device = settings.device or linked_device(captured.binding.device, settings.host_budget_bytes, settings.host_dir)
    outside_bytes = bytes_outside(step, captured, settings)
    problem = Problem(graph=captured.graph, device=device, budget_bytes=0, bytes_outside=outside_bytes)
    unplanned = predict(problem, unplanned_schedule(problem))
    if not settings.is_in_bytes and settings.whole_bytes is None:
        settings = settings.of_whole(unplanned.peak_bytes)
    captured = with_update_in_parts(step, captured)
    for share in SHARES:
        form = with_states_on_host(step, captured, device, share=share, room_bytes=settings.host_budget_bytes)
        if form is None:
            continue
        try:
            program = make_step_program(step, form, settings, plan, store, AS_IT_IS)
        except (NoPlanError, PlanMismatchError) as error:
            errors.append(error)
            continue
        own = msgspec.structs.replace(program.plan, unplanned=unplanned)
        found.append(replace(program, prepared=replace(program.prepared, plan=own)))
    if not found:
        raise min(errors, key=_least_bytes)
    return min(found, key=lambda program: (not _fits(program), program.plan.predicted.seconds))


def _fits(program: StepProgram) -> bool:
    """Return whether a plan fits as its bytes are placed."""
    return program.peak_bytes <= program.plan.budget_bytes


def _least_bytes(error: NoPlanError | PlanMismatchError) -> int:
    if isinstance(error, PlanMismatchError):
        return 0
    return error.least_budget_found_bytes or error.least_budget_bound_bytes
