"""Hooks of saved tensors that change values: each door has eager's bits with them, or refuses them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.errors import NotOneGraphError, UnsupportedStepError

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler
ROWS, WIDTH, STEPS, LATE = 64, 16, 4, 2
AROUND = torch.autograd.graph.saved_tensors_hooks


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def same(value: Any) -> Any:
    return value


def rounded(tensor: Tensor) -> Tensor:
    return (tensor * 8).round() / 8 if tensor.is_floating_point() else tensor


def quantized(tensor: Tensor) -> Any:
    scale = tensor.abs().max().clamp_min(1e-6) / 127
    return (tensor / scale).round().to(torch.int8), scale


def cast(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


class OfOneShape:
    """Keeps the tensors of one shape in half precision, which a plan need not keep at all."""

    def pack(self, tensor: Tensor) -> Tensor:
        return tensor.half() if tensor.shape == (ROWS, 4 * WIDTH) else tensor

    def hooks(self) -> AbstractContextManager[Any]:
        return AROUND(self.pack, lambda kept: kept.float() if kept.dtype is torch.half else kept)


@contextmanager
def pushed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def nested(*blocks: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block())
        yield


save_on_cpu = torch.autograd.graph.save_on_cpu
CHANGING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "rounded": lambda: AROUND(rounded, same),
    "cast": lambda: AROUND(cast, lambda kept: kept.float() if kept.dtype is torch.bfloat16 else kept),
    "quantized": lambda: AROUND(quantized, lambda kept: kept[0] * kept[1]),
    "of one shape": lambda: OfOneShape().hooks(),
    "no Python function": lambda: AROUND(torch.round, same),
    "set once": lambda: pushed(rounded, same),
    "around what torch saves on the CPU": lambda: nested(save_on_cpu, lambda: AROUND(rounded, same)),
}
KEEPING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "on the CPU": save_on_cpu,
    "inside of hooks that change": lambda: nested(lambda: AROUND(rounded, same), save_on_cpu),
    "none allowed": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(functional.gelu(self.wide(x))))


class Net(nn.Module):
    def __init__(self, inside: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with self.inside():
            for layer in self.layers:
                x = layer(x)
        return x


def compiled(model: Net) -> Any:
    return torch.compile(model, backend="memfit", options={"budget": "1GiB", "reserve": 0})


def train(
    own: Callable[[], AbstractContextManager[Any]],
    enter: Callable[[Net], Any] = same,
    *,
    where: str = "step",
    late: bool = False,
) -> list[Tensor]:
    """Return the parameters after some steps inside of hooks, `late` in the last ones only."""
    model = Net(own if where == "forward" else nullcontext)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    call = enter(model)
    for number in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        is_on = where != "forward" and (not late or number >= LATE)
        with own() if is_on else nullcontext():
            loss = call(x).square().mean()
            if where == "step":
                loss.backward()
        if where != "step":
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def checkpointed(model: Net) -> Net:
    memfit.checkpoint(model, policy={str(ROWS * WIDTH): {f"layers.{n}": "full" for n in range(3)}})
    return model


@pytest.mark.parametrize(("where", "late"), [("step", False), ("loss", True)])
@pytest.mark.parametrize("name", CHANGING)
def test_a_compiled_model_is_handed_over_where_hooks_may_change_values(
    name: str, where: str, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = CHANGING[name]
    expected = train(hooks, where=where, late=late)
    assert not all(map(torch.equal, expected, train(nullcontext)))
    found = train(hooks, lambda model: memfit.compile(model, budget="1GiB"), where=where, late=late)
    assert all(map(torch.equal, found, expected))
    (line,) = [each for each in caplog.messages if "hooks of saved tensors" in each]
    assert "held by memfit.checkpoint" in line
    with pytest.raises(NotOneGraphError, match=r"hooks of saved tensors \(.+\) are around a call"):
        train(hooks, compiled, where=where, late=late)


@pytest.mark.parametrize("where", ["step", "loss", "forward"])
@pytest.mark.parametrize("name", CHANGING)
def test_recomputed_blocks_have_what_hooks_change(name: str, where: str) -> None:
    expected = train(CHANGING[name], where=where)
    assert all(map(torch.equal, train(CHANGING[name], checkpointed, where=where), expected))


@pytest.mark.parametrize("where", ["step", "loss"])
@pytest.mark.parametrize("name", KEEPING)
def test_a_plan_stays_where_hooks_keep_values(name: str, where: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(nullcontext)
    for enter in (compiled, lambda model: memfit.compile(model, budget="1GiB")):
        assert all(map(torch.equal, train(KEEPING[name], enter, where=where), expected))
    assert not any("held by memfit.checkpoint" in each for each in caplog.messages)


@pytest.mark.parametrize("name", CHANGING)
def test_a_planned_step_has_hooks_in_its_loss_and_refuses_those_around_it(name: str) -> None:
    models = [Net(nullcontext) for _ in range(2)]
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def loss(model: Net, x: Tensor) -> Tensor:
        with CHANGING[name]():
            return model(x).square().mean()

    fit = partial(memfit.fit, models[0], batch=batch, budget="1GiB")
    step = fit(loss=loss)
    step(batch)
    loss(models[1], batch).backward()
    for mine, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad is not None and expected.grad is not None and torch.equal(mine.grad, expected.grad)
    with CHANGING[name](), pytest.raises(UnsupportedStepError, match=r"called inside hooks of saved .* the loss func"):
        step(batch)
    step(batch)
    with CHANGING[name](), pytest.raises(UnsupportedStepError, match="captured inside hooks of saved tensors"):
        fit(loss=lambda model, x: model(x).square().mean())


def test_eager_mode_takes_hooks_inside_of_its_block_and_refuses_to_be_inside_of_them() -> None:
    expected = train(CHANGING["cast"])
    with ExitStack() as stack:
        found = train(CHANGING["cast"], lambda model: stack.enter_context(memfit.eager(model, budget="1GiB")) and model)
    assert all(map(torch.equal, found, expected))
    with CHANGING["cast"](), pytest.raises(UnsupportedStepError, match=r"inside hooks of saved tensors \(cast\)"):
        memfit.eager(Net(nullcontext), budget="1GiB").__enter__()


def test_an_evaluation_inside_of_hooks_stays_planned() -> None:
    model = memfit.compile(Net(nullcontext), budget="1GiB")
    x = torch.randn(ROWS, WIDTH)
    with CHANGING["cast"](), torch.no_grad():
        assert torch.equal(model(x), Net(nullcontext)(x))
