"""Tensors that a step sets in Python: a planned step does not compute them, and whoever reads one is told."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import memfit
from memfit.capture.unrecorded import Unrecorded
from memfit.errors import UnsupportedStepError

LAST: Any = None


class Leaving(nn.Module):
    """Leaves its features in many places; reads none of them."""

    total: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: Any = None
        self.old: Any = torch.zeros(3)
        self.table: dict[str, Any] = {}
        self.box = SimpleNamespace(seen=None)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        global LAST
        features = self.layer(values)
        self.last = self.old = self.table["seen"] = self.box.seen = features
        self.pair = features, 1
        LAST = Leaving.total = features
        return features


def squares(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return model(values).square().mean()


def fitted(model: nn.Module, loss: Any = squares) -> Any:
    return memfit.fit(model, loss, torch.randn(8, 4), budget="1MiB", time_limit_seconds=1)


READS: dict[str, Callable[[Leaving], Any]] = {
    "an attribute": lambda model: model.last,
    "an attribute that had a tensor": lambda model: model.old,
    "a new attribute": lambda model: model.pair,
    "an entry of a dictionary": lambda model: model.table["seen"],
    "an object": lambda model: model.box.seen,
    "a class": lambda _: Leaving.total,
    "a global": lambda _: LAST,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_a_step_leaves_is_refused_where_it_is_read(read: Callable[[Leaving], Any]) -> None:
    model = Leaving()
    step = fitted(model)
    for _ in range(2):
        step(torch.randn(8, 4))
        for use in (lambda left: left[0].mean(), lambda left: left + 1, torch.as_tensor, lambda left: f"{left:.2f}"):
            with pytest.raises((UnsupportedStepError, RuntimeError), match="step"):
                use(read(model))
        with torch.no_grad():
            model(torch.ones(8, 4))
        assert not isinstance(read(model), Unrecorded)
        model.zero_grad()
    assert len(step.plans) == 1


def test_a_closure_variable_is_refused_where_it_is_read() -> None:
    seen: Any = None

    def loss(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen = model(values)
        return seen.square().mean()

    model = nn.Linear(4, 4)
    step = fitted(model, loss)
    assert seen is None
    for _ in range(3):
        step(torch.randn(8, 4))
        model.zero_grad()
        with pytest.raises(UnsupportedStepError, match="'seen'"):
            seen.mean()
    assert len(step.plans) == 1


def test_nothing_is_left_before_the_first_step() -> None:
    model = Leaving()
    old = model.old
    fitted(model)
    assert model.old is old and model.last is None and not hasattr(model, "pair") and not model.table


@pytest.mark.parametrize("has_called", [True, False], ids=["after a call", "at once"])
def test_pruning_a_pruned_layer_asks_for_its_weight(has_called: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    prune.l1_unstructured(model[0], "weight", 0.3)
    fitted(model)(torch.randn(8, 4))
    if has_called:
        with torch.no_grad():
            model(torch.randn(8, 4))
        prune.l1_unstructured(model[0], "weight", 0.3)
    else:
        with pytest.raises(UnsupportedStepError, match=r"0\.weight"):
            prune.l1_unstructured(model[0], "weight", 0.3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_a_normalized_weight_has_its_step_bits_and_is_not_read_stale(norm: Any) -> None:
    def train(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh())
        step = wrap(model)
        for _ in range(3):
            step(torch.randn(8, 4))
        if wrap is fitted:
            with pytest.raises(UnsupportedStepError, match=r"0\.weight"):
                model[0].weight.sum()
        return [each.grad for each in model.parameters() if each.grad is not None] + list(model.buffers())

    def eager(model: nn.Module) -> Any:
        torch.randn(8, 4)  # which `fitted` draws
        return lambda values: squares(model, values).backward()

    assert all(torch.equal(a, b) for a, b in zip(train(eager), train(fitted), strict=True))


def test_a_model_with_such_places_is_copied_and_pickled() -> None:
    model = Leaving()
    step = fitted(model)
    step(torch.randn(8, 4))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "do not compute" in repr(other.last)
        with pytest.raises(UnsupportedStepError, match=r"model\.last"):
            torch.sum(other.last)
        other(torch.randn(8, 4))
        assert other.last.shape == (8, 4)


def test_a_recurrent_layer_keeps_its_list_of_weights() -> None:
    model = nn.Sequential(nn.LSTM(4, 4))
    step = fitted(model, lambda own, values: own(values)[0].square().mean())
    step(torch.randn(8, 4))
    assert all(a is b for a, b in zip(model[0]._flat_weights, model.parameters(), strict=True))
    model(torch.randn(8, 4))
