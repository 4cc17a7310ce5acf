"""Outputs that no loss uses: their gradients are absent, and `.grad` is None where eager leaves it None."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.errors import UnsupportedStepError
from memfit.system.recorder import allocated_bytes, record

_WIDTH = 16
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


class Heads(nn.Module):
    """A trunk with heads, put together by a function."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH))
        self.first, self.second, self.third = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(_WIDTH), nn.Dropout(0.2)
        self.cell = nn.GRUCell(_WIDTH, _WIDTH)
        self.table = nn.Embedding(4, _WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, 2, batch_first=True)
        self.of = forward

    def forward(self, values: torch.Tensor) -> Any:
        return self.of(self, values)


def two(model: Any, values: torch.Tensor) -> Any:
    hidden = model.trunk(values).relu()
    return model.first(hidden), model.second(hidden)


def three(model: Any, values: torch.Tensor) -> Any:
    hidden = model.trunk(values)
    return model.first(hidden), model.second(hidden.tanh()), model.third(model.drop(hidden))


def in_turn(model: Any, values: torch.Tensor) -> Any:
    first = model.first(model.trunk(values))
    second = model.second(first.relu())
    return first, second, model.third(second.sin())


def loss_and_logits(model: Any, values: torch.Tensor) -> Any:
    logits = model.first(model.norm(model.trunk(values)))
    return functional.cross_entropy(logits, values.argmax(-1)), logits


def dictionary(model: Any, values: torch.Tensor) -> Any:
    return dict(enumerate(two(model, values)))


def chunks(model: Any, values: torch.Tensor) -> Any:
    return model.first(model.trunk(values)).chunk(2, dim=-1)


def views_and_copies(model: Any, values: torch.Tensor) -> Any:
    hidden = model.first(model.trunk(values))
    return hidden[:, :4], hidden[:, 4:].contiguous(), hidden[1:]


def unbound(model: Any, values: torch.Tensor) -> Any:
    first, second = model.trunk(values).view(-1, 2, _WIDTH // 2).unbind(1)
    return first.exp(), second.sin()


def tied(model: Any, values: torch.Tensor) -> Any:
    hidden = model.trunk(values) + model.table.weight[0]
    return hidden @ model.table.weight.t(), model.first(hidden)


def written(model: Any, values: torch.Tensor) -> Any:
    hidden = model.trunk(values)
    whole = torch.zeros_like(hidden)
    whole[:, :4] = model.first(hidden)[:, :4]
    whole[:, 4:] += model.second(hidden)[:, 4:]
    return whole, hidden.tanh()


def joined(model: Any, values: torch.Tensor) -> Any:
    first, second = two(model, values)
    return torch.cat([first, second.sin()]), first * second, second.square()


def recurrent(model: Any, values: torch.Tensor) -> Any:
    first = model.cell(model.trunk(values), values)
    second = model.cell(model.second(first), first)
    return first, second, model.cell(second, first)


def attended(model: Any, values: torch.Tensor) -> Any:
    hidden = model.trunk(values).view(4, -1, _WIDTH)
    return model.attention(hidden, hidden, hidden)


def maximum(model: Any, values: torch.Tensor) -> Any:
    hidden = model.trunk(values)
    return model.first(hidden).max(-1)[0], model.second(hidden).sort(-1)[0], model.third(hidden).logsumexp(-1)


def detached(model: Any, values: torch.Tensor) -> Any:
    first, second = two(model, values)
    return first + second.detach(), second + first.detach()


def with_a_parameter(model: Any, values: torch.Tensor) -> Any:
    return model.first(values), model.second.weight.square(), model.third.weight.sum()


def double_use(model: Any, values: torch.Tensor) -> Any:
    hidden = model.trunk(values)
    return model.first(model.first(hidden)), model.second(model.first(hidden).relu())


def standard(model: Any, values: torch.Tensor) -> Any:
    hidden = model.norm(model.trunk(values))
    return torch.var_mean(model.first(hidden), -1), model.second(hidden).std(-1)


MODELS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    function.__name__: function
    for function in (
        *(two, three, in_turn, loss_and_logits, dictionary, chunks, views_and_copies, unbound, tied, written, joined),
        *(recurrent, attended, maximum, detached, with_a_parameter, double_use, standard),
    )
}


