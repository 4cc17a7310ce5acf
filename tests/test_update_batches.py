"""Updates of many parameters at once: eager's bits, few calls, little memory, and costs that were measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit import TrainingStep
from memfit.capture import capture, update_trial
from memfit.capture.finish import finish
from memfit.capture.optimizer import ParameterUpdate, updates_many_at_once
from memfit.cost.measurement import measure
from memfit.doors.step import fit_step
from memfit.memory.snapshot import StepState
from memfit.planning import Settings
from memfit.step.planned_step import PlannedStep

WIDTH, LAYERS = 24, 8
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, foreach=True),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": (own := list(p))[::2], "lr": 0.1}, {"params": own[1::2], "weight_decay": 0.0}],
        lr=0.01,
        foreach=True,
    ),
}


def step_with(make: Callable[[Any], torch.optim.Optimizer]) -> TrainingStep:
    torch.manual_seed(0)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4000))  # the last gradient is most of all bytes
    batch = torch.randn(32, WIDTH), torch.randint(0, 4000, (32,))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return TrainingStep(model=model, loss=loss, batch=batch, optimizer=make(model.parameters()))


def updates_of(step: TrainingStep) -> list[ParameterUpdate]:
    return [call.target for call in capture(step).binding.calls if isinstance(call.target, ParameterUpdate)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_steps_have_eagers_bits(name: str) -> None:
    step, eager = step_with(MAKERS[name]), step_with(MAKERS[name])
    planned = fit_step(step, Settings(budget="100%", planner="none"))
    assert isinstance(planned, PlannedStep)
    for _ in range(3):
        assert torch.equal(planned(step.batch), eager.run_eager(eager.batch))
    assert StepState.take(eager).first_difference(StepState.take(step)) is None
    planned.verify()


@pytest.mark.parametrize("name", MAKERS)
def test_few_gradients_wait_for_one_another(name: str) -> None:
    step = step_with(MAKERS[name])
    parameters = list(step.model.parameters())
    whole_bytes = sum(parameter.nbytes for parameter in parameters)
    updates = updates_of(step)
    updated = [parameter for update in updates for parameter in update.parameters]
    assert sorted(map(id, updated)) == sorted(map(id, parameters)), "each once"
    assert len(updates) <= len(parameters) / 2
    assert all(sum(p.nbytes for p in update.parameters[:-1]) <= whole_bytes / 12 for update in updates)
    assert step.optimizer is not None
    for update in updates:
        assert {*map(id, update.parameters)} <= {*map(id, step.optimizer.param_groups[update.group]["params"])}


def test_updates_that_loop_over_parameters_stay_apart() -> None:
    for foreach in (None, False):
        step = step_with(lambda p, foreach=foreach: torch.optim.AdamW(p, foreach=foreach))
        assert len(updates_of(step)) == len(list(step.model.parameters()))


def test_a_gpus_default_is_many_at_once() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    chosen: dict[str, Any] = {"foreach": None, "fused": None}
    assert not updates_many_at_once(chosen, cpu)
    assert updates_many_at_once(chosen, cuda)
    assert not updates_many_at_once(chosen | {"foreach": False}, cuda)
    assert updates_many_at_once(chosen | {"fused": True}, cpu)
    assert not updates_many_at_once(chosen | {"differentiable": True}, cuda)
    assert not updates_many_at_once({}, cuda), "SparseAdam has no such setting"


@pytest.mark.parametrize("name", ["adamw foreach", "sgd fused"])
def test_updates_cost_what_they_were_measured_to_take_and_are_measured_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_with(MAKERS[name])
    before = StepState.take(step)
    first = finish(capture(step))
    graph = measure(first.graph, first.binding, first.observed)
    updates = [op for op, call in zip(graph.ops, first.binding.calls, strict=True) if update_trial.is_update(call)]
    assert all(op.seconds > 1e-6 for op in updates)
    assert before.first_difference(StepState.take(step)) is None

    def again(*_given: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(update_trial, "trial_of", again)
    assert step.optimizer is not None
    step.optimizer.param_groups[0]["lr"] = 0.003  # a scheduler's doing
    second = finish(capture(step))
    assert measure(second.graph, second.binding, second.observed) == graph
    with pytest.raises(AssertionError, match="measured again"):
        finish(capture(step_with(lambda p: torch.optim.AdamW(p, weight_decay=0.0, foreach=True))))


def test_a_trial_of_an_update_runs_no_hook_on_all_optimizers() -> None:
    seen: list[torch.optim.Optimizer] = []
    handles = [
        register(lambda optimizer, *_: seen.append(optimizer))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        step = step_with(lambda p: torch.optim.AdamW(p, foreach=True))
        finish(capture(step))
        finish(capture(step_with(lambda p: torch.optim.NAdam(p))))
        assert seen == []
        step.run_eager(step.batch)
        assert seen == [step.optimizer] * 2
    finally:
        for handle in handles:
            handle.remove()
