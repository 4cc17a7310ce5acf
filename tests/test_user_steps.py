"""Steps as users write them: each keeps eager's bits over several steps, or is refused with what to do."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions, nn
from torch.nn import functional

import memfit
from memfit.capture import capture, finish, with_real_results
from memfit.capture.compare import require_as_eager
from memfit.checkpointing.step import CheckpointedStep
from memfit.doors.step import fit_step
from memfit.errors import (
    CaptureError,
    InvalidBudgetError,
    InvalidOptionError,
    InvalidTargetError,
    MemfitError,
    UnsupportedStepError,
)
from memfit.memory.snapshot import StepState
from memfit.planning import Settings
from memfit.torch_private.tensors import is_fake

WIDTH = 24
Loss = Callable[..., torch.Tensor]


def network(outputs: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, outputs)
    )


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, WIDTH, generator=generator), torch.randint(0, 10, (64,), generator=generator))
        for _ in range(count)
    ]


def _entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def run_both(
    make: Callable[[], nn.Module], loss: Loss, given: list[Any], budget: str = "100%"
) -> tuple[nn.Module, str | None]:
    """Run eager and planned steps of two equal models; return the planned one, and the first difference in bits."""
    states: list[StepState] = []
    losses: list[list[torch.Tensor]] = []
    model = make()
    for planned in (False, True):
        torch.manual_seed(0)
        model = make()  # not a copy: copies of parameters have no hooks
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = memfit.TrainingStep(model=model, loss=loss, batch=given[0], optimizer=optimizer)
        run: Callable[[Any], torch.Tensor] = step.run_eager
        if planned:
            run = memfit.fit(model, loss, given[0], optimizer=optimizer, budget=budget, planner="none")
        torch.manual_seed(5)
        losses.append([run(batch) for batch in given])
        states.append(StepState.take(step))
    assert len(set(losses[0])) == len(given)
    if not all(torch.equal(*pair) for pair in zip(*losses, strict=True)):
        return model, "loss"
    return model, states[0].first_difference(states[1])


class Averaging(nn.Module):
    """Replaces a buffer in every step, as a running mean is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(inputs)
        self.mean = self.mean * 0.9 + outputs.detach().mean(0) * 0.1
        return outputs - self.mean


class Remembering(nn.Module):
    """Keeps its hidden state as a plain attribute, from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.hidden: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.cell(inputs, torch.zeros_like(inputs) if self.hidden is None else self.hidden)
        self.hidden = hidden.detach()
        return hidden


class Counting(nn.Module):
    """Scales its output by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(inputs) / self.calls


class Showing(nn.Module):
    """Leaves its last features and their number where a user may look at them, and reads them in no later step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.features: torch.Tensor | None = None
        self.size = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.features = self.inner(inputs)
        self.size = self.features.shape[1]
        return self.features


class Drawing(nn.Module):
    """Draws its scale with a function that is no part of torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner = network()
        self.draw = draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.draw()


class Resizing(nn.Module):
    """Keeps what it has seen in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(1, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(inputs)
        self.seen = torch.cat([self.seen, outputs.detach()])
        return outputs


class Registering(nn.Module):
    """Registers a buffer when it is first called, for the longest batch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("mask", None, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) < len(inputs):
            self.register_buffer("mask", torch.arange(len(inputs))[:, None] / len(inputs), persistent=False)
        return self.inner(inputs) * self.mask[: len(inputs)]


class Growing(nn.Module):
    """Makes its last layer when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "last"):
            self.last = nn.Linear(WIDTH, 10)
        return self.last(self.inner(inputs))


class Scaled:
    """A loss with a parameter of its own, which is in no module."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(10))

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]) * self.scale, batch[1])


def refused(model: nn.Module, loss: Loss | None = None, batch: Any = None, **options: Any) -> MemfitError:
    """Return the error that refuses to fit; the model is as it was before."""
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(MemfitError) as raised:
        memfit.fit(model, loss or nn.CrossEntropyLoss(), batch or batches()[0], **{"budget": "100%", **options})
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    return raised.value


def test_hooks_of_parameters_change_the_gradients() -> None:
    def hooked() -> nn.Module:
        model = network()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return model

    assert run_both(hooked, nn.CrossEntropyLoss(), batches())[1] is None


