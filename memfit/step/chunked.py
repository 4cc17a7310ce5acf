"""Programs and plans of iterative functions: as captured, or with chains of ops run on some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import msgspec

from memfit.capture import Captured, TrainingStep
from memfit.capture.row_chunks import COUNTS, in_row_chunks
from memfit.cost.calibration import local_device
from memfit.device import Device
from memfit.errors import NoPlanError, PlanMismatchError
from memfit.graph import Graph
from memfit.memory.host.store import HostStore
from memfit.plan import Plan, Prediction
from memfit.planners.engine.results import predict, unplanned_schedule
from memfit.planning import Settings, make_plan, make_problem
from memfit.step.prepare import with_costs
from memfit.step.step_program import StepProgram, make_step_program

Form = TypeVar("Form", Graph, Captured)
Made = TypeVar("Made")


def make_function_program(
    step: TrainingStep, captured: Captured, settings: Settings, plan: Plan | None, store: HostStore
) -> StepProgram:
    """Plan a captured function, and return the fastest program found, in the form that `fastest` finds.

    Args:
        step: a `FunctionStep`.
        captured: its capture.
        settings: the budget, and how a plan is searched. A budget in percent is of the function's own peak.
        plan: a plan made before, with or without chunks, used instead of searching.
        store: for host copies.

    Raises:
        InfeasibleBudgetError, TimeLimitError: as `fastest`.
        HostMemoryError, PlanMismatchError: as `make_step_program`.
    """

    def costed() -> Iterator[Captured]:
        settings.on_stage("cutting chains of ops into chunks of rows")
        return (with_costs(form, settings) for form in in_chunks(captured))

    if plan is not None:
        return _given(step, chain([captured], in_chunks(captured)), settings, plan, store)
    device = settings.device or local_device(captured.binding.device)
    unplanned = _unplanned(with_costs(captured, settings).graph, device, settings)
    settings = settings if settings.whole_bytes is not None else settings.of_whole(unplanned.peak_bytes)
    found = fastest(
        captured,
        costed,
        lambda form: make_step_program(step, form, settings, None, store),
        graph_of=lambda form: form.graph,
        plan_of=lambda program: program.plan,
    )
    own = msgspec.structs.replace(found.plan, unplanned=unplanned)
    return replace(found, prepared=replace(found.prepared, plan=own))


def plan_of_function(whole: Graph, others: Callable[[], Iterable[Graph]], device: Device, settings: Settings) -> Plan:
    """Return a plan of a function in the form that `fastest` finds; its unplanned figures are those of the whole.

    Args:
        whole: the function as captured, with the seconds of its ops.
        others: returns its other forms.
        device: what the plan is for.
        settings: for `make_plan`. A budget in percent is of the function's own peak.

    Raises:
        MemfitError: as `make_plan`.
    """
    unplanned = _unplanned(whole, device, settings)
    settings = settings if settings.whole_bytes is not None else settings.of_whole(unplanned.peak_bytes)
    found = fastest(
        whole,
        others,
        lambda form: make_plan(form, device, settings),
        graph_of=lambda form: form,
        plan_of=lambda plan: plan,
    )
    return msgspec.structs.replace(found, unplanned=unplanned)


def fastest(
    whole: Form,
    others: Callable[[], Iterable[Form]],
    make: Callable[[Form], Made],
    *,
    graph_of: Callable[[Form], Graph],
    plan_of: Callable[[Made], Plan],
) -> Made:
    """Return what `make` makes of the fastest form of a function whose plan fits.

    If the function fits as it is, at no cost, that is it. Otherwise its other forms are planned as well, the fastest
    first, and the first of these plans that fits is compared.

    Args:
        whole: the function as it is.
        others: returns its other forms, with the seconds of their ops.
        make: plans a form.
        graph_of: returns the graph of a form.
        plan_of: returns the plan of a result of `make`.

    Raises:
        NoPlanError: no form has a plan that fits; the error of the one that came closest.
    """
    best: Made | None = None
    errors: list[NoPlanError] = []
    try:
        best = make(whole)
        if plan_of(best).overhead <= 0:
            return best
    except NoPlanError as error:
        errors.append(error)
    for form in sorted(others(), key=lambda form: seconds_of(graph_of(form))):
        if best is not None and plan_of(best).predicted.seconds <= seconds_of(graph_of(form)):
            break
        try:
            return make(form)
        except NoPlanError as error:
            errors.append(error)
    if best is None:
        raise min(errors, key=lambda error: error.least_budget_found_bytes or error.least_budget_bound_bytes)
    return best


def in_chunks(captured: Captured, *, is_run: bool = True) -> Iterator[Captured]:
    """Yield a function with its chains in chunks, by number of chunks.

    Args:
        captured: the function.
        is_run: whether chains are run here, and only those are cut that give the same bits.
    """
    for count in COUNTS:
        chunked = in_row_chunks(captured, count, is_run=is_run)
        if chunked is None:
            return
        yield chunked


def seconds_of(graph: Graph) -> float:
    """Return the seconds of all ops of a graph."""
    return sum(op.seconds for op in graph.ops)


def _given(
    step: TrainingStep, forms: Iterable[Captured], settings: Settings, plan: Plan, store: HostStore
) -> StepProgram:
    """Return the program of a given plan, in the form of the function that it was made for."""
    first: PlanMismatchError | None = None
    for form in forms:
        try:
            return make_step_program(step, form, settings, plan, store)
        except PlanMismatchError as error:
            first = first or error
    assert first is not None
    raise first


def _unplanned(graph: Graph, device: Device, settings: Settings) -> Prediction:
    problem = make_problem(graph, device, settings)
    return predict(problem, unplanned_schedule(problem))
