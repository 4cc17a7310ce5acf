"""Updates in several calls have the bits of one call, and take less."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import memfit
from memfit.step.divided_updates import DividedUpdates
from memfit.system.recorder import record

CPU = torch.device("cpu")
Optimizer = torch.optim.Optimizer


@pytest.fixture(autouse=True, scope="module")
def _recorder() -> None:
    with record("cpu"):  # which does not count what is older
        pass


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(24)], torch.nn.BatchNorm1d(64))


@contextmanager
def divided(left: float | None = None) -> Iterator[DividedUpdates]:
    updates = DividedUpdates(CPU, lambda: left)
    try:
        yield updates
    finally:
        updates.remove()


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:11]}, {"params": parameters[11:], "lr": 3e-3}]


def of(kind: type[Optimizer], **options: Any) -> Callable[[torch.nn.Module], Optimizer]:
    return lambda model: kind(two_groups(model), foreach=True, **options)  # type: ignore[call-arg]


MANY = {
    "adadelta": of(torch.optim.Adadelta, weight_decay=0.1),
    "adafactor": of(torch.optim.Adafactor),
    "adagrad": of(torch.optim.Adagrad, lr_decay=0.1),
    "adam": of(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "adamax": of(torch.optim.Adamax),
    "adamw": of(torch.optim.AdamW),
    "asgd": of(torch.optim.ASGD),
    "nadam": of(torch.optim.NAdam),
    "radam": of(torch.optim.RAdam),
    "rmsprop": of(torch.optim.RMSprop, momentum=0.9, centered=True),
    "rprop": of(torch.optim.Rprop),
    "sgd": of(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
}


def trained(make: Callable[[torch.nn.Module], Optimizer], how: str = "") -> tuple[list[torch.Tensor], list[int]]:
    """Return the tensors of a model and its optimizer after four steps, and what each update took."""
    model = model_of()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    groups, state = optimizer.param_groups, optimizer.state
    members = [[*group["params"]] for group in groups]
    seen: list[str] = []
    if how == "hooks":

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda mine, *_: seen.append(type(mine).__name__))
    torch.manual_seed(1)
    taken: list[int] = []
    for number in range(4):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            return loss

        if number == 2:
            model[3].weight.requires_grad_(False)
        if how == "closure":
            loss = optimizer.step(closure)
            assert loss is not None and loss.item() > 0
        else:
            closure()
            with record("cpu") as usage:
                assert optimizer.step() is None
            taken.append(usage.most_live_bytes - usage.end_bytes)
        scheduler.step()
    assert optimizer.param_groups is groups and optimizer.state is state
    assert all(
        each is mine
        for group, was in zip(groups, members, strict=True)
        for each, mine in zip(group["params"], was, strict=True)
    )
    assert len(seen) == (4 if how == "hooks" else 0)
    kept = [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [*model.state_dict().values(), *kept], taken


@pytest.mark.parametrize("how", ["", "hooks", "closure"])
@pytest.mark.parametrize("name", MANY)
def test_an_update_in_parts_has_the_bits_of_one_call_and_takes_less(name: str, how: str) -> None:
    whole, at_once = trained(MANY[name], how)
    with divided():
        parts, taken = trained(MANY[name], how)
    assert len(whole) == len(parts) and all(map(torch.equal, whole, parts))
    if name not in ("adafactor", "asgd") and not how:  # in these, what is temporary is small or becomes the state
        assert max(taken) < 0.5 * max(at_once)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: torch.optim.AdamW(model.parameters()), id="a call for each parameter"),
        pytest.param(lambda model: torch.optim.AdamW(model.parameters(), fused=True), id="fused"),
        pytest.param(lambda model: torch.optim.LBFGS(model.parameters()), id="all at once"),
        pytest.param(lambda model: Own(model.parameters(), foreach=True), id="of the user"),
    ],
)
def test_other_optimizers_step_as_they_are(make: Callable[[torch.nn.Module], Optimizer]) -> None:
    model = model_of()
    optimizer = make(model)
    given: list[Any] = []
    optimizer.register_step_post_hook(lambda _, args, named: given.append((args, named)))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        return loss

    with divided():
        optimizer.step(closure)
    assert given[0][0][0] is optimizer


class Own(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_update_with_room_is_one_call() -> None:
    with divided(left=math.inf) as updates:
        trained(MANY["adamw"])
        assert updates.more_bytes == 0
    with divided() as updates:
        trained(MANY["adamw"])
        assert updates.more_bytes > 0


def test_an_error_in_a_part_leaves_the_optimizer_as_it_was() -> None:
    model = model_of()
    optimizer = MANY["adamw"](model)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.state[model[5].weight]["step"] = None
    groups = [[*group["params"]] for group in optimizer.param_groups]
    with divided(), pytest.raises((TypeError, KeyError)):
        optimizer.step()
    assert [[*group["params"]] for group in optimizer.param_groups] == groups


def large(door: str, budget: str | int = 0) -> tuple[list[Any], list[int], Any]:
    """Train a model of which the update takes the most; return its numbers, peaks, and memfit's report."""
    gc.collect()
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(16)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    handle = memfit.checkpoint(model, budget) if door == "checkpoint" else None
    called, block = model, nullcontext()
    if door == "compile":
        called = memfit.compile(model, budget=budget)
    elif door == "compile, optimizer":
        called = memfit.compile(model, budget=budget, optimizer=optimizer)
    elif door == "backend":
        called = torch.compile(model, backend="memfit", options={"budget": budget})
    elif door == "eager":
        block = memfit.eager(model, budget=budget)
    peaks: list[int] = []
    losses: list[float] = []
    with block:
        for _ in range(8):
            with record("cpu") as usage:
                loss = called(torch.randn(64, 256)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            peaks.append(usage.most_live_bytes)
            del loss
    report = None
    if handle is not None:
        handle.end_step()
        report = handle.report()
        handle.close()
    return [losses, *(each.detach().numpy().tobytes() for each in model.parameters())], peaks, report


@pytest.fixture(scope="module")
def bare() -> tuple[list[Any], int]:
    """What the loop gives without memfit, and its peak; before any compiled model, whose budget divides updates."""
    numbers, peaks, _ = large("bare")
    return numbers, max(peaks)


@pytest.mark.parametrize("door", ["checkpoint", "compile", "compile, optimizer", "backend", "eager"])
def test_a_budget_below_what_the_update_takes_at_once_is_held_from_the_first_step_on(
    door: str, bare: tuple[list[Any], int]
) -> None:
    budget = int(bare[1] * 0.9)
    parts, peaks, _ = large(door, budget)
    assert bare[0] == parts
    assert max(peaks) <= budget


def test_a_percentage_counts_the_update_at_once(bare: tuple[list[Any], int]) -> None:
    _, _, report = large("checkpoint", "90%")
    assert report.budget_bytes == pytest.approx(0.9 * bare[1], rel=0.02)
    assert report.over == 0
