"""Functions that `torch.compile` has compiled, called inside of models and loops, which memfit lets run as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoint_models import Trained, cross_entropy, rows, train
from torch import nn

import memfit
from memfit.capture import capture
from memfit.checkpointing.step import CheckpointedStep
from memfit.errors import NoGraphError
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import record

# Dynamo's own warnings while it traces, which are errors under pytest.
pytestmark = [
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
WIDTH = 64


def doubled(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """A compiler whose code gives other numbers than eager, so that it shows which of them ran."""
    return lambda *given: tuple(2 * each for each in module(*given))


def _act(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x) * x.sigmoid()


class Block(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)).tanh())


def make(act: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block(act) for _ in range(6)), nn.Linear(WIDTH, 4))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(params=[True, False], ids=["fullgraph", "with breaks"])
def act(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(_act, backend=doubled, fullgraph=request.param)


@pytest.fixture
def wanted(act: Callable[[torch.Tensor], torch.Tensor]) -> Trained:
    with record("cpu"):
        pass
    found = train(make(act))
    assert found.losses != train(make(_act)).losses
    return found


@pytest.mark.parametrize("share", [1.2, 0.8])
def test_under_checkpoints(act: Callable[[torch.Tensor], torch.Tensor], wanted: Trained, share: float) -> None:
    model = make(act)
    budget = int(share * max(wanted.peaks[2:]))
    with memfit.checkpoint(model, budget) as handle:
        got = train(model)
        assert got.same_bits(wanted)
        assert (
            max(got.peaks[-2:]) <= budget and handle.report().over <= 2
        )  # of what is compiled, only what it saves is known
        assert set(handle.report().sizes[0].planned.rules.values()) <= {"none", "full"}
        assert handle.report().lean == 2  # the first does not know which blocks call compiled code
    assert train(make(act)).same_bits(wanted), "the code is compiled as before"


@pytest.mark.parametrize("share", [1.2, 1.1])
def test_in_eager_mode(act: Callable[[torch.Tensor], torch.Tensor], wanted: Trained, share: float) -> None:
    model = make(act)
    with memfit.eager(model, budget=int(share * max(wanted.peaks[2:]))):
        assert train(model).same_bits(wanted)
    assert train(make(act)).same_bits(wanted)


def test_fit_leaves_such_a_step_to_checkpoints(act: Callable[[torch.Tensor], torch.Tensor], wanted: Trained) -> None:
    model = make(act)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    step = memfit.fit(model, cross_entropy, rows(0), optimizer=optimizer, budget="1GiB")
    assert isinstance(step, CheckpointedStep) and "torch.compile" in step.why
    assert [float(step(rows(number))) for number in range(8)] == wanted.losses
    with pytest.raises(NoGraphError, match=r"test_checkpoint_compiled_inside\.py:\d+.*TORCH_COMPILE_DISABLE"):
        capture(memfit.TrainingStep(model=make(act), loss=cross_entropy, batch=rows(0)))


class Compiled(torch.optim.Optimizer):
    """An optimizer that compiles its update, as those of low precision do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros_like(parameter)
            update = torch.compile(_update, backend=doubled, fullgraph=True, dynamic=False)
            with torch._dynamo.utils.disable_cache_limit():
                parameter.copy_(update(parameter, parameter.grad, state["average"]))


def _update(parameter: torch.Tensor, gradient: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    return parameter * 0.5 - 0.05 * gradient.lerp(average, 0.9)


@pytest.mark.parametrize("door", ["fit", "checkpoint", "eager"])
def test_an_optimizer_that_compiles_its_update(door: str) -> None:
    def run(door: str) -> list[float]:
        model = make(_act)
        optimizer = Compiled(model.parameters())
        if door == "fit":
            step = memfit.fit(model, cross_entropy, rows(0), optimizer=optimizer, budget="100%")
            assert isinstance(step, PlannedStep)
            return [float(step(rows(number))) for number in range(4)]
        if door == "checkpoint":
            with memfit.checkpoint(model, "1GiB"):
                return train(model, steps=4, optimizer=optimizer).losses
        if door == "eager":
            with memfit.eager(model, budget="1GiB"):
                return train(model, steps=4, optimizer=optimizer).losses
        return train(model, steps=4, optimizer=optimizer).losses

    assert run(door) == run("bare")
