"""The torch.compile backend: planned halves inside a user's own loop."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from occupied import bytes_now
from steps import MODELS, ConvNet, conv_batch, cross_entropy, make_pair, unusual_batch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import memfit
from memfit.dynamo import backend
from memfit.dynamo.backend import PlannedGraph
from memfit.dynamo.inputs import Signatures, only_device_of, signatures
from memfit.dynamo.optimizers import state_to_come
from memfit.errors import (
    InfeasibleBudgetError,
    InvalidBudgetError,
    InvalidDeviceError,
    InvalidOptionError,
    NoPlanError,
    NotOneGraphError,
    UnsupportedStepError,
)
from memfit.system.recorder import record
from memfit.torch_private.dynamo import times_compiled

# Dynamo's own warnings while it traces, which are errors under pytest.
pytestmark = [
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, budget: str = "10MiB", **options: Any) -> Any:
    options = {"budget": budget, "options": {"iterations": 5_000}, "reserve": 0, **options}
    return torch.compile(model, backend="memfit", options=options)


def assert_steps_equal(planned: nn.Module, model: nn.Module, eager: nn.Module, batch: Any) -> None:
    torch.manual_seed(5)
    loss = cross_entropy(planned, batch)
    loss.backward()
    generator = torch.get_rng_state()
    torch.manual_seed(5)
    expected = cross_entropy(eager, batch)
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(generator, torch.get_rng_state())
    for (name, mine), (_, theirs) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    for (name, mine), (_, theirs) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_have_eagers_bits(name: str) -> None:
    step, eager = make_pair(name)
    planned = compiled(step.model)
    for _ in range(2):
        assert_steps_equal(planned, step.model, eager.model, MODELS[name][1]())


def test_a_tight_budget_rematerializes_with_the_same_bits_and_holds() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.1)) for _ in range(12)]
    model = nn.Sequential(*layers, nn.Linear(128, 4))
    eager = copy.deepcopy(model)
    batch = torch.randn(2048, 128), torch.zeros(2048, dtype=torch.long)
    resident = sum(t.nbytes for t in (*model.parameters(), *batch))
    gc.collect()
    with record("cpu") as unplanned:
        cross_entropy(eager, batch).backward()
    eager.zero_grad()
    budget = resident + unplanned.peak_bytes // 2
    planned = compiled(model, str(budget))
    assert_steps_equal(planned, model, eager, batch)
    assert_steps_equal(planned, model, eager, batch)
    model.zero_grad()
    with record("cpu") as usage:
        cross_entropy(planned, batch).backward()
    assert resident + usage.peak_bytes <= budget


_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "a place": lambda m: m[2, 2].fill_(0),
    "a row": lambda m: m.__setitem__(1, m[2] * 2),
    "a column": lambda m: m.__setitem__((slice(None), 3), 0.5),
    "a diagonal": lambda m: m.diagonal().copy_(m[0] * 1),
    "every other row": lambda m: m[1::2].copy_(m[::4]),
    "a block": lambda m: m[1:3, 1:3].copy_(torch.zeros(2, 2)),
    "of another view": lambda m: m.view(-1)[7:9].zero_(),
    "of another type": lambda m: m[2].copy_(torch.arange(5)),
    "broadcast": lambda m: m[2:4].copy_(m[0]),
    "to the right": lambda m: m[:, 1:].copy_(m[:, :-1]),
    "across": lambda m: m.t()[2].copy_(m[1]),
}


class _Writing(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(5, 5), write
        self.register_buffer("mask", torch.rand(5, 5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mask, hidden = self.mask.clone(), self.layer(values).clone()
        self.write(mask)
        self.write(hidden)
        return nn.functional.linear(hidden, self.layer.weight * mask).square().mean()


@pytest.mark.parametrize("where", _WRITES)
def test_writes_to_parts_of_a_tensor(where: str) -> None:
    """Copies keep their place in a storage; one over what it reads has no bits that a graph could have."""
    model, values = _Writing(_WRITES[where]), torch.randn(5, 5)
    model(values).backward()
    eager = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    planned = torch.compile(model, backend="memfit", options={"budget": "64MiB", "reserve": 0})
    if where in ("to the right", "across"):
        with pytest.raises(NotOneGraphError, match=r"copy_.default writes over what it reads.*kernel$"):
            planned(values)
        return
    planned(values).backward()
    assert all(map(torch.equal, eager, (parameter.grad for parameter in model.parameters())))


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_which_only_a_constant_is_compiled_is_refused_at_its_first_update() -> None:
    """PyTorch's compiler goes on in eager at sparse tensors, and leaves the layers behind them out."""

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            matrix = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]) / 4, (len(nodes), len(nodes)))
            return torch.sparse.mm(matrix, self.layer(nodes))

    from memfit.dynamo.lookup import memfit_backend

    model = Spectrum()
    planned = torch.compile(model, backend=memfit_backend, options={"budget": "64MiB", "reserve": 0})
    planned(torch.randn(6, 8), torch.randint(0, 6, (2, 20))).square().mean().backward()
    with pytest.raises(UnsupportedStepError, match="no graph of it has reached the backend"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("frozen", [(False, False, True), (True, True, False)])
def test_what_is_set_aside_for_the_optimizer_is_not_set_aside_again_for_a_later_graph(frozen: Any) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 4))
    state_bytes = 2 * sum(each.nbytes for each in model.parameters())
    options = {"budget": bytes_now(torch.device("cpu")) + state_bytes + (9 << 20), "reserve": state_bytes}
    planned = torch.compile(model, backend="memfit", options=options)
    optimizer = torch.optim.Adam(model.parameters())
    for is_frozen in frozen:
        model[2].requires_grad_(not is_frozen)  # another graph
        with record("cpu") as seen:
            planned(torch.randn(64, 1024)).square().mean().backward()
        assert seen.start_bytes + seen.peak_bytes <= options["budget"]
        optimizer.step()
        optimizer.zero_grad()


