"""Compiled models call eager's kernels, also where PyTorch's compiler or a library would take another way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from occupied import bytes_now
from torch import nn
from torch.nn import functional

import memfit
from memfit.dynamo.model import PlannedCalls
from memfit.errors import InvalidTargetError
from memfit.system.recorder import record


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_as_eager(model: nn.Module, given: torch.Tensor) -> None:
    """Compare losses and gradients of two calls with those of a copy of the model in eager."""
    outcomes: list[list[torch.Tensor]] = []
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="2GiB", reserve=0, planner="none")
    for own in (eager, model):
        torch.manual_seed(1)
        losses: list[torch.Tensor] = []
        for _ in range(2):
            losses.append(own(given).square().mean())
            losses[-1].backward()
        outcomes.append([*losses, *(p.grad for p in own.parameters() if p.grad is not None)])
    assert len(outcomes[0]) == len(outcomes[1])
    for expected, mine in zip(*outcomes, strict=True):
        assert torch.equal(expected, mine)


def convolutions(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), middle, nn.Conv2d(4, 2, 3))


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear with corners": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "nearest": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    "nearest exact": lambda: nn.Upsample(scale_factor=2, mode="nearest-exact"),
    "norm of instances": lambda: nn.InstanceNorm2d(4),
    "norm of instances with statistics": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "norm of groups": lambda: nn.GroupNorm(2, 4),
    "circular": lambda: nn.CircularPad2d(1),
    "circular convolution": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "reflected": lambda: nn.ReflectionPad2d(1),
    "hard shrinkage": lambda: nn.Hardshrink(0.1),
    "soft shrinkage": lambda: nn.Softshrink(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIDDLES)
def test_layers(name: str) -> None:
    assert_as_eager(
        convolutions(MIDDLES[name]()), torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    )


@pytest.mark.parametrize(("mode", "shape"), [("linear", (2, 4, 8)), ("trilinear", (2, 4, 4, 4, 4))])
def test_interpolation_of_other_dimensions(mode: str, shape: tuple[int, ...]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4).view(4, *[1] * (len(shape) - 2)))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return functional.interpolate(inputs * self.weight, scale_factor=2, mode=mode)

    assert_as_eager(Scaled(), torch.randn(shape, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("loss", [nn.MultiMarginLoss(), nn.MultiLabelMarginLoss()])
def test_losses_with_margins(loss: nn.Module) -> None:
    class Margins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            classes = torch.arange(4, device=inputs.device)
            outputs = self.layer(inputs)
            return loss(outputs, classes if isinstance(loss, nn.MultiMarginLoss) else classes.repeat(4, 2))

    assert_as_eager(Margins(), torch.randn(4, 8, generator=torch.Generator().manual_seed(2)))


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("kind", ["trained", "evaluated", "without statistics"])
def test_batch_norm_by_cudnn_updates_its_statistics_once(kind: str, share: float) -> None:
    """The graph has what stands for cuDNN's kernel; a CPU then runs its own, as eager does."""

    class OnCuda(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            training = self.training or self.running_mean is None
            if self.training and self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            statistics = self.running_mean, self.running_var, training
            return torch.cudnn_batch_norm(input, self.weight, self.bias, *statistics, self.momentum, self.eps)[0]

    class Norms(nn.Module):
        def __init__(self, norm: Callable[..., nn.Module]) -> None:
            super().__init__()
            torch.manual_seed(0)
            blocks = [(nn.Conv2d(8, 8, 3), norm(8, track_running_stats=kind != "without statistics"), nn.GELU())] * 4
            self.layers = nn.Sequential(*(copy.deepcopy(layer) for block in blocks for layer in block))
            self.layers.train(kind != "evaluated")

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layers(inputs).square().mean()

    given = torch.randn(8, 8, 32, 32, generator=torch.Generator().manual_seed(2))
    eager, planned = Norms(nn.BatchNorm2d), Norms(OnCuda)
    with record("cpu") as usage:
        eager(given).backward()
    eager.zero_grad()
    eager.load_state_dict(planned.state_dict())
    budget = bytes_now(torch.device("cpu")) + int(share * usage.peak_bytes)
    memfit.compile(planned, budget=budget, reserve=0, time_limit_seconds=60, options={"iterations": 1000, "threads": 1})
    for _ in range(3):
        for model in (eager, planned):
            model(given).backward()
    calls = planned._compiled_call_impl
    assert isinstance(calls, PlannedCalls)
    assert share == 1.0 or calls.plans[0].overhead > 0
    for one, other in zip(eager.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(eager.buffers(), planned.buffers(), strict=True):
        assert torch.equal(one, other)


def test_classes_as_vectors() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = self.layer(inputs)
            return outputs * functional.one_hot(outputs.argmax(-1), 8)

    assert_as_eager(Classes(), torch.randn(4, 8, generator=torch.Generator().manual_seed(2)))


def test_code_that_asks_whether_it_is_compiled_is_named(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install memfit[transformers]")
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model = memfit.compile(transformers.LlamaForCausalLM(config), budget="1GiB", reserve=0, planner="none")
    numbers = torch.ones(2, 8, dtype=torch.long)
    model(input_ids=numbers, labels=numbers, attention_mask=torch.ones_like(numbers)).loss.backward()
    assert "asks whether it is being compiled" in caplog.text
    assert "masking_utils.py" in caplog.text


def test_lazy_modules_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(InvalidTargetError, match="run a batch through the model first"):
        memfit.compile(model, budget="1GiB")
    model(torch.ones(2, 8))
    memfit.compile(model, budget="1GiB", reserve=0, planner="none")
    model(torch.ones(2, 8)).sum().backward()


class Between(nn.Module):
    """Calls something between two linear layers, on images whose channels are stored last."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.call = nn.Linear(8, 8), nn.Linear(8, 8), call
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.BatchNorm3d(8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.call(self, torch.relu(self.first(given)))))


def _square(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(8) * 9 + x.transpose(1, 2) @ x


STRIDED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "lengths last": lambda own, x: own.norm1(x.transpose(1, 2)).transpose(1, 2),
    "batch last": lambda own, x: own.norm1(x.permute(1, 2, 0)).permute(2, 0, 1),
    "images": lambda own, x: own.norm2(x.view(4, 4, 6, 8).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).reshape(4, 24, 8),
    "images on their side": lambda own, x: (
        own.norm2(x.view(4, 4, 6, 8).permute(0, 3, 2, 1)).permute(0, 3, 2, 1).reshape(4, 24, 8)
    ),
    "volumes": lambda own, x: (
        own.norm3(x.view(4, 2, 3, 4, 8).permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1).reshape(4, 24, 8)
    ),
    "a factor": lambda _, x: x @ torch.linalg.cholesky(_square(x)).transpose(1, 2),
    "an inverse": lambda _, x: x @ torch.linalg.inv(_square(x)),
    "a solution": lambda _, x: torch.linalg.solve(_square(x), x.transpose(1, 2)).transpose(1, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRIDED)
def test_results_of_other_strides_than_predicted(name: str) -> None:
    assert_as_eager(Between(STRIDED[name]), torch.randn(4, 24, 8, generator=torch.Generator().manual_seed(2)))


def test_what_linear_algebra_checks_is_checked() -> None:
    class Factor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            return torch.linalg.cholesky(self.weight * scale)

    model = memfit.compile(Factor(), budget="1GiB", reserve=0, planner="none")
    model(torch.tensor(2.0)).sum().backward()
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        model(torch.tensor(-2.0))