def test_a_buffer_that_is_replaced_goes_from_step_to_step() -> None:
    model, difference = run_both(Averaging, nn.CrossEntropyLoss(), batches())
    assert difference is None
    assert model.get_buffer("mean").abs().max() > 0


def hooked_when_gradients_are_there() -> nn.Module:
    model = network()

    def shrink(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(shrink)
    return model


def seeded(draw: Callable[[], float]) -> nn.Module:
    random.seed(3)
    np.random.seed(3)
    return Drawing(draw)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Remembering, "sets 'hidden' in its model and reads it in the next step"),
        (Counting, "sets 'calls' in its model and reads it in the next step"),
        (Resizing, "replaces 'seen', of shape (1, 10)"),
        (Registering, "makes 'mask' of shape (64, 1), which the model had not before"),
        (partial(seeded, random.random), "the step draws from Python's `random`"),
        (partial(seeded, np.random.rand), "the step draws from `numpy.random`"),
        (hooked_when_gradients_are_there, "parameter '0.weight' has a hook"),
    ],
)
def test_what_a_graph_cannot_repeat_runs_under_checkpoints(
    make: Callable[[], nn.Module], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model, difference = run_both(make, nn.CrossEntropyLoss(), batches(), "200%")
    assert difference is None
    assert why in caplog.text
    assert "it is no graph, and runs under memfit.checkpoint" in caplog.text
    assert not any(is_fake(tensor) for tensor in (*model.parameters(), *model.buffers()))


def test_a_module_that_is_made_in_a_step_is_refused() -> None:
    assert "makes the module 'last', which the model had not before" in str(refused(Growing()))


def test_a_step_that_is_no_graph_leaves_its_model_as_it_was_before_it_is_called() -> None:
    random.seed(3)
    np.random.seed(3)
    states = random.getstate(), np.random.get_state()[1].copy()
    for model in (Remembering(), Counting(), Resizing(), Registering(), Drawing(random.random)):
        before = {name: dict(module.__dict__) for name, module in model.named_modules()}
        tensors = dict(model.state_dict(keep_vars=True))
        memfit.fit(model, nn.CrossEntropyLoss(), batches()[0], budget="1MiB").close()
        assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
        assert all(tensor is tensors[name] for name, tensor in model.state_dict(keep_vars=True).items())
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_what_a_step_leaves_in_its_model_and_never_reads_is_there_or_refused_when_read() -> None:
    model, difference = run_both(Showing, nn.CrossEntropyLoss(), batches())
    assert difference is None
    assert model.size == 10  # as eager leaves it
    assert "do not compute" in repr(model.features)


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    model, loss = network(), Scaled()
    assert "tensor of shape (10,) that is no parameter of the model" in str(refused(model, loss))
    assert loss.scale.grad is None
    optimizer = torch.optim.SGD([*model.parameters(), loss.scale], lr=0.1)
    assert "parameter 6 of the optimizer's group 0" in str(refused(model, loss, optimizer=optimizer))


def test_a_teacher_is_a_constant() -> None:
    torch.manual_seed(9)
    teacher = network()

    def distance(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), teacher(batch[0]).detach())

    assert run_both(network, distance, batches())[1] is None


def _weighted(model: nn.Module, batch: Any, *, weight: float) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1]) * weight


@pytest.mark.parametrize(
    "loss", [partial(functional.cross_entropy, label_smoothing=0.1), partial(_weighted, weight=2.0)]
)
def test_a_partial_loss_is_called_as_its_function(loss: Loss) -> None:
    assert run_both(network, loss, batches())[1] is None


def test_numbers_and_texts_of_a_batch_are_those_of_the_step() -> None:
    given = [{"x": x, "y": y, "name": f"{n}", "weight": 0.5 + n} for n, (x, y) in enumerate(batches())]

    def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"]) * batch["weight"]

    assert run_both(network, weighted, given)[1] is None


@dataclass
class _Record:
    inputs: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda x, y: (x.numpy(), y.numpy()), _Record])
