"""Steps that replace a tensor's memory (`.data = ...`), or a buffer by another one, train as eager steps do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InvalidOptionError, UnsupportedStepError


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.teacher = copy.deepcopy(self.layers).requires_grad_(requires_grad=False)
        for name in ("near", "far"):
            self.register_buffer(name, torch.rand(6))


class Teacher(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for mine, theirs in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
            theirs.data = theirs.data * 0.5 + mine.data * 0.5
        return self.layers(values) - self.teacher(values * 1.1)


class Quantized(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.layers[0].weight.data = (self.layers[0].weight.data * 16).round() / 16
        return self.layers(values)


class QuantizedAfterUse(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(values)
        self.layers[2].weight.data = (self.layers[2].weight.data * 16).round() / 16
        return hidden


class Binary(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0].weight
        kept, weight.data = weight.data, weight.data.sign()
        hidden = self.layers(values)
        weight.data = kept
        return hidden


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_pre_hook(self._clamp)

    @staticmethod
    def _clamp(layer: Any, _: Any) -> None:
        layer.weight.data = layer.weight.data.clamp(-0.1, 0.1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(values)


class Normalized(Base):
    """Reads what it has written once more in backward, and nothing of it after that."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[2].weight.data = nn.functional.normalize(self.layers[2].weight.data, dim=1)
        hidden = self.layers[1](self.layers[0](values))
        return nn.functional.linear(hidden, nn.functional.normalize(self.layers[2].weight, dim=1))


class Averages(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(values) + self.near
        self.near.data = self.near.data * 0.9 + hidden.detach().mean(0)
        return hidden


class Exchanging(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.near, self.far = self.far, self.near
        return self.layers(values) * self.near


class Shifting(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(values) + self.near - self.far
        self.far = self.near
        self.near = hidden.detach().mean(0)
        return hidden


def squares(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return model(values).square().mean()


def trained(kind: Callable[[], nn.Module], *, is_planned: bool, has_optimizer: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    batches = [torch.randn(8, 6) for _ in range(4)]
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.05)
    if is_planned:
        own = optimizer if has_optimizer else None
        step = memfit.fit(model, squares, batches[0], optimizer=own, budget="1MiB", time_limit_seconds=1)
    for batch in batches:
        if is_planned:
            step(batch)
        else:
            squares(model, batch).backward()
        if not (is_planned and has_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_what_backward_reads_of_replaced_memory_is_refused_in_a_compiled_model() -> None:
    model = torch.compile(QuantizedAfterUse(), backend="memfit", options={"budget": "64MiB", "reserve": 0})
    with pytest.raises(UnsupportedStepError, match=r"in backward that has other memory by then \(`\.data = \.\.\.`"):
        squares(model, torch.randn(8, 6)).backward()


@pytest.mark.parametrize("kind", [Teacher, Quantized, Hooked, Normalized, Averages])
def test_replaced_values_are_there_in_the_next_step_of_a_compiled_model(kind: Callable[[], nn.Module]) -> None:
    def states(backend: str) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model, found = kind(), list[dict[str, torch.Tensor]]()
        options: Any = {"options": {"budget": "64MiB", "reserve": 0}} if backend == "memfit" else {}
        compiled = torch.compile(model, backend=backend, **options) if backend else model
        optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.05)
        for number in range(4):
            squares(compiled, torch.randn(8, 6, generator=torch.Generator().manual_seed(number))).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return found

    for planned, eager in zip(states("memfit"), states(""), strict=True):
        assert [name for name, tensor in eager.items() if not torch.equal(tensor, planned[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("has_optimizer", [True, False], ids=["with optimizer", "without"])
@pytest.mark.parametrize(
    "kind", [Teacher, Quantized, QuantizedAfterUse, Normalized, Binary, Hooked, Averages, Exchanging, Shifting]
)
def test_replaced_values_are_there_in_the_next_step(kind: Callable[[], nn.Module], has_optimizer: bool) -> None:
    planned = trained(kind, is_planned=True, has_optimizer=has_optimizer)
    eager = trained(kind, is_planned=False, has_optimizer=has_optimizer)
    assert [name for name, tensor in eager.items() if not torch.equal(tensor, planned[name])] == []


class Sharing(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.teacher[0].weight.data = self.layers[0].weight.data
        return self.layers(values) + self.teacher(values)


class ExchangingMemory(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.near.data, self.far.data = self.far.data, self.near.data
        return self.layers(values) * self.near


class Tying(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.far = self.near
        return self.layers(values) * self.far


class Turning(Base):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.layers[0].weight.data = self.layers[0].weight.data.t()
        return self.layers(values)


class Plain(Base):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(values) + self.shift
        self.shift.data = hidden.detach().mean(0)
        return hidden


class InBackward(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_full_backward_hook(self._shrink)

    @staticmethod
    def _shrink(layer: Any, *_: Any) -> None:
        layer.weight.data = layer.weight.data * 0.9

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(values)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Sharing, "share memory"),
        (ExchangingMemory, "share memory"),
        (Tying, "be the tensor 'near'"),
        (Turning, "strides"),
        (Plain, "no parameter or buffer"),
        (InBackward, "in backward"),
    ],
)
def test_what_a_planned_step_cannot_do_is_refused(kind: Callable[[], nn.Module], says: str) -> None:
    model = kind()
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedStepError, match=says):
        memfit.fit(model, squares, torch.randn(8, 6), optimizer=optimizer, budget="1MiB")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name][0]) and tensor.data_ptr() == before[name][1]
    assert getattr(model, "shift", torch.zeros(6)).device.type == "cpu"


def compiled(model: nn.Module, *, is_planned: bool) -> dict[str, torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    if is_planned:
        memfit.compile(model, budget="4MiB", optimizer=optimizer)
    for _ in range(3):
        squares(model, torch.randn(8, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("kind", [Teacher, Quantized, Averages, Exchanging, Shifting])
def test_replaced_values_are_there_in_the_next_call_of_a_compiled_model(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    planned, eager = compiled(copy.deepcopy(model), is_planned=True), compiled(model, is_planned=False)
    assert [name for name, tensor in eager.items() if not torch.equal(tensor, planned[name])] == []


@pytest.mark.parametrize("kind", [Sharing, ExchangingMemory])
def test_a_compiled_model_that_exchanges_memory_is_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedStepError, match="memory of another one"):
        compiled(kind(), is_planned=True)


@pytest.mark.parametrize("part", ["layers.2.weight", "near"])
def test_a_batch_on_the_memory_of_what_the_step_writes_to_is_refused(part: str) -> None:
    model = Shifting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memfit.fit(model, squares, torch.randn(6, 6), optimizer=optimizer, budget="1MiB", time_limit_seconds=1)
    tensor = model.get_submodule(part.rpartition(".")[0]).state_dict()[part.rpartition(".")[2]]
    before = tensor.clone()
    with pytest.raises(InvalidOptionError, match=f"shares memory with '{part}'"):
        step(tensor.view(-1, 6))
    assert torch.equal(tensor, before)
    rows = torch.randn(12, 6)
    step(rows[:6])
    step(before.view(-1, 6))


def test_a_batch_may_be_on_the_memory_of_what_the_step_only_reads() -> None:
    model = Base()
    model.forward = lambda values: model.layers(values) + model.far  # pyright: ignore[reportAttributeAccessIssue]
    step = memfit.fit(model, squares, torch.randn(6, 6), budget="1MiB", time_limit_seconds=1)
    step(model.far.view(1, 6))
    loss = step(model.layers[0].weight.detach())
    assert torch.equal(loss, squares(model, model.layers[0].weight.detach()))
