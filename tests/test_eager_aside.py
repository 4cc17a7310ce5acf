"""Eager mode is off in backward passes and updates on a CPU: bits and budget hold whatever runs there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from eager_loops import CPU, Trained, mlp, mlp_loss
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.eager_mode.contents import Contents
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.errors import OverBudgetError
from memfit.system.recorder import allocated_bytes, record
from memfit.torch_private.autograd import RUNS_BACKWARD, has_modes

Step = Callable[[nn.Module, torch.optim.Optimizer, int], float]
STEPS = 4


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def trained(
    step: Step, optimizer: Callable[[nn.Module], torch.optim.Optimizer], budget: int | None
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Train for some steps, and return losses, parameters, and the report or the peak."""
    torch.manual_seed(0)
    model = mlp()
    updates = optimizer(model)
    torch.manual_seed(1)
    if budget is None:
        with record(CPU) as usage:
            losses = [step(model, updates, number) for number in range(STEPS)]
        return losses, [each.detach() for each in model.parameters()], usage.peak_bytes
    with memfit.eager(model, budget=bytes_of_tensors(CPU) + budget) as block:
        losses = [step(model, updates, number) for number in range(STEPS)]
    return losses, [each.detach() for each in model.parameters()], block.report()


def check_same_within(
    step: Step, share: float, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum, *, again: bool = True
) -> None:
    """Compare a loop with and without a budget, bit by bit."""
    allocated_bytes(CPU)
    trained(step, optimizer, None)
    gc.collect()
    losses, state, peak_bytes = trained(step, optimizer, None)
    gc.collect()
    found, mine, report = trained(step, optimizer, int(share * peak_bytes))
    assert found == losses
    assert all(torch.equal(one, other) for one, other in zip(state, mine, strict=True))
    assert report.peak_bytes <= report.budget_bytes, report
    assert (report.made_again > 0) == again, report


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = mlp_loss(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Looks(torch.autograd.Function):
    """Notes whether modes are on in backward."""

    found: list[bool]

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        Looks.found.append(has_modes())
        return gradients[0]


class LooksToo(torch.optim.SGD):
    """Notes whether modes are on in an update, and fails if it is told to."""

    found: list[bool]
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        LooksToo.found.append(has_modes())
        if self.fails:
            raise ValueError("of the update")
        return super().step(closure)


def looking(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = Looks.apply(mlp_loss(model, number))
    loss.backward()  # pyright: ignore
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # pyright: ignore


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    for kind in (torch.optim.SGD, LooksToo, torch.optim.LBFGS):  # which torch changes for the first object
        kind([torch.zeros(1)], lr=0.1)
    Looks.found, LooksToo.found = [], []
    function: Any = torch.autograd.function.BackwardCFunction

    def patched() -> list[Any]:
        steps = [torch.optim.SGD.step, LooksToo.step, torch.optim.LBFGS.step]
        hooks = [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook]
        return [*steps, *hooks, function.apply]

    before = patched()
    yield
    assert patched() == before
    assert torch.autograd._engine_run_backward is RUNS_BACKWARD  # pyright: ignore
    assert not has_modes()


def test_the_mode_is_off_in_backward_and_in_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    unpack = Contents.unpack

    def looks(self: Contents, saved: Any) -> torch.Tensor:
        seen.append(has_modes())
        return unpack(self, saved)

    monkeypatch.setattr(Contents, "unpack", looks)
    check_same_within(looking, 0.6, lambda model: LooksToo(model.parameters(), lr=0.01))
    assert seen and not any(seen)
    assert Looks.found == [False] * 2 * STEPS + [True] * STEPS  # what its code writes to is seen
    assert LooksToo.found == [False] * 2 * STEPS + [True] + [False] * (STEPS - 1)  # the first update of a class is seen


@pytest.mark.parametrize("inside", [False, True])
def test_updates_that_a_scheduler_counts(inside: bool) -> None:
    model = mlp()
    optimizer = LooksToo(model.parameters(), lr=0.01)
    schedulers = [] if inside else [torch.optim.lr_scheduler.ConstantLR(optimizer)]
    before = vars(optimizer).get("step")
    with memfit.eager(model, budget=bytes_of_tensors(CPU) + (8 << 20)):
        for number in range(3):
            plain(model, optimizer, number)
            for scheduler in schedulers:
                scheduler.step()
            schedulers = schedulers or [torch.optim.lr_scheduler.ConstantLR(optimizer)]
    assert LooksToo.found == [True, False, False]
    assert inside or vars(optimizer).get("step") is before
    plain(model, optimizer, 3)
    assert LooksToo.found == [True, False, False, False]


def test_the_mode_stays_on_where_hooks_of_parameters_may_write() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        next(iter(model.parameters())).register_hook(lambda gradient: gradient * 0.5)
        return LooksToo(model.parameters(), lr=0.01)

    check_same_within(looking, 0.6, optimizer)
    assert Looks.found[-STEPS:] == [True] * STEPS


@pytest.mark.parametrize("is_on_module", [False, True])
def test_the_mode_stays_on_where_hooks_of_a_layer_that_was_added_inside_may_write(is_on_module: bool) -> None:
    shift = torch.zeros(64)

    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.gelu(super().forward(x) + shift)

    def writes(*_: Any) -> None:
        shift.add_(1)

    def train(budget: int) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model, most = nn.Sequential(*[Shifted(64, 64) for _ in range(8)], nn.Linear(64, 4)), 0
        with nullcontext() if budget == 0 else memfit.eager(model, budget=budget):
            for number in range(4):
                if number == 1:
                    model[-1] = nn.Linear(64, 4)
                    if is_on_module:
                        model[-1].register_full_backward_hook(writes)
                    else:
                        model[-1].weight.register_hook(writes)
                shift.zero_()
                with record(CPU) as usage:
                    plain(model, torch.optim.SGD(model.parameters(), lr=0.01), number)
                most = max(most, usage.start_bytes + usage.peak_bytes)
        return [each.detach() for each in model.parameters()], most

    expected, most = train(0)
    found, _ = train(most * 9 // 10)
    assert all(map(torch.equal, found, expected))


def test_parameters_that_are_updated_in_backward() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        whole = torch.optim.SGD(model.parameters(), lr=0.01)
        own = {each: torch.optim.SGD([each], lr=0.01) for each in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            own[parameter].step()  # type: ignore[index]
            own[parameter].zero_grad()  # type: ignore[index]

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(update)
        return whole

    check_same_within(plain, 0.7, optimizer)


def test_an_update_in_a_hook_of_a_result() -> None:
    """Its hook is none of a parameter's: the update is seen all the same, before it loses what contents are made of."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _number: int) -> float:
        layers: Any = model
        head = torch.optim.SGD(layers[0].parameters(), lr=0.1)
        hidden = layers[:9](torch.randn(2048, 64))

        def update(_gradient: torch.Tensor) -> None:
            with torch.no_grad():
                for each in layers[0].parameters():
                    each.grad = torch.full_like(each, 0.25)
            head.step()
            head.zero_grad()

        hidden.register_hook(update)
        loss = layers[9:](hidden).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    check_same_within(step, 0.75)


def test_a_closure_that_trains_inside_of_the_update() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _number: int) -> float:
        batch = torch.randn(2048, 64)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        return loss.item()

    check_same_within(step, 0.7, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_that_run_forward_again(use_reentrant: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _number: int) -> float:
        layers: Any = model
        hidden: Any = layers[:6](torch.randn(2048, 64))
        hidden = checkpoint(layers[6:14], hidden, use_reentrant=use_reentrant)
        loss = layers[14:](hidden).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    check_same_within(step, 0.8)


def test_gradients_of_gradients_and_a_second_backward() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _number: int) -> float:
        x = torch.randn(1024, 64, requires_grad=True)
        out = model(x).square().mean()
        out.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + gradient.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    check_same_within(step, 0.8)


def test_an_update_while_another_graph_lives() -> None:
    """Its saved tensors are made of parameters that the update writes to."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _number: int) -> float:
        layers: Any = model
        held = layers[:8](torch.randn(1024, 64))
        loss = model(torch.randn(2048, 64)).square().mean()
        loss.backward()
        biases = [layer.bias for layer in layers if isinstance(layer, nn.Linear)]
        torch.optim.SGD(biases, lr=0.01).step()
        optimizer.zero_grad()
        held.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    check_same_within(step, 0.7)


def test_gradients_that_are_added_up_and_read_in_forward() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        loss = mlp_loss(model, number)
        loss.backward()
        first: Any = next(iter(model.parameters()))
        scale = first.grad.square().sum().sqrt()
        other = mlp_loss(model, number) * scale
        other.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.item() + other.item()

    check_same_within(step, 0.7)


@pytest.mark.parametrize("where", ["backward", "update"])
def test_an_error_inside_and_the_steps_after_it(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, *_gradients: torch.Tensor) -> Any:
            raise ValueError("of backward")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        loss: Any = mlp_loss(model, number)
        optimizer.fails = number == 2 and where == "update"  # type: ignore[attr-defined]
        try:
            (Fails.apply(loss) if number == 1 and where == "backward" else loss).backward()
            optimizer.step()
        except ValueError:
            assert number in (1, 2)
        optimizer.zero_grad()
        return loss.item()

    check_same_within(step, 0.6, lambda model: LooksToo(model.parameters(), lr=0.01))


class Takes(torch.autograd.Function):
    """Takes in backward what no budget has."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.empty(1 << 24)
        return gradients[0]


def test_what_does_not_fit_is_refused_in_backward_and_in_an_update() -> None:
    loop = Trained(mlp, lambda model, number: Takes.apply(mlp_loss(model, number)))  # type: ignore[arg-type, return-value]
    allocated_bytes(CPU)
    with memfit.eager(loop.model, budget=bytes_of_tensors(CPU) + (32 << 20)):
        with pytest.raises(OverBudgetError, match=r"test_eager_aside\.py:\d+"):
            loop.step(0)
        mlp_loss(loop.model, 0).backward()  # goes on as ever

    class Large(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.state:
                torch.empty(1 << 24)
            return super().step(closure)

    model = mlp()
    optimizer = Large(model.parameters(), lr=0.1, momentum=0.9)
    with memfit.eager(model, budget=bytes_of_tensors(CPU) + (32 << 20)):
        plain(model, optimizer, 0)
        with pytest.raises(OverBudgetError, match=r"test_eager_aside\.py:\d+"):
            plain(model, optimizer, 1)


def test_calls_in_backward_end_a_calm_pass() -> None:
    """The next one is noted: what backward takes alone is seen by the record around it."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        out = model(torch.randn(8, 64)).square().mean()
        if number == 4:
            out.register_hook(lambda gradient: gradient + 0 * torch.empty(5 << 20).fill_(0).sum())
        return out

    loop = Trained(mlp, loss)
    with memfit.eager(loop.model, budget=bytes_of_tensors(CPU) + (64 << 20)) as block:
        loop.run(4)
        mode: Any = block._mode  # pyright: ignore
        assert not mode._is_noting
        loop.step(4)
        loop.step(5)
        assert mode._is_noting
