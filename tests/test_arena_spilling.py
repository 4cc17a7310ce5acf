"""Arenas that record a step while what autograd saves is elsewhere: the same recording, and the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import HostMemoryError, InvalidOptionError
from memfit.system.recorder import record

Step = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(inputs)[0])


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout()) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=False)
        return inputs


def dense() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout()) for _ in range(6)))


def convolutions() -> nn.Module:
    layers = ((nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(6))
    return nn.Sequential(*(nn.Sequential(*each) for each in layers))


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 3)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (1024, 512)),
    "convolutions": (convolutions, (4, 8, 64, 64)),
    "transformer": (transformer, (16, 64, 64)),
    "recurrent": (Recurrent, (32, 64, 64)),
    "checkpoints": (Regions, (1024, 512)),
}


def trained(name: str, *, spill: bool) -> tuple[list[torch.Tensor], Any, int]:
    """Return what three steps leave, the recording of the first, and its peak in bytes."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, batch = make(), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recordings: list[Any] = []
    peaks: list[int] = []
    losses: list[torch.Tensor] = []
    with memfit.arena(spill=spill, time_limit_seconds=0.2) as arena:
        for number in range(3):
            torch.manual_seed(number)
            window = record("cpu")
            usage = window.__enter__()
            with arena.step():
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                del loss
                window.__exit__(None, None, None)  # before the arena takes its memory
            peaks.append(usage.peak_bytes)
            recordings.append(arena.plans[None].recording)
    return [*losses, *(each.detach() for each in model.parameters()), *model.buffers()], recordings[0], peaks[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_recording_and_the_bits_are_those_of_a_step_with_its_memory(name: str) -> None:
    wanted, recording, peak_bytes = trained(name, spill=False)
    found, spilled_recording, spilled_peak_bytes = trained(name, spill=True)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert spilled_recording.equals(recording)
    assert spilled_peak_bytes < (1.01 if name == "checkpoints" else 0.7) * peak_bytes


def test_small_results_that_their_own_node_saves_are_freed() -> None:
    """Autograd would hold such a result by its node, and the node by what was packed."""

    def step(batch: torch.Tensor) -> None:
        (batch * torch.ones(64, requires_grad=True)).tanh().exp().sum()  # no backward lets go of what is saved

    batch = torch.ones(64, 64)
    with memfit.arena(step, spill=True, time_limit_seconds=0.2) as arena:
        arena(batch)
        assert not arena.plans[next(iter(arena.plans))].recording.outlives.any()


def squares(step: Callable[[torch.Tensor], Any], *, spill: bool = True, **options: Any) -> Any:
    with memfit.arena(step, spill=spill, time_limit_seconds=0.2, **options) as arena:
        return arena(torch.ones(64, 1024).mul_(3)), arena.plans


def test_a_saved_tensor_that_is_written_to_raises_as_in_eager() -> None:
    def step(batch: torch.Tensor) -> None:
        weight = torch.ones(1024, requires_grad=True)
        product = (batch * weight).exp()
        product.add_(1.0)
        product.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(torch.ones(64, 1024))
    small = torch.ones(2, 1024)
    with memfit.arena(step, spill=True) as arena, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        arena(small)


def test_backward_twice_and_views_of_one_storage() -> None:
    def step(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = torch.full((1024,), 0.5, requires_grad=True)
        hidden = (batch * weight).tanh()
        loss = (hidden[:32] * hidden[32:] * hidden.view(2, 32, 1024)[0]).sum()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        return first.detach().clone(), second

    wanted, plans = squares(step, spill=False)
    found, spilled_plans = squares(step)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert len(spilled_plans) == len(plans) == 1


def test_a_graph_that_outlives_its_step_still_runs_backward() -> None:
    weight = torch.ones(1024, requires_grad=True)
    kept: list[torch.Tensor] = []

    def step(batch: torch.Tensor) -> None:
        kept.append((batch * weight).tanh().square().sum())

    with memfit.arena(step, spill=True, time_limit_seconds=0.2) as arena:
        arena(torch.ones(64, 1024))
        kept[0].backward()
        arena(torch.ones(64, 1024))
        kept[1].backward()
    assert torch.equal(
        weight.grad, 2 * torch.autograd.grad((torch.ones(64, 1024) * weight).tanh().square().sum(), weight)[0]
    )


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_file_is_left_open(tmp_path: Path) -> None:
    def step(batch: torch.Tensor) -> None:
        (batch * torch.ones(1024, requires_grad=True)).tanh().sum().backward()

    squares(step, host_dir=tmp_path)
    gc.collect()
    before = open_files()
    squares(step, host_dir=tmp_path)
    gc.collect()
    assert open_files() <= before
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_hold_files_is_named(tmp_path: Path) -> None:
    def step(batch: torch.Tensor) -> None:
        (batch * torch.ones(1024, requires_grad=True)).tanh().sum().backward()

    with pytest.raises(HostMemoryError, match="no file can be made in"):
        squares(step, host_dir=tmp_path / "nowhere")
    with pytest.raises(InvalidOptionError, match="spill is False"):
        squares(step, spill=False, host_dir=tmp_path)
