"""Steps as users write them: each keeps eager's bits over several steps, or is refused with what to do."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.errors import (
    CaptureError,
    InvalidBudgetError,
    InvalidOptionError,
    InvalidTargetError,
    MemfitError,
    UnsupportedStepError,
)
from memfit.runtime.state import StepState

WIDTH = 24
Loss = Callable[..., torch.Tensor]


def network(outputs: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, outputs)
    )


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, WIDTH, generator=generator), torch.randint(0, 10, (64,), generator=generator))
        for _ in range(count)
    ]


def same_steps(make: Callable[[], nn.Module], loss: Loss, given: list[Any]) -> nn.Module:
    """Run eager and planned steps of two equal models; assert equal bits, and return the planned one."""
    states: list[StepState] = []
    losses: list[list[torch.Tensor]] = []
    model = make()
    for planned in (False, True):
        torch.manual_seed(0)
        model = make()  # not a copy: copies of parameters have no hooks
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = memfit.TrainingStep(model=model, loss=loss, batch=given[0], optimizer=optimizer)
        run: Callable[[Any], torch.Tensor] = step.run_eager
        if planned:
            run = memfit.fit(model, loss, given[0], optimizer=optimizer, budget="100%", time_limit_seconds=0.5)
        torch.manual_seed(5)
        losses.append([run(batch) for batch in given])
        states.append(StepState.take(step))
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    assert len(set(losses[0])) == len(given)
    assert states[0].first_difference(states[1]) is None
    return model


class Averaging(nn.Module):
    """Replaces a buffer in every step, as a running mean is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(inputs)
        self.mean = self.mean * 0.9 + outputs.detach().mean(0) * 0.1
        return outputs - self.mean


class Remembering(nn.Module):
    """Keeps its hidden state as a plain attribute, from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.hidden: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.cell(inputs, torch.zeros_like(inputs) if self.hidden is None else self.hidden)
        self.hidden = hidden.detach()
        return hidden


class Counting(nn.Module):
    """Scales its output by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(inputs) / self.calls


class Showing(nn.Module):
    """Leaves its last features and their number where a user may look at them, and reads them in no later step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.features: torch.Tensor | None = None
        self.size = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.features = self.inner(inputs)
        self.size = self.features.shape[1]
        return self.features


class Drawing(nn.Module):
    """Draws its scale with a function that is no part of torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner = network()
        self.draw = draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.draw()


class Resizing(nn.Module):
    """Keeps what it has seen in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(1, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(inputs)
        self.seen = torch.cat([self.seen, outputs.detach()])
        return outputs


class Scaled:
    """A loss with a parameter of its own, which is in no module."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(10))

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]) * self.scale, batch[1])


def refused(model: nn.Module, loss: Loss | None = None, batch: Any = None, **options: Any) -> MemfitError:
    """Return the error that refuses to fit; the model is as it was before."""
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(MemfitError) as raised:
        memfit.fit(model, loss or nn.CrossEntropyLoss(), batch or batches()[0], **{"budget": "100%", **options})
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    return raised.value


def test_hooks_of_parameters_change_the_gradients() -> None:
    def hooked() -> nn.Module:
        model = network()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return model

    same_steps(hooked, nn.CrossEntropyLoss(), batches())


def test_a_hook_on_gradients_that_are_there_is_refused() -> None:
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda _parameter: None)
    error = refused(model)
    assert isinstance(error, UnsupportedStepError)
    assert "parameter '0.weight' has a hook" in str(error)


def test_a_buffer_that_is_replaced_goes_from_step_to_step() -> None:
    model = same_steps(Averaging, nn.CrossEntropyLoss(), batches())
    assert model.get_buffer("mean").abs().max() > 0


def test_a_buffer_that_grows_is_refused() -> None:
    assert "replaces 'seen', of shape (1, 10)" in str(refused(Resizing()))


@pytest.mark.parametrize(("kind", "name"), [(Remembering, "hidden"), (Counting, "calls")])
def test_what_python_would_carry_from_step_to_step_is_refused(kind: Callable[[], nn.Module], name: str) -> None:
    error = refused(kind())
    assert isinstance(error, UnsupportedStepError)
    assert f"sets '{name}' in its model and reads it in the next step" in str(error)


def test_what_a_step_leaves_in_its_model_and_never_reads_is_put_back() -> None:
    model = same_steps(Showing, nn.CrossEntropyLoss(), batches())
    assert (model.features, model.size) == (None, 0)


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's `random`"), (np.random.rand, "`numpy.random`")])
def test_a_number_drawn_outside_of_torch_is_refused(draw: Callable[[], float], name: str) -> None:
    states = random.getstate(), np.random.get_state()[1].copy()
    assert f"the step draws from {name}" in str(refused(Drawing(draw)))
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    model, loss = network(), Scaled()
    assert "tensor of shape (10,) that is no parameter of the model" in str(refused(model, loss))
    assert loss.scale.grad is None
    optimizer = torch.optim.SGD([*model.parameters(), loss.scale], lr=0.1)
    assert "parameter 6 of the optimizer's group 0" in str(refused(model, loss, optimizer=optimizer))


