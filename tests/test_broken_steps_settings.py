"""Settings of steps with graph breaks reach their graphs: arenas, host budgets, planners and their options."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import linked
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


def planned_step(kind: type[nn.Module], share: float, *, rows: int = 512, **settings: Any) -> PartlyPlannedStep:
    torch.manual_seed(0)
    step = step_of(kind(), batch_of(rows, shift=1.0))
    return planned_within(step, int(share * measured_eager_peak(step, CPU)), **settings)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Looking, Twice])
def test_graphs_share_a_host_budget(kind: type[nn.Module]) -> None:
    host_bytes, fast = 64 << 20, linked(1e13, 1e13, alignment_bytes=64)
    copying = {"planner": "offload", "options": {"rematerialize": False, "iterations": 500}}
    planned = planned_step(kind, 0.65, rows=2048, host_budget_bytes=host_bytes, device=fast, **copying)
    planned.verify()
    assert planned.measure(repeats=1).peak_bytes <= int(planned.settings.budget)
    assert sum(plan.offloaded_bytes for plan in planned.plans) > 0
    assert sum(plan.predicted.host_peak_bytes for plan in planned.plans) <= host_bytes


@pytest.mark.slow
def test_layers_of_one_kind_have_room_for_all_their_calls() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result = hidden + self.inner(hidden)
            if result.sum().item() > 1e30:
                raise ValueError("the values explode")
            return result

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(6))
            self.last = nn.Linear(32, 5)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(hidden)
            return self.last(hidden)

    planned = planned_step(Layers, 0.8)
    planned.verify()
    used = planned.measure(repeats=1).peak_bytes / int(planned.settings.budget)
    assert 0.8 < used <= 1.0
    assert 0.0 < max(plan.overhead for plan in planned.plans) < 0.2


def test_the_sizes_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.runtime.parts.MOST_OPS", 150)
    sizes = (16, 18, 20, 22, 24, 26, 28, 16, 18)
    torch.manual_seed(0)
    model, kept = Looking(count=2), list[int]()
    twin = copy.deepcopy(model)
    eager = step_of(twin, batch_of(16))
    planned = planned_within(step_of(model, batch_of(16)), "1GiB")
    for rows in sizes:
        planned(batch_of(rows))
        eager.run_eager(batch_of(rows))
        eager.update()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        kept.append(sum(len(graph.compiled) for graph in planned._graphs))
        assert len(planned.plans) <= kept[-1]
    assert max(kept) == kept[3] < 18, kept  # it grows no more
