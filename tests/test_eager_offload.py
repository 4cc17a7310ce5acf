"""`memfit.eager` with a host budget: what autograd saved is dropped, or copied to a disk and back, with its bits."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eager_loops import CPU, Trained, checked, convolutions, images_loss, mlp, mlp_loss
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.cost.link import link_rates
from memfit.eager_mode.call_times import MOST_OPEN
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.eager_mode.needs import Need, Needs
from memfit.errors import HostMemoryError, InvalidBudgetError, InvalidOptionError, OverBudgetError, UnsupportedStepError
from memfit.memory.host.room import Host, HostPlaces
from memfit.memory.host.store import HostCopy
from memfit.system.spill_file import BLOCK_BYTES


class Foreign(torch.autograd.Function):
    """The hyperbolic tangent by NumPy, which no call of PyTorch's makes again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        np.tanh(x.detach().numpy(), out=result.numpy())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (result,) = ctx.saved_tensors
        return gradients[0] * (1 - result**2)


class ForeignTanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Foreign.apply(x)


def foreign() -> nn.Module:
    return nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(64, 64), ForeignTanh())], nn.Linear(64, 4))


def views_loss(model: Any, _number: int) -> torch.Tensor:
    """Several saved tensors share a storage: halves, a transposed one, and all of it."""
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


def written_loss(model: Any, number: int) -> torch.Tensor:
    """What the hidden values are made of is written to after each layer."""
    hidden, scale = torch.randn(2048, 64), torch.ones(2048, 1)
    for place, layer in enumerate(model):
        hidden = layer(hidden) + scale
        scale.fill_(0.01 * (place + number))
    return hidden.square().mean()


def retained_loss(model: Any, _number: int) -> torch.Tensor:
    loss = mlp_loss(model, 0)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return loss


def penalty_loss(model: Any, _number: int) -> torch.Tensor:
    """The loss has the gradient of a gradient in it."""
    x = torch.randn(2048, 64, requires_grad=True)
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def checkpointed_loss(model: Any, _number: int) -> torch.Tensor:
    """Regions whose results no call makes again run anew in backward, while the host is full."""
    hidden: Any = torch.randn(2048, 64)
    for begin in range(0, 16, 4):
        hidden = checkpoint(model[begin : begin + 4], hidden, use_reentrant=False)
    return model[16:](hidden).square().mean()


def dropped() -> nn.Module:
    return nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh())])


