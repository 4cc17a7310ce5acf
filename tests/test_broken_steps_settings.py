"""Settings of steps with graph breaks reach their graphs: arenas, host budgets, planners and their options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_broken_steps import CPU, Choosing, Looking, Twice, batch_of, least_budget, planned_within, pytestmark, step_of
from torch import nn

from memfit.runtime.measure import measured_eager_peak
from memfit.runtime.parts import PartlyPlannedStep
from memfit.runtime.state import StepState

__all__ = ["pytestmark"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def planned_step(kind: type[nn.Module], share: float, **settings: Any) -> PartlyPlannedStep:
    torch.manual_seed(0)
    step = step_of(kind(), batch_of(512, shift=1.0))
    return planned_within(step, int(share * measured_eager_peak(step, CPU)), **settings)


@pytest.mark.parametrize("kind", [Looking, Twice])
def test_an_arena_counts_in_full_and_serves_the_halves(kind: type[nn.Module]) -> None:
    planned = planned_step(kind, 0.75, arena=True)
    planned.verify()
    assert planned.arena is not None
    assert planned.arena.last_step.served > 0
    assert planned.arena.counts.not_served == 0
    assert planned.held_bytes == planned.arena.height_bytes > 0
    assert planned.measure(repeats=2).peak_bytes <= int(planned.settings.budget)


@pytest.mark.slow
def test_the_least_budget_with_an_arena_works() -> None:
    torch.manual_seed(0)
    step = step_of(Looking(), batch_of(512))
    named = least_budget(step, arena=True).least_budget_found_bytes
    assert named is not None
    planned = planned_within(step, named, arena=True)
    planned.verify()
    assert planned.measure(repeats=2).peak_bytes <= named


def test_a_new_branch_gets_a_place_in_the_arena() -> None:
    batches = [batch_of(256, shift=shift) for shift in (1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0)]
    states: list[StepState] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        step = step_of(Choosing(), batches[0])
        run: Any = planned_within(step, "90%", arena=True) if is_planned else step.run_eager
        for batch in batches:
            run(batch)
        states.append(StepState.take(step))
    assert states[0].first_difference(states[1]) is None
    assert run.arena.last_step.recorded == run.arena.counts.not_served == 0


def test_the_planner_that_is_named_makes_the_plans() -> None:
    planned = planned_step(Looking, 1.0, planner="none", options={})
    assert {plan.planner for plan in planned.plans} == {"none"}
