"""Ops whose fake kernel returns something else than the real one: the step is captured with the real results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_user_steps import WIDTH, batches, network, run_both
from torch import nn
from torch.nn import functional

import memfit
from memfit.capture import capture, finish, with_real_results
from memfit.cost.observations import Corrections
from memfit.errors import CaptureError, WrongFakesError

cross_entropy = nn.CrossEntropyLoss()


@torch.library.custom_op("memfit_tests::in_double", mutates_args=())
def in_double(values: torch.Tensor) -> torch.Tensor:
    """Returns float64; its fake says that the dtype is that of the input."""
    return values.double() * 0.5


@torch.library.custom_op("memfit_tests::by_columns", mutates_args=())
def by_columns(values: torch.Tensor) -> torch.Tensor:
    """Returns a matrix stored by columns; its fake says that it is stored by rows."""
    return (values * 0.5).t().contiguous().t()


@torch.library.custom_op("memfit_tests::refused", mutates_args=())
def refused(values: torch.Tensor) -> torch.Tensor:
    """Returns half of its input; its fake takes no float32."""
    return values * 0.5


@torch.library.custom_op("memfit_tests::longer", mutates_args=())
def longer(values: torch.Tensor) -> torch.Tensor:
    """Returns one row more than its fake says."""
    return torch.cat([values, values[:1]])


in_double.register_fake(torch.empty_like)
by_columns.register_fake(torch.empty_like)
longer.register_fake(torch.empty_like)


@refused.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    torch._check(values.dtype == torch.bfloat16, lambda: "expected bfloat16")
    return torch.empty_like(values)


for operator in (in_double, by_columns, refused, longer):
    operator.register_autograd(lambda _context, gradient: gradient.float() * 0.5)


class Using(nn.Module):
    """A network whose hidden values go through an operator, and through the sigmoid in its result's dtype."""

    def __init__(self, operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.operator = nn.Linear(WIDTH, WIDTH), network(), operator

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        halved = self.operator(self.first(values))
        return self.last(torch.sigmoid(halved).float().reshape(-1, WIDTH))


@pytest.mark.parametrize("operator", [in_double, by_columns, refused])
def test_a_step_has_eagers_bits_whatever_the_fake_says(operator: Any) -> None:
    for _ in range(2):  # the second capture starts from what was observed at the first
        assert run_both(lambda: Using(operator), cross_entropy, batches(4))[1] is None


def test_the_graph_has_what_the_real_kernel_returns() -> None:
    step = memfit.TrainingStep(model=Using(in_double), loss=cross_entropy, batch=batches()[0])
    with pytest.raises(WrongFakesError, match="returned other dtypes or strides than its fake kernel") as raised:
        finish(capture(step))
    assert isinstance(raised.value, CaptureError)
    tried: list[Corrections] = []

    def finished(corrections: Corrections) -> Any:
        tried.append(corrections)
        return finish(capture(step, corrections=corrections))

    captured = with_real_results(finished)
    assert [len(corrections) for corrections in tried] == [0, 1]
    dtypes = {call.results[0].dtype for call in captured.binding.calls if "in_double" in str(call.target)}
    assert dtypes == {torch.float64}
    sigmoid = next(call for call in captured.binding.calls if "sigmoid" in str(call.target))
    assert sigmoid.results[0].dtype is torch.float64


def test_another_shape_may_depend_on_values_and_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"is float32\[65, 24\] at offset 0, expected float32\[64, 24\]"):
        memfit.fit(Using(longer), lambda model, batch: model(batch).sum(), batches()[0][0], budget="1MiB")


def test_a_correction_that_does_not_help_ends_in_the_error() -> None:
    def never(_corrections: Corrections) -> None:
        raise WrongFakesError("still wrong", corrections={"a call": {}})

    with pytest.raises(WrongFakesError, match="still wrong"):
        with_real_results(never)


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)) for _ in range(4)
    ]


def convolutional(norm: nn.Module, *, first: bool = False, frozen: bool = False) -> nn.Sequential:
    """A normalization over 3 channels stands first, or one over 8 after a convolution, which may be frozen."""
    layers = [norm, nn.Conv2d(3, 8, 3)] if first else [nn.Conv2d(3, 8, 3), norm]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    if frozen:
        model[0].requires_grad_(False)
    return model


def in_bfloat16(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: convolutional(nn.BatchNorm2d(3), first=True),
        lambda: convolutional(nn.BatchNorm2d(8), frozen=True),
        lambda: convolutional(nn.BatchNorm2d(8, affine=False), frozen=True),
        lambda: convolutional(nn.GroupNorm(3, 3), first=True),
        lambda: convolutional(nn.InstanceNorm2d(8, affine=True), frozen=True),
        lambda: convolutional(nn.LayerNorm([8, 6, 6]), frozen=True),
    ],
)
@pytest.mark.parametrize("loss", [cross_entropy, in_bfloat16])
def test_a_normalization_whose_input_needs_no_gradient(make: Callable[[], nn.Module], loss: Any) -> None:
    assert run_both(make, loss, images())[1] is None


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm([8, 6, 6])])
def test_a_normalization_under_autocast(norm: nn.Module) -> None:
    state = {name: value.clone() for name, value in norm.state_dict().items()}

    def make() -> nn.Module:
        norm.load_state_dict(state)
        return convolutional(norm)

    assert run_both(make, in_bfloat16, images())[1] is None


def test_freezing_below_a_batch_normalization_in_mid_training() -> None:
    losses: list[list[torch.Tensor]] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = convolutional(nn.BatchNorm2d(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = memfit.TrainingStep(model=model, loss=cross_entropy, batch=images()[0], optimizer=optimizer)
        run: Callable[[Any], torch.Tensor] = step.run_eager
        if planned:
            run = memfit.fit(
                model, cross_entropy, images()[0], optimizer=optimizer, budget="100%", time_limit_seconds=0.5
            )
        losses.append([])
        for number, batch in enumerate([*images(), *images()]):
            model[0].requires_grad_(number not in (2, 3))
            losses[-1].append(run(batch))
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))


def test_layer_normalization_under_autocast_in_a_compiled_model() -> None:
    states: list[dict[str, torch.Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called: Any = model
        if compiled:
            called = torch.compile(model, backend="memfit", options={"budget": "1GiB", "reserve": 0})
        for batch in batches():
            in_bfloat16(called, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("operator", [in_double, by_columns])
def test_a_compiled_model_has_eagers_bits_whatever_the_fake_says(operator: Any) -> None:
    torch.compiler.reset()
    model, eager = Using(operator), Using(operator)
    eager.load_state_dict(model.state_dict())
    memfit.compile(model, budget="1GiB", reserve=0, planner="none")
    (given, wanted) = batches()[0]
    for own in (eager, model):
        cross_entropy(own(given), wanted).backward()
    for mine, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and expected.grad is not None and torch.equal(mine.grad, expected.grad)