Loss = Callable[[Any, int], torch.Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Loss, float]] = {
    "mlp": (mlp, mlp_loss, 0.65),
    "dropout": (dropped, mlp_loss, 0.65),
    "views": (mlp, views_loss, 0.65),
    "in place": (mlp, in_place_loss, 0.65),
    "convolutions in place": (convolutions, images_loss, 0.65),
    "a function of the user's own": (foreign, mlp_loss, 0.65),
    "written to since": (mlp, written_loss, 0.65),
    "retained graphs": (mlp, retained_loss, 0.75),
    "gradients of gradients": (mlp, penalty_loss, 0.75),
    "checkpoints": (foreign, checkpointed_loss, 0.85),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def copies_cost(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Let copies take so many times the seconds that they take over the link."""
    real = Host.seconds
    monkeypatch.setattr(Host, "seconds", lambda host, size_bytes: factor * real(host, size_bytes))


@pytest.fixture
def free_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e-9)


def open_files(directory: Path) -> list[int]:
    """Return the bytes on the disk of each file without a name that this process has open in a directory."""
    found: list[int] = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(link.readlink()).startswith(str(directory)):
                found.append(link.stat().st_blocks * 512)
        except FileNotFoundError:  # the listing's own
            continue
    return found


def is_closed(directory: Path) -> bool:
    """Return whether no such file is open, or none soon: the thread that copies has it for a moment longer."""
    ends = time.monotonic() + 10
    while open_files(directory) and time.monotonic() < ends:
        time.sleep(0.01)
    return not open_files(directory) and not list(directory.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("case", CASES)
def test_copies_to_the_host_have_the_bits_within_both_budgets(case: str, tmp_path: Path) -> None:
    make, loss, share = CASES[case]
    files: list[int] = []
    options: dict[str, Any] = {"host_budget": "3MiB", "host_dir": tmp_path}
    report = checked(make, loss, share, after=lambda _: files.extend(open_files(tmp_path)), **options)
    assert len(files) == 3 and max(files) <= 3 << 20
    assert report.to_device_bytes > 0 and report.to_host_bytes > 0
    assert is_closed(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "dropout", "views", "a function of the user's own"])
def test_slow_copies_are_made_only_of_what_no_call_makes_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e9)
    report = checked(*CASES[case][:2], 0.75, host_budget="16MiB")
    assert report.made_again > 0
    assert (report.to_host_bytes > 0) == (CASES[case][0] is foreign)


def test_the_host_is_too_small() -> None:
    """What does not fit there is dropped; what cannot be is named."""
    report = checked(mlp, mlp_loss, 0.7, host_budget=BLOCK_BYTES)
    assert report.made_again > 0 and report.to_host_bytes == 0
    torch.manual_seed(0)
    model = foreign()
    gc.collect()
    budget = bytes_of_tensors(CPU) + (3 << 20)
    with (
        memfit.eager(model, budget=budget, host_budget="1MiB") as steps,
        pytest.raises(OverBudgetError, match="cannot be recomputed now"),
    ):
        mlp_loss(model, 0).backward()
    assert 0 < steps.report().to_host_bytes <= 1 << 20


def test_places_do_not_overlap() -> None:
    class Slab:
        size_bytes = 64 * BLOCK_BYTES

    places = HostPlaces(Slab())  # type: ignore[arg-type]
    generator, taken = np.random.default_rng(0), list[tuple[int, int]]()
    for _ in range(2000):
        size_bytes = int(generator.integers(1, 9)) * BLOCK_BYTES
        if size_bytes <= places.largest_bytes():
            taken.append(places.take(size_bytes))
        elif taken:
            places.returned.append(taken.pop(int(generator.integers(len(taken)))))
        ends = [(offset, offset + size) for offset, size in sorted(taken)]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        assert not ends or ends[-1][1] <= Slab.size_bytes
    places.returned.extend(taken)
    assert places.largest_bytes() == Slab.size_bytes


@pytest.mark.usefixtures("free_copies")
def test_nothing_grows_over_50_steps(tmp_path: Path) -> None:
    loop = Trained(mlp, mlp_loss)
    gc.collect()
    seen: list[tuple[int, ...]] = []

    def count() -> None:
        threads = list(threading.enumerate())
        seen.append((len([*Path("/proc/self/fd").iterdir()]), len(threads), *open_files(tmp_path)))

    budget = bytes_of_tensors(CPU) + (3 << 20)
    with memfit.eager(loop.model, budget=budget, host_budget="4MiB", host_dir=tmp_path) as steps:
        loop.run(50, count)
    assert steps.report().to_host_bytes > 0 and steps.report().peak_bytes <= budget
    files, threads, size_bytes = zip(*seen, strict=True)
    assert set(size_bytes) == {4 << 20}
    assert min(files[-9:]) <= files[1] and min(threads[-9:]) <= threads[1]  # planning opens some for a moment
    assert is_closed(tmp_path)


@pytest.mark.usefixtures("free_copies")
def test_what_outlives_the_block_is_read_and_then_freed(tmp_path: Path) -> None:
    plain, loop = Trained(mlp, mlp_loss), Trained(mlp, mlp_loss)
    x = torch.randn(2048, 64)
    plain.model(x).square().mean().backward()
    gc.collect()
    budget = bytes_of_tensors(CPU) + (3 << 20)
    with memfit.eager(loop.model, budget=budget, host_budget="4MiB", host_dir=tmp_path) as steps:
        loss = loop.model(x).square().mean()
    assert len(open_files(tmp_path)) == 1
    loss.backward()
    for one, other in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    del loss
    assert is_closed(tmp_path)  # without a collection of garbage
    assert steps.report().to_host_bytes > 0 and "copied to the host and" in str(steps.report())


class MidwayError(Exception):
    """Raised by a step midway."""


@pytest.mark.usefixtures("free_copies")
def test_a_step_that_fails_midway_and_the_next_ones(tmp_path: Path) -> None:
    def loss_of(model: Any, number: int) -> torch.Tensor:
        hidden = model(torch.randn(2048, 64))
        if number == 1:
            raise MidwayError
        hidden.register_hook(lambda _: fail() if number == 3 else None)
        return hidden.square().mean()

    def fail() -> None:
        raise MidwayError

    def run(loop: Trained) -> list[float]:
        losses: list[float] = []
        for number in range(6):
            torch.manual_seed(number)
            try:
                losses.append(loop.step(number))
            except MidwayError:
                loop.optimizer.zero_grad()
        return losses

    expected = run(Trained(mlp, loss_of))
    loop = Trained(mlp, loss_of)
    gc.collect()
    budget = bytes_of_tensors(CPU) + (3 << 20)
    with memfit.eager(loop.model, budget=budget, host_budget="4MiB", host_dir=tmp_path) as steps:
        assert run(loop) == expected
    assert len(expected) == 4 and steps.report().to_host_bytes > 0 and steps.report().peak_bytes <= budget
    with (
        pytest.raises(MidwayError),
        memfit.eager(loop.model, budget=budget, host_budget="4MiB", host_dir=tmp_path),
    ):
        loop.step(1)
    gc.collect()
    assert is_closed(tmp_path)


def full(_file: int, _offset: int, _size_bytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_refused_at_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    link_rates(CPU, tmp_path)  # is measured once, with a file of its own
    monkeypatch.setattr(os, "posix_fallocate", full)
    block = memfit.eager(model, budget="1GiB", host_budget="1MiB", host_dir=tmp_path)
    with pytest.raises(HostMemoryError, match=r"has no room for 1 MiB .*No space left"), block:
        raise AssertionError
    assert is_closed(tmp_path)
    monkeypatch.undo()
    with block:  # once there is room
        mlp_loss(model, 0).backward()
    assert block.report().passes == 1


def test_bad_options(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(InvalidOptionError, match="host_budget is 0"):
        memfit.eager(model, budget="1GiB", host_dir=tmp_path)
    with pytest.raises(InvalidBudgetError):
        memfit.eager(model, budget="1GiB", host_budget="10%")
    with pytest.raises(InvalidOptionError, match="path of a directory"):
        memfit.eager(model, budget="1GiB", host_budget="1MiB", host_dir=3)  # type: ignore[arg-type]
    with (
        pytest.raises(HostMemoryError, match="absent"),
        memfit.eager(model, budget="1GiB", host_budget="1MiB", host_dir=tmp_path / "absent"),
    ):
        raise AssertionError


@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_copy_that_fails(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = getattr(os, call), 0

    def fails(*given: Any) -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*given)

    expected = Trained(mlp, mlp_loss).run(2)
    loop = Trained(mlp, mlp_loss)
    gc.collect()
    budget = bytes_of_tensors(CPU) + (3 << 20)
    with memfit.eager(loop.model, budget=budget, host_budget="4MiB", host_dir=tmp_path):
        monkeypatch.setattr(os, call, fails)
        with pytest.raises(HostMemoryError, match=r"could not be copied (to|from) the file .*Input/output error"):
            loop.run(1)
        loop.optimizer.zero_grad()
        assert loop.run(2) == expected  # the disk is whole again
    gc.collect()
    assert is_closed(tmp_path)


@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("method", ["wait", "arrived"])
def test_an_interrupted_copy(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, count = Trained(mlp, mlp_loss), 0
    real = getattr(HostCopy, method)

    def interrupted(copy: HostCopy) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        real(copy)

    def run() -> None:
        budget = bytes_of_tensors(CPU) + (3 << 20)
        options: dict[str, Any] = {"budget": budget, "host_budget": "4MiB", "host_dir": tmp_path}
        with suppress(KeyboardInterrupt), memfit.eager(loop.model, **options):
            loop.run(1)

    gc.collect()
    monkeypatch.setattr(HostCopy, method, interrupted)
    run()
    gc.collect()
    assert count >= 3 and is_closed(tmp_path)
    loop.optimizer.zero_grad()
    assert loop.run(2) == Trained(mlp, mlp_loss).run(2)


class Scaled(torch.autograd.Function):
    """Twice its argument; backward writes to what it saved, in a way of its own."""

    way = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        result = gradients[0] * 2 + x
        with torch.no_grad():
            if Scaled.way == "in place":
                x.mul_(3)
            elif Scaled.way == "past the version":
                x.data.mul_(3)
            else:
                x.numpy()[:] *= 3
        return result


@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("way", ["in place", "past the version", "by NumPy"])
def test_a_copy_of_what_was_written_to_since_is_never_read(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second backward pass finds what the first one wrote, as in the bare loop, or is refused."""
    monkeypatch.setattr(Scaled, "way", way)
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(2048, 64)

    def gradients() -> list[torch.Tensor]:
        hidden = x
        for _ in range(8):
            hidden = Scaled.apply((hidden @ weight).tanh())
        loss = hidden.sum()
        first = torch.autograd.grad(loss, weight, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, weight)]

    expected: list[torch.Tensor] | None = None
    if way != "in place":
        expected = gradients()
        assert not torch.equal(*expected)
    gc.collect()
    with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (6 << 19), host_budget="16MiB") as steps:
        try:
            found = gradients()
        except UnsupportedStepError as error:
            assert way == "by NumPy" and "written to where torch's operators do not show it" in str(error)
        except RuntimeError as error:
            assert expected is None and "modified by an inplace operation" in str(error)
        else:
            assert expected is not None and all(map(torch.equal, found, expected))
    assert steps.report().to_host_bytes > 0


