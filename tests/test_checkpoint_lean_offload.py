"""Offloading in lean passes: budgets below what their checkpoints take, with the bits of the bare loop."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoint_models import Mlp, Net, Trained, convs, images, rows, train

import memfit
from memfit.eager_mode.eager import Report, bytes_of_tensors
from memfit.errors import HostMemoryError
from memfit.integrations.found_models import Running
from memfit.system.recorder import allocated_bytes, record
from memfit.torch_private.autograd import default_saved_hooks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _recorder() -> None:
    with record("cpu"):
        pass


class Spread(torch.nn.Module):
    """Layers without blocks, each of which saves what it is given or makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh().sigmoid().exp()
        return self.second(x).tanh().sigmoid().exp()


def spread() -> Net:
    torch.manual_seed(0)
    return Net([Mlp(64) for _ in range(4)], Spread(64), torch.nn.Linear(64, 4))


class Branches(Net):
    """A model whose own code reads what it has made before: views, a slice, a tensor that it keeps, one of no float."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.before(x).tanh()
        self.held = held  # code holds it beside autograd
        x = held.transpose(0, 1).exp().transpose(0, 1)
        for layer in self.layers:
            x = layer(x) * held.sigmoid()
        order = x.argsort(1)
        return self.after(x.gather(1, order) + x[:, 1:].square().sum(1, keepdim=True))


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches([Mlp(64) for _ in range(3)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))


def _trained(make: Callable[[], Any], data: Callable[[int], Any], share: float) -> tuple[Trained, Trained, int]:
    """Train without and with a budget, a share of the peak; return both, and the budget.

    Peaks and the budget are bytes above those that were there before the model.
    """
    gc.collect()
    before_bytes = allocated_bytes(CPU)
    wanted = train(make(), data)
    budget_bytes = int(share * (max(wanted.peaks[2:]) - before_bytes))
    gc.collect()
    before_bytes, older_bytes = allocated_bytes(CPU), bytes_of_tensors(CPU)
    model = make()
    with memfit.checkpoint(model, budget_bytes + older_bytes if share else 1, budget_is="soft"):
        got = train(model, data)
    return wanted, replace(got, peaks=[peak - before_bytes for peak in got.peaks]), budget_bytes


@pytest.mark.parametrize("share", [0.6, 0.35, 0.0])
@pytest.mark.parametrize(("make", "data"), [(spread, rows), (branches, rows), (convs, images)])
def test_bits_are_those_of_the_bare_loop(make: Callable[[], Any], data: Callable[[int], Any], share: float) -> None:
    wanted, got, _ = _trained(make, data, share)
    assert got.same_bits(wanted)


def test_first_step_holds_less_than_its_checkpoints_take(monkeypatch: pytest.MonkeyPatch) -> None:
    _, got, budget_bytes = _trained(spread, rows, 0.47)
    monkeypatch.setattr("memfit.checkpointing.loop.lean_offload", lambda *_: None)
    _, without, _ = _trained(spread, rows, 0.47)
    assert got.peaks[0] <= budget_bytes < without.peaks[0]
    assert got.peaks[1:] == without.peaks[1:]  # what was on the host is no less of what a plan has to hold


def test_a_host_without_room_leaves_all_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise HostMemoryError("no room")

    monkeypatch.setattr("memfit.checkpointing.lean_offload.make_slab", refuse)
    wanted, got, budget_bytes = _trained(spread, rows, 0.47)
    assert got.same_bits(wanted) and got.peaks[0] > budget_bytes


class _Fails(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.isnan().any():
            raise ValueError("no numbers")
        return super().forward(x)


def test_a_call_that_fails_and_a_graph_that_is_dropped_leave_nothing() -> None:
    torch.manual_seed(0)
    model = _Fails([Mlp(64) for _ in range(4)], Spread(64), torch.nn.Linear(64, 4))
    with memfit.checkpoint(model, 1 << 20, budget_is="soft"):
        with pytest.raises(ValueError, match="no numbers"):
            model(torch.full((512, 8), math.nan))
        assert default_saved_hooks() is None
        gc.collect()
        hooks, before_bytes = len(model._forward_hooks), allocated_bytes(CPU)
        for _ in range(2):
            model(torch.randn(512, 8))
        gc.collect()
        assert allocated_bytes(CPU) == before_bytes and len(model._forward_hooks) == hooks
        model(torch.randn(512, 8)).sum().backward()


def test_a_write_to_what_was_saved_is_the_bare_loops_error() -> None:
    class Writes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.before(x).exp()
            returned = super().forward(x)
            made.mul_(2.0)
            return returned * made.sum()

    torch.manual_seed(0)
    model = Writes([Mlp(64) for _ in range(2)], Spread(64), torch.nn.Linear(64, 4))
    with memfit.checkpoint(model, 1 << 20, budget_is="soft"):
        loss = model(torch.randn(512, 8)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_of_gradients_and_a_graph_that_is_kept_come_through() -> None:
    def grads(budget: int | None) -> list[torch.Tensor]:
        model, (x, _) = branches(), rows(0)
        handle = None if budget is None else memfit.checkpoint(model, budget, budget_is="soft")
        x.requires_grad_()
        loss = model(x).square().mean()
        (found,) = torch.autograd.grad(loss, x, create_graph=True)
        (found.square().sum() + loss).backward(retain_graph=True)
        loss.backward()
        if handle is not None:
            handle.close()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, grads(1 << 20), grads(None)))


def test_a_run_goes_on_in_eager_mode_before_a_step_that_no_plan_would_hold() -> None:
    gc.collect()
    before_bytes = allocated_bytes(CPU)
    wanted = train(spread(), rows)
    budget_bytes = int(0.47 * (max(wanted.peaks[2:]) - before_bytes))
    gc.collect()
    before_bytes, running = allocated_bytes(CPU), Running(budget_bytes + bytes_of_tensors(CPU))
    running.begin()
    got = train(spread(), rows)
    by_checkpoint, by_eager = running.end()
    assert got.same_bits(wanted) and max(got.peaks) - before_bytes <= budget_bytes
    assert by_checkpoint.history is not None and by_checkpoint.history.over == 0
    assert by_eager.why.startswith("a step would take") and isinstance(by_eager.report, Report)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_first_step_that_is_interrupted_leaves_no_hooks(goes_on: bool) -> None:
    """Hooks on modules are not called after a KeyboardInterrupt, whatever `always_call` says."""
    model, batch = spread(), rows(0)
    handle = memfit.checkpoint(model, "1GiB")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.after.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch[0])
    hook.remove()
    if goes_on:
        model(batch[0]).sum().backward()
        assert default_saved_hooks() is None
    handle.close()
    del handle
    gc.collect()
    assert default_saved_hooks() is None
