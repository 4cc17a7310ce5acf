"""Optimizer's state that is on the host between steps: eager's bits, within budgets that nothing else keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import InfeasibleBudgetError, NoPlanError
from memfit.memory.kept_on_host import is_kept_on_host
from memfit.plan import Plan
from memfit.step.planned_step import PlannedStep

WIDTH, LAYERS = 128, 6
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
HOST = "64MiB"
Batch = tuple[torch.Tensor, torch.Tensor]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters),
    "radam": lambda parameters: torch.optim.RAdam(parameters),
    "adamax": lambda parameters: torch.optim.Adamax(parameters),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2], "lr": 0.1}]
    ),
}


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def make_batch(rows: int = 16, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


class Pair:
    """A planned loop, and the same loop in eager PyTorch."""

    def __init__(self, name: str = "adamw", budget: int | str = 0, **options: Any) -> None:
        self.model, self.eager = make_model(), make_model()
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.eager_optimizer = OPTIMIZERS[name](list(self.eager.parameters()))
        self.clip_norm = options.get("clip_norm")
        options = {"host_budget": HOST, "time_limit_seconds": 1.0, **options}
        step = memfit.fit(self.model, loss, make_batch(), optimizer=self.optimizer, budget=budget, **options)
        assert isinstance(step, PlannedStep)
        self.step = step

    def train(self, steps: int = 3, rows: int = 16) -> None:
        for number in range(steps):
            batch = make_batch(rows, number)
            planned = self.step(batch)
            eager = loss(self.eager, batch)
            eager.backward()
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.eager.parameters(), self.clip_norm)
            self.eager_optimizer.step()
            self.eager_optimizer.zero_grad()
            assert torch.equal(planned, eager.detach())
        self.check_same()

    def check_same(self) -> None:
        mine, theirs = self.optimizer.state_dict(), self.eager_optimizer.state_dict()
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            assert mine["state"][number].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(mine["state"][number][key]), torch.as_tensor(value)), key
        for one, other in zip(self.model.parameters(), self.eager.parameters(), strict=True):
            assert torch.equal(one, other)

    @property
    def on_host(self) -> int:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(is_kept_on_host(value) for value in states if isinstance(value, torch.Tensor))


def below_its_state(count: int = 2) -> int:
    """A budget into which the parameters and `count` states of each do not fit together."""
    return int((1 + 0.9 * count) * PARAMETER_BYTES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_eagers_and_the_budget_is_kept(name: str) -> None:
    count = {"amsgrad": 3, "rmsprop": 3, "adagrad": 1}.get(name, 2)
    pair = Pair(name, below_its_state(count))
    pair.train()
    assert pair.on_host >= LAYERS
    pair.step.verify()
    measured = pair.step.measure(repeats=1)
    assert measured.peak_bytes <= pair.step.plan.predicted.peak_bytes <= below_its_state(count)
    assert measured.baseline_peak_bytes is not None
    assert measured.baseline_peak_bytes > (1 + count) * PARAMETER_BYTES  # eager has all of its state on the device
    assert not pair.step.corrections
    pair.train(1)


def test_without_a_host_budget_there_is_no_such_plan() -> None:
    with pytest.raises(NoPlanError):
        Pair("adamw", below_its_state(), host_budget=0)


def test_a_step_that_fits_keeps_its_state_on_the_device() -> None:
    pair = Pair("adamw", "100%")
    pair.train()
    assert pair.on_host == 0


def test_a_host_budget_that_is_too_small_leaves_states_on_the_device() -> None:
    with pytest.raises(NoPlanError):
        Pair("adamw", below_its_state(), host_budget=WIDTH * WIDTH * 4)


def test_clipped_gradients_are_updated_in_parts() -> None:
    """Parameters, all gradients and all states would be three more times the parameters' bytes."""
    pair = Pair("groups", int(2.9 * PARAMETER_BYTES), clip_norm=0.01)
    pair.train()
    assert pair.on_host >= LAYERS
    updates = [op.name for op in pair.step.plan.graph.ops if op.target == "optimizer_update"]
    assert len(updates) > 2
    assert pair.step.measure(repeats=1).peak_bytes <= int(2.9 * PARAMETER_BYTES)


def test_state_that_was_saved_is_loaded_again() -> None:
    pair = Pair("adamw", below_its_state())
    pair.train()
    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.train(1)
    pair.optimizer.load_state_dict(saved)
    pair.eager_optimizer.load_state_dict(copy.deepcopy(saved))
    pair.eager.load_state_dict(pair.model.state_dict())
    pair.train(2)
    assert pair.on_host >= LAYERS


def test_training_that_has_begun_goes_on() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss(model, make_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    budget_bytes = below_its_state(1)
    step = memfit.fit(model, loss, make_batch(), optimizer=optimizer, budget=budget_bytes, host_budget=HOST)
    assert isinstance(step, PlannedStep)
    step.verify()
    assert step.measure(repeats=1).peak_bytes <= budget_bytes
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p.dim() > 1]
    assert sum(map(is_kept_on_host, momenta)) >= LAYERS // 2  # half of them, or all: what the search finds faster


def test_state_that_torch_makes_in_the_first_update_is_not_there_yet() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(InfeasibleBudgetError):
        memfit.fit(model, loss, make_batch(), optimizer=optimizer, budget=below_its_state(1), host_budget=HOST)


def test_batches_of_other_sizes_have_other_plans() -> None:
    pair = Pair("adamw", below_its_state())
    for rows in (16, 40, 16, 8):
        pair.train(2, rows)
    assert len(pair.step.plans) == 3


def test_a_plan_is_kept_in_a_file(tmp_path: Path) -> None:
    pair = Pair("adamw", below_its_state())
    pair.step.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    again = Pair("adamw", below_its_state(), plan=plan)
    again.train()
    assert again.on_host >= LAYERS
    assert again.step.plan.schedule == plan.schedule


def test_a_step_that_is_interrupted_leaves_a_state_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("adamw", below_its_state())
    pair.train()
    with monkeypatch.context() as patch:
        calls = 0

        def interrupted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
            return whole(*args)

        whole = torch.optim.AdamW._init_group
        patch.setattr(torch.optim.AdamW, "_init_group", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.step(make_batch())
    pair.eager.load_state_dict(pair.model.state_dict())
    pair.eager_optimizer.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    pair.train(2)
    assert pair.on_host >= LAYERS