def outputs_of(returned: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(returned)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def trained(
    model: Any, uses: Sequence[Sequence[int]], optimizer: torch.optim.Optimizer, run: Callable[[torch.Tensor], Any]
) -> list[Any]:
    """Return gradients of all steps, then the parameters; `uses` are the outputs that each step's loss has."""
    generator, found = torch.Generator().manual_seed(3), []
    for used in uses:
        values = torch.randn(64, _WIDTH, generator=generator)
        torch.manual_seed(7)
        outputs = outputs_of(run(values))
        loss = sum(outputs[number % len(outputs)].square().mean() for number in used)
        loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
        found.append({name: each.grad for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, dict(model.named_parameters())]


USES = [(0,), (0,), (1,), (0, 1), (2,), (1, 2), (0,)]


@pytest.mark.parametrize(
    "door",
    ["recomputing", *(pytest.param(door, marks=pytest.mark.slow) for door in ("backend", "compile", "inductor"))],
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_absent_as_in_eager(name: str, door: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Heads(MODELS[name])
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, twin)]
    wanted = trained(model, USES, optimizers[0], model)
    if door == "compile":
        memfit.compile(twin, budget="8MiB", optimizer=optimizers[1], time_limit_seconds=0.2)
        run = twin
    else:
        options = {"budget": "64MiB", "reserve": 0, "kernels": "inductor" if door == "inductor" else "eager"}
        if door == "recomputing":
            options |= {"planner": "recursive"}
        run = torch.compile(twin, backend="memfit", options=options)
    found = trained(twin, USES, optimizers[1], run)
    for number, (eagers, ours) in enumerate(zip(wanted, found, strict=True)):
        none = [name for name in eagers if (eagers[name] is None) != (ours[name] is None)]
        assert not none, (number, none)
        if door != "inductor":
            there = [name for name, each in eagers.items() if each is not None]
            other = [name for name in there if not torch.equal(eagers[name], ours[name])]
            assert not other, (number, other)


class Language(nn.Module):
    """Returns its loss and its logits, as language models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 32)
        layers = [layer for _ in range(4) for layer in (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(32, 2000, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(self.table(tokens)))
        return functional.cross_entropy(logits, labels), logits


def language_steps(model: Any, optimizer: torch.optim.Optimizer) -> tuple[list[float], int]:
    """Return the losses of some steps, and the most bytes that one took."""
    losses, most_bytes = [], 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens, labels = torch.randint(0, 2000, (2, 1024), generator=generator)
        with record("cpu") as usage:
            loss = model(tokens, labels)[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        most_bytes = max(most_bytes, usage.start_bytes + usage.peak_bytes)
    return losses, most_bytes


def test_logits_that_no_loss_uses_take_no_gradients() -> None:
    torch._dynamo.reset()
    gc.collect()
    before_bytes = allocated_bytes("cpu")
    torch.manual_seed(0)
    model = Language()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, twin)]
    losses, bare_bytes = language_steps(model, optimizers[0])
    held_bytes = sum(each.nbytes for each in twin.parameters())
    del model, optimizers[0]
    budget_bytes = before_bytes + int(0.83 * (bare_bytes - before_bytes - held_bytes))
    memfit.compile(twin, budget=budget_bytes, optimizer=optimizers[0], time_limit_seconds=1)
    found, most_bytes = language_steps(twin, optimizers[0])
    assert found == losses and most_bytes <= budget_bytes
    loss, logits = twin(*torch.randint(0, 2000, (2, 1024)))
    with pytest.raises(UnsupportedStepError, match="an output of the model beside its scalar one"):
        (loss + logits.square().mean()).backward()
