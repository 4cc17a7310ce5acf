"""`memfit.fit(..., arena=True)`: the same bits and peaks, out of laid out memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workspace import WORKSPACE, Workspace, open_workspace

import memfit
from memfit.errors import InvalidOptionError
from memfit.step.measure import resident_bytes
from memfit.system.recorder import record


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.Tanh())], nn.Linear(96, 4))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(open_workspace(batch[0])), batch[1])


def batch_of(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 96, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def fitted(model: nn.Module, *, arena: bool, with_optimizer: bool, verify: bool = True) -> memfit.PlannedStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) if with_optimizer else None
    if optimizer is not None:
        optimizer.register_step_pre_hook(WORKSPACE.close)
    step = memfit.fit(
        model,
        loss,
        batch_of(256),
        optimizer=optimizer,
        budget="95%" if with_optimizer else "115%",  # gradients that outlive the step are beside the arena
        options={"iterations": 5_000},
        arena=arena,
        verify=verify,
    )
    assert isinstance(step, memfit.PlannedStep)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_the_same_bits_from_the_arena(with_optimizer: bool) -> None:
    found: list[list[torch.Tensor]] = []
    for arena in (False, True):
        model = net()
        step = fitted(model, arena=arena, with_optimizer=with_optimizer)
        losses = [step(batch_of(256, seed)) for seed in range(5)]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([*losses, *(p.detach() for p in model.parameters()), *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert step.arena is not None
    assert step.arena.last_step.served > 10
    assert step.arena.last_step.not_served == 0
    assert step.arena.reoptimizations <= 1  # the first step makes the optimizer's state


@pytest.mark.slow
def test_the_measured_peak_has_the_arena_in_it() -> None:
    planned = fitted(net(), arena=True, with_optimizer=True)
    assert planned.arena is not None
    measured = planned.measure()
    assert measured.peak_bytes >= measured.resident_bytes + planned.arena.height_bytes
    assert measured.peak_bytes <= 1.01 * planned.plan.predicted.peak_bytes
    assert planned.arena.height_bytes <= 1.005 * planned.arena.peak_bytes


def test_every_call_is_inside_the_budget() -> None:
    planned = fitted(net(), arena=True, with_optimizer=True)
    for seed in range(5):  # recorded without and with the optimizer's state, then served
        there_before = resident_bytes(planned, batch_of(256, seed)) + planned.held_bytes
        with record("cpu") as usage:
            planned(batch_of(256, seed))
        batch_bytes = sum(tensor.nbytes for tensor in batch_of(256))  # a second one was made for the call
        assert there_before + usage.peak_bytes <= int(planned.settings.budget) + batch_bytes
    assert planned.arena is not None
    assert planned.arena.last_step.not_served == 0 < planned.arena.last_step.served
    assert not planned.corrections


def test_a_step_that_takes_more_than_its_budget_is_planned_again_with_its_arena(
    workspace: Workspace,
) -> None:
    planned = fitted(net(), arena=True, with_optimizer=True, verify=False)  # whose planned step would be the first
    asked_bytes = int(planned.settings.budget)
    spare_bytes = asked_bytes - planned.plan.predicted.peak_bytes
    workspace.bytes = spare_bytes + (64 << 10)
    batch = batch_of(256)
    for _ in range(3):
        planned(batch)
    there_before = resident_bytes(planned, batch) + planned.held_bytes
    with record("cpu") as usage:
        planned(batch)
    (correction,) = planned.corrections
    assert correction.measured_bytes > asked_bytes > planned.plan.budget_bytes == correction.aim_bytes
    assert planned.arena is not None
    assert planned.arena.last_step.not_served == 0 < planned.arena.last_step.served
    assert there_before + usage.peak_bytes <= asked_bytes


def test_batches_of_another_shape_share_the_memory() -> None:
    planned = fitted(net(), arena=True, with_optimizer=True)
    assert planned.arena is not None
    for size in (256, 128, 256, 128, 256):
        planned(batch_of(size))
    heights = sorted(plan.height_bytes for plan in planned.arena.plans.values())
    assert len(heights) >= 2
    assert planned.arena.height_bytes == heights[-1]
    assert planned.arena.last_step.not_served == 0


def test_an_arena_for_a_step_without_a_graph_is_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y * 2 if y.sum() > 0 else y

    with pytest.raises(InvalidOptionError, match="arena=True is for graphs; leave it out"):
        memfit.fit(Looks(), loss, batch_of(64), budget="64MiB", arena=True)
