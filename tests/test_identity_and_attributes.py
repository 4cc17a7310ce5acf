"""What Python code can ask of tensors beside their values: their attributes, their identity, their lazy bits."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import memfit

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


class Scaled(torch.autograd.Function):
    """A linear layer whose backward pass reads, and may write, attributes of the weight that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        of_weight = gradients[0].t() @ x * getattr(w, "grad_scale", 1.0)
        if hasattr(w, "main_grad"):
            w.main_grad.add_(of_weight)
        return gradients[0] @ w, of_weight


def scaled_loss(model: torch.nn.Module, x: Any) -> torch.Tensor:
    return Scaled.apply(x, model.weight).square().mean()


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


def weight_after(loss: Loss, batches: list[Any], *, planned: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the losses of some steps of SGD, and the weight at the end."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    step = memfit.fit(model, loss, batches[0], budget="2MiB", optimizer=optimizer) if planned else None
    for batch in batches:
        if step is not None:
            losses.append(step(batch))
            continue
        losses.append(loss(model, batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in losses], model.weight.detach()


def check_as_eager(loss: Loss, batches: list[Any]) -> None:
    (losses, weight), (own_losses, own_weight) = (weight_after(loss, batches, planned=p) for p in (False, True))
    assert [a.item() for a in losses] == [b.item() for b in own_losses]
    assert torch.equal(weight, own_weight)


@pytest.mark.parametrize("way", ["fit", "eager"])
def test_backward_reads_and_writes_attributes_of_a_saved_parameter(way: str) -> None:
    found: list[list[torch.Tensor]] = []
    for is_plain in (True, False):
        model, x = linear(), torch.ones(4, 8)
        model.weight.grad_scale = 10.0  # pyright: ignore[reportAttributeAccessIssue]
        model.weight.main_grad = torch.zeros(8, 8)  # pyright: ignore[reportAttributeAccessIssue]
        if way == "fit" and not is_plain:
            step = memfit.fit(model, scaled_loss, x, budget="1MiB")
            step(x)
            step(x)
        else:
            with nullcontext() if is_plain else memfit.eager(model, budget="64MiB"):
                scaled_loss(model, x).backward()
                scaled_loss(model, x).backward()
        assert isinstance(model.weight.grad, torch.Tensor)
        found.append([model.weight.grad, model.weight.main_grad])  # pyright: ignore
    assert all(map(torch.equal, *found))
    assert found[0][1].abs().sum() > 0


def test_a_changed_or_a_new_attribute_of_a_parameter_is_seen() -> None:
    def loss(model: torch.nn.Module, x: Any) -> torch.Tensor:
        return model(x).square().mean() * getattr(model.weight, "scale", 1.0) + getattr(model.bias, "more", 0.0)

    model, x = linear(), torch.ones(4, 8)
    model.weight.scale = 3.0  # pyright: ignore[reportAttributeAccessIssue]
    step = memfit.fit(model, loss, x, budget="1MiB")
    assert step(x).item() == loss(model, x).item()
    model.weight.scale = 5.0  # pyright: ignore[reportAttributeAccessIssue]
    assert step(x).item() == loss(model, x).item()
    model.bias.more = 7.0  # pyright: ignore[reportAttributeAccessIssue]
    assert step(x).item() == loss(model, x).item()


class Weight(torch.nn.Parameter):
    """A parameter of a class of its own, as quantizing and sharding libraries have them."""


@pytest.mark.parametrize("way", ["fit", "backend"])
def test_parameters_of_a_class_that_only_adds_attributes(way: str) -> None:
    torch.compiler.reset()
    found: list[torch.Tensor] = []
    for is_plain in (True, False):
        model, x = linear(), torch.ones(4, 8)
        model.weight = Weight(model.weight.detach())
        model.weight.kind = "own"  # pyright: ignore[reportAttributeAccessIssue]
        if way == "fit" and not is_plain:
            step = memfit.fit(model, lambda model, x: model(x).square().mean(), x, budget="1MiB")
            step(x)
            step(x)
        else:
            options = {"budget": "64MiB", "reserve": 0}
            call = model if is_plain else torch.compile(model, backend="memfit", options=options)  # pyright: ignore
            for _ in range(2):
                call(x).square().mean().backward()
        assert type(model.weight) is Weight and model.weight.grad is not None
        found.append(model.weight.grad)
    assert torch.equal(*found)


def test_a_step_that_sets_an_attribute_and_reads_it_again_is_no_graph() -> None:
    def loss(model: torch.nn.Module, x: Any) -> torch.Tensor:
        model.weight.times = getattr(model.weight, "times", 0) + 1  # pyright: ignore[reportAttributeAccessIssue]
        return model(x).square().mean() * model.weight.times  # pyright: ignore

    model, x = linear(), torch.ones(4, 8)
    step = memfit.fit(model, loss, x, budget="1MiB")
    assert "times" in step.why
    assert not hasattr(model.weight, "times")
    first = step(x)
    assert step(x) == 2 * first


def test_a_step_that_replaces_an_attribute_of_a_parameter_is_no_graph() -> None:
    def loss(model: torch.nn.Module, x: Any) -> torch.Tensor:
        weight: Any = model.weight
        weight.kept = weight.kept + model(x).detach().sum()
        return model(x).square().mean() * weight.kept

    model, x = linear(), torch.ones(4, 8)
    model.weight.kept = before = torch.zeros(())  # pyright: ignore[reportAttributeAccessIssue]
    step = memfit.fit(model, loss, x, budget="1MiB")
    assert "kept" in step.why
    assert model.weight.kept is before  # pyright: ignore[reportAttributeAccessIssue]
    assert step(x) != step(x)


def test_one_tensor_at_two_places_of_a_batch() -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) * model(batch[1])).mean() * (2 if batch[0] is batch[1] else 1)

    x, y = torch.randn(16, 8), torch.randn(16, 8)
    for batches in ([(x, x), (x, y), (y, y)], [(x, y), (x, x)], [(x, x), (y[:8], y[:8]), (z := y[:12], z)]):
        check_as_eager(loss, list(batches))


