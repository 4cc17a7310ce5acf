"""Graph breaks in functions that other functions call: what is around them is one graph, or else graphs by function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import CaptureError, UnsupportedStepError
from memfit.planning import Settings
from memfit.runtime import parts
from memfit.runtime.fitting import fit_step
from memfit.runtime.parts import PartlyPlannedStep
from memfit.torch_private.dynamo import compiled_around_breaks, divides_calls

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a"),
]
needs_division = pytest.mark.skipif(not divides_calls(), reason="this torch leaves a function with a break by itself")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Looks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.block(values)
        if values.sum().item() > 1e9:
            values = -values
        return values.square()


class Stack(nn.Module):
    """Four blocks in a loop, two of which look at a value two calls deep."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        plain = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
        self.blocks = nn.ModuleList([plain[0], Looks(width), plain[1], nn.Sequential(Looks(width), plain[2])])
        self.last = nn.Linear(width, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            values = block(values) + number
        return self.last(values)


def step_of(model: nn.Module) -> memfit.TrainingStep:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return memfit.TrainingStep(model=model, loss=nn.CrossEntropyLoss(), batch=batch, optimizer=optimizer)


def planned(step: memfit.TrainingStep) -> PartlyPlannedStep:
    found = fit_step(step, Settings(budget="90%", planner="search", options={"iterations": 200}))
    assert isinstance(found, PartlyPlannedStep)
    return found


@needs_division
@pytest.mark.parametrize("nested", [True, False])
def test_a_break_costs_one_graph_more_wherever_it_is(nested: bool) -> None:
    called: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            called.append(len(inputs))
            return module.forward(*inputs)

        return run

    model = Stack().eval()
    values = torch.randn(8, 16)
    assert torch.equal(compiled_around_breaks(model, backend, nested=nested)(values), model(values))
    called.clear()
    compiled_around_breaks(model, backend, nested=nested)(values)
    assert (len(called) == 3) == nested


@pytest.mark.slow
def test_a_step_with_breaks_in_calls_keeps_bits_and_budget() -> None:
    step = planned(step_of(Stack()))
    step.verify()
    assert step.measure(repeats=1).peak_bytes <= step.settings.budget
    if divides_calls():
        assert len(step.plans) == 3


@pytest.mark.slow
@needs_division
@pytest.mark.parametrize("failure", [RuntimeError("the compiler's own fault"), UnsupportedStepError("other bits")])
def test_what_the_compiler_cannot_take_up_is_compiled_function_by_function(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def compiled(model: nn.Module, backend: Any, *, nested: bool) -> Any:
        tried.append(nested)
        run = compiled_around_breaks(model, backend, nested=nested)

        def call(*args: Any) -> Any:
            if nested and isinstance(failure, RuntimeError) and not isinstance(failure, UnsupportedStepError):
                raise failure
            result = run(*args)
            return result * (1 + 1e-6) if nested else result  # a fault that only the bits show

        return call

    monkeypatch.setattr(parts, "compiled_around_breaks", compiled)
    step = planned(step_of(Stack()))
    assert tried == [True, False]
    step.verify()
    assert len(step.plans) > 3


def test_a_model_that_no_way_compiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(_model: nn.Module, _backend: Any, **_: bool) -> Any:
        def call(*_args: Any) -> Any:
            raise RuntimeError("the compiler's own fault")

        return call

    monkeypatch.setattr(parts, "compiled_around_breaks", compiled)
    with pytest.raises(CaptureError, match="the compiler's own fault"):
        planned(step_of(Stack()))


@pytest.mark.slow
@needs_division
def test_a_compiler_that_fails_in_training_is_given_an_easier_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    step = planned(step_of(Stack()))
    run = step._model

    def fails(*_args: Any) -> Any:
        raise InternalTorchDynamoError("its own fault")

    monkeypatch.setattr(step, "_model", fails)
    with pytest.raises(InternalTorchDynamoError) as raised:
        step(step.step.batch)
    assert any("later calls of the step are compiled in a simpler way" in note for note in raised.value.__notes__)
    assert step._model is not run
    for _ in range(3):
        step(step.step.batch)
    step.verify()
    assert len(step.plans) > 3