def test_a_batch_whose_numbers_would_not_be_seen_is_refused(wrap: Callable[..., Any]) -> None:
    error = refused(network(), lambda model, batch: model(batch).sum(), wrap(*batches()[0]))
    assert isinstance(error, InvalidOptionError)
    assert "the batch holds a" in str(error)


def test_a_later_batch_of_nothing_or_of_arrays_is_refused_and_the_step_goes_on() -> None:
    inputs, labels = batches()[0]
    step = memfit.fit(network(), nn.CrossEntropyLoss(), (inputs, labels), budget="1MiB", options={"iterations": 2_000})
    with pytest.raises(InvalidOptionError, match="called with None"):
        step(None)
    with pytest.raises(InvalidOptionError, match=r"numpy\.ndarray"):
        step((inputs.numpy(), labels))
    assert step((inputs, labels)) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": [1]}, "optimizer is a list, expected a torch.optim.Optimizer or None"),
        ({"time_limit_seconds": -1}, "time_limit_seconds is -1, expected"),
        ({"seed": "x"}, "seed is 'x', expected"),
        ({"loss": "mse"}, "memfit.fit: loss is a str, expected a function"),
        ({"budget": 1.5e9}, "budget 1500000000.0 is a float, expected text or an integer"),
        ({"budget": None}, "budget None is a NoneType, expected"),
        ({"budget": True}, "budget True is a bool, expected"),
    ],
)
def test_an_argument_of_another_kind_is_named(options: dict[str, Any], message: str) -> None:
    error = refused(network(), **options)
    assert isinstance(error, InvalidOptionError | InvalidBudgetError | InvalidTargetError)
    assert message in str(error)


def test_a_model_that_is_no_module_is_named() -> None:
    with pytest.raises(InvalidTargetError, match=r"model is a function, expected a torch\.nn\.Module"):
        memfit.fit(batches, nn.CrossEntropyLoss(), batches()[0], budget="1MiB")  # pyright: ignore[reportArgumentType]
    model = network()
    with pytest.raises(InvalidTargetError, match=r"clip_norm is -1\.0, expected a number above 0"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memfit.fit(model, nn.CrossEntropyLoss(), batches()[0], optimizer=optimizer, budget="1MiB", clip_norm=-1.0)


def test_an_optimizer_of_another_model_is_refused() -> None:
    error = refused(network(), optimizer=torch.optim.SGD(network().parameters(), lr=0.1))
    assert "parameter 0 of the optimizer's group 0, of shape (24, 24), is not the model's" in str(error)


def test_a_script_is_refused() -> None:
    class Script(torch.jit.ScriptModule):
        """What torch.jit.script returns, which warns that it is deprecated."""

    with pytest.raises(UnsupportedStepError, match=r"model is a script of torch\.jit"):
        memfit.fit(Script(), nn.CrossEntropyLoss(), batches()[0], budget="1MiB")
    with pytest.raises(UnsupportedStepError, match=r"calls '1', a function or a module of torch\.jit"):
        memfit.fit(nn.Sequential(nn.Linear(2, 2), Script()), nn.CrossEntropyLoss(), batches()[0], budget="1MiB")


def test_a_shape_that_does_not_fit_is_said_with_its_module() -> None:
    error = refused(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(9, 2)))
    assert isinstance(error, CaptureError)
    assert "in module '2' (Linear)" in str(error)


INTERRUPTED = """
import signal, torch
from torch import nn
import memfit

layers = [layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(64, 10))
batch = torch.randn(256, 64), torch.randint(0, 10, (256,))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background

def interrupt(progress):
    print("heard", flush=True)
    signal.raise_signal(signal.SIGINT)

try:
    memfit.fit(model, nn.CrossEntropyLoss(), batch, budget="60%", time_limit_seconds=20, progress=interrupt)
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_while_a_plan_is_searched_stops_the_program() -> None:
    command = [sys.executable, "-c", INTERRUPTED]  # a process of its own: the signal is for its only program
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "heard\nstopped\n"), done.stderr


class Averaged(nn.Module):
    """Batch normalizations that average all steps with equal weight, one of them called twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.affine_free = nn.BatchNorm1d(WIDTH, momentum=None, affine=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.norm(self.first(inputs))))
        return self.last(self.affine_free(hidden))


