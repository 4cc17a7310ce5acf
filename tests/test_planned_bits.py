"""Every planner there is, on a CNN, a U-Net, a transformer with dropout and an LSTM: the step gives eager's bits.

So do steps that compute all again that can be, where they read what they write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import counted
from planned_steps import NAMES, computed_ops, run_at_least_memory, small_step
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit import PlannedStep, TrainingStep
from memfit.doors.step import fit_step
from memfit.planners import PLANNERS
from memfit.planning import Settings

_MOVES = 50_000  # so that the plan does not depend on how busy the machine is
_SEARCHED_ROOM = 1.2  # so few moves may not find the least memory twice
_MARKED = {"cnn": "stem", "unet": "downs", "transformer": "encoder", "lstm": "cell"}
# Of themselves, or without a host to copy to.
_COMPUTES_ONCE = {(planner, name) for planner in ("none", "mirror", "vdnn", "tflms", "autoswap") for name in NAMES}
# On this small network nothing that is cheap is worth dropping: activations are written over.
_COMPUTES_ONCE.add(("drop_cheap", "cnn"))
COMPUTE_AGAIN = {"threshold": 1e30}  # of drop_cheap: each op is cheap


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_at_the_least_memory_run_with_the_same_bits(planner: str, name: str) -> None:
    few = counted(planner, _MOVES, episodes=8)
    searched: dict[str, Any] = {"room": _SEARCHED_ROOM, **few} if "iterations" in few else few
    planned = run_at_least_memory(name, planner, **searched)
    assert (computed_ops(planned) == len(planned.plan.graph.ops)) == ((planner, name) in _COMPUTES_ONCE)


class Noisy(torch.nn.Module):
    """Draws with torch.rand, whose call names its device."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(64)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x * weight) * torch.rand(x.shape, device=x.device)
        return x


def test_noise_drawn_on_a_named_device_is_drawn_again_with_the_same_bits() -> None:
    model, batch = Noisy(), torch.randn(512, 64)
    mark = memfit.mirror(model, 2, of=model)
    planned = memfit.fit(
        model,
        lambda net, rows: net(rows).square().mean(),
        batch,
        budget="1GiB",
        planner="mirror",
        options={"mirror": mark},
    )
    again = planned.plan.schedule.lines()
    draws = [op.id for op in planned.plan.graph.ops if op.target == "aten.rand.default"]
    assert len(draws) == 4 and any(again.count(f"compute {op}") > 1 for op in draws)
    planned.verify()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("planner", ["mirror", "sublinear", "division_tree", "search"])
def test_marked_modules_are_computed_again_with_the_same_bits(planner: str, name: str) -> None:
    step = small_step(name)
    mark = memfit.mirror(step.model.get_submodule(_MARKED[name]), 2, of=step.model)
    options = {"mirror": mark, **counted(planner, _MOVES)}
    planned = fit_step(step, Settings(budget="1GiB", planner=planner, options=options))
    again = [line for line in planned.plan.schedule.lines() if line.startswith("compute")]
    marked = mark.counts(planned.plan.graph)
    assert any(again.count(f"compute {op}") > 1 for op in marked)
    planned.verify()


class Applied(nn.Module):
    """Calls a function of a normalization and of its input, between two linear layers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], norm: Any = None) -> None:
        super().__init__()
        self.function = function
        self.norm = nn.BatchNorm1d(32) if norm is None else norm
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.norm, functional.gelu(self.first(x))))


def computed_again(function: Callable[[Any, Tensor], Tensor], norm: Any = None) -> PlannedStep:
    """Return a step that recomputes all of its forward pass that can be, and has eager's bits."""
    torch.manual_seed(0)
    model, batch = Applied(function, norm), torch.randn(16, 32)
    step = TrainingStep(
        model=model,
        loss=lambda net, rows: net(rows).square().mean(),
        batch=batch,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    )
    planned = fit_step(step, Settings(budget="1GiB", planner="drop_cheap", options=COMPUTE_AGAIN))
    assert isinstance(planned, PlannedStep)
    planned.verify()
    return planned


def times_computed(planned: PlannedStep, words: str) -> list[int]:
    """Return how often each op is computed whose target has `words` in it."""
    lines = planned.plan.schedule.lines()
    return [lines.count(f"compute {op.id}") for op in planned.plan.graph.ops if words in op.target]


def twice(norm: Any, x: Tensor) -> Tensor:
    return norm(x) + norm(x.tanh())


def between(norm: Any, x: Tensor) -> Tensor:
    y, mean = norm(x), norm.running_mean.clone()
    return norm(y.tanh()) + mean


def in_evaluation(norm: Any, x: Tensor) -> Tensor:
    y = norm(x)
    return y + functional.batch_norm(x.tanh(), norm.running_mean, norm.running_var)


