"""The note on the error of a step: whether it can be run again is said of buffers, states and gradients, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfit
from memfit.checkpointing.step import CheckpointedStep
from memfit.memory.what_is_left import saying_what_is_left

AGAIN = "memfit: no parameter had been updated when the step failed; it can be run again"


class Stopping(torch.optim.Optimizer):
    """Counts its steps and adds up squares, as Adagrad does; stops where it is told to."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.stops = ""

    def step(self, closure: Any = None) -> None:
        del closure
        self._stop("before")
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter)
                with torch.no_grad():
                    state["sum"].addcmul_(parameter.grad, parameter.grad)
                    self._stop("between")
                    parameter.addcdiv_(parameter.grad, state["sum"].sqrt() + 1.0, value=-group["lr"])
                    self._stop("after one")

    def _stop(self, at: str) -> None:
        if self.stops == at:
            raise KeyboardInterrupt


class Broken(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 32), torch.nn.Linear(32, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.last(hidden.tanh() if float(hidden.sum()) > -1e9 else hidden)


def plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


def normalized() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 2))


def planned(make: Any) -> Any:
    torch.manual_seed(0)
    model, batch = make(), (torch.randn(16, 8), torch.randint(0, 2, (16,)))
    step = memfit.fit(
        model, torch.nn.functional.cross_entropy, batch, optimizer=Stopping(model.parameters()), budget="100%"
    )
    step(batch)
    return step, batch


def stopped(step: Any, batch: Any, at: str) -> str:
    step.step.optimizer.stops = at
    with pytest.raises(KeyboardInterrupt) as raised:
        step(batch)
    step.step.optimizer.stops = ""
    (note,) = raised.value.__notes__
    return note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "at", "words"),
    [
        (plain, "before", AGAIN),
        (plain, "between", "but 0 buffers, 1 states of the optimizer and 0 gradients had been, so the step is lost"),
        (plain, "after one", "memfit: 1 of 4 parameters had been updated"),
        (normalized, "before", "but 3 buffers, 0 states of the optimizer and 0 gradients had been, so the step is"),
    ],
)
def test_the_note_counts_all_that_a_step_writes_to(make: Any, at: str, words: str) -> None:
    assert words in stopped(*planned(make), at)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("make", [plain, Broken])
def test_a_step_that_can_be_run_again_gives_what_it_would_have_given(make: Any) -> None:
    step, batch = planned(make)
    assert isinstance(step, CheckpointedStep) == (make is Broken)
    twin, _ = planned(make)
    note = stopped(step, batch, "before")
    assert note == AGAIN
    assert all(parameter.grad is None for parameter in step.step.model.parameters())
    step(batch)
    twin(batch)
    for name, tensor in step.step.model.state_dict().items():
        assert torch.equal(tensor, twin.step.model.state_dict()[name]), name


def test_gradients_that_were_there_are_as_before_or_the_step_is_lost() -> None:
    model, failure = plain(), ValueError()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first, second, *_ = model.parameters()
    before = first.grad
    with pytest.raises(ValueError) as raised, saying_what_is_left(model.parameters(), model.buffers(), None):
        first.grad = None
        assert second.grad is not None
        second.grad.add_(1)
        raise failure
    assert "0 states of the optimizer and 1 gradients had been" in raised.value.__notes__[0]
    assert first.grad is before