def test_a_batch_normalization_without_momentum_counts_its_steps() -> None:
    model, difference = run_both(Averaged, nn.CrossEntropyLoss(), batches(5))
    assert difference is None
    assert isinstance(model, Averaged)
    assert model.norm.num_batches_tracked == 10
    assert model.norm.momentum is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "planner",
    [
        "none",
        "search",
        "auto",
        "offload",
        "sublinear",
        "recursive",
        "segments",
        "drop_cheap",
        "superneurons",
        "capuchin",
    ],
)
def test_every_planner_keeps_checks_and_counts(planner: str) -> None:
    torch.manual_seed(0)
    inputs, labels = batches()[0]
    model = Averaged()
    step = memfit.fit(model, categorical, (inputs, labels), budget="100%", planner=planner, time_limit_seconds=0.5)
    step.verify()
    assert any(op.name == "check_0" for op in step.plan.graph.ops)


def normal(model: nn.Module, batch: Any) -> torch.Tensor:
    mean, scale = model(batch[0]).chunk(2, -1)
    drawn = distributions.Normal(mean, functional.softplus(scale) + 0.1).rsample()
    prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    posterior = distributions.Normal(mean, functional.softplus(scale) + 0.1)
    return distributions.kl_divergence(posterior, prior).mean() - posterior.log_prob(drawn).mean()


def categorical(model: nn.Module, batch: Any) -> torch.Tensor:
    chosen = distributions.Categorical(logits=model(batch[0]))
    return -chosen.log_prob(batch[1]).mean() - 0.1 * chosen.entropy().mean()


def multivariate(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    factor = torch.diag_embed(functional.softplus(outputs[:, :3]) + 0.1)
    spread = distributions.MultivariateNormal(outputs[:, 3:6], covariance_matrix=factor @ factor.mT)
    return -spread.log_prob(batch[0][:, :3]).mean()


def of_gamma(model: nn.Module, batch: Any) -> torch.Tensor:
    rate = functional.softplus(model(batch[0])) + 0.1
    return -distributions.Gamma(rate, rate + 1.0).log_prob(batch[0][:, :10].abs() + 0.1).mean()


def mixture(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    weights = distributions.Categorical(logits=outputs[:, :5])
    parts = distributions.Independent(distributions.Normal(outputs[:, 5:, None], 1.0), 1)
    return -distributions.MixtureSameFamily(weights, parts).log_prob(batch[0][:, :1]).mean()


@pytest.mark.parametrize("loss", [normal, categorical, multivariate, of_gamma, mixture])
def test_checks_of_distributions_are_captured(loss: Loss) -> None:
    assert run_both(network, loss, batches())[1] is None


def test_a_check_of_a_distribution_fails_in_a_planned_step_as_in_an_eager_one() -> None:
    model, (inputs, labels) = network(), batches()[0]
    step = memfit.fit(model, categorical, (inputs, labels), budget="1MiB", time_limit_seconds=0.5)
    step((inputs, labels))
    before = StepState.take(step.step)
    broken = inputs.clone()
    broken[3] = torch.nan
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        step.step.run_eager((broken, labels))
    with pytest.raises(ValueError, match=r"test_user_steps.py:\d+: a check of the arguments of a torch.distributions"):
        step((broken, labels))
    assert before.first_difference(StepState.take(step.step)) is None
    step((inputs, labels))


def _squared_curvature(model: nn.Module, batch: Any) -> torch.Tensor:
    curvatures = torch.func.vmap(torch.func.hessian(lambda values: model(values).sum()))(batch[0][:8])
    return curvatures.diagonal(dim1=-2, dim2=-1).sum(-1).pow(2).mean()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward-mode formulas use it
def test_a_hessian_of_each_sample() -> None:
    def smooth() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 1))

    assert run_both(smooth, _squared_curvature, batches())[1] is None


