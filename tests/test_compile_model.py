"""`memfit.compile`, and what `backend="memfit"` does where nothing is captured: a budget is enforced, or raises."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from occupied import bytes_now
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import memfit
from memfit.dynamo.account import Account
from memfit.dynamo.gradient_sums import watch_sums
from memfit.dynamo.model import PlannedCalls, compile_in_place
from memfit.errors import (
    BudgetNotHeldError,
    CaptureError,
    InfeasibleBudgetError,
    InvalidTargetError,
    NotOneGraphError,
    OverBudgetError,
    UnsupportedStepError,
)
from memfit.memory.contract import Warnings
from memfit.system.recorder import record

pytestmark = [
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
OPTIONS = {"iterations": 3_000}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def deep_model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(dropout)) for _ in range(10)]
    return nn.Sequential(*layers, nn.Linear(64, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3, pieces: int = 3) -> list[float]:
    """Train with accumulation, clipping and dropout, with the loss outside of the model."""
    torch.manual_seed(1)
    losses: list[float] = []
    for _ in range(steps):
        for _ in range(pieces):
            inputs, labels = torch.randn(1024, 64), torch.randint(0, 4, (1024,))
            loss = nn.functional.cross_entropy(model(inputs), labels) / pieces
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def calls_of(model: nn.Module) -> PlannedCalls:
    calls = model._compiled_call_impl
    assert isinstance(calls, PlannedCalls)
    return calls


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loop_that_accumulates_keeps_its_bits_and_its_budget(kind: Any) -> None:
    model = deep_model()
    eager = copy.deepcopy(model)
    before = bytes_now(CPU)
    with record("cpu") as usage:
        expected = train(eager, kind(eager.parameters(), lr=1e-2))
    budget = before + usage.peak_bytes * 6 // 10
    optimizer = kind(model.parameters(), lr=1e-2)
    memfit.compile(model, budget=budget, optimizer=optimizer, options=OPTIONS)
    assert train(model, optimizer) == expected
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    account = calls_of(model).account
    assert 0 < account.most_bytes <= budget
    assert account.ran == 9
    assert calls_of(model).plans[0].overhead > 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_in_low_precision_has_eagers_gradients(dtype: torch.dtype) -> None:
    model = deep_model()
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="256MiB", reserve=0, planner="none")
    inputs = torch.randn(64, 64)
    for each in (model, eager):
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype):
            outputs = each(inputs)
        outputs.float().square().mean().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("dropout", [0.15, 0.45, 1.0])
@pytest.mark.parametrize("is_first", [False, True])
def test_dropout_rounds_as_eagers(dropout: float, is_first: bool) -> None:
    model = deep_model(dropout)
    if is_first:  # the batch needs no gradient, and no mask is kept
        model = nn.Sequential(nn.Dropout(dropout), model)
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="256MiB", reserve=0, planner="none")
    inputs = torch.randn(64, 64)
    losses: list[torch.Tensor] = []
    for each in (model, eager):
        torch.manual_seed(2)
        losses.append(each(inputs).square().mean())
        losses[-1].backward()
    assert torch.equal(*losses)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_dropout_without_gradients_rounds_as_eagers() -> None:
    """As of a teacher that is left in training mode."""
    model = deep_model(0.45)
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="256MiB", reserve=0, planner="none")
    results: list[torch.Tensor] = []
    for each in (model, eager):
        torch.manual_seed(2)
        with torch.no_grad():
            results.append(each(torch.ones(64, 64)))
    assert torch.equal(*results)


def test_a_backward_pass_that_takes_more_than_planned_is_planned_for_less(caplog: pytest.LogCaptureFixture) -> None:
    model = deep_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    budget = bytes_now(CPU) + 6_000_000

    def loss_with_workspace(outputs: torch.Tensor, workspace_bytes: int) -> torch.Tensor:
        torch.empty(workspace_bytes, dtype=torch.uint8).fill_(0)
        return outputs.square().mean()

    memfit.compile(model, budget=budget, optimizer=optimizer, options=OPTIONS)
    account, inputs = calls_of(model).account, torch.randn(1024, 64)
    for workspace_bytes in (1000, 1000, 2_500_000, 2_500_000, 2_500_000):
        account.most_bytes = 0
        loss_with_workspace(model(inputs), workspace_bytes).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "more than the budget" in caplog.text
    assert 0 < account.most_bytes <= budget


def test_an_update_beyond_the_budget_raises() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    budget = bytes_now(CPU) + sum(p.nbytes for p in model.parameters()) * 3 // 2
    compile_in_place(model, {"budget": budget, "reserve": 0, "options": OPTIONS}, "here").account.optimizers.follow(
        optimizer
    )
    account = calls_of(model).account
    account.optimizers.bytes_to_come = lambda: 0  # an optimizer whose state is not what its first step showed
    with pytest.raises(InfeasibleBudgetError, match="update of the parameters took"):
        for _ in range(3):
            model(torch.randn(4, 512)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("way", ["compile", "compile, with the optimizer", "backend"])
def test_what_takes_more_than_the_budget_between_two_steps_is_told_once(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = deep_model()
    optimizer, budget = torch.optim.SGD(model.parameters(), lr=1e-2), bytes_now(CPU) + (12 << 20)
    if way == "backend":
        called: Any = torch.compile(model, backend="memfit", options={"budget": budget, "reserve": 0})
    else:
        followed = optimizer if way == "compile, with the optimizer" else None
        called = memfit.compile(model, budget=budget, optimizer=followed, options=OPTIONS)

    for step in range(4):
        nn.functional.cross_entropy(called(torch.randn(1024, 64)), torch.randint(0, 4, (1024,))).backward()
        assert caplog.text.count("memfit: between two steps") == (step > 1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            torch.zeros(4 << 20)  # of an average of the weights, say


def test_an_evaluation_beyond_the_budget_raises() -> None:
    model = memfit.compile(deep_model(), budget=bytes_now(CPU) + (1 << 20), reserve=0)
    with torch.no_grad():
        model(torch.randn(8, 64))
        inputs = torch.randn(2048, 64)
        with pytest.raises(OverBudgetError, match="make the batch of the evaluation smaller"):
            model(inputs)


class Logging(nn.Module):
    """Computes something for a log without gradients, in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = deep_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.deep(inputs)
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.entropy = torch.softmax(inputs.repeat(1, 8), 1).log().sum(1)
        return outputs