@pytest.mark.usefixtures("free_copies")
def test_memory_of_numpy_stays_on_the_device() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    array = np.ones((2048, 64), np.float32)

    def gradient() -> torch.Tensor:
        array[:] = 1.0
        hidden = torch.from_numpy(array) @ weight
        for _ in range(8):
            hidden = (hidden @ weight).tanh()
        array[:] = 3.0  # which backward sees
        return torch.autograd.grad(hidden.sum(), weight)[0]

    expected = gradient()
    gc.collect()
    with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (6 << 19), host_budget="16MiB") as steps:
        assert torch.equal(gradient(), expected)
    assert steps.report().to_host_bytes > 0


class GpuEvent:
    """An event on a GPU that is not here, which has reached so many of them."""

    made = recorded = reached = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        GpuEvent.made += 1

    def record(self, stream: str) -> None:
        assert stream == "the current stream of cuda:1"
        GpuEvent.recorded += 1
        self.number = GpuEvent.recorded

    def query(self) -> bool:
        return self.number <= GpuEvent.reached

    def elapsed_time(self, end: GpuEvent) -> float:
        assert end.query()
        return 1000.0 * (end.number - self.number)


def test_one_call_of_a_kind_lies_between_events_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", GpuEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", "the current stream of {}".format)
    needs = Needs(torch.device("cuda", 1))

    def seconds(number: int) -> float:
        returned, seconds = needs.timed(max, (1, 2), {}, Need(0, 0, 7.0, number))
        assert returned == 2
        return seconds

    assert [seconds(1), seconds(1)] == [7.0, 7.0], "the GPU has not reached the second event"
    GpuEvent.reached = 1
    assert seconds(1) == 7.0 and GpuEvent.recorded == 2
    GpuEvent.reached = 2
    assert [seconds(1), seconds(1)] == [1.0, 1.0] and GpuEvent.recorded == 2, "one call stands for those after it"
    assert [seconds(2), seconds(3)] == [7.0, 7.0] and GpuEvent.made == 4, "events that were read are recorded again"
    kinds = range(4, 2 + MOST_OPEN)
    assert [seconds(each) for each in kinds] == [7.0] * len(kinds) and GpuEvent.made == 2 * MOST_OPEN
    assert seconds(0) == 7.0 and GpuEvent.made == 2 * MOST_OPEN, "of so many open kinds the first is given up"
    GpuEvent.reached = GpuEvent.recorded
    assert [seconds(2), seconds(3), seconds(4)] == [7.0, 1.0, 1.0] and GpuEvent.made == 2 * MOST_OPEN


def test_calls_on_a_cpu_are_timed_each() -> None:
    x = torch.randn(64, 64)
    with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (1 << 20)) as steps:
        made = [x.sin(), x.sin(), x.sin()]
        sources: Any = steps._mode.contents.sources  # pyright: ignore
        seconds = [sources.find(each.untyped_storage()).call.seconds for each in made]
    assert min(seconds) > 0 and len(set(seconds)) > 1
