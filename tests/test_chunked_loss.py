"""Chunked loss: logits by rows give eager's numbers to rounding, are never whole, and work at each door."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.chunked_loss.heads import ChunkedHead
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.system.recorder import record

CPU = torch.device("cpu")
CLASSES, WIDTH, ROWS = 600, 16, (3, 100)
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Some layers, and a head on the embedding's weight."""

    def __init__(self, classes: int = CLASSES, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.layer = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class WithAdapter(Model):
    """A head with a bias, and a product of two small matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        return self.head(hidden) + self.up(self.down(hidden)) * 2.0


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, CLASSES, ROWS, generator=generator)
    target = torch.randint(0, CLASSES, ROWS, generator=generator)
    target[0, :30] = -100
    return tokens, target


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(flat(logits), target.reshape(-1), **options)


def shifted(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    logits = model(tokens).float()
    return cross_entropy(logits[..., :-1, :].contiguous(), target[..., 1:].contiguous())


def with_z_loss(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    logits = model(tokens)
    return cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).pow(2).mean()


def policy_gradient(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    log_probabilities = torch.log_softmax(model(tokens).double(), dim=-1)
    chosen = log_probabilities.gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return -(chosen * 0.5).mean() - 0.01 * entropy.mean()


def normalized(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    logits = model(tokens)
    logits = logits - logits.logsumexp(-1, keepdim=True)
    return -logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).mean()


def weighted_by_row(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    losses = cross_entropy(model(tokens), target, reduction="none").view(tokens.shape)
    return (losses * torch.arange(1.0, 1.0 + losses.numel()).view(tokens.shape)).mean()


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def weight() -> Tensor:
    return random(CLASSES) + 0.1


def shares() -> Tensor:
    return random(300, CLASSES).softmax(-1)


def allowed() -> Tensor:
    return torch.arange(CLASSES) < 550


LOSSES: dict[str, Loss] = {
    "mean": lambda m, x, y: cross_entropy(m(x), y),
    "a loss module": lambda m, x, y: nn.CrossEntropyLoss()(m(x).flatten(0, 1), y.flatten()),
    "classes second": lambda m, x, y: functional.cross_entropy(m(x).transpose(1, 2), y),
    "classes second, permuted": lambda m, x, y: functional.cross_entropy(m(x).permute(0, 2, 1), y, reduction="sum"),
    "label smoothing": lambda m, x, y: cross_entropy(m(x), y, label_smoothing=0.1),
    "class weights": lambda m, x, y: cross_entropy(m(x), y, weight=weight()),
    "class weights, smoothed": lambda m, x, y: cross_entropy(m(x), y, weight=weight(), label_smoothing=0.2),
    "another ignored index": lambda m, x, y: cross_entropy(m(x), y.clamp(min=0), ignore_index=0),
    "by a token count": lambda m, x, y: cross_entropy(m(x), y, reduction="sum") / 123,
    "of each row": weighted_by_row,
    "shifted": shifted,
    "soft cap": lambda m, x, y: cross_entropy(torch.tanh(m(x) / 5) * 5, y),
    "z-loss": with_z_loss,
    "log softmax": lambda m, x, y: functional.nll_loss(functional.log_softmax(m(x), -1).view(-1, CLASSES), y.view(-1)),
    "policy gradient": policy_gradient,
    "normalized": normalized,
    "selected by a mask": lambda m, x, y: functional.cross_entropy(m(x)[y != -100], y[y != -100]),
    "last position": lambda m, x, y: functional.cross_entropy(m(x)[:, -1], y[:, -1]),
    "probabilities": lambda m, x, _: functional.cross_entropy(flat(m(x)), shares()),
    "a learned temperature": lambda m, x, y: cross_entropy(m(x) * m.scale.exp(), y),
    "a divisor of each row": lambda m, x, y: cross_entropy(m(x) / (1 + x[..., None]), y),
    "masked classes": lambda m, x, y: cross_entropy(m(x).masked_fill(~allowed(), -1e9), y.clamp(max=549)),
    "where": lambda m, x, y: cross_entropy(torch.where(allowed(), m(x), -1e9), y.clamp(max=549)),
    "detached beside": lambda m, x, y: (lambda z: cross_entropy(z, y) + z.detach().amax(-1).mean())(m(x)),
}
WHOLE: dict[str, Loss] = {
    "along the rows": lambda m, x, _: m(x).cumsum(0).square().mean(),
    "another divergence": lambda m, x, _: functional.kl_div(
        functional.log_softmax(flat(m(x)), -1), shares(), reduction="batchmean"
    ),
    "of all": lambda m, x, _: m(x).square().mean(),
    "another product": lambda m, x, _: (m(x) @ torch.ones(CLASSES, 2, dtype=torch.float64)).mean(),
}


def results(model: nn.Module, loss: Loss, *, chunked: bool) -> list[Tensor]:
    """Return the loss and all gradients."""
    model = copy.deepcopy(model)
    with ChunkedHead(model) if chunked else torch.enable_grad():
        value = loss(model, *data())
    value.backward()
    return [value.detach(), *(torch.zeros(()) if p.grad is None else p.grad for p in model.parameters())]


@pytest.mark.parametrize("model", [Model, WithAdapter])
@pytest.mark.parametrize("name", [*LOSSES, *WHOLE])
def test_losses_and_gradients_are_eagers_to_rounding(name: str, model: type[Model]) -> None:
    loss = (LOSSES | WHOLE)[name]
    if name == "shifted":
        loss = lambda m, x, y: cross_entropy(m(x)[..., :-1, :], y[..., 1:])  # noqa: E731 - float() would round
    torch.manual_seed(0)
    made = model().double()
    torch.testing.assert_close(
        results(made, loss, chunked=True), results(made, loss, chunked=False), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "probabilities"])  # which are whole themselves
def test_logits_are_never_whole(name: str) -> None:
    torch.manual_seed(0)
    model, (tokens, target) = Model().double(), (each.repeat_interleave(8, 0) for each in data())
    logits_bytes = tokens.numel() * CLASSES * 8
    gc.collect()
    with record(CPU) as usage, ChunkedHead(model):
        LOSSES[name](model, tokens, target).backward()
    assert usage.peak_bytes < 0.4 * logits_bytes, "eager takes at least twice the logits"


def test_what_needs_logits_whole_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, (tokens, _) = Model(), data()
    with caplog.at_level(logging.WARNING, "memfit"):
        for _ in range(2):
            with ChunkedHead(model):
                assert model(tokens).diff(dim=0).shape == (2, 100, CLASSES)
    assert [record.getMessage() for record in caplog.records] == [
        "memfit: chunk_loss: diff needs the logits whole, of shape (3, 100, 600)"
    ]


def test_logits_that_are_written_to_are_refused() -> None:
    model, (tokens, _) = Model(), data()
    with ChunkedHead(model), pytest.raises(UnsupportedStepError, match=r"div_ writes to the logits.*chunk_loss out"):
        model(tokens).div_(2)
    with ChunkedHead(model), pytest.raises(UnsupportedStepError, match="writes to the logits"):
        model(tokens)[..., 0] = 0.0


def test_what_was_written_to_before_the_loss_is_refused() -> None:
    model, (tokens, target) = Model(), data()
    with ChunkedHead(model):
        logits = model(tokens)
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(UnsupportedStepError, match="written to in place before they were used"):
        cross_entropy(logits, target)


def test_a_second_backward_pass_is_refused() -> None:
    model, (tokens, target) = Model(), data()
    with ChunkedHead(model):
        loss = cross_entropy(model(tokens), target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward once"):
        loss.backward()


def test_evaluations_are_left_alone() -> None:
    model, (tokens, _) = Model(), data()
    with ChunkedHead(model), torch.no_grad():
        assert type(model(tokens)) is Tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_short_weights_add_up_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model()
    exact = results(model, LOSSES["mean"], chunked=False)
    short, chunked = (results(model.to(dtype), LOSSES["mean"], chunked=each) for each in (False, True))
    for right, one, other in zip(exact, short, chunked, strict=True):
        error, own_error = ((each.float() - right).norm() for each in (one, other))
        assert own_error <= 1.25 * error + 1e-6


def test_autocast_is_eagers() -> None:
    torch.manual_seed(0)
    model = Model()

    def inside(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens)
            assert logits.dtype == torch.bfloat16
            return cross_entropy(logits, target)

    exact = results(model, LOSSES["mean"], chunked=False)
    eager, chunked = (results(model, inside, chunked=each) for each in (False, True))
    for right, one, other in zip(exact, eager, chunked, strict=True):
        assert one.dtype == other.dtype
        assert (other - right).norm() <= 1.4 * (one - right).norm() + 1e-6


def test_heads_are_found_by_name_or_refused() -> None:
    with pytest.raises(InvalidOptionError, match="chunk_loss='lm_head': the model has no projection"):
        ChunkedHead(Model(), "lm_head")
    with pytest.raises(InvalidOptionError, match=r"no projection .* is not repeated and has more"):
        ChunkedHead(nn.ModuleList(nn.Linear(4, 8) for _ in range(3)))
    with pytest.raises(UnsupportedStepError, match="computed by a parametrization"):
        ChunkedHead(nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))))


def test_a_head_that_is_not_called_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    model, (tokens, target) = Model(), data()
    model.other = nn.Linear(WIDTH, 2 * CLASSES)
    loss = lambda model, batch: LOSSES["mean"](model, *batch)  # noqa: E731
    with pytest.raises(UnsupportedStepError, match=r"the head that was found, other, was not called.*name the head"):
        memfit.fit(model, loss, (tokens, target), budget="1GiB", chunk_loss=True)
    with memfit.checkpoint(model, "1GiB", blocks=["layer"], chunk_loss=True), caplog.at_level("WARNING", "memfit"):
        for _ in range(2):
            LOSSES["mean"](model, tokens, target).backward()
    assert sum("other, was not called" in record.getMessage() for record in caplog.records) == 1


def test_a_step_without_a_loss_has_no_chunks() -> None:
    from memfit.capture.function_step import FunctionStep
    from memfit.capture.step_check import check_step

    step = dataclasses.replace(FunctionStep.of(torch.sin, torch.ones(2)), chunk_loss=True)
    with pytest.raises(UnsupportedStepError, match="chunk_loss is for the loss of a training step"):
        check_step(step, "here")


# -- doors


def steps_of(model: Model, loss: Loss = LOSSES["mean"]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for _ in range(5):
        value = loss(model, *data())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def large() -> Model:
    torch.manual_seed(0)
    return Model(classes=6000, width=32)


def taken(run: Callable[[], list[float]]) -> tuple[list[float], int]:
    gc.collect()
    with record(CPU) as usage:
        losses = run()
    return losses, usage.peak_bytes


@pytest.fixture(scope="module")
def stock() -> tuple[list[float], int]:
    return taken(lambda: steps_of(large()))


def _checkpointed(model: Model, budget: int) -> list[float]:
    with memfit.checkpoint(model, budget, blocks=["layer"], chunk_loss=True):
        return steps_of(model)


def _eager(model: Model, budget: int) -> list[float]:
    with memfit.eager(model, budget=budget, chunk_loss=True):
        return steps_of(model)


def _compiled(model: Model, budget: int) -> list[float]:
    return steps_of(memfit.compile(model, budget=budget, chunk_loss="head"))  # pyright: ignore[reportArgumentType]


def _fitted(model: Model, budget: int) -> list[float]:
    loss = lambda model, batch: LOSSES["mean"](model, *batch)  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = memfit.fit(model, loss, data(), optimizer=optimizer, budget=budget, chunk_loss=True, planner="none")
    return [step(data()).item() for _ in range(5)]


@pytest.mark.parametrize("door", [_checkpointed, _eager, _compiled, _fitted])
def test_each_door_takes_less(door: Callable[[Model, int], list[float]], stock: tuple[list[float], int]) -> None:
    losses, most_bytes = taken(lambda: door(large(), 1 << 30))
    assert losses == pytest.approx(stock[0], rel=1e-5)
    logits_bytes = 300 * 6000 * 4
    assert most_bytes < stock[1] - logits_bytes


def test_the_model_is_left_as_it_was() -> None:
    model = large()
    _checkpointed(model, 1 << 30)
    _eager(model, 1 << 30)
    _fitted(model, 1 << 30)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_planned_step_is_eagers_chunked_one_bit_by_bit() -> None:
    model, loss = large(), lambda model, batch: LOSSES["mean"](model, *batch)
    step = memfit.fit(model, loss, data(), budget="1GiB", chunk_loss=True, planner="none")
    step.verify()


def test_gradients_of_the_logits_themselves_are_kept() -> None:
    model, (tokens, target) = Model(), data()
    with ChunkedHead(model):
        logits = model(tokens)
        logits.retain_grad()
        cross_entropy(logits, target).backward()
    assert logits.grad is not None
    assert logits.grad.shape == (*ROWS, CLASSES)


def test_a_sum_that_is_too_large_for_float16_is_scaled_first() -> None:
    torch.manual_seed(0)
    head = nn.Linear(1, 4, bias=False).half()
    hidden, target = torch.full((100_000, 1), 8.0).half(), torch.zeros(100_000, dtype=torch.long)
    for chunked in (False, True):
        with ChunkedHead(nn.ModuleDict({"head": head})) if chunked else torch.enable_grad():
            functional.cross_entropy(head(hidden).float(), target).backward()
    assert head.weight.grad is not None
    assert head.weight.grad.isfinite().all()
