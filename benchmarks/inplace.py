"""What writing over inputs that die saves: the measured peak of each workload's step, without and with it.

Three times over the same graph: with every result in a storage of its own; with what torch's schemas promise
(activations, pointwise arithmetic, sums of gradients); and with what was seen to give the same bits on this device
besides (the softmax family). Each is run unplanned (planner `none`), and planned at the least budget that the default
planner finds for it. Peaks are measured by the recorder, above what is resident, and each step is compared with eager
bit by bit.

A step gains only where its peak lies at an op that may write over an input. Peaks of CNNs lie at a convolution's
backward or at a matrix product, planned or not: these may not, and the activation after them reads their inputs.

    python benchmarks/inplace.py
    python benchmarks/inplace.py gpt2 encoder
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch
from _measure import EIGHT, MIB, outcome, resident_bytes, same_bits, usage_of
from _planned import NO_BUDGET_BYTES, build_for_measurement, eager_run, planned_run
from _process import answer_if_child, fresh_cache, in_fresh_process
from _record import store

from memfit import TrainingStep
from memfit.binding import Binding
from memfit.capture import Captured
from memfit.cost.calibration import local_device
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError
from memfit.graph import Graph, Op
from memfit.plan import Plan
from memfit.planning import Settings, make_plan
from memfit.schedule import Compute
from memfit.simulate import simulate
from memfit.step.planned_step import PlannedStep

CHILD_SECONDS = 1800
VARIANTS = ("apart", "promised", "seen")
SETTINGS = Settings(budget=NO_BUDGET_BYTES, planner="none")
LEAST_SECONDS = 10.0  # of search for the least budget of a variant


def measure(workload: str) -> dict[str, Any]:
    """Measure the step of a workload eagerly and under each variant; called in a process of its own."""
    step = build_for_measurement(workload, {})
    eager = eager_run(step)
    eager()
    result: dict[str, Any] = {"workload": workload, "eager_peak_bytes": usage_of(eager, step).peak_bytes}
    step.model.zero_grad(set_to_none=True)  # a step that finds gradients is another one
    planned = fit_step(step, SETTINGS)
    assert isinstance(planned, PlannedStep)
    captured = planned.captured
    for variant in VARIANTS:
        graph = allowing(captured.graph, captured.binding, variant)
        allowed = replace(captured, graph=graph)
        plans = {"unplanned": plan_within(allowed, SETTINGS), "least": least_plan(allowed, resident_bytes(step))}
        result[variant] = {what: _measured(step, plan, eager) for what, plan in plans.items()}
    return result


def plan_within(captured: Captured, settings: Settings) -> Plan:
    """Return a plan of a captured step for the device that it was captured on."""
    return make_plan(captured.graph, local_device(captured.binding.device), settings)


def least_plan(captured: Captured, resident: int) -> Plan:
    """Return the plan of the least budget that the default planner finds, from `resident` bytes up."""
    settings = Settings(budget=resident + 1, time_limit_seconds=LEAST_SECONDS)
    try:
        return plan_within(captured, settings)
    except InfeasibleBudgetError as error:
        if error.least_budget_found_bytes is None:
            raise
        return plan_within(captured, replace(settings, budget=error.least_budget_found_bytes))


def allowing(graph: Graph, binding: Binding, variant: str) -> Graph:
    """Return `graph` with the `reuses` of a variant only."""

    def allowed(op: Op) -> tuple[tuple[int, int], ...]:
        forms = binding.calls[op.id].in_place_forms
        return tuple(
            pair for pair in op.reuses if variant == "seen" or (variant == "promised" and forms[pair[0]].promised)
        )

    return msgspec.structs.replace(
        graph, ops=tuple(msgspec.structs.replace(op, reuses=allowed(op)) for op in graph.ops)
    )


def _measured(step: TrainingStep, plan: Plan, eager: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Measure a step under a plan and compare it with eager."""
    step.model.zero_grad(set_to_none=True)
    planned = fit_step(step, replace(SETTINGS, budget=plan.budget_bytes), plan=plan)
    assert isinstance(planned, PlannedStep)
    run = planned_run(planned)
    run()
    usage = usage_of(run, step)
    return {
        "peak_bytes": usage.peak_bytes,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "taken_over": sum(isinstance(i, Compute) and i.in_place_of is not None for i in plan.schedule),
        "at_peak": _at_peak(plan),
        **same_bits(outcome(run, step), outcome(eager, step)),
    }


def _at_peak(plan: Plan) -> str:
    """The operator that the predicted peak lies at."""
    position = int(simulate(plan.graph, plan.schedule, plan.device).device_bytes.argmax())
    instruction = list(plan.schedule)[position]
    assert isinstance(instruction, Compute)
    return plan.graph.ops[instruction.op].target


def measure_workload(workload: str) -> None:
    """Measure a workload, print what was found and store it."""
    result = in_fresh_process(__file__, {"workload": workload}, timeout_seconds=CHILD_SECONDS)
    if "error" in result:
        raise SystemExit(f"{workload}: {result['error']}")
    store(f"inplace/{workload}", result)
    print(f"{workload}: eager {result['eager_peak_bytes'] / MIB:.1f} MiB above residents")
    for variant in VARIANTS:
        for what, found in result[variant].items():
            differing = found["first_difference"]
            bits = "same bits" if differing is None else f"differs first in {differing}"
            peak = f"{found['peak_bytes'] / MIB:8.1f} MiB at {found['at_peak']}"
            print(f"  {variant:9} {what:9} {peak}, {bits}", flush=True)


def main() -> None:
    """Measure the workloads named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(EIGHT), metavar="WORKLOAD")
    with fresh_cache():
        for workload in parser.parse_args().workloads:
            measure_workload(workload)


if __name__ == "__main__" and not answer_if_child(measure):
    main()