def test_a_call_that_reaches_no_graph_is_told_where_no_optimizer_steps(caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron(4)
    planned = torch.compile(model, backend="memfit", options={"budget": "64MiB", "reserve": 0})
    rows = torch.randn(8, 64)
    with torch.no_grad():
        planned(rows)
    planned(rows).square().mean().backward()
    assert "no budget is enforced" not in caplog.text
    for _ in range(2):
        torch.func.grad(lambda given: planned(given).square().mean())(rows)
    assert caplog.text.count("no budget is enforced in it: it enters no transformation of torch.func") == 1


def perceptron(outputs: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def test_what_eager_code_before_the_model_saves_for_backward_counts() -> None:
    torch.manual_seed(0)
    encoder, head = perceptron(64), perceptron(4)
    inputs = torch.randn(1024, 64)
    before = bytes_now(torch.device("cpu"))
    with record("cpu") as unplanned:
        head(encoder(inputs)).square().mean().backward()
    budget = before + unplanned.peak_bytes * 8 // 10
    planned = compiled(head, str(budget))
    taken: list[int] = []
    for _ in range(3):
        for parameter in (*encoder.parameters(), *head.parameters()):
            parameter.grad = None
        with record("cpu") as usage:
            planned(encoder(inputs)).square().mean().backward()
        taken.append(before + usage.peak_bytes)
    assert max(taken[1:]) <= budget, taken


class Counting(nn.Module):
    """Counts its calls in an integer, so that Dynamo compiles it anew for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = perceptron(4), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(inputs) * (1.0 if self.calls % 2 else 2.0)


@pytest.mark.slow
def test_a_model_that_is_compiled_often_keeps_its_budget(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo would take it to eager at the ninth time."""
    torch.manual_seed(0)
    model, inputs = Counting(), torch.randn(64, 64)
    eager = copy.deepcopy(model)
    planned = compiled(model)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in range(12):
        for each in (planned, eager):
            torch.manual_seed(number)
            each(inputs).square().mean().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before >= 12
    assert not [record for record in caplog.records if record.name == "memfit"]


@pytest.mark.slow
def test_a_model_that_is_compiled_very_often_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = times_compiled()
    monkeypatch.setattr(backend, "times_compiled", lambda: times_compiled() - before + 61)
    planned = compiled(Counting())
    for _ in range(6):
        planned(torch.randn(8, 64)).square().mean().backward()
    assert sum("was compiled 64 times by now" in message for message in caplog.messages) == 1


def test_a_mode_of_torchs_own_backend_is_refused() -> None:
    planned = torch.compile(perceptron(4), backend="memfit", mode="reduce-overhead")
    with pytest.raises(InvalidOptionError, match=r"mode='reduce-overhead' is of PyTorch's own backend"):
        planned(torch.randn(8, 64))


def test_other_batch_sizes_are_planned_at_their_own_sizes() -> None:
    step, eager = make_pair("conv")
    planned = compiled(step.model)
    for size in (48, 20, 30, 48, 20):
        assert_steps_equal(planned, step.model, eager.model, conv_batch(size))


def test_gradients_accumulate_over_two_forwards_before_a_backward() -> None:
    step, eager = make_pair("conv")
    planned = compiled(step.model)
    torch.manual_seed(0)
    first, second = conv_batch(), conv_batch()
    for model in (planned, eager.model):
        torch.manual_seed(1)
        losses = [cross_entropy(model, first), cross_entropy(model, second)]
        sum(losses).backward()
    for (name, mine), (_, theirs) in zip(step.model.named_parameters(), eager.model.named_parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_evaluation_without_gradients() -> None:
    step, eager = make_pair("conv")
    planned = compiled(step.model)
    step.model.eval()
    eager.model.eval()
    images, _ = conv_batch()
    with torch.no_grad():
        assert torch.equal(planned(images), eager.model(images))


def test_a_graph_break_plans_what_lies_around_it() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = torch.relu(self.before(values))
            torch._dynamo.graph_break()
            return self.after(values)

    torch.manual_seed(0)
    model = Broken()
    eager = copy.deepcopy(model)
    batch = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    planned = compiled(model)
    for _ in range(2):
        assert_steps_equal(planned, model, eager, batch)


def test_views_that_the_model_returns() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = torch.tanh(self.linear(values))
            return {"turned": hidden.t(), "part": hidden[:, 2:5], "same": values, "whole": hidden.view(-1)}

    torch.manual_seed(0)
    model = Views()
    eager = copy.deepcopy(model)
    values = torch.randn(5, 6)
    mine, theirs = compiled(model)(values), eager(values)
    for name, output in theirs.items():
        assert torch.equal(mine[name], output)
        assert mine[name].stride() == output.stride()
    assert mine["same"] is values
    for outputs in (mine, theirs):
        (outputs["turned"].sum() * 2 + outputs["part"].pow(2).sum() + outputs["whole"].mean()).backward()
    assert torch.equal(model.linear.weight.grad, eager.linear.weight.grad)


def test_a_model_under_ddp_is_planned_by_each_door(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    call = PlannedGraph.__call__
    monkeypatch.setattr(PlannedGraph, "__call__", lambda self, *inputs: (calls.append(self), call(self, *inputs))[1])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    doors: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
        "eager": lambda inner, wrap: wrap(inner),
        "around": lambda inner, wrap: memfit.compile(wrap(inner), budget="1GiB", reserve=0),
        "inside": lambda inner, wrap: wrap(memfit.compile(inner, budget="1GiB", reserve=0)),
        "backend around": lambda inner, wrap: compiled(wrap(inner)),
        "backend inside": lambda inner, wrap: wrap(compiled(inner)),
    }
    found: dict[str, list[torch.Tensor]] = {}
    try:
        for name, door in doors.items():
            torch.manual_seed(0)
            inner = ConvNet()
            model = door(inner, partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=1e-4))  # many
            ran = len(calls)
            for _ in range(3):
                torch.manual_seed(0)
                cross_entropy(model, conv_batch()).backward()
            assert len(calls) - ran == (0 if name == "eager" else 3)
            found[name] = [parameter.grad for parameter in inner.parameters()]  # pyright: ignore
    finally:
        torch.distributed.destroy_process_group()
    assert not [each for each in caplog.records if "memfit.checkpoint" in each.getMessage()]
    for gradients in found.values():
        assert all(map(torch.equal, gradients, found["eager"]))


def test_retain_graph_is_refused_before_anything_is_released() -> None:
    step, _ = make_pair("conv")
    loss = cross_entropy(compiled(step.model), conv_batch())
    with pytest.raises(UnsupportedStepError, match="retain_graph=True"):
        loss.backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in step.model.parameters())
    loss.backward()
    assert step.model.head.weight.grad is not None


def test_a_second_backward_is_refused() -> None:
    step, _ = make_pair("conv")
    loss = cross_entropy(compiled(step.model), conv_batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_refused() -> None:
    step, _ = make_pair("unusual")
    inputs, labels = unusual_batch()
    loss = cross_entropy(compiled(step.model), (inputs.requires_grad_(), labels))
    with pytest.raises(UnsupportedStepError, match=r"create_graph=True: .*memfit\.eager, or give memfit\.fit"):
        torch.autograd.grad(loss, inputs, create_graph=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, InvalidOptionError, "needs a budget"),
        ({"budget": "6GiB", "bugdet": 1}, InvalidOptionError, "option 'bugdet' does not exist"),
        ({"budget": "60%"}, InvalidOptionError, "or use memfit.checkpoint or memfit.fit"),
        ({"budget": "12XB"}, InvalidBudgetError, "12XB"),
        ({"budget": 0}, InvalidBudgetError, "0"),
    ],
)
def test_options_that_cannot_be_read_are_refused(options: Any, error: type[Exception], words: str) -> None:
    from memfit.dynamo.backend import memfit_backend

    with pytest.raises(error, match=words):
        memfit_backend(torch.fx.symbolic_trace(nn.Linear(2, 2)), [torch.randn(1, 2)], options=options)(
            torch.randn(1, 2)
        )