def written_before(norm: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        norm.running_mean.mul_(0.5).add_(0.1)
    return norm(x) + norm.running_mean


def written_after(norm: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = norm(x)
        norm.running_mean.clamp_(-0.01, 0.01)
        norm.running_var[::2] *= 2
    return x * y * norm.running_var + norm.running_mean


def renormalized(norm: Any, x: Tensor) -> Tensor:
    y, deviation = norm(x), (norm.running_var.detach() + norm.eps).sqrt()
    return y * x.std(0).detach() / deviation + (x.mean(0).detach() - norm.running_mean.detach()) / deviation


def of_channels(shape: tuple[int, ...]) -> Callable[[Any, Tensor], Tensor]:
    def normalized(norm: Any, x: Tensor) -> Tensor:
        y = norm(x.view(16, 4, *shape)) + norm.running_mean.view(4, *(1 for _ in shape))
        return y.reshape(16, 32) * norm.running_var.mean()

    return normalized


def functional_kernel(norm: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        kernel = torch.ops.aten._native_batch_norm_legit_functional
        y, _, _, mean, variance = kernel(x, None, None, norm.running_mean, norm.running_var, True, 0.1, 1e-5)
        norm.running_mean.mul_(0.5)
        norm.running_mean.add_(mean)
        norm.running_var.copy_(variance)
    return x * y * mean + variance


def with_update(norm: Any, x: Tensor) -> Tensor:
    statistics = norm.running_mean, norm.running_var
    y = torch.ops.aten._batch_norm_with_update(x, norm.weight, norm.bias, *statistics, 0.1, 1e-5)[0]
    return y + norm.running_mean * norm.running_var


READS_STATISTICS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any]] = {
    "added": (lambda norm, x: norm(x) + 0.1 * norm.running_mean + (norm.running_var + 1).rsqrt(), None),
    "saved for backward": (lambda norm, x: norm(x) * (1 + norm.running_mean) + x * norm.running_var, None),
    "cumulative": (lambda norm, x: norm(x) + norm.running_mean, nn.BatchNorm1d(32, momentum=None)),
    "without weights": (lambda norm, x: norm(x) + norm.running_var, nn.BatchNorm1d(32, affine=False)),
    "called twice": (lambda norm, x: twice(norm, x) + norm.running_mean, None),
    "between two calls": (between, None),
    "in evaluation": (in_evaluation, None),
    "by chunks": (lambda norm, x: torch.cat([norm(c) for c in x.chunk(4)]) + norm.running_var, None),
    "written before": (written_before, None),
    "written after": (written_after, None),
    "renormalized": (renormalized, None),
    "2d": (of_channels((2, 4)), nn.BatchNorm2d(4)),
    "3d": (of_channels((2, 2, 2)), nn.BatchNorm3d(4)),
    "instances": (of_channels((8,)), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
    "a functional kernel": (functional_kernel, None),
    "a fused kernel": (with_update, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READS_STATISTICS)
def test_statistics_that_a_batch_normalization_has_updated_may_be_read(name: str) -> None:
    function, norm = READS_STATISTICS[name]
    planned = computed_again(function, copy.deepcopy(norm))
    assert computed_ops(planned) > len(planned.plan.graph.ops)


@pytest.mark.parametrize("name", ["added", "between two calls", "in evaluation", "written after"])
def test_updated_statistics_may_be_read_under_torch_compile(name: str) -> None:
    results: list[list[Tensor]] = []
    function, norm = READS_STATISTICS[name]
    options = {"budget": "1GiB", "planner": "drop_cheap", "options": COMPUTE_AGAIN, "reserve": 0}
    for is_planned in (False, True):
        torch.manual_seed(0)
        model, x = Applied(function, copy.deepcopy(norm)), torch.randn(16, 32)
        call = torch.compile(model, backend="memfit", options=options) if is_planned else model
        call(x).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([*gradients, *model.buffers()])
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("function", [lambda norm, x: norm(x), twice])
def test_a_batch_normalization_whose_new_statistics_are_not_read_is_computed_again(function: Any) -> None:
    assert set(times_computed(computed_again(function), "native_batch_norm.")) == {2}


def test_running_statistics_that_are_the_weight_too_are_refused() -> None:
    def normalized(norm: Any, x: Tensor) -> Tensor:
        return functional.batch_norm(x, norm.running_mean, norm.running_var, norm.running_var, training=True)

    with pytest.raises(memfit.MemfitError, match="share memory with another argument"):
        computed_again(normalized)


def halves(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.tanh(), torch.zeros_like(x), torch.zeros_like(x)


def rows(x: Tensor) -> Tensor:
    other, first, second = halves(x)
    first[:4] = x[:4]
    second[:4] = first[:4]
    first[:4] = other[:4]
    return first + 2 * second


def columns(x: Tensor) -> Tensor:
    other, first, second = halves(x)
    first[:, 1:9] = x[:, :8]
    second[:, ::2] = first[:, ::2]
    first[:, ::2] = other[:, ::2]
    return first + 2 * second


def arithmetic(x: Tensor) -> Tensor:
    other, first, second = halves(x)
    first[2:9] = x[2:9]
    second[:12].add_(first[:12])
    first[2:9].mul_(3.0)
    return first + 2 * second * other


def other_views(x: Tensor) -> Tensor:
    other, first, second = halves(x)
    first[:8] = x[:8]
    second[:12].copy_(first[:12])
    first.view(-1)[:64].zero_()
    second.t()[:8] += first.t()[:8]
    return first + second * other


def diagonals(x: Tensor) -> Tensor:
    _, first, second = halves(x)
    first.diagonal().copy_(x.diagonal())
    second[0, :16].copy_(first.diagonal())
    first.diagonal().fill_(7.0)
    return first + second + x


def parts_of_one(x: Tensor) -> Tensor:
    first, second = x.new_zeros(2, 16, 32), x.new_zeros(2, 16, 32)
    first[0, :4] = x[:4]
    second[0, :4] = first[0, :4]
    second[1, :4] = first[1, :4]
    first[1, :4] = x[4:8]
    first[0, :4] = 9.0
    return (first + 2 * second).sum(0) + x


def running_sum(x: Tensor) -> Tensor:
    _, total, sums = halves(x)
    for row in range(4):
        total[0] += x[row]
        sums[row] = total[0]
    return sums + total


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() + rows(gradients[0])


WRITES = [rows, columns, arithmetic, other_views, diagonals, parts_of_one, running_sum, InBackward.apply]


@pytest.mark.parametrize("function", WRITES)
def test_a_part_that_is_copied_into_a_fresh_tensor_may_be_overwritten(function: Any) -> None:
    computed_again(lambda _norm, x: function(x))