class CurvedAboveFrozen(nn.Module):
    """A frozen layer and its normalization, then a curvature whose derivative is known to be zero in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.norm = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.BatchNorm1d(WIDTH)
        self.inner, self.last = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.norm(self.below(inputs))
        curved = torch.func.vmap(torch.func.hessian(lambda row: self.inner(row).tanh().sum()))(values[:4])
        return self.last(values + 0.01 * curved.diagonal(dim1=-2, dim2=-1).mean())


def _with_own_backward(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    outputs.square().mean().backward(retain_graph=True)
    return functional.cross_entropy(outputs, batch[1])


@pytest.mark.parametrize("loss", [_entropy, _with_own_backward])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_fakes_of_the_comparison_with_eager_are_as_real_as_those_of_a_capture(
    loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    """Autograd's zeros have no memory, and a kernel returns none of the gradients that nobody asked it for."""
    torch.manual_seed(0)
    step = memfit.TrainingStep(model=CurvedAboveFrozen(), loss=loss, batch=batches()[0])
    with_real_results(partial(_as_eager, step))
    assert not caplog.records


def _as_eager(step: memfit.TrainingStep, corrections: Any) -> None:
    captured = finish(capture(step, corrections=corrections))
    require_as_eager(step, step.batch, captured.stream)


class OfArrays(nn.Module):
    """A module with an array, which its forward pass uses and changes in one of several ways."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.array, self.change = nn.Linear(WIDTH, 10), np.ones(1, np.float32), change

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.change(self)


def _counted(module: Any) -> Any:
    module.array += 1
    return torch.from_numpy(module.array)


def _noted(module: Any) -> float:
    module.array[0] = WIDTH
    return 2.0


ARRAYS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "written through torch": (lambda module: torch.from_numpy(module.array).add_(1), False),
    "written through as_tensor": (lambda module: torch.as_tensor(module.array).add_(1), False),
    "counted by NumPy": (_counted, False),
    "a copy written": (lambda module: torch.tensor(module.array).add_(1), True),
    "numbers written": (lambda _module: torch.tensor(3.0).sqrt_(), True),
    "noted": (_noted, True),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_a_step_changes_is_as_eager_leaves_it(name: str) -> None:
    change, is_graph = ARRAYS[name]
    torch.manual_seed(0)
    models, losses = [OfArrays(change) for _ in range(2)], list[list[torch.Tensor]]()
    models[1].load_state_dict(models[0].state_dict())
    planned = memfit.fit(models[0], _entropy, batches()[0], budget="150%")
    assert isinstance(planned, memfit.PlannedStep) is is_graph
    eager = memfit.TrainingStep(model=models[1], loss=_entropy, batch=batches()[0])
    for run in (planned, eager.run_eager):
        losses.append([run(batch) for batch in batches(4)])
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    assert models[0].array == models[1].array


def test_a_tensor_that_gets_more_memory_as_out_is_in_no_graph() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        with torch.no_grad():
            largest = torch.amax(outputs, 1, keepdim=True, out=torch.empty(0))
        return functional.cross_entropy(outputs - largest, batch[1])

    torch.manual_seed(0)
    step = memfit.fit(network(), loss, batches()[0], budget="150%")
    assert isinstance(step, CheckpointedStep)
    step(batches()[0])


def _sum_of_products(model: nn.Module, batch: Any) -> torch.Tensor:
    """Uses a grouped product, whose fake kernel takes no float32."""
    weights = model.get_parameter("0.weight").view(3, 8, WIDTH).mT
    ends = torch.tensor([16, 40, 64], dtype=torch.int32)
    grouped = torch._grouped_mm(batch[0], weights, offs=ends)
    return functional.cross_entropy(model[1:](functional.pad(grouped, (0, WIDTH - 8))), batch[1])  # pyright: ignore


def test_an_op_that_its_fake_kernel_refuses() -> None:
    assert run_both(network, _sum_of_products, batches())[1] is None


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("freezes", [False, True])
def test_two_steps_of_a_gan_share_their_parameters(clears: bool, freezes: bool) -> None:
    entropy = functional.binary_cross_entropy_with_logits

    def of_discriminator(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            made = model.get_submodule("generator")(batch[1])
        judged, fooled = (model.get_submodule("discriminator")(images) for images in (batch[0], made))
        return entropy(judged, torch.ones_like(judged)) + entropy(fooled, torch.zeros_like(fooled))

    def of_generator(model: nn.Module, batch: Any) -> torch.Tensor:
        judged = model.get_submodule("discriminator")(model.get_submodule("generator")(batch[1]))
        return entropy(judged, torch.ones_like(judged))

    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        discriminator, generator = nn.Linear(8, 1), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        both = nn.ModuleDict({"discriminator": discriminator, "generator": generator})
        given = [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(4)]
        parts = [(discriminator, of_discriminator), (generator, of_generator)]
        runs: list[tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], torch.Tensor]]] = []
        for module, loss in parts:
            optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
            step = memfit.TrainingStep(model=both, loss=loss, batch=given[0], optimizer=optimizer)
            run: Callable[[Any], torch.Tensor] = step.run_eager
            if planned:
                run = memfit.fit(both, loss, given[0], optimizer=optimizer, budget="1MiB", time_limit_seconds=0.5)
            runs.append((module, optimizer, run))
            run(given[0])  # so that the second is fitted after a step of the first, as in a loop
        losses: list[torch.Tensor] = []
        for batch in given:
            for module, optimizer, run in runs:
                if freezes:
                    both.requires_grad_(False)
                    module.requires_grad_(True)
                if clears:
                    optimizer.zero_grad()
                losses.append(run(batch))
        return [*losses, *(parameter.detach() for parameter in both.parameters())]

    assert all(torch.equal(*pair) for pair in zip(trained(False), trained(True), strict=True))


class Tables(nn.Module):
    """Embeddings with sparse gradients, alone or below a dense layer."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Embedding(50, 10, sparse=True) for _ in range(2))
        self.last = nn.Linear(10, 10) if dense else nn.Identity()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(words) * self.second(words)).mean(1))