def test_a_budget_below_the_parameters_is_refused() -> None:
    step, _ = make_pair("conv")
    with pytest.raises(InfeasibleBudgetError, match="no plan can go below"):
        compiled(step.model, "1KiB")(conv_batch()[0])


def test_what_is_set_aside_for_the_optimizer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    step, _ = make_pair("conv")
    planned = torch.compile(step.model, backend="memfit", options={"budget": "10MiB", "planner": "none"})
    planned(conv_batch()[0])
    assert "set aside for the optimizer" in caplog.text


def test_what_is_set_aside_is_what_the_optimizer_has_yet_to_make(caplog: pytest.LogCaptureFixture) -> None:
    models = [nn.Linear(64, 64) for _ in range(4)]
    parameters = [list(model.parameters()) for model in models]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(parameters[0], lr=0.1),
        torch.optim.SGD(parameters[1], lr=0.1, momentum=0.9),
        torch.optim.AdamW(parameters[2]),
    ]
    size_bytes, count_bytes, device = 64 * 65 * 4, 64, torch.device("cpu")
    to_come = [state_to_come(each, device) for each in parameters]
    assert to_come[:2] == [(0, 0), (size_bytes, 0)]
    assert to_come[2] == (2 * size_bytes + 2 * count_bytes, 0)
    assert to_come[3] == (2 * size_bytes, 2 * size_bytes), "of one that no optimizer has, as Adam would take"
    set_optimizer_state_dict(models[2], optimizers[2], get_optimizer_state_dict(models[2], optimizers[2]))
    assert state_to_come(parameters[2], device) == (0, 0), "it is there"
    torch.compile(models[0], backend="memfit", options={"budget": "10MiB", "planner": "none"})(torch.randn(2, 64))
    assert "set aside" not in caplog.text


