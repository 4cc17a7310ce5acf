"""Plans that offload, run on a CPU: the same bits, and never more on the device than was predicted.

A CPU's memory is its host's own, so that the recorder counts the host's copies beside the device's.
"""

from __future__ import annotations

import msgspec
import pytest
from devices import linked
from planned_steps import small_step

from memfit.errors import UnsupportedStepError
from memfit.plan import Plan, Problem
from memfit.planners.offload import OffloadPlanner
from memfit.planning import Settings
from memfit.runtime.step import PlannedStep, fit_step
from memfit.schedule import Code

LINKED = linked(2e9, 2e9, alignment_bytes=64)


def offloading_plan(step: PlannedStep, share: float) -> Plan:
    """A plan with all that fits on the host, at `share` of the way from the unplanned peak down to what is least."""
    graph = step.captured.graph
    graph = msgspec.structs.replace(graph, ops=[msgspec.structs.replace(op, seconds=1e-3) for op in graph.ops])
    most, least = step.plan.unplanned.peak_bytes, step.plan.bounds.least_budget_bound_bytes
    task = Problem(
        graph=graph,
        device=LINKED,
        budget_bytes=int(most - share * (most - least)),
        host_budget_bytes=1 << 40,
    )
    plan = OffloadPlanner(iterations=20_000, rematerialize=False).plan(task).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("name", ["cnn", "unet", "transformer", "lstm"])
def test_a_plan_that_offloads_gives_the_same_bits(name: str) -> None:
    first = fit_step(small_step(name), Settings(budget="100%", planner="none"))
    assert isinstance(first, PlannedStep)
    plan = offloading_plan(first, 0.3)
    assert (plan.schedule.codes == Code.PREFETCH).sum() > 0
    step = small_step(name)
    planned = fit_step(step, Settings(budget=plan.budget_bytes, device=LINKED), plan=plan)
    assert isinstance(planned, PlannedStep)
    planned.verify()
    measured = planned.measure(repeats=1)
    assert measured.peak_bytes <= plan.predicted.peak_bytes + plan.predicted.host_peak_bytes
    assert ".prefetch()" in planned.source and ".arrived()" in planned.source


def test_a_host_budget_for_a_step_on_the_cpu_is_refused() -> None:
    for device in (None, LINKED):
        with pytest.raises(UnsupportedStepError, match="frees nothing"):
            fit_step(small_step("cnn"), Settings(budget="90%", host_budget_bytes=1 << 20, device=device))
