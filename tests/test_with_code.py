"""Operators that are given code: flex attention, `torch.cond` and its like, custom operators that write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from occupied import bytes_now
from torch import nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops.map import map as mapped
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

import memfit
from memfit.errors import NotOneGraphError
from memfit.system.recorder import record

# Dynamo's own warnings while it traces, which are errors under pytest.
pytestmark = [
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
CPU = torch.device("cpu")
ROWS, LENGTH, HEADS, WIDTH = 24, 32, 4, 128


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch has flex attention's gradients on a CPU, and refuses them
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.library.custom_op("memfit_with_code::average_", mutates_args=("average",))
def _average(average: torch.Tensor, values: torch.Tensor) -> None:
    average.mul_(0.9).add_(values, alpha=0.1)


@torch.library.custom_op("memfit_with_code::by_columns", mutates_args=())
def _by_columns(values: torch.Tensor) -> torch.Tensor:
    return (2 * values).transpose(-1, -2).contiguous().transpose(-1, -2)


_by_columns.register_fake(torch.empty_like)  # wrong about the strides, so that the graph is captured again
_by_columns.register_autograd(lambda _context, gradient: 2 * gradient)


@torch.compiler.nested_compile_region
def _region(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.dropout(torch.relu(values @ weight), 0.5).tanh()


def _by_average(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    _average(layer.average, x.detach().mean((0, 1)))
    return x - layer.average


def _by_bias(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Attention with a bias that is learned, and one that was computed from another."""
    heads, doubled = x.unflatten(-1, (HEADS, -1)).transpose(1, 2), 2 * layer.bias.tanh()

    def biased(score: torch.Tensor, _b: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return score + layer.bias[head] * (query - key) * 0.1 + doubled[head] * score

    mask = flex.create_block_mask(lambda _b, _h, query, key: query >= key, None, None, LENGTH, LENGTH, device="cpu")
    return flex.flex_attention(heads, heads, heads, biased, mask).transpose(1, 2).flatten(2)


WAYS: dict[str, Callable[[Layer, torch.Tensor], torch.Tensor]] = {
    "attention": _by_bias,
    "cond": lambda layer, x: torch.cond(
        x.sum() > 0, lambda z: (z @ layer.w).sin(), lambda z: (z @ layer.w).cos(), (x,)
    ),
    "map": lambda layer, x: mapped(lambda row, weight: (row @ weight).tanh(), _by_columns(x), layer.w),
    "scan": lambda _, x: scan(lambda sums, row: (sums * 0.9 + row, (sums * row).tanh()), torch.zeros_like(x[0]), x)[1],
    "sums": lambda _, x: associative_scan(lambda a, b: a * 0.5 + b, x, dim=0, combine_mode="generic"),
    "region": lambda layer, x: _region(x, layer.w),
    "writes": _by_average,
}


class Layer(nn.Module):
    """A residual block with something between its linear layers."""

    def __init__(self, way: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), way
        self.w, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH), nn.Parameter(torch.randn(HEADS))
        self.average = nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.way(self, self.last(functional.gelu(self.first(x))))


def _model(way: Callable[[Layer, torch.Tensor], torch.Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(way) for _ in range(3)), nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _train(call: Callable[..., torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Take three steps; return losses, parameters and buffers."""
    torch.manual_seed(1)
    losses: list[torch.Tensor] = []
    for _ in range(3):
        inputs, labels = torch.randn(ROWS, LENGTH, WIDTH), torch.randint(0, 10, (ROWS,))
        loss = functional.cross_entropy(call(inputs).mean(1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers()))]


def _by_backend(model: nn.Module, optimizer: torch.optim.Optimizer, budget: int) -> list[torch.Tensor]:
    options = {"budget": budget, "reserve": 0, "options": {"iterations": 1_000}}
    return _train(torch.compile(model, backend="memfit", options=options), model, optimizer)


def _by_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, budget: int) -> list[torch.Tensor]:
    handle = memfit.checkpoint(model, budget=budget)
    trained = _train(model, model, optimizer)
    handle.end_step()
    return trained


def _by_eager_mode(model: nn.Module, optimizer: torch.optim.Optimizer, budget: int) -> list[torch.Tensor]:
    with memfit.eager(model, budget=budget):
        return _train(model, model, optimizer)


@pytest.mark.parametrize(
    ("door", "way"),
    [*((_by_backend, way) for way in WAYS), (_by_checkpoint, "attention"), (_by_eager_mode, "attention")],
)
def test_steps_have_eagers_bits_within_the_budget(door: Callable[..., list[torch.Tensor]], way: str) -> None:
    expected_model, expected_optimizer = _model(WAYS[way])
    with record(CPU) as usage:
        expected = _train(expected_model, expected_model, expected_optimizer)
    model, optimizer = _model(WAYS[way])
    start_bytes = bytes_now(CPU)
    allowed_bytes = int(0.85 * usage.peak_bytes)
    with record(CPU) as usage:
        trained = door(model, optimizer, start_bytes + allowed_bytes)
    assert usage.peak_bytes <= allowed_bytes
    assert all(map(torch.equal, trained, expected))


def test_code_that_draws_is_refused_and_left_to_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    def drops(_: Layer, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda z: functional.dropout(z, 0.5), lambda z: z.cos(), (x,))

    model, optimizer = _model(drops)
    expected = _train(model, model, optimizer)
    model, optimizer = _model(drops)
    with pytest.raises(NotOneGraphError, match=r"0 calls cond, whose code draws random numbers: memfit\.checkpoint\("):
        _by_backend(model, optimizer, 1 << 30)
    model, optimizer = _model(drops)
    memfit.compile(model, budget="1GiB", optimizer=optimizer)
    assert all(map(torch.equal, _train(model, model, optimizer), expected))
    assert "since 0 calls cond, whose code draws random numbers" in caplog.text


def test_loops_that_numbers_end_are_refused() -> None:
    def loops(_: Layer, x: torch.Tensor) -> torch.Tensor:
        return torch.while_loop(lambda n, _: n < 3, lambda n, z: (n + 1, z.sin()), (torch.tensor(0), x))[1]  # pyright: ignore

    with pytest.raises(NotOneGraphError, match=r"torch\.while_loop, of which numbers decide how long it runs"):
        _by_backend(*_model(loops), 1 << 30)


def test_inductors_kernels_leave_it_to_eagers_and_to_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _model(WAYS["cond"])
    compiled = torch.compile(model, backend="memfit", options={"budget": "1GiB", "reserve": 0, "kernels": "inductor"})
    with pytest.raises(
        NotOneGraphError, match=r'cond is no operator .* kernels="eager" plans it .* memfit\.checkpoint\('
    ):
        _train(compiled, model, optimizer)
    model, optimizer = _model(WAYS["cond"])
    memfit.compile(model, budget="1GiB", optimizer=optimizer, kernels="inductor")
    expected_model, expected_optimizer = _model(WAYS["cond"])
    assert all(
        map(torch.equal, _train(model, model, optimizer), _train(expected_model, expected_model, expected_optimizer))
    )
    assert "held by memfit.checkpoint, without kernels, since cond is no operator" in caplog.text
