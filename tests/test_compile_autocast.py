"""Models compiled inside autocast: backward runs outside of it, as eager's does, and has eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import UnsupportedStepError

pytestmark = pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Product(torch.autograd.Function):
    """A product in low precision, whose gradients are computed in float32."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return (inputs.bfloat16() @ weight.t().bfloat16()).float()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        return gradients[0].float() @ weight, gradients[0].float().t() @ inputs.float()


class CastProduct(torch.autograd.Function):
    """The same, whose gradients are computed as forward is cast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return (inputs @ weight.t()).float()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        return gradients[0].to(weight.dtype) @ weight, gradients[0].t() @ inputs.to(gradients[0].dtype)


Own = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Two layers, around what a test is about."""

    def __init__(self, own: Own) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.own = own

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.own(self, torch.tanh(self.first(inputs))))


def island(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return inputs.float() @ model.second.weight


def attention(dropout: float, is_masked: bool) -> Own:
    def attend(_model: Model, inputs: torch.Tensor) -> torch.Tensor:
        heads = inputs.view(4, 4, 2, 16).transpose(1, 2)
        mask = torch.ones(4, 4, dtype=torch.bool).tril() if is_masked else None
        attended = functional.scaled_dot_product_attention(
            heads, heads, heads, attn_mask=mask, dropout_p=dropout, is_causal=not is_masked
        )
        return attended.transpose(1, 2).reshape(16, 32)

    return attend


KINDS: dict[str, Own] = {
    "an island of float32": island,
    "an island that is checkpointed": lambda model, inputs: checkpoint(island, model, inputs, use_reentrant=False),
    "a custom function": lambda model, inputs: Product.apply(inputs, model.second.weight),
    "a custom function with forward's casts": lambda model, inputs: CastProduct.apply(inputs, model.second.weight),
    "attention": attention(0.0, is_masked=False),
    "attention with dropout": attention(0.1, is_masked=False),
    "attention with dropout and a mask": attention(0.1, is_masked=True),
    "a product in float64": lambda model, inputs: (inputs.double() @ model.second.weight.double()).float(),
    "distances": lambda model, inputs: torch.cdist(inputs.float(), model.second.weight),
}


def gradients(model: nn.Module, called: Callable[..., Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = called(torch.randn(16, 32))
    outputs.float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_gradients_have_eagers_bits(name: str) -> None:
    model = Model(KINDS[name])
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="2GiB", reserve=0, planner="none")
    for mine, theirs in zip(gradients(model, model), gradients(eager, eager), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


def test_the_backend_has_eagers_bits() -> None:
    model = Model(island)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="memfit", options={"budget": "2GiB", "reserve": 0})
    for mine, theirs in zip(gradients(model, compiled), gradients(eager, eager), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


def test_backward_inside_autocast_is_refused_unless_it_was_said() -> None:
    model = Model(island)
    memfit.compile(model, budget="2GiB", reserve=0, planner="none")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(16, 32)).float().square().mean()
        with pytest.raises(UnsupportedStepError, match="backward_autocast=True"):
            loss.backward()
        with torch.autocast("cpu", enabled=False):
            model(torch.randn(16, 32)).float().square().mean().backward()
    assert model.first.weight.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_backward_inside_autocast_has_eagers_bits(name: str) -> None:
    model = Model(KINDS[name])
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="2GiB", reserve=0, planner="none", backward_autocast=True)
    for each in (model, eager):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            each(torch.randn(16, 32)).float().square().mean().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad)


def uncached(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model.first(inputs)


def beside_an_island(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        hidden = functional.linear(inputs.float(), model.first.weight)
    return model.first(functional.layer_norm(hidden, (32,), model.first.bias)) + functional.linear(
        inputs, model.first.weight.bfloat16()
    )


def without_gradients(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.second(inputs)


def cleared(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    torch.clear_autocast_cache()
    return model.first(inputs)


USED_AGAIN: dict[str, Own] = {
    "as it is": lambda model, inputs: model.first(inputs),
    "after it was used without gradients": lambda model, inputs: (
        without_gradients(model, inputs) + model.second(inputs)
    ),
    "after the cache was cleared": cleared,
    "twice in one call": lambda model, inputs: inputs @ (model.second.weight @ model.second.weight),
    "by what casts a view of it": lambda model, inputs: torch.einsum("bi,oi->bo", inputs, model.first.weight),
    "without the cache": uncached,
    "beside an island": beside_an_island,
    "checkpointed": lambda model, inputs: checkpoint(model.first, inputs, use_reentrant=False),
}


class Inside(nn.Module):
    """Enters autocast by itself, in two blocks."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.model(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            return outputs + self.model(inputs)


@pytest.mark.parametrize("name", USED_AGAIN)
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_parameter_that_is_used_again_is_cast_as_often_as_in_eager(name: str, is_inside: bool) -> None:
    model = Inside(Model(USED_AGAIN[name])) if is_inside else Model(USED_AGAIN[name])
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="2GiB", reserve=0, planner="none")
    for each in (model, eager):
        torch.manual_seed(1)
        inputs = torch.randn(16, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_inside):
            outputs = each(inputs)
        outputs.float().square().mean().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad)


def test_two_calls_inside_autocast_before_one_backward_pass_warn(caplog: pytest.LogCaptureFixture) -> None:
    model = memfit.compile(Model(lambda _, inputs: inputs), budget="2GiB", reserve=0, planner="none")
    for calls in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [model(torch.randn(16, 32)) for _ in range(calls)]
        torch.stack(outputs).float().square().mean().backward()
        assert caplog.text.count("summed first") == calls - 1