def test_a_model_that_breaks_into_graphs_is_held_by_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    model = Logging()
    bare, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=1e-2)
    gc.collect()
    with record("cpu") as usage:
        expected = train(bare, torch.optim.SGD(bare.parameters(), lr=1e-2))
    budget = bytes_now(CPU) + usage.peak_bytes * 7 // 10
    memfit.compile(model, budget=budget, optimizer=optimizer, options=OPTIONS)
    before_bytes = bytes_now(CPU)
    with record("cpu") as usage:
        assert train(model, optimizer) == expected
    assert before_bytes + usage.peak_bytes <= budget
    (said,) = [text for text in caplog.messages if "held by memfit.checkpoint" in text]
    assert "without options, since" in said and "graph_break" in said


def test_a_model_without_blocks_that_breaks_into_graphs_runs_where_it_fits() -> None:
    class Broken(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(inputs).tanh()

    def train(budget: str | None) -> list[float]:
        torch.manual_seed(0)
        model = Broken(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        if budget is not None:
            memfit.compile(model, budget=budget, optimizer=optimizer)
        losses = []
        for _ in range(5):
            loss = model(torch.randn(4096, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train("1GiB") == train(None)
    with pytest.raises(
        BudgetNotHeldError, match=r"no blocks of the model were found .*memfit\.eager, .* which needs none"
    ):
        train("1MiB")


def test_an_optimizer_whose_step_calls_that_of_its_base_class_is_one_update() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = deep_model()
    optimizer = Own(model.parameters(), lr=0.1)
    memfit.compile(model, budget="64MiB", optimizer=optimizer)
    for _ in range(3):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.forward(torch.randn(8, 64)).sum().backward()
    with pytest.raises(UnsupportedStepError, match="no call of the model was planned"):
        optimizer.step()


def test_a_loop_that_does_not_call_the_model_raises() -> None:
    model = deep_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.compile(model, budget="64MiB", optimizer=optimizer)
    model.forward(torch.randn(8, 64)).sum().backward()
    with pytest.raises(UnsupportedStepError, match="no call of the model was planned"):
        optimizer.step()


def test_a_model_that_the_compiler_may_not_enter_is_held_by_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    model = memfit.compile(deep_model(), budget="64MiB", reserve=0)
    with torch._dynamo.config.patch(disable=True):
        model(torch.randn(8, 64))
    assert any("held by memfit.checkpoint" in text for text in caplog.messages)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (len, InvalidTargetError, "expected a torch.nn.Module"),
        (nn.DataParallel(nn.Linear(2, 2)), UnsupportedStepError, "wrapped in DataParallel"),
    ],
)
def test_models_that_cannot_be_planned_are_refused(model: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        memfit.compile(model, budget="64MiB")


def test_a_model_is_compiled_once() -> None:
    model = memfit.compile(deep_model(), budget="64MiB")
    with pytest.raises(InvalidTargetError, match="compiled already"):
        memfit.compile(model, budget="64MiB")
    with pytest.raises(InvalidTargetError, match="compiled already"):
        memfit.compile(torch.compile(deep_model(), backend="eager"), budget="64MiB")


def test_copies_and_pickles_are_of_the_bare_model() -> None:
    model = memfit.compile(deep_model(), budget="64MiB")
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made._compiled_call_impl is None
        assert list(made.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("is_named", [False, True])
def test_an_update_whose_closure_calls_the_model_is_checked_after_the_closure(is_named: bool) -> None:
    model = deep_model()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, eager)]
    memfit.compile(model, budget="256MiB", optimizer=optimizers[0], planner="none")
    inputs, losses = torch.randn(8, 64), []
    for each, optimizer in zip((model, eager), optimizers, strict=True):

        def closure(*_: Any, call: Any = each, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            torch.manual_seed(2)
            loss = call(inputs).square().mean()
            loss.backward()
            return loss

        losses += [optimizer.step(closure=closure) if is_named else optimizer.step(closure) for _ in range(2)]
    assert losses[:2] == losses[2:]
    assert torch.equal(model[0][0].weight, eager[0][0].weight)
    before = model[0][0].weight.clone()
    with pytest.raises(UnsupportedStepError, match="no call of the model was planned"):
        optimizers[0].step(lambda: closure(call=model.forward, optimizer=optimizers[0]))
    assert torch.equal(model[0][0].weight, before)
    optimizers[0].zero_grad()
    optimizers[0].step()  # changes nothing, so that nothing had to be planned


class Halving(torch.optim.SGD):
    """Halves its step until the loss is less: its closure is asked for the loss alone, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        (parameters,) = [group["params"] for group in self.param_groups]
        before = [each.clone() for each in parameters]
        for rate in (4.0, 2.0, 1.0, 0.5):
            torch._foreach_copy_(parameters, torch._foreach_sub(before, [rate * each.grad for each in parameters]))
            if closure(backward=False) < loss:
                break
        return loss


def test_a_closure_with_arguments_of_its_own() -> None:
    model = deep_model(dropout=0.0)
    eager, given, losses = copy.deepcopy(model), torch.randn(64, 64), []
    optimizers = [Halving(each.parameters(), lr=1.0) for each in (model, eager)]
    memfit.compile(model, budget="256MiB", optimizer=optimizers[0], planner="none")
    for call, optimizer in zip((model, eager), optimizers, strict=True):

        def closure(backward: bool = True, call: Any = call, optimizer: Any = optimizer) -> torch.Tensor:
            with torch.set_grad_enabled(backward):
                loss = call(given).square().mean()
            if backward:
                optimizer.zero_grad()
                loss.backward()
            return loss.detach()

        losses += [optimizer.step(closure).item() for _ in range(3)]
    assert losses[:3] == losses[3:] and losses[0] > losses[2]


def test_the_state_of_an_optimizer_that_is_followed_is_read_and_written_before_its_first_step() -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    memfit.compile(model, budget="256MiB", optimizer=optimizer, planner="none")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    assert of_optimizer["state"]
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    model.forward(torch.randn(8, 64)).sum().backward()
    with pytest.raises(UnsupportedStepError, match="no call of the model was planned"):
        optimizer.step()


def trained_by_lbfgs(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return [each.detach() for each in model.parameters()]


def test_an_optimizer_that_calls_the_loss_is_left_out() -> None:
    """Its state is not tried, since a trial has no loss."""
    eager, model = deep_model(0.0), deep_model(0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    with pytest.raises(UnsupportedStepError, match=r"leave it out \(optimizer=None\)"):
        memfit.compile(model, budget="1GiB", optimizer=optimizer)
    found = trained_by_lbfgs(memfit.compile(model, budget="1GiB", planner="none"), optimizer)
    expected = trained_by_lbfgs(eager, torch.optim.LBFGS(eager.parameters(), lr=0.1, max_iter=2))
    assert all(map(torch.equal, found, expected))


def test_wrapped_optimizers_are_followed_and_what_is_none_is_refused() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = deep_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.compile(model, budget="256MiB", optimizer=Wrapper(Wrapper(optimizer)), planner="none")
    assert calls_of(model).account.optimizers.followed == (optimizer,)
    with pytest.raises(InvalidTargetError, match="optimizer is a list, expected"):
        memfit.compile(deep_model(), budget="256MiB", optimizer=[optimizer])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidTargetError, match="a Wrapper around a SGD, and its own step"):
        memfit.fit(deep_model(), nn.MSELoss(), torch.zeros(1), optimizer=Wrapper(optimizer), budget="1MiB")


_ASKED = """
import torch
from torch import nn
import torch._dynamo.backends.registry as registry
from memfit.dynamo.lookup import memfit_backend
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{compile}(backend=memfit_backend, options={{"budget": "1MiB", "reserve": 0, "planner": "none"}})

def closure():
    loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    return loss

optimizer.step(closure)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile_line", "words"),
    [
        ("model.compile", ""),
        ("model[1].forward = torch.compiler.disable(model[1].forward); model.compile", "no graph of it has reached"),
        (
            "import os; os.environ['TORCH_COMPILE_DISABLE'] = '1'; torch._dynamo.config.disable = True; model.compile",
            "no",
        ),
    ],
)
def test_a_backend_that_no_graph_reaches_raises_at_the_first_update(compile_line: str, words: str) -> None:
    code = _ASKED.format(compile=compile_line)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not words), done.stderr
    assert words in done.stderr


def test_each_model_that_is_compiled_is_checked_at_its_first_update() -> None:
    from memfit.dynamo.lookup import memfit_backend

    def train(call: Any, model: nn.Module) -> None:
        call(torch.randn(3, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    models = [nn.Linear(4, 2) for _ in range(3)]
    options: Any = {"budget": "64MiB", "reserve": 0, "planner": "none"}
    compiled = [torch.compile(model, backend=memfit_backend, options=options) for model in models[:2]]
    train(compiled[0], models[0])
    train(compiled[1].forward, models[1])
    train(torch.compile(models[2], backend=memfit_backend, options=options), models[2])
    late = torch.compile(models[2], backend=memfit_backend, options=options)
    with pytest.raises(UnsupportedStepError, match="the loop calls a method or a part"):
        train(late._orig_mod, models[2])
    train(late, models[2])


def _blocks_and_optimizer(*, are_compiled: bool = True) -> tuple[list[nn.Module], torch.optim.Optimizer]:
    from memfit.dynamo.lookup import memfit_backend

    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    for block in blocks if are_compiled else ():
        block.compile(backend=memfit_backend, options={"budget": "64MiB", "reserve": 0, "planner": "none"})
    return blocks, torch.optim.SGD([each for block in blocks for each in block.parameters()], lr=0.1)


@pytest.mark.parametrize("sets_to_none", [False, True])
def test_blocks_that_were_not_called_yet_are_checked_at_their_first_gradients(sets_to_none: bool) -> None:
    trained: list[list[nn.Parameter]] = []
    for are_compiled in (False, True):
        blocks, optimizer = _blocks_and_optimizer(are_compiled=are_compiled)
        parameters = [each for block in blocks for each in block.parameters()]
        for called in ((0,), (1, 0), (0, 1, 2)):
            optimizer.zero_grad(set_to_none=sets_to_none)
            values = torch.randn(3, 4)
            for number in called:
                values = blocks[number](values)
            values.sum().backward()
            if not sets_to_none:
                for parameter in (each for each in parameters if each.grad is None):
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        trained.append(parameters)
    assert all(map(torch.equal, *trained)), "no update was refused, and each is eager's"


def test_a_model_whose_methods_train_is_refused_where_graphs_of_others_run() -> None:
    blocks, optimizer = _blocks_and_optimizer()
    values = blocks[1](blocks[0](torch.randn(3, 4)))
    with torch.no_grad():
        blocks[2](values)
    blocks[2].forward(values).sum().backward()
    before = [each.clone() for block in blocks for each in block.parameters()]
    with pytest.raises(UnsupportedStepError, match=r"a model \(Sequential\) was compiled .* memfit\.compile"):
        optimizer.step()
    assert all(map(torch.equal, before, (each for block in blocks for each in block.parameters())))


def test_weights_that_are_computed_of_parameters_reach_a_graph() -> None:
    trained: list[list[nn.Parameter]] = []
    for are_compiled in (False, True):
        (block, *_), optimizer = _blocks_and_optimizer(are_compiled=are_compiled)
        computed = {name: each * 0.5 for name, each in block.named_parameters()}
        torch.func.functional_call(block, computed, (torch.randn(3, 4),)).sum().backward()
        optimizer.step()
        trained.append(list(block.parameters()))
    assert all(map(torch.equal, *trained)), "the update was not refused, and is eager's"


def test_updates_without_a_graph_between_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (block, *_), optimizer = _blocks_and_optimizer()
    for call in [block, block, block.forward, block.forward]:
        call(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        assert ("no graph was called since its last update" in caplog.text) == (call is not block)
    assert caplog.text.count("no graph was called") == 1


class Scaling(nn.Linear):
    def scaled(self, given: torch.Tensor) -> torch.Tensor:
        return given * 2


@pytest.mark.parametrize("is_method", [False, True])
def test_a_function_that_was_compiled_is_reached_by_any_graph(is_method: bool) -> None:
    from memfit.dynamo.lookup import memfit_backend

    model = Scaling(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"budget": "64MiB", "reserve": 0, "planner": "none"}
    function = model.scaled if is_method else lambda given: given * 2
    scaled = torch.compile(function, backend=memfit_backend, options=options)
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(UnsupportedStepError, match="a function was compiled"):
        optimizer.step()
    model(scaled(torch.randn(3, 4))).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("is_tied", [False, True])
def test_two_calls_before_one_backward_warn_where_a_parameter_is_used_often(
    is_tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [nn.Linear(8, 8) for _ in range(2)]
    if is_tied:
        layers[1].weight = layers[0].weight
    model = memfit.compile(nn.Sequential(layers[0], nn.Tanh(), layers[1]), budget="256MiB", reserve=0, planner="none")
    inputs = torch.randn(4, 8)
    for _ in range(2):
        model(inputs).sum().backward()
    assert "summed first" not in caplog.text
    (model(inputs) + model(inputs)).sum().backward()
    assert ("summed first" in caplog.text) == is_tied


class Residual(nn.Linear):
    """A block that PyTorch's compiler takes in by itself, in a loop that breaks; its input is used outside, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Lambda(nn.Module):
    def __init__(self, *, is_used_outside: bool) -> None:
        super().__init__()
        self.blocks, self.is_used_outside = nn.ModuleList(Residual(8, 8) for _ in range(3)), is_used_outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = x + (block(x) - x) * 0.3 if self.is_used_outside else block(x)
        return x


@pytest.mark.parametrize("is_used_outside", [False, True])
def test_what_a_graph_uses_often_and_others_use_too_is_warned_of(
    is_used_outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"budget": "256MiB", "reserve": 0, "planner": "none"}
    model: Any = torch.compile(Lambda(is_used_outside=is_used_outside), backend="memfit", options=options)
    for _ in range(2):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert caplog.text.count("summed first") == is_used_outside


def test_a_call_whose_sums_are_watched_is_freed_without_a_backward_pass() -> None:
    parameter = nn.Parameter(torch.randn(1000))
    before = bytes_now(CPU)
    gc.disable()
    try:
        hidden = parameter.exp()
        output = hidden * 2
        watch_sums(output.grad_fn, [parameter, hidden], Warnings())
        del hidden, output
        assert bytes_now(CPU) == before
    finally:
        gc.enable()


class Twice(nn.Linear):
    """Uses its weight twice, after code that PyTorch's compiler does not take in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            x = x + 1
        return nn.functional.linear(nn.functional.linear(x, self.weight).tanh(), self.weight)


def test_blocks_that_run_by_one_graph_with_parameters_of_their_own_are_no_two_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"budget": "256MiB", "reserve": 0, "planner": "none"}
    model: Any = torch.compile(nn.Sequential(*[Twice(8, 8) for _ in range(4)]), backend="memfit", options=options)
    for again in (False, True):
        hidden = model(torch.randn(4, 8))
        (model(hidden) if again else hidden).sum().backward()
        assert ("summed first" in caplog.text) == again


class Numbers(nn.Module):
    """Computes with an attribute that the loop changes, in each of the ways that take a tensor in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = (1 - self.scale) * self.linear(inputs) * self.scale + self.scale * 2 - inputs / self.scale
        hidden = self.scale - torch.mul(hidden.add(self.scale / 3 - 1), -self.scale)
        hidden *= self.scale
        hidden -= self.scale
        return hidden.tanh()


class Powers(Numbers):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).abs() ** self.scale


def call_with(model: Numbers, scale: float, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.scale = scale
    model.zero_grad()
    outputs = model(inputs)
    outputs.float().square().mean().backward()
    assert model.linear.weight.grad is not None
    return [outputs, model.linear.weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_that_change_keep_the_bits(dtype: torch.dtype) -> None:
    model = Numbers().to(dtype)
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="256MiB", reserve=0, planner="none")
    for number in range(4):
        inputs = torch.randn(64, 8, dtype=dtype)
        mine, theirs = (call_with(each, 1.0 + number / 3, inputs) for each in (model, eager))
        assert all(map(torch.equal, mine, theirs))
    assert len(calls_of(model).plans) == 2  # of the first number as a constant, and of all others


def test_a_model_that_is_compiled_in_each_call_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = memfit.compile(deep_model(), budget="256MiB")
    for _ in range(100):
        calls_of(model)._planned_graph(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    assert sum("64 graphs of Sequential" in message for message in caplog.messages) == 1


def test_a_number_that_cannot_be_a_tensor_is_held_by_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    model = Powers()
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="256MiB", reserve=0, planner="none")
    for number in (1.0, 1.5, 2.0):
        inputs = torch.randn(4, 8)
        mine, theirs = (call_with(each, number, inputs) for each in (model, eager))
        assert all(map(torch.equal, mine, theirs))
    assert any(
        re.search(r"a number that changes from call to call .* at .*\.py:\d+\)", text) for text in caplog.messages
    )


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        hidden = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden.values()


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_that_a_model_makes_are_left_to_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    given = torch.randn(64, 16), torch.tensor([0, 10, 30, 64])
    model = torch.compile(Jagged(), backend="memfit", options={"budget": "1GiB", "reserve": 0})
    with pytest.raises(UnsupportedStepError, match="tensors of type NestedTensor, of which graphs are not planned"):
        model(*given)
    held = Jagged()
    memfit.compile(held, budget="1GiB", optimizer=torch.optim.SGD(held.parameters()))
    held(*given).sum().backward()
    assert "held by memfit.checkpoint, since the model holds tensors of type NestedTensor" in caplog.text


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.deep = nn.Embedding(300, 64, sparse=True), deep_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.deep(self.words(inputs).mean(1))


def test_sparse_gradients_are_left_to_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    given = torch.randint(0, 300, (64, 4))
    model = torch.compile(Bag(), backend="memfit", options={"budget": "1GiB", "reserve": 0})
    with pytest.raises(CaptureError, match=r"sparse=False, or train under memfit\.checkpoint or memfit\.eager"):
        model(given).sum().backward()
    held = memfit.compile(Bag(), budget="1GiB")
    held(given).sum().backward()
    assert held.words.weight.grad.is_sparse
    assert "held by memfit.checkpoint, since a tensor of shape [300, 64] has layout torch.sparse_coo" in caplog.text


class Weighted(nn.Module):
    """Its fake of a backward kernel, PyTorch's own, fails."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.deep = nn.EmbeddingBag(300, 64, mode="sum", sparse=True), deep_model()

    def forward(self, words: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.deep(self.bag(words, starts, weights))


@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_which_pytorch_makes_no_halves_is_left_to_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    given = torch.randint(0, 300, (64,)), torch.arange(0, 64, 4), torch.rand(64)
    model = torch.compile(Weighted(), backend="memfit", options={"budget": "1GiB", "reserve": 0})
    with pytest.raises(NotOneGraphError, match=r"cannot make the two halves .*: memfit\.checkpoint\(model, budget\)"):
        model(*given)
    held = memfit.compile(Weighted(), budget="1GiB")
    held(*given).sum().backward()
    assert held.bag.weight.grad.is_sparse
    assert "held by memfit.checkpoint, since PyTorch cannot make the two halves" in caplog.text
    assert "failed while attempting to run meta" not in caplog.text


def test_an_error_inside_of_pytorchs_compiler_leaves_the_model_to_checkpoint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("not on the root tracer")

    monkeypatch.setattr(torch._dynamo.convert_frame, "trace_frame", fail)
    model = memfit.compile(deep_model(), budget="1GiB")
    model(torch.randn(4, 64)).sum().backward()
    assert "compiler cannot take in Sequential: not on the root tracer" in caplog.text


_LEFT_TO_CHECKPOINT = """
import gc, weakref, torch, memfit

class Broken(torch.nn.Linear):
    def forward(self, inputs):
        torch._dynamo.graph_break()
        return super().forward(inputs).tanh()

model, refs = Broken(64, 64), []
memfit.compile(model, budget="1GiB")

def step():
    inputs = torch.randn(64, 64)
    refs.append(weakref.ref(inputs))
    model(inputs).sum().backward()

gc.disable()
step()
assert refs[0]() is None
"""


def test_a_step_that_is_left_to_checkpoint_keeps_nothing_of_the_functions_around_it() -> None:
    """In a process of its own: pytest captures records of PyTorch's compiler, which hold its errors."""
    done = subprocess.run([sys.executable, "-c", _LEFT_TO_CHECKPOINT], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "held by memfit.checkpoint" in done.stderr, done.stderr


def test_models_whose_backward_never_comes_leave_records_to_others() -> None:
    accounts = [Account(1 << 30, torch.device("cpu")) for _ in range(18)]  # two more than may measure at once
    for account in accounts:
        account.begin()
    marks = [account.begin_loss() for account in accounts]
    held = torch.ones(1 << 10)
    for account, mark in ((accounts[-1], marks[-1]), (accounts[0], marks[0])):
        account.losses.end(mark)
    assert marks[-1].most_bytes >= held.nbytes
    assert marks[0].most_bytes == 0
    with record("cpu") as usage:
        held = held.clone()
    assert usage.peak_bytes == held.nbytes


class Queued(nn.Module):
    """Keeps results in a queue, at a place that a buffer says, without gradients."""

    place: torch.Tensor
    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.register_buffer("queue", torch.zeros(64, 16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        with torch.no_grad():
            first = int(self.place)
            self.queue[first : first + len(values)] = values
            self.place[0] = (first + len(values)) % 64
        return values @ self.queue.clone().t()


class Routed(nn.Module):
    """Sends rows to experts, of which some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        chosen, results = self.router(values).argmax(1), values * 1.0
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                results = results.index_add(0, rows, expert(values[rows]))
        return results


class Pushed(nn.Module):
    """Adds its derivative in one direction, where a fake layer normalization fails inside of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result, derivative = torch.func.jvp(self.layers, (values,), (torch.ones_like(values),))
        return result + derivative


@pytest.mark.parametrize("kind", [Queued, Routed, Pushed])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own, in a class that differs by version
def test_a_model_at_which_the_compiler_stops_trains_on_and_leaves_gradients_on(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    memfit.compile(model, budget="1GiB", optimizer=optimizers[0])
    for rows in (8, 2, 8):
        batch = torch.randn(rows, 16)
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            each(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.is_grad_enabled()
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


def stop(_module: nn.Module, _given: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ends", ["well", "by an error", "before its backward pass"])
def test_a_compiled_model_that_nobody_has_takes_no_memory(ends: str) -> None:
    """Dynamo keeps every backend that it was given: it had kept the model, its plans and its records with it."""
    model = deep_model()
    optimizer = torch.optim.Adam(model.parameters())
    gone = weakref.ref(model)
    compiled = memfit.compile(model, budget="64MiB", optimizer=optimizer, options=OPTIONS)

    train(compiled, optimizer, steps=1)
    if ends == "by an error":
        compiled[3].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            compiled(torch.randn(1024, 64))
    if ends == "before its backward pass":
        compiled(torch.randn(1024, 64))
    del model, compiled, optimizer
    gc.collect()

    assert gone() is None


def test_an_optimizer_that_the_loop_replaces_takes_no_memory() -> None:
    """Its states, and parameters that the model has no more, had stayed beside those of the new one."""
    model = deep_model()
    optimizer = torch.optim.Adam(model.parameters())
    memfit.compile(model, budget="64MiB", optimizer=optimizer, options=OPTIONS)
    train(model, optimizer)

    gone = [weakref.ref(each) for each in (optimizer, model[-1].weight)]
    model[-1] = nn.Linear(64, 4)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=1)
    gc.collect()

    assert [each() for each in gone] == [None, None]


class _TakesOut(nn.Module):
    """Computes with a parameter that it takes out of its module, and puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner._parameters.pop("weight")
        self.inner.weight = weight * 2  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return self.inner(x)
        finally:
            del self.inner.weight
            self.inner._parameters["weight"] = weight


def test_a_parameter_that_the_compiler_loses_is_there_again_and_the_model_is_refused() -> None:
    model = _TakesOut()
    own = [*model.parameters()]
    memfit.compile(model, budget="8MiB", reserve=0)
    for _ in range(2):
        with pytest.raises(UnsupportedStepError, match="'weight' out of its module"):
            model(torch.randn(4, 8))
        assert {*map(id, model.parameters())} == {*map(id, own)}


class _Around(torch.optim.Optimizer):
    """Calls another optimizer's step, and then asks for all of its parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)
        fast = [each for group in self.param_groups for each in group["params"]]
        with torch.no_grad():
            for slow, each in zip(self.slow, fast, strict=True):
                each.copy_(slow.lerp_(each, 0.5))


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_trial_of_an_optimizer_around_another_does_not_call_it(has_gradients: bool) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = torch.randn(64, 16)
    for model in models:
        optimizer = _Around(torch.optim.AdamW(model.parameters()))
        if has_gradients:
            model(inputs).mean().backward()
        called = memfit.compile(model, budget="8MiB", optimizer=optimizer) if model is models[0] else model
        for _ in range(3):
            called(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_many_sizes_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    memfit.compile(model, budget="8MiB")
    for rows in (*range(8, 21), *range(8, 21)):
        model(torch.randn(rows, 16)).square().mean().backward()
    assert sum("batches of 12 sizes were traced and planned" in message for message in caplog.messages) == 1