def test_the_backend_is_found_without_importing_memfit() -> None:
    code = (
        "import sys, torch; model = torch.nn.Linear(4, 2);"
        "options = {'budget': '1MiB', 'planner': 'none', 'reserve': 0};"
        "compiled = torch.compile(model, backend='memfit', options=options);"
        "compiled(torch.randn(3, 4)).sum().backward();"
        "assert model.weight.grad is not None and 'memfit' in sys.modules"
    )
    warnings = ["-W", "error", "-W", "ignore:Guards may run slower on Python 3.13.0"]  # Dynamo's, of that one version
    finished = subprocess.run([sys.executable, *warnings, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_what_a_loss_takes_between_the_halves_counts() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model, inputs = nn.Sequential(*layers), torch.randn(4096, 64)

    def peak_bytes(budget: int) -> int:
        torch.compiler.reset()
        call = torch.compile(model, backend="memfit", options={"budget": budget, "reserve": 0})
        for _ in range(2):
            model.zero_grad()
            with record("cpu") as usage:
                outputs = call(inputs)
                torch.cat([outputs] * 4).sum()  # 4 MiB, gone when backward begins
                outputs.square().mean().backward()
                del outputs
        return inputs.nbytes + sum(parameter.nbytes for parameter in model.parameters()) + usage.peak_bytes

    most_bytes = peak_bytes(64 << 20)
    for budget in (most_bytes + (1 << 20), most_bytes - (1 << 20)):  # less is kept between the halves
        assert peak_bytes(budget) <= budget
    with pytest.raises(NoPlanError):
        peak_bytes(most_bytes - (5 << 20))


class _Reads(nn.Module):
    """Reads a value under a mode, by which it computes then."""

    def __init__(self, mode: Callable[[], Any], *, breaks: bool) -> None:
        super().__init__()
        self.first, self.last, self.mode, self.breaks = nn.Linear(16, 64), nn.Linear(64, 16), mode, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        with self.mode():
            total = hidden.detach().sum()
            scale = (2.0 if total > 0 else 3.0) if self.breaks else total.item()
        return self.last(hidden * scale)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    "mode", [torch.inference_mode, partial(torch.inference_mode, False), torch.no_grad, torch.enable_grad]
)
@pytest.mark.parametrize("door", ["backend", "compile"])
def test_a_value_that_is_read_under_a_mode_leaves_torch_as_it_was(
    door: str, mode: Callable[[], Any], breaks: bool
) -> None:
    """PyTorch cannot trace a graph that enters inference mode, and left the mode at another time."""
    torch.manual_seed(0)
    model, x = _Reads(mode, breaks=breaks), torch.randn(32, 16)
    twin = copy.deepcopy(model)
    if door == "compile":
        memfit.compile(model, budget="8MiB", reserve=0)
    run = (
        torch.compile(model, backend="memfit", options={"budget": "8MiB", "reserve": 0}) if door == "backend" else model
    )
    for _ in range(2):
        run(x).square().sum().backward()
        twin(x).square().sum().backward()
    nn.Linear(16, 4)(x).sum().backward()  # as any other code in the process
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    for own, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own.grad, its.grad)  # pyright: ignore[reportArgumentType]


