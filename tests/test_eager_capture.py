"""A captured step is the one that eager runs: what code asks is answered as in eager, and the calls are compared."""

from __future__ import annotations

import itertools
import math
import random
import re
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture import capture
from memfit.capture.compare import require_as_eager
from memfit.capture.draws import seeding_refused
from memfit.capture.eager_run import run_as_eager
from memfit.checkpointing.step import CheckpointedStep
from memfit.errors import (
    CaptureError,
    GraphBreakError,
    MemfitError,
    NoGraphError,
    NoPlanError,
    UnsupportedStepError,
    VerificationError,
)
from memfit.memory.snapshot import StepState
from memfit.step.verify import require_same

WIDTH = 8


class Network(nn.Module):
    """Two layers; `between` is the code under test."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.between = between

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(inputs)))


def square_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def fitted(between: Callable[[torch.Tensor], torch.Tensor], loss: Any = square_loss, batch: Any = None) -> Any:
    model = Network(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = inputs() if batch is None else batch
    return memfit.fit(model, loss, batch, budget="100%", planner="none", optimizer=optimizer)


def losses_of(
    between: Callable[[torch.Tensor], torch.Tensor], loss: Any = square_loss, batches: Any = None
) -> tuple[list[float], list[float]]:
    """Return the losses of four eager steps, and of four planned ones."""
    batches = [inputs()] * 4 if batches is None else batches
    step = fitted(between, loss, batches[0])
    model = Network(between)
    eager = memfit.TrainingStep(
        model=model, loss=loss, batch=batches[0], optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    torch.manual_seed(3)
    expected = [eager.run_eager(batch).item() for batch in batches]
    torch.manual_seed(3)
    return expected, [step(batch).item() for batch in batches]


def by_name_of_torch(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def by_module_of_torch(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def by_import_in_function(tensor: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor as Imported

    return isinstance(tensor, (str, Imported))


def by_import_of_a_function(tensor: torch.Tensor) -> bool:
    from torch._guards import active_fake_mode as active
    from torch._subclasses.fake_tensor import is_fake as asked

    return asked(tensor) or active() is not None


QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "a global": lambda tensor: isinstance(tensor, FakeTensor),
    "an attribute": by_name_of_torch,
    "an attribute of a module": by_module_of_torch,
    "an import": by_import_in_function,
    "an import of functions": by_import_of_a_function,
    "a subclass": lambda tensor: issubclass(type(tensor), torch._subclasses.FakeTensor),
    "is_fake": lambda tensor: is_fake(tensor),
    "is_fake by attribute": lambda tensor: torch._subclasses.fake_tensor.is_fake(tensor),
    "detect_fake_mode": lambda tensor: detect_fake_mode([tensor]) is not None,
    "the mode by attribute": lambda tensor: torch._guards.detect_fake_mode([tensor]) is not None,
    "the active mode": lambda _tensor: torch._guards.active_fake_mode() is not None,
    "is_compiling": lambda _tensor: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda _tensor: torch.compiler.is_dynamo_compiling(),
    "is_exporting": lambda _tensor: torch.compiler.is_exporting(),
    "jit": lambda _tensor: torch.jit.is_tracing() or torch.jit.is_scripting(),
    "fx": lambda tensor: isinstance(tensor, torch.fx.Proxy),
    "meta": lambda tensor: tensor.is_meta or tensor.device.type == "meta",
    "overrides": lambda tensor: torch.overrides.has_torch_function((tensor,)),
    "parameter": lambda tensor: isinstance(tensor, nn.Parameter),
    "subclass with parts": lambda tensor: hasattr(tensor, "__tensor_flatten__"),
    "functional": lambda tensor: torch._is_functional_tensor(tensor),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_code_is_answered_as_in_eager(
    question: Callable[[torch.Tensor], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    def between(tensor: torch.Tensor) -> torch.Tensor:
        print(answer := question(tensor))
        return tensor.abs() if answer else tensor.relu()

    model = Network(between)
    captured = capture(memfit.TrainingStep(model=model, loss=square_loss, batch=inputs()))
    assert capsys.readouterr().out == "False\n"
    assert [op.target for op in captured.graph.ops if "abs" in op.target] == []


def test_an_answer_that_gets_through_is_found_with_both_lines() -> None:
    def between(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor:
            return tensor.relu()
        return tensor.abs()

    step = fitted(between)
    assert isinstance(step, CheckpointedStep)
    step.verify()
    line = between.__code__.co_firstlineno
    message = step.why
    assert message.startswith(f"{__file__}:{line + 2}: the captured step is not the one that eager runs")
    assert f"aten.abs.default(float32[4, 8]) at {__file__}:{line + 3}, eager it calls aten.relu.default" in message
    assert "determinis" not in message


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.tensor(16.0).mul_(0.5)


TABLE = torch.arange(8.0)

CONSTANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sqrt of a new tensor": lambda x: x / torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 3),
    "in place": halved,
    "twice in place": lambda x: x * torch.tensor(2.0).sqrt_().exp_(),
    "a list": lambda x: x * torch.tensor([1.0, 2.0] * 4).add_(1),
    "a view in place": lambda x: x * torch.tensor([[1.0, 2.0] * 4]).view(8).mul_(3),
    "a slice in place": lambda x: x * _sliced(torch.tensor([1.0] * 8)),
    "numpy": lambda x: x * torch.from_numpy(np.full(8, 4.0, np.float32)).sqrt_(),
    "as_tensor": lambda x: x * torch.as_tensor(np.full(8, 4.0, np.float32)).clone().sqrt_(),
    "a global's view": lambda x: x + TABLE.view(2, 4).flatten(),
    "a global, indexed": lambda x: x + TABLE[[1, 0, 2, 3, 4, 5, 6, 7]],
    "a global, out of place": lambda x: x + TABLE.view(8).sqrt(),
    "filled": lambda x: x * torch.full((), 2.0).mul_(2),
    "arange": lambda x: x * torch.arange(8.0).add_(1),
    "a mask": lambda x: x.masked_fill(torch.tensor([True, False] * 4).logical_not_(), 0.0),
    "a number of another type": lambda x: x * torch.tensor(3).add_(1),
    "item of a constant": lambda x: x * torch.tensor(9.0).sqrt_().item(),
    "float of a constant": lambda x: x * float(torch.tensor(4.0).mul_(2)),
    "scalar_tensor": lambda x: x * torch.scalar_tensor(4.0).sqrt_(),
    "empty_like filled": lambda x: x * torch.empty_like(x).fill_(4.0).sqrt_(),
    "data of the parameters": lambda x: x * torch.tensor(x.shape).prod().float().sqrt_(),
}


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    tensor[2:4] *= 2
    return tensor


@pytest.mark.slow
@pytest.mark.parametrize("between", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_tensors_made_of_numbers_are_made_in_each_step(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected, found = losses_of(between)
    assert expected == found
    assert len(set(expected)) == 4


def test_a_tensor_of_the_users_that_the_step_writes_to_is_written_to_in_each_step() -> None:
    counted = torch.zeros(8)

    def between(tensor: torch.Tensor) -> torch.Tensor:
        counted.view(2, 4)[0].add_(1)
        return tensor + counted

    step = fitted(between)
    assert counted.tolist() == [0.0] * 8
    step(inputs())
    step(inputs())
    assert counted.tolist() == [2.0] * 4 + [0.0] * 4


def masked(batch_mask: torch.Tensor) -> Any:
    return {"inputs": inputs(), "mask": batch_mask}


def masked_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch["inputs"])
    if (batch["mask"] == 1).all():
        return outputs.square().mean()
    return (outputs * batch["mask"][:, None]).abs().sum()


def test_a_truth_value_of_the_batch_chooses_the_program() -> None:
    full, padded = masked(torch.ones(4)), masked(torch.tensor([1.0, 1.0, 0.0, 1.0]))
    expected, found = losses_of(torch.relu, masked_loss, [full, padded, full, padded])
    assert expected == found
    step = fitted(torch.relu, masked_loss, full)
    for batch in (full, padded, full, padded):
        step(batch)
    assert len(step.plans) == 2


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda mask: mask.bool().all(),
    "any": lambda mask: (mask == 0).any(),
    "comparison": lambda mask: mask.sum() == 4,
    "last": lambda mask: mask[-1] > 0,
    "view": lambda mask: mask.view(2, 2)[:, 0].min() > 0,
    "equal": lambda mask: (mask == torch.ones(4)).all(),
    "changed in place": lambda mask: mask.clone().mul_(2).max() > 1,
    "item": lambda mask: (mask > 0).all().item(),
}


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_looks(look: Callable[[torch.Tensor], Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch["inputs"])
        return outputs.square().mean() if look(batch["mask"]) else outputs.abs().mean()

    batches = [masked(mask) for mask in (torch.ones(4), torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.ones(4))]
    expected, found = losses_of(torch.relu, loss, batches)
    assert expected == found


def test_a_truth_value_of_the_parameters_breaks_the_graph() -> None:
    def between(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if (tensor > 0).all() else tensor.relu()

    with pytest.raises(GraphBreakError):
        capture(memfit.TrainingStep(model=Network(between), loss=square_loss, batch=inputs()))


def _weight(model: nn.Module) -> torch.Tensor:
    weight = model.first.weight
    assert isinstance(weight, torch.Tensor)
    return weight


# What a step may make of its parameters: each is trained as in eager, or refused; none is frozen.
PARAMETER_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda w: w.sum().item(),
    "float": lambda w: float(w.abs().max()),
    "int": lambda w: int(w.abs().max() * 1e6) * 1e-6,
    "bool": lambda w: 2.0 if w.sum() > 0.1 else 0.5,
    "tolist": lambda w: w.tolist()[0][0],
    "numpy": lambda w: float(w.detach().numpy().sum()),
    "asarray": lambda w: float(np.asarray(w.detach()).sum()),
    "array of a list": lambda w: float(np.mean([row.item() for row in w[0]])),
    "math": lambda w: math.sqrt(w.abs().sum()),
    "format": lambda w: float(f"{w.sum():.6f}"),
    "text": lambda w: float(str(w.sum().detach()).split("(")[1].rstrip(")")),
    "equal": lambda w: 2.0 if torch.equal(w, w.clone()) else 1.0,
    "allclose": lambda w: 2.0 if torch.allclose(w, w + 1e-9) else 1.0,
    "nonzero": lambda w: float(len((w > 0).nonzero())),
    "boolean index": lambda w: w[w > 0].sum(),
    "max of Python": lambda w: max(w[0]),
    "sorted": lambda w: sorted(w[0], key=float)[0],
    "index": lambda w: w.flatten()[w.flatten().argmax()],
    "index of Python": lambda w: w[int(w[0].argmax())].sum(),
    "tensor of a tensor": lambda w: torch.tensor(w.sum().detach()),
    "as_tensor": lambda w: torch.as_tensor(w.sum()),
    "new_tensor": lambda w: w.new_tensor(w.detach().sum()),
    "data": lambda w: w.data.sum().sqrt_() if w.numel() else w,
    "detach": lambda w: w.detach().abs().mean(),
    "norm": lambda w: w / w.norm().clamp(min=1e-6),
    "unique": lambda w: float(w.unique().numel()),
    "memoryview": lambda w: struct.unpack("f", bytes(w.detach().untyped_storage())[:4])[0],
}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Converting a tensor", "ignore:To copy construct", "ignore:Accessing the data pointer"
)
@pytest.mark.parametrize("value", PARAMETER_VALUES.values(), ids=PARAMETER_VALUES.keys())
def test_no_value_of_the_parameters_is_frozen(value: Callable[[torch.Tensor], Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = value(_weight(model))
        scale = found.sum() if isinstance(found, torch.Tensor) else found
        return (model(batch) * scale).square().mean()

    try:
        expected, found = losses_of(torch.relu, loss)
    except (CaptureError, UnsupportedStepError, NoPlanError):  # without a graph, a step of so few bytes may not fit
        return
    assert str(expected) == str(found)


def test_a_truth_value_of_drawn_numbers_breaks_the_graph() -> None:
    model = Network(lambda tensor: tensor if torch.rand(()) < 0.5 else tensor.relu())
    with pytest.raises(GraphBreakError):
        capture(memfit.TrainingStep(model=model, loss=square_loss, batch=inputs()))


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


GLOBAL_NUMPY = np.random.default_rng(3)
GLOBAL_PYTHON = random.Random(3)
HOLDER = Holder([GLOBAL_NUMPY])


class Mine(random.Random):
    pass


HOST_DRAWS: dict[str, tuple[Callable[[], float], str]] = {
    "random": (random.random, "Python's `random`"),
    "uniform": (lambda: random.uniform(1, 2), "Python's `random`"),
    "choice": (lambda: random.choice([1.0, 2.0]), "Python's `random`"),
    "numpy": (np.random.rand, "`numpy.random`"),
    "numpy normal": (lambda: float(np.random.normal()), "`numpy.random`"),
    "instance of Random": (GLOBAL_PYTHON.random, "instance of random.Random"),
    "method of Random": (lambda: GLOBAL_PYTHON.expovariate(1), "instance of random.Random"),
    "subclass of Random": (
        Mine(1).random,
        r"instance of .*\.Mine",
    ),
    "default_rng": (lambda: float(GLOBAL_NUMPY.normal()), "instance of numpy.random.Generator"),
    "held default_rng": (lambda: float(HOLDER.generator[0].random()), "instance of numpy.random.Generator"),
    "closure over default_rng": (np.random.default_rng(5).random, "instance of numpy.random.Generator"),
    "RandomState": (np.random.RandomState(4).rand, "instance of numpy.random.RandomState"),
    "Philox": (np.random.Generator(np.random.Philox(4)).random, "instance of numpy.random.Generator"),
    "map": (lambda: sum(map(GLOBAL_PYTHON.uniform, [1], [2])), "instance of random.Random"),
}


@pytest.mark.parametrize(("draw", "name"), HOST_DRAWS.values(), ids=HOST_DRAWS.keys())
def test_a_draw_from_a_generator_of_the_host_is_seen(draw: Callable[[], float], name: str) -> None:
    step = fitted(lambda tensor: tensor * draw())
    assert isinstance(step, CheckpointedStep)
    assert re.match(rf"the step draws from (an )?{name}", step.why)
    step.verify()


UNSEEN: dict[str, Callable[[], float]] = {
    "new default_rng": lambda: float(np.random.default_rng().random()),
    "SystemRandom": random.SystemRandom().random,
    "new Random": lambda: random.Random().random(),
    "counter": iter(range(1, 1 << 30)).__next__,
    "clock": lambda: __import__("time").perf_counter() % 1,
    "uuid": lambda: float(__import__("uuid").uuid4().int % 1000003),
}


@pytest.mark.parametrize("draw", UNSEEN.values(), ids=UNSEEN.keys())
def test_numbers_that_differ_between_two_runs_are_refused_with_their_line(draw: Callable[[], float]) -> None:
    def between(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * draw()

    with pytest.raises(UnsupportedStepError) as caught:
        fitted(between)
    line = between.__code__.co_firstlineno + 1
    is_iterator = draw is UNSEEN["counter"]
    says = "takes values from draw, an iterator" if is_iterator else f"{line}: two eager runs of the step from the same"
    assert says in str(caught.value)


def test_a_drawn_tensor_that_differs_between_two_runs_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match="two eager runs of the step"):
        fitted(lambda tensor: tensor + torch.from_numpy(np.random.default_rng().normal(size=WIDTH).astype(np.float32)))


def test_draws_of_another_thread_are_its_own() -> None:
    stop, numbers = threading.Event(), random.Random(4)
    counts = [0]

    def draw() -> None:
        while not stop.is_set():
            numbers.random(), random.random(), np.random.rand()
            counts[0] += 1

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        step = fitted(torch.relu)
        drawn = counts[0]
        states = numbers.getstate(), random.getstate()
        while counts[0] == drawn:
            pass
    finally:
        stop.set()
        thread.join()
    assert step(inputs()).item() > 0
    assert states != (numbers.getstate(), random.getstate())
    assert drawn > 0


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "Python's `random`"), (GLOBAL_NUMPY.random, "an instance of numpy.random.Generator")],
)
def test_a_step_that_draws_beside_another_thread_is_seen(draw: Callable[[], float], name: str) -> None:
    stop = threading.Event()

    def draw_too() -> None:
        while not stop.is_set():
            np.random.rand(), random.random()

    thread = threading.Thread(target=draw_too)
    thread.start()
    try:
        try:
            why = fitted(lambda tensor: tensor * float(draw())).why
        except UnsupportedStepError as refused:  # blocks that draw after the other thread
            why = str(refused)
        assert f"draws from {name}, whose" in why
    finally:
        stop.set()
        thread.join()


TORCH_DRAWS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "randn": lambda x, g: x + torch.randn(x.shape, generator=g),
    "rand": lambda x, g: x * torch.rand(x.shape, generator=g),
    "normal_": lambda x, g: x + torch.empty(WIDTH).normal_(generator=g),
    "uniform_": lambda x, g: x + torch.zeros(WIDTH).uniform_(1, 2, generator=g),
    "bernoulli": lambda x, g: x * torch.bernoulli(torch.full((WIDTH,), 0.5), generator=g),
    "randperm": lambda x, g: x[:, torch.randperm(WIDTH, generator=g)],
    "randint": lambda x, g: x * torch.randint(1, 9, (WIDTH,), generator=g),
    "multinomial": lambda x, g: x[:, torch.multinomial(torch.ones(WIDTH), WIDTH, generator=g)],
    "exponential_": lambda x, g: x + torch.empty(WIDTH).exponential_(generator=g),
    "two": lambda x, g: x + torch.randn(WIDTH, generator=g) * torch.rand(WIDTH, generator=g),
    "beside the default": lambda x, g: functional.dropout(x + torch.randn(WIDTH, generator=g)),
}


@pytest.mark.slow
@pytest.mark.parametrize("draw", TORCH_DRAWS.values(), ids=TORCH_DRAWS.keys())
def test_a_generator_that_is_handed_in_draws_as_in_eager(
    draw: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(7)
    state = generator.get_state()
    step = fitted(lambda tensor: draw(tensor, generator))
    assert torch.equal(generator.get_state(), state)
    step.verify()
    assert torch.equal(generator.get_state(), state)
    model = Network(lambda tensor: draw(tensor, generator))
    eager = memfit.TrainingStep(
        model=model, loss=square_loss, batch=inputs(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    torch.manual_seed(3)
    expected = [eager.run_eager(inputs()).item() for _ in range(3)]
    generator.set_state(state)
    torch.manual_seed(3)
    assert [step(inputs()).item() for _ in range(3)] == expected


def seeded_anew(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))


SEEDED = torch.Generator()


def reseeded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + torch.randn(WIDTH, generator=SEEDED.manual_seed(0))


def seeded_by_default(tensor: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return tensor + torch.randn(WIDTH)


def forked(tensor: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return functional.dropout(tensor)


@pytest.mark.parametrize("between", [seeded_anew, reseeded, seeded_by_default, forked])
def test_a_step_that_seeds_is_no_graph(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    Network(between)
    state = torch.get_rng_state()
    step = fitted(between)
    assert re.search("sets the seed|calls `|two eager runs", step.why)
    step.verify()
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_of_gpus_are_not_seeded_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    with seeding_refused(), pytest.raises(NoGraphError, match="calls `manual_seed` of torch's generator"):
        torch.cuda.default_generators[0].manual_seed(0)
    torch.cuda.default_generators[0].manual_seed(0)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, inputs, use_reentrant=self.use_reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_on_an_input_without_gradient(use_reentrant: bool) -> None:
    states: list[StepState] = []
    for planned in (False, True):
        model = Checkpointed(use_reentrant=use_reentrant)
        step = memfit.TrainingStep(model=model, loss=square_loss, batch=inputs())
        run: Any = (
            memfit.fit(model, square_loss, inputs(), budget="100%", planner="none") if planned else step.run_eager
        )
        run(inputs())
        states.append(StepState.take(step))
    assert states[0].first_difference(states[1]) is None
    assert (states[0].gradients["first.weight"] is None) == use_reentrant


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_left_to_the_plan(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(use_reentrant=use_reentrant))
    captured = capture(memfit.TrainingStep(model=model, loss=square_loss, batch=inputs()))
    assert sum("addmm" in op.target for op in captured.graph.ops) == 3


def test_the_eager_run_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2))
    written = torch.zeros(2)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        batch.mul_(1.5)
        written.add_(1)
        model[0].seen = getattr(model[0], "seen", 0) + 1
        return model(batch).square().mean() + written.sum()

    batch = inputs()
    model[3].weight.grad = torch.ones(2, WIDTH)
    step = memfit.TrainingStep(model=model, loss=loss, batch=batch)
    before = StepState.take(step)
    stream, _ = run_as_eager(step, batch)
    assert len(stream.calls) > 10
    assert before.first_difference(StepState.take(step)) is None
    assert torch.equal(batch, inputs()) and written.tolist() == [0.0, 0.0]
    assert not hasattr(model[0], "seen") and type(model[3].weight.grad) is torch.Tensor


def test_the_eager_run_stays_within_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
    batch = torch.randn(512, 256)
    step = memfit.TrainingStep(model=model, loss=square_loss, batch=batch)
    stream = capture(step).stream
    one_bytes = 512 * 256 * 4
    require_as_eager(step, batch, stream, limit_bytes=3 * one_bytes)
    assert not caplog.records  # eager's own step keeps all twelve results
    require_as_eager(step, batch, stream, limit_bytes=one_bytes)
    assert "was not compared with eager's" in caplog.text


def test_verification_sees_a_value_that_is_frozen_at_capture() -> None:
    step = fitted(torch.relu)

    before = step.step.model.first.weight.detach().clone()

    class Frozen:
        generators = ()

        def __init__(self) -> None:
            self.step = step.step

        def __call__(self, batch: Any) -> torch.Tensor:
            same = torch.equal(self.step.model.first.weight, before)
            loss = step(batch)
            return loss if same else loss + 1

    with pytest.raises(VerificationError, match=r"changed; 4 pairs of eager steps .* are equal"):
        require_same(Frozen(), inputs())
    assert torch.equal(step.step.model.first.weight, before)


def test_verification_blames_kernels_only_where_eager_differs() -> None:
    calls = itertools.count(1)

    def between(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.relu()

    step = fitted(between)

    def unsteady(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * next(calls)

    step.step.model.between = unsteady
    with pytest.raises(MemfitError, match=r"takes values from calls, an iterator"):
        require_same(step, inputs())


def test_stand_ins_do_not_outlive_a_capture() -> None:
    """Capture copies the globals that the step names, while stand-ins are there, and puts the copies back."""
    capture(
        memfit.TrainingStep(model=Network(lambda x: x.abs() if is_fake(x) else x), loss=square_loss, batch=inputs())
    )
    assert is_fake is torch._subclasses.fake_tensor.is_fake
    assert FakeTensor is torch._subclasses.fake_tensor.FakeTensor
