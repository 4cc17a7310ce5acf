"""Eager mode with a host budget, on structures that repeat: copies begin when the plan says, in both directions."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from eager_loops import CPU, Trained, compared, convolutions, images_loss, mlp, mlp_loss
from torch import nn

import memfit
from memfit.cost.link import LinkRates, link_rates
from memfit.errors import HostMemoryError
from memfit.runtime.eager import host as eager_host
from memfit.runtime.eager import structures
from memfit.runtime.eager.contents import Contents
from memfit.runtime.eager.eager import bytes_of_tensors
from memfit.runtime.eager.sources import Source
from memfit.system import spill_file


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    gc.collect()
    monkeypatch.setattr(structures, "_TIME_LIMIT_SECONDS", 0.4)
    monkeypatch.setattr(structures, "_PAID_SECONDS", 0.0)
    yield


@pytest.fixture(autouse=True)
def _fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a link on which copies take next to nothing."""

    def rates(device: torch.device, directory: Path | None) -> LinkRates:
        fast = dict.fromkeys(field for field in LinkRates.__struct_fields__ if field.endswith("bytes_per_second"))
        fields = {**msgspec.structs.asdict(link_rates(device, directory)), **dict.fromkeys(fast, 1e12)}
        return LinkRates(**{**fields, "copy_latency_seconds": 0.0, "copy_compute_seconds_per_byte": 0.0})

    monkeypatch.setattr(eager_host, "link_rates", rates)


class Begun:
    """How many copies plans began in each direction."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.to_host = self.to_device = 0
        to_host, to_device = Contents.begin_to_host, Contents.begin_to_device

        def begin_to_host(contents: Contents, source: Source) -> None:
            had = source.host is not None
            to_host(contents, source)
            self.to_host += source.host is not None and not had

        def begin_to_device(contents: Contents, source: Source) -> None:
            to_device(contents, source)
            self.to_device += source.host is not None and source.host.coming is not None

        monkeypatch.setattr(Contents, "begin_to_host", begin_to_host)
        monkeypatch.setattr(Contents, "begin_to_device", begin_to_device)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(monkeypatch)


def wait_for_plans(block: Any) -> None:
    planned = block._mode.passes._structures._planned
    if planned is not None:
        planned[1].join()


def views_loss(model: Any, _number: int) -> torch.Tensor:
    hidden = torch.randn(2048, 64)
    for layer in model:
        hidden = layer(hidden)
        if hidden.shape[1] == 64:
            left, right = hidden.chunk(2, 1)
            hidden = torch.cat([left * right, right.sigmoid()], 1) * hidden.t().exp().t()
    return hidden.square().mean()


def in_place_loss(model: Any, _number: int) -> torch.Tensor:
    hidden = torch.randn(2048, 64)
    for layer in model:
        hidden = layer(hidden)
        hidden = hidden.clone().mul_(0.5).add_(1.0).tanh_()
    return hidden.square().mean()


def listed_loss(model: Any, _number: int) -> torch.Tensor:
    """Code itself holds every second result."""
    hidden, held = torch.randn(2048, 64), list[torch.Tensor]()
    for number, layer in enumerate(model):
        hidden = layer(hidden)
        if number % 4 == 1:
            held.append(hidden)
    return hidden.square().mean() + torch.stack([each.mean() for each in held]).sum()


def dropped() -> nn.Module:
    return nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh())])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], torch.Tensor]]] = {
    "mlp": (mlp, mlp_loss),
    "dropout": (dropped, mlp_loss),
    "views": (mlp, views_loss),
    "in place": (mlp, in_place_loss),
    "convolutions in place, batch normalization": (convolutions, images_loss),
    "held by code": (mlp, listed_loss),
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 3),
        lambda model, _: model(torch.randn(8, 32, 32)).square().mean(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.85, 0.65])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_copies_of_a_plan_have_the_bits_within_both_budgets(
    case: str, share: float, begun: Begun, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"host_budget": "16MiB", "host_dir": tmp_path, "after": wait_for_plans}
    report = compared(*CASES[case], share, steps=9, **options)
    assert report.by_plan.passes >= 2, report
    assert begun.to_host >= begun.to_device > 0, report
    assert report.to_host_bytes <= 9 * (16 << 20)


def test_a_plan_with_copies_that_is_left_midway(begun: Begun) -> None:
    def loss(model: Any, number: int) -> torch.Tensor:
        hidden = model[:8](torch.randn(2048, 64))
        if number in (6, 8):
            hidden = hidden.sigmoid() * 2
        return model[8:](hidden).square().mean()

    report = compared(mlp, loss, 0.7, steps=10, largest=6, after=wait_for_plans, host_budget="16MiB")
    assert report.left_plan.passes >= 1 and report.by_plan.passes >= 1 and begun.to_host > 0, report


def test_a_backward_that_differs_while_copies_come_back(begun: Begun) -> None:
    """Memory for copies under way is given back where a call needs it."""

    def loss(model: Any, number: int) -> torch.Tensor:
        hidden = model[:12](torch.randn(2048, 64))
        hidden.register_hook(lambda gradient: gradient * 1.0 if number < 8 else torch.cat([gradient] * 4)[:2048])
        return model[12:](hidden).square().mean()

    report = compared(mlp, loss, 0.6, steps=11, largest=0, after=wait_for_plans, host_budget="16MiB")
    assert report.left_plan.passes >= 1 and begun.to_device > 0, report


def test_what_is_written_to_while_its_copy_is_made() -> None:
    with memfit.eager(nn.Linear(4, 4), budget="64MiB", host_budget="16MiB") as steps:
        contents = steps._mode.contents  # type: ignore[union-attr]
        x = torch.randn(1 << 20, requires_grad=True)
        hidden = x.exp()
        bits = hidden.detach().clone()
        loss = (hidden.sin() + hidden.cos()).sum()
        source = contents.sources.find(hidden.untyped_storage())
        assert source is not None
        contents.begin_to_host(source)
        assert source.host is not None
        hidden.data.mul_(2.0)
        assert torch.equal(source.host.back().view(torch.float32), bits)
        del loss


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_copy_of_a_plan_that_fails(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fails = spill_file._all_of, False

    def all_of(function: Any, *rest: Any) -> None:
        if fails and function.__name__ == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(function, *rest)

    monkeypatch.setattr(spill_file, "_all_of", all_of)
    expected = Trained(mlp, mlp_loss).run(8)
    loop = Trained(mlp, mlp_loss)
    gc.collect()
    budget = bytes_of_tensors(CPU) + (3 << 20)
    with memfit.eager(loop.model, budget=budget, host_budget="16MiB") as steps:
        losses = loop.run(7, lambda: wait_for_plans(steps))
        assert steps._mode.passes._structures.expected() is not None  # type: ignore[union-attr]
        fails, state = True, torch.get_rng_state()
        with pytest.raises(HostMemoryError, match=r"could not be copied (to|from) the file .*Input/output error"):
            loop.step(7)
        fails = False
        torch.set_rng_state(state)
        loop.optimizer.zero_grad()
        assert [*losses, loop.step(7)] == expected
