"""Loops over layers, with a graph break in them: the layers are planned, whatever the loop goes over."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import memfit

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
Way = Callable[["Layers", torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.named = nn.ModuleDict({str(number): nn.Linear(32, 32) for number in range(4)})
        self.way = way

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.way(self, inputs)


def broken(values: torch.Tensor) -> torch.Tensor:
    return values * 1.5 if values.sum() > -1e9 else values


def over(layers: Callable[[Layers], Iterator[nn.Module]]) -> Way:
    def forward(own: Layers, values: torch.Tensor) -> torch.Tensor:
        for layer in layers(own):
            values = broken(torch.tanh(layer(values)))
        return values

    return forward


def by_name(own: Layers, values: torch.Tensor) -> torch.Tensor:
    for name, layer in own.named.items():
        values = broken(torch.tanh(layer(values))) * (int(name) + 1)
    return values


def by_children(own: Layers, values: torch.Tensor) -> torch.Tensor:
    for name, layer in own.layers.named_children():
        values = broken(torch.tanh(layer(values))) * (int(name) + 1)
    return values


def counted(own: Layers, values: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(own.layers, start=1):
        values = torch.tanh(layer(values)) * number
        values = broken(values) if number == 2 else values
    return values


def beside_each_other(own: Layers, values: torch.Tensor) -> torch.Tensor:
    for layer, other in zip(own.layers, own.named.values(), strict=True):
        values = torch.tanh(layer(values)) + other(values)
        values = broken(values) if layer is own.layers[1] else values
    return values


def with_pairs(own: Layers, values: torch.Tensor) -> torch.Tensor:
    for number, (name, layer) in enumerate(own.named.items()):
        values = torch.tanh(layer(values)) * (number + int(name))
        values = broken(values) if name == "1" else values
    return values


def a_list_that_grows(own: Layers, values: torch.Tensor) -> torch.Tensor:
    found = [values]
    for number, each in enumerate(found):
        if len(found) < 4:
            found.append(torch.tanh(own.layers[number](each)))
    return broken(torch.cat(found))


WAYS: dict[str, Way] = {
    "enumerate": counted,
    "zip": beside_each_other,
    "enumerate items": with_pairs,
    "a list that grows": a_list_that_grows,
    "items of a ModuleDict": by_name,
    "values of a ModuleDict": over(lambda own: iter(own.named.values())),
    "keys of a ModuleDict": over(lambda own: iter([own.named[name] for name in own.named])),
    "children": over(lambda own: own.layers.children()),
    "named children": by_children,
    "a slice": over(lambda own: iter(own.layers[1:])),
    "reversed": over(lambda own: iter(reversed(own.layers))),
    "a list": lambda own, values: sum((broken(layer(values)) for layer in list(own.layers)), torch.zeros(())),
    "reduce": lambda own, values: functools.reduce(lambda before, layer: broken(layer(before)), own.layers, values),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_layers_are_planned_with_eagers_bits(name: str) -> None:
    model = Layers(WAYS[name])
    eager = copy.deepcopy(model)

    def loss(own: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return own(batch).square().mean()

    planned = memfit.fit(model, loss, torch.randn(16, 32), budget="64MiB", planner="none")
    step = memfit.TrainingStep(model=eager, loss=loss, batch=torch.randn(16, 32))
    for _ in range(3):
        batch = torch.randn(16, 32)
        assert torch.equal(planned(batch), step.run_eager(batch))
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad)
    if name != "a list":  # a generator of the user's
        assert any(op.name.startswith("addmm") for plan in planned.plans for op in plan.graph.ops)
    if name in ("enumerate", "zip", "enumerate items"):  # with one break: a graph before it, and one behind it
        layers = [sum(op.name.startswith("addmm") for op in plan.graph.ops) for plan in planned.plans]
        assert [count for count in layers if count] in ([2, 2], [4, 4])
