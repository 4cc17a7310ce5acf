"""Programs of iterative functions: as captured, or with chains of ops run on some rows at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from memfit.capture import Captured, TrainingStep
from memfit.capture.row_chunks import COUNTS, in_row_chunks
from memfit.cost.calibration import local_device
from memfit.errors import InfeasibleBudgetError, PlanMismatchError, TimeLimitError
from memfit.memory.host.store import HostStore
from memfit.plan import Plan
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.planning import Settings
from memfit.step.prepare import with_costs
from memfit.step.step_program import StepProgram, make_step_program

_log = logging.getLogger(__name__)


def make_function_program(
    step: TrainingStep, captured: Captured, settings: Settings, plan: Plan | None, store: HostStore
) -> StepProgram:
    """Plan a captured function, and return the fastest program found.

    If the function fits as it is, at no cost, that is it. Otherwise it is planned also with its chains of row-wise ops
    run in chunks, the fastest number of chunks first, and the first of these plans that fits is compared.

    Args:
        step: a `FunctionStep`.
        captured: its capture.
        settings: the budget, and how a plan is searched. A budget in percent is of the function's own peak.
        plan: a plan made before, with or without chunks, used instead of searching.
        store: for host copies.

    Raises:
        InfeasibleBudgetError, TimeLimitError: no plan was found; of all forms of the function, the error of the one
            that came closest.
        HostMemoryError, PlanMismatchError: as `make_step_program`.
    """
    if plan is not None:
        return _given(step, captured, settings, plan, store)
    if not settings.is_in_bytes and settings.whole_bytes is None:
        device = settings.device or local_device(captured.binding.device)
        settings = settings.of_whole(unplanned_peak_bytes(with_costs(captured, settings).graph, device))
    best: StepProgram | None = None
    errors: list[InfeasibleBudgetError | TimeLimitError] = []
    try:
        best = make_step_program(step, captured, settings, None, store)
        if best.plan.overhead <= 0:
            return best
    except (InfeasibleBudgetError, TimeLimitError) as error:
        errors.append(error)
    costed = [with_costs(chunked, settings) for chunked in _forms(captured, settings)]
    for chunked in sorted(costed, key=_seconds):
        if best is not None and best.plan.predicted.seconds <= _seconds(chunked):
            break
        try:
            return make_step_program(step, chunked, settings, None, store)
        except (InfeasibleBudgetError, TimeLimitError) as error:
            errors.append(error)
    if best is None:
        raise min(errors, key=lambda error: error.least_budget_found_bytes or error.least_budget_bound_bytes)
    return best


def _given(step: TrainingStep, captured: Captured, settings: Settings, plan: Plan, store: HostStore) -> StepProgram:
    """Return the program of a given plan, in the form of the function that it was made for."""
    first: PlanMismatchError | None = None
    for form in (captured, *_forms(captured, settings)):
        try:
            return make_step_program(step, form, settings, plan, store)
        except PlanMismatchError as error:
            first = first or error
    assert first is not None
    raise first


def _forms(captured: Captured, settings: Settings) -> Iterator[Captured]:
    """Yield the function with its chains in chunks, by number of chunks, as far as they give the same bits."""
    settings.on_stage("cutting chains of ops into chunks of rows")
    for count in COUNTS:
        chunked = in_row_chunks(captured, count)
        if chunked is None:
            return
        yield chunked


def _seconds(captured: Captured) -> float:
    return sum(op.seconds for op in captured.graph.ops)
