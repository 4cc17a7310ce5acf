"""One thread at a time runs planned steps: whoever comes in between is refused, whoever comes after is served."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.errors import UnsupportedStepError
from memfit.step.turns import Turn

pytestmark = [
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
FEW_MOVES = {"iterations": 200, "threads": 1}
BATCH = torch.linspace(-1.0, 1.0, 256).reshape(32, 8)


@torch.library.custom_op("memfit_turns::call", mutates_args=())
def call(x: torch.Tensor) -> torch.Tensor:
    """Run the user's Python in the middle of a planned step."""
    for each in calls:
        each()
    return x.clone()


call.register_fake(torch.empty_like)
call.register_autograd(lambda _context, gradient: call(gradient))
calls: list[Callable[[], Any]] = []


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    calls.clear()
    yield
    calls.clear()


class Net(nn.Module):
    """Draws random numbers, and runs `calls` in forward and in backward."""

    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.is_broken = nn.Linear(8, 8), nn.Linear(8, 8), is_broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.first(x), 0.1)
        if self.is_broken and x.sum() > 1e9:
            x = x * 2
        return self.second(call(x.tanh()))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def planned(*, is_broken: bool = False) -> Any:
    model = Net(is_broken=is_broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memfit.fit(model, loss, BATCH, optimizer=optimizer, budget="1MiB", options=FEW_MOVES)


def compiled(*, in_place: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    options = {"budget": "16MiB", "reserve": 0, "options": FEW_MOVES}
    model: Any = (
        memfit.compile(Net(), **options) if in_place else torch.compile(Net(), backend="memfit", options=options)
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        value = loss(model, batch)
        value.backward()
        return value.detach()

    step(BATCH)
    return step


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as executor:
        return executor.submit(function, *arguments).result()


MAKERS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "fit": planned,
    "graph breaks": lambda: planned(is_broken=True),
    "compile": lambda: compiled(in_place=True),
    "backend": lambda: compiled(in_place=False),
}


@pytest.mark.parametrize("name", MAKERS)
def test_another_thread_is_refused_while_a_step_runs_and_served_afterwards(name: str) -> None:
    step = MAKERS[name]()
    refusals: list[str] = []

    def another() -> None:
        with pytest.raises(UnsupportedStepError) as caught:
            in_thread(step, BATCH)
        refusals.append(str(caught.value))

    calls.append(another)
    torch.manual_seed(1)
    step(BATCH)
    calls.clear()
    assert len(refusals) == 2, "once in forward, once in backward"
    for refusal in refusals:
        assert "in thread 'other_0' while" in refusal and "runs in thread 'MainThread'" in refusal
        assert "one thread at a time may run it" in refusal and "\n" not in refusal
    assert torch.isfinite(in_thread(step, BATCH))
    assert torch.isfinite(step(BATCH))


@pytest.mark.parametrize("name", ["fit", "graph breaks"])
def test_a_step_inside_of_itself_is_refused(name: str) -> None:
    step: Any = MAKERS[name]()
    for inside in (lambda: step(BATCH), step.verify, step.measure):
        calls[:] = [inside]
        with pytest.raises(UnsupportedStepError, match="inside of itself"):
            step(BATCH)
    calls.clear()
    assert torch.isfinite(step(BATCH))


def test_two_steps_share_the_turn_of_their_device() -> None:
    first, second = planned(), planned()

    def other_step() -> None:
        calls.clear()
        with pytest.raises(UnsupportedStepError, match="planned step of Net was called in thread 'other_0'"):
            in_thread(second, BATCH)
        with pytest.raises(UnsupportedStepError, match=r"memfit.fit of Net was called in thread 'other_0'"):
            in_thread(planned)

    calls.append(other_step)
    first(BATCH)
    assert not calls


def test_steps_of_many_threads_one_after_the_other_train_as_eager_does() -> None:
    torch.manual_seed(3)
    step = planned()
    eager = Net()
    eager.load_state_dict(step.step.model.state_dict())
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for seed in range(4):
        torch.manual_seed(seed)
        got = in_thread(step, BATCH)
        torch.manual_seed(seed)
        expected = loss(eager, BATCH)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(got, expected.detach())
    for mine, theirs in zip(step.step.model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_backward_may_run_in_another_thread_than_forward_but_not_beside_another() -> None:
    model = memfit.compile(Net(), budget="16MiB", reserve=0, options=FEW_MOVES)
    in_thread(loss(model, BATCH).backward)
    first, second = loss(model, BATCH), loss(model, BATCH)

    def another() -> None:
        with pytest.raises(UnsupportedStepError, match=r"the backward pass .* was called in thread 'other_0'"):
            in_thread(second.backward)

    calls.append(another)
    first.backward()
    calls.clear()
    loss(model, BATCH).backward()


def test_eager_is_for_the_thread_that_enters_its_block() -> None:
    model = Net()
    budget = bytes_of_tensors(torch.device("cpu")) + (1 << 20)
    step = planned()
    block = memfit.eager(model, budget=budget)
    with block:
        value = loss(model, BATCH)
        with pytest.raises(UnsupportedStepError, match=r"backward runs in thread 'other_0', and memfit.eager's block"):
            in_thread(value.backward)
        with pytest.raises(
            UnsupportedStepError, match=r"block was called in thread 'other_0' while memfit.eager's block"
        ):
            in_thread(memfit.eager(model, budget=budget).__enter__)
        with pytest.raises(UnsupportedStepError, match=r"planned step of Net was called in thread 'other_0' while"):
            in_thread(step, BATCH)
        with pytest.raises(UnsupportedStepError, match="is left in thread 'other_0'"):
            in_thread(block.__exit__, None, None, None)
        loss(model, BATCH).backward()
        after = loss(model, BATCH)
    in_thread(after.backward)
    in_thread(step, BATCH)

    def whole() -> int:
        with memfit.eager(model, budget=budget) as steps:
            loss(model, BATCH).backward()
        return steps.report().passes

    assert in_thread(whole) == 1


def test_an_error_and_a_fork_give_the_turn_back() -> None:
    turn, entered, leave = Turn(), threading.Event(), threading.Event()
    with pytest.raises(ZeroDivisionError), turn.of(turn, "the step"):
        raise ZeroDivisionError

    def hold() -> None:
        with turn.of(turn, "the step"):
            entered.set()
            leave.wait()

    with ThreadPoolExecutor(1) as executor:
        held = executor.submit(hold)
        entered.wait()
        with pytest.raises(UnsupportedStepError), turn.of(object(), "another step"):
            pass
        child = os.fork()
        if child == 0:  # the thread that has the turn is not there
            try:
                with turn.of(turn, "the step"):
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        leave.set()
        held.result()
    with turn.of(turn, "the step"), turn.of(object(), "another"), turn.of(turn, "the step", may_nest=True):
        pass