def test_a_teacher_is_a_constant() -> None:
    torch.manual_seed(9)
    teacher = network()
    same_steps(
        network, lambda model, batch: functional.mse_loss(model(batch[0]), teacher(batch[0]).detach()), batches()
    )


def test_a_partial_loss_is_called_as_its_function() -> None:
    same_steps(network, partial(functional.cross_entropy, label_smoothing=0.1), batches())
    same_steps(network, partial(_weighted, weight=2.0), batches())


def _weighted(model: nn.Module, batch: Any, *, weight: float) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1]) * weight


def test_numbers_and_texts_of_a_batch_are_those_of_the_step() -> None:
    given = [{"x": x, "y": y, "name": f"{n}", "weight": 0.5 + n} for n, (x, y) in enumerate(batches())]
    same_steps(network, lambda model, b: functional.cross_entropy(model(b["x"]), b["y"]) * b["weight"], given)


@dataclass
class _Record:
    inputs: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda x, y: (x.numpy(), y.numpy()), _Record])
def test_a_batch_whose_numbers_would_not_be_seen_is_refused(wrap: Callable[..., Any]) -> None:
    error = refused(network(), lambda model, batch: model(batch).sum(), wrap(*batches()[0]))
    assert isinstance(error, InvalidOptionError)
    assert "the batch holds a" in str(error)


def test_a_later_batch_of_nothing_or_of_arrays_is_refused_and_the_step_goes_on() -> None:
    inputs, labels = batches()[0]
    step = memfit.fit(network(), nn.CrossEntropyLoss(), (inputs, labels), budget="1MiB", time_limit_seconds=0.5)
    with pytest.raises(InvalidOptionError, match="called with None"):
        step(None)
    with pytest.raises(InvalidOptionError, match=r"numpy\.ndarray"):
        step((inputs.numpy(), labels))
    assert step((inputs, labels)) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": [1]}, "optimizer is a list, expected a torch.optim.Optimizer or None"),
        ({"time_limit_seconds": -1}, "time_limit_seconds is -1, expected"),
        ({"seed": "x"}, "seed is 'x', expected"),
        ({"loss": "mse"}, "memfit.fit: loss is a str, expected a function"),
        ({"budget": 1.5e9}, "budget 1500000000.0 is a float, expected text or an integer"),
        ({"budget": None}, "budget None is a NoneType, expected"),
        ({"budget": True}, "budget True is a bool, expected"),
    ],
)
def test_an_argument_of_another_kind_is_named(options: dict[str, Any], message: str) -> None:
    error = refused(network(), **options)
    assert isinstance(error, InvalidOptionError | InvalidBudgetError | InvalidTargetError)
    assert message in str(error)


def test_a_model_that_is_no_module_is_named() -> None:
    with pytest.raises(InvalidTargetError, match=r"model is a function, expected a torch\.nn\.Module"):
        memfit.fit(batches, nn.CrossEntropyLoss(), batches()[0], budget="1MiB")  # pyright: ignore[reportArgumentType]
    model = network()
    with pytest.raises(InvalidTargetError, match=r"clip_norm is -1\.0, expected a number above 0"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memfit.fit(model, nn.CrossEntropyLoss(), batches()[0], optimizer=optimizer, budget="1MiB", clip_norm=-1.0)


def test_an_optimizer_of_another_model_is_refused() -> None:
    error = refused(network(), optimizer=torch.optim.SGD(network().parameters(), lr=0.1))
    assert "parameter 0 of the optimizer's group 0, of shape (24, 24), is not the model's" in str(error)


def test_a_script_is_refused() -> None:
    class Script(torch.jit.ScriptModule):
        """What torch.jit.script returns, which warns that it is deprecated."""

    with pytest.raises(UnsupportedStepError, match=r"model is a script of torch\.jit"):
        memfit.fit(Script(), nn.CrossEntropyLoss(), batches()[0], budget="1MiB")


def test_a_shape_that_does_not_fit_is_said_with_its_module() -> None:
    error = refused(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(9, 2)))
    assert isinstance(error, CaptureError)
    assert "in module '2' (Linear)" in str(error)


def test_ctrl_c_while_a_plan_is_searched_stops_the_program() -> None:
    layers = [layer for _ in range(40) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    heard = 0

    def interrupt(_progress: object) -> None:
        nonlocal heard
        heard += 1
        if heard == 1:
            signal.raise_signal(signal.SIGINT)  # in this thread, at once: os.kill may be heard later, in other code

    with pytest.raises(KeyboardInterrupt):
        memfit.fit(model, nn.CrossEntropyLoss(), batches()[0], budget="60%", time_limit_seconds=20, progress=interrupt)
    assert heard == 1