def test_signatures_of_the_same_inputs_are_found_again_and_of_no_others() -> None:
    weight, running = torch.nn.Parameter(torch.randn(4, 4)), torch.zeros(4)
    batch = torch.randn(3, 4)
    both = torch.randn(6, 4)
    calls: dict[str, Callable[[], tuple[Any, ...]]] = {
        "another batch": lambda: (weight, running, torch.randn(3, 4), 2),
        "a number": lambda: (weight, running, batch, 3),
        "a flag": lambda: (weight, running, batch, True),
        "a size": lambda: (weight, running, torch.randn(5, 4), 2),
        "strides": lambda: (weight, running, torch.randn(4, 3).t(), 2),
        "a dtype": lambda: (weight, running, batch.double(), 2),
        "a gradient": lambda: (weight, running, batch.clone().requires_grad_(), 2),
        "another weight": lambda: (torch.nn.Parameter(weight.detach().clone()), running, batch, 2),
        "memory of the buffer": lambda: (weight, running, running.expand(3, 4), 2),
        "the buffer itself": lambda: (weight, running, running, 2),
        "the weight's memory": lambda: (weight, running, weight.detach()[:3], 2),
        "a conjugate": lambda: (weight, running, torch.randn(3, 4, dtype=torch.complex64).conj(), 2),
        "two halves": lambda: (weight, both[:3], both[3:], 2),
        "no tensor": lambda: (weight, running, 1.5, 2),
        "fewer": lambda: (weight, running, batch),
    }
    known = Signatures()
    for _ in range(4):
        assert known.of((weight, running, batch, 2)) == signatures((weight, running, batch, 2))
    for name, call in calls.items():
        assert known.of(inputs := call()) == signatures(inputs), name
        for _ in range(3):
            assert known.of(inputs := (weight, running, batch, 2)) == signatures(inputs)
    weight.data = both[:4]  # in the memory of a batch
    assert known.of(inputs := (weight, running, both[1:4], 2)) == signatures(inputs)


def test_signatures_hold_no_inputs() -> None:
    known, weight = Signatures(), torch.nn.Parameter(torch.randn(4, 4))
    for _ in range(3):
        known.of((weight, batch := torch.randn(3, 4)))
    gone = [weakref.ref(weight), weakref.ref(batch)]
    del weight, batch
    assert [each() for each in gone] == [None, None]


def test_a_graph_over_two_gpus_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(InvalidDeviceError, match="tensors on cuda:0 and cuda:1, and memfit plans"):
        only_device_of([torch.empty(1), torch.empty(1, device="cuda:1"), torch.empty(1, device="cuda:0")])
    with FakeTensorMode():
        found = only_device_of([torch.empty(1), 3, torch.empty(1, device="cuda:1")])
    assert found == torch.device("cuda:1")