def test_self_attention_of_one_tensor_takes_the_packed_projection() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(4, 16, 32)
    step = memfit.fit(model, lambda m, b: m(*b)[0].square().mean(), (x, x, x), budget="3MiB", verify=True)
    assert torch.isfinite(step((x, x, x)))


def test_a_function_of_a_state_with_one_tensor_twice() -> None:
    def next_state(state: Any, batch: Any) -> Any:
        return state[0] + batch, state[1] * (2 if state[0] is state[1] else 1)

    x = torch.randn(64)
    planned = memfit.fit_function(next_state, (x, x), x.clone(), budget="1MiB")
    assert all(map(torch.equal, planned((x, x), x.clone()), next_state((x, x), x.clone())))
    assert all(map(torch.equal, planned((x, x.clone()), x.clone()), next_state((x, x.clone()), x.clone())))


@pytest.mark.parametrize("lazy", [lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.imag.conj()])
def test_a_batch_that_is_lazily_conjugated_or_negated(lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def loss(model: torch.nn.Module, b: Any) -> torch.Tensor:
        return model(b.real + b.imag if b.is_complex() else b).square().mean() + model.weight.sum()

    x = torch.randn(64, 8, dtype=torch.cfloat)
    made = lazy(x)
    resolved = made.resolve_conj().resolve_neg()
    check_as_eager(loss, [made, resolved, made])
    check_as_eager(loss, [resolved, made])


def test_a_function_takes_a_state_and_its_conjugate() -> None:
    x = torch.randn(4, dtype=torch.cfloat)
    planned = memfit.fit_function(torch.add, x, x, budget="1MiB")
    assert torch.equal(planned(x, x.conj()), x + x.conj())


class Described(torch.nn.Module):
    """Calls a function of itself in forward, which reads one of its dictionaries."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.read, self.gain = read, torch.nn.Parameter(torch.full((8,), 0.5))
        self.linear, self.norm = linear(), torch.nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.zeros(8))
        self.factor = 0.25
        self.attributes, self.parameter_table = vars(self), self._parameters
        self.view, self.values_of = types.MappingProxyType(vars(self.linear)), self.linear._parameters.values()

    @functools.cached_property
    def half(self) -> float:
        return self.factor * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.gain * self.read(self) + self.shift


def replaces_a_buffer(own: Any) -> float:
    own.shift = own.shift + vars(own)["factor"]
    return 1.0


def sets_attributes(own: Any) -> float:
    own.factor, own.seen = 0.25, 3
    own.linear.register_forward_hook(lambda *_: None)
    own.submodule = torch.nn.Tanh()
    return len(vars(own.linear)) * own.attributes["factor"]


def raises(own: Any) -> float:
    raise ValueError(vars(own).keys())


READS: dict[str, Callable[[Any], float]] = {
    "cached property": lambda own: own.half,
    "vars": lambda own: vars(own)["factor"],
    "in": lambda own: 0.25 if "factor" in own.__dict__ else 1.0,
    "a module's table": lambda own: float(len(own.linear.__dict__["_parameters"])),
    "a library's module": lambda own: vars(own.norm)["momentum"],
    "all modules": lambda own: sum(float(len(vars(module))) for module in own.modules()),
    "a copy": lambda own: copy.copy(own).factor,
    "a merged dictionary": lambda own: (own.__dict__ | {"factor": 2.0})["factor"],
    "a kept dictionary": lambda own: own.attributes["factor"],
    "a kept table": lambda own: float(len(own.parameter_table)),
    "a kept proxy": lambda own: float(len(own.view)),
    "kept values": lambda own: float(len(own.values_of)),
    "and a buffer is replaced": replaces_a_buffer,
    "and attributes are set": sets_attributes,
    "and the step raises": raises,
}


def held(model: torch.nn.Module) -> dict[Any, Any]:
    """Return what all modules hold, with the entries of their tables in order."""
    found: dict[Any, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            entries = value.items() if isinstance(value, dict) and name.startswith("_") else ((None, value),)
            found |= {(path, name, key): entry for key, entry in entries}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_a_module_whose_dictionary_forward_reads_is_as_it_was(name: str) -> None:
    results: list[list[torch.Tensor]] = []
    for is_planned in (False, True):
        model, x = Described(READS[name]), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Any = lambda batch, net=model: net(batch).square().mean()  # noqa: E731
        if is_planned:
            before = held(model)
            with pytest.raises(memfit.MemfitError) if name == "and the step raises" else nullcontext():
                step = memfit.fit(model, lambda m, b: m(b).square().mean(), x, budget="2MiB", optimizer=optimizer)
            after = held(model)
            assert list(after) == list(before)
            assert all(after[place] is value for place, value in before.items())
        if name == "and the step raises":
            continue
        losses: list[torch.Tensor] = []
        for _ in range(3):
            losses.append(step(x))
            if not is_planned:
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([each.detach() for each in (*losses, *model.parameters(), *model.buffers())])
    assert name == "and the step raises" or all(map(torch.equal, *results))