@pytest.mark.parametrize(
    ("dense", "optimizer"),
    [
        (False, torch.optim.SparseAdam),
        (True, partial(torch.optim.SGD, lr=0.1)),
        (True, partial(torch.optim.Adagrad, lr=0.1)),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_of_embeddings_reach_their_optimizer(dense: bool, optimizer: Any) -> None:
    words = [torch.randint(0, 50, (64, 6)) for _ in range(5)]
    labels = torch.randint(0, 10, (64,))
    states: list[StepState] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Tables(dense=dense)
        step = memfit.TrainingStep(
            model=model,
            loss=nn.CrossEntropyLoss(),
            batch=(words[0], labels),
            optimizer=optimizer(model.parameters()),
        )
        run: Callable[[Any], torch.Tensor] = step.run_eager
        if planned:
            run = fit_step(step, Settings(budget="1MiB", time_limit_seconds=0.5))
        for number, indices in enumerate(words):
            if dense:
                model.last.requires_grad_(number != 2)
            run((indices, labels))
        states.append(StepState.take(step))
    assert states[0].first_difference(states[1]) is None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_whose_sizes_are_not_known_are_no_graph() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 10, sparse=True, padding_idx=0)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.table(words).mean(1)

    states: list[StepState] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model, batch = Padded(), (torch.randint(0, 40, (8, 6)), torch.randint(0, 10, (8,)))
        step = memfit.TrainingStep(
            model=model,
            loss=nn.CrossEntropyLoss(),
            batch=batch,
            optimizer=torch.optim.SparseAdam(model.parameters()),
        )
        run: Callable[[Any], torch.Tensor] = fit_step(step, Settings(budget="1MiB")) if planned else step.run_eager
        for _ in range(3):
            run(batch)
        states.append(StepState.take(step))
    assert states[0].first_difference(states[1]) is None


def test_sparse_gradients_of_an_embedding_that_is_called_twice_are_in_no_graph() -> None:
    class Again(Tables):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return super().forward(words) + self.first(words + 1).mean(1)

    model, batch = Again(dense=False), (torch.randint(0, 40, (8, 6)), torch.randint(0, 10, (8,)))
    optimizer = torch.optim.SparseAdam(model.parameters())
    step = memfit.fit(model, nn.CrossEntropyLoss(), batch, optimizer=optimizer, budget="1MiB")
    assert isinstance(step, CheckpointedStep)
    assert "each embedding is called once" in step.why
    assert all(parameter.grad is None for parameter in model.parameters())
    step.verify()
