"""Changes between steps: a planned step goes on as eager does, to the bit, or says in one line why it will not."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import memfit
from memfit.errors import InfeasibleBudgetError, UnsupportedStepError
from memfit.step.measure import resident_bytes
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import record

WIDTH = 12
SCALE = 1.0
SETTINGS: dict[str, Any] = {"weights": [1.0, 2.0], "temperature": 1.0}


class Config:
    """Settings as a class, as scripts often have them."""

    temperature = 1.0


@dataclass
class Case:
    """A loop: eager and planned steps each run one of their own.

    Attributes:
        model, loss, optimizer: of the step.
        box: what the loop and the loss share.
    """

    model: Any
    loss: Any
    optimizer: Any
    box: Any = field(default_factory=SimpleNamespace)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5), nn.Linear(WIDTH, 4))


def case(model: nn.Module | None = None, loss: Any = None, optimizer: Any = sgd) -> Case:
    model = model or dense()
    return Case(model, loss or nn.CrossEntropyLoss(), None if optimizer is None else optimizer(model))


def dense_batch() -> Any:
    return torch.randn(32, WIDTH), torch.randint(0, 4, (32,))


def image_batch() -> Any:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


Change = Callable[[Case], object]


def check_followed(
    make: Callable[[], Case],
    change: Change,
    *,
    make_batch: Callable[[], Any] = dense_batch,
    back: Change | None = None,
    start: Change | None = None,
    steps: int = 2,
) -> PlannedStep:
    """Run eager and planned steps before a change, after it, and after the way back; all bits are equal.

    Args:
        make: makes the loop, anew for eager and for planned steps.
        change: what the loop does after its first steps.
        make_batch: makes a batch of random numbers.
        back: undoes the change, after which nothing is captured anew.
        start: what the loop does before the step is planned.
        steps: in each of the three stretches.
    """
    torch.manual_seed(3)
    batches = [make_batch() for _ in range(3 * steps)]
    outcomes: list[list[torch.Tensor]] = []
    planned: Any = None
    plans = 0
    for runs_planned in (False, True):
        torch.manual_seed(4)
        own = make()
        if start is not None:
            start(own)
        step = memfit.TrainingStep(model=own.model, loss=own.loss, batch=batches[0], optimizer=own.optimizer)
        run: Callable[[Any], torch.Tensor] = step.run_eager
        if runs_planned:
            run = planned = memfit.fit(
                own.model, own.loss, batches[0], optimizer=own.optimizer, budget="64MiB", planner="none"
            )
        torch.manual_seed(5)
        outcome: list[torch.Tensor] = []
        for number, batch in enumerate(batches):
            if number == steps:
                change(own)
            if number == 2 * steps:
                if back is None:
                    break
                plans = len(planned.plans) if runs_planned else 0
                back(own)
            outcome.append(run(batch).clone())
            outcome += [p.detach().clone() for p in own.model.parameters()]
            outcome += [b.detach().clone() for b in own.model.buffers()]
            if number >= 2 * steps and runs_planned:
                assert len(planned.plans) == plans, "the way back was planned again"
        outcomes.append(outcome)
    assert len(outcomes[0]) == len(outcomes[1])
    for number, (eager, mine) in enumerate(zip(*outcomes, strict=True)):
        assert torch.equal(eager, mine), f"value {number} differs"
    return planned


# --- layouts


def _flatten(own: Case) -> None:
    flat = torch.cat([p.detach().flatten() for p in own.model.parameters()])
    start = 0
    for parameter in own.model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def _unflatten(own: Case) -> None:
    for parameter in own.model.parameters():
        parameter.data = parameter.data.clone()


def _transposed(own: Case) -> None:
    weight = own.model[0].weight
    weight.data = weight.data.t().contiguous().t() * 1.5


def test_channels_last_after_fit() -> None:
    def change(own: Case) -> None:
        own.model.to(memory_format=torch.channels_last)

    planned = check_followed(lambda: case(convolutions()), change, make_batch=image_batch)
    assert len(planned.plans) == 2


def test_parameters_that_become_views_of_one_tensor() -> None:
    assert len(check_followed(case, _flatten, back=_unflatten).plans) == 2


def test_parameters_that_were_views_of_one_tensor() -> None:
    assert len(check_followed(case, _unflatten, start=_flatten).plans) == 2


def test_a_parameter_of_other_strides() -> None:
    assert len(check_followed(case, _transposed).plans) == 2


def test_a_parameter_with_other_memory_needs_no_new_plan() -> None:
    assert len(check_followed(case, _unflatten).plans) == 1


# --- the optimizer's groups


def _two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[3].parameters()), "lr": 0.3}],
        momentum=0.9,
    )


def _first_layer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[0].parameters(), lr=0.1)


GROUP_CHANGES: dict[str, Change] = {
    "cleared": lambda own: own.optimizer.param_groups[0]["params"].clear(),
    "removed": lambda own: own.optimizer.param_groups.pop(),
    "reversed": lambda own: own.optimizer.param_groups.reverse(),
    "another list": lambda own: own.optimizer.param_groups.__setitem__(
        slice(None), [{**own.optimizer.param_groups[0], "params": [own.model[3].bias]}]
    ),
}


@pytest.mark.parametrize("change", ["removed", "frozen"])
def test_what_the_optimizer_keeps_of_parameters_that_it_no_longer_updates_is_predicted(change: str) -> None:
    model, batch = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 5)), torch.randn(64, 16)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)
    step = memfit.fit(
        model,
        lambda model, batch: model(batch).pow(2).mean(),
        batch,
        optimizer=optimizer,
        budget="300%",
        planner="none",
    )
    assert isinstance(step, PlannedStep)
    step(batch)
    if change == "removed":
        del optimizer.param_groups[-1]
    else:
        for parameter in parameters[2:]:
            parameter.requires_grad_(False)
    for _ in range(3):  # the gradients of what has no group any more are added to
        before_bytes = resident_bytes(step, batch) + sum(p.grad.nbytes for p in parameters if p.grad is not None)
        plans = len(step.plans)
        with record("cpu") as usage:
            step(batch)
    assert len(step.plans) == plans, "the last step must not be one that plans"
    padding_bytes = sum(-p.nbytes % 64 for p in parameters if p.grad is not None)
    assert before_bytes + padding_bytes + usage.peak_bytes == step.plans[-1].predicted.peak_bytes


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_a_weight_decay_that_is_switched_on_is_in_the_plan(kind: Any) -> None:
    model, batch = nn.Linear(64, 64), torch.randn(4, 64)
    optimizer = kind(model.parameters(), lr=0.01)
    step = memfit.fit(model, lambda model, batch: model(batch).pow(2).mean(), batch, optimizer=optimizer, budget="300%")
    assert isinstance(step, PlannedStep)
    step(batch)
    predicted_bytes = step.plans[-1].predicted.peak_bytes
    optimizer.param_groups[0]["lr"] = 0.005  # changes nothing
    step(batch)
    assert len(step.plans) == 1
    optimizer.param_groups[0]["weight_decay"] = 0.1
    for _ in range(2):  # the first one plans
        before_bytes = resident_bytes(step, batch)
        with record("cpu") as usage:
            step(batch)
    assert len(step.plans) == 2
    assert before_bytes + usage.peak_bytes <= step.plans[-1].predicted.peak_bytes
    assert step.plans[-1].predicted.peak_bytes > predicted_bytes


def test_add_param_group() -> None:
    def change(own: Case) -> None:
        own.optimizer.add_param_group({"params": list(own.model[3].parameters()), "lr": 0.5})

    def make() -> Case:
        own = case(optimizer=_first_layer)
        own.model[3].requires_grad_(False)
        return own

    def thaw(own: Case) -> None:
        own.model[3].requires_grad_(True)
        change(own)

    assert len(check_followed(make, thaw).plans) == 2


@pytest.mark.parametrize("change", list(GROUP_CHANGES))
def test_groups_that_change(change: str) -> None:
    check_followed(lambda: case(optimizer=_two_groups), GROUP_CHANGES[change])


def test_a_hook_on_the_optimizer() -> None:
    def halve(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    check_followed(case, lambda own: own.optimizer.register_step_pre_hook(halve))


# --- modules, parameters and buffers


def _replace_layer(own: Case) -> None:
    torch.manual_seed(7)
    own.model[3] = nn.Linear(WIDTH, 4)


def _tie(own: Case) -> None:
    own.model[0].weight = own.model[2].weight


def _squares() -> Case:
    return case(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)))


def _tie_memory(own: Case) -> None:
    own.model[0].weight.data = own.model[2].weight.data


def test_a_module_that_is_replaced_is_let_go() -> None:
    old: list[weakref.ref[nn.Module]] = []

    def change(own: Case) -> None:
        old.append(weakref.ref(own.model[3]))
        _replace_layer(own)

    check_followed(case, change)
    gc.collect()
    assert [reference() for reference in old] == [None, None]


def test_weights_that_are_tied_later() -> None:
    check_followed(_squares, _tie)
    check_followed(_squares, _tie_memory)


def test_a_module_that_is_added_and_a_parameter_that_gets_a_formula() -> None:
    check_followed(case, lambda own: own.model.append(nn.Tanh()))

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    check_followed(case, lambda own: parametrize.register_parametrization(own.model[0], "weight", Doubled()))


def test_hooks_that_are_added_and_removed() -> None:
    handles: list[Any] = []

    def change(own: Case) -> None:
        handles.append(own.model[0].weight.register_hook(lambda gradient: gradient * 2))

    def back(_own: Case) -> None:
        handles.pop().remove()

    check_followed(case, change)
    check_followed(case, back, start=change)
    check_followed(case, change, start=lambda own: own.model[0].weight.register_hook(torch.neg).remove())

    check_followed(case, lambda own: own.model[0].register_forward_hook(lambda _m, _i, output: output * 2))


def test_double_is_planned_again_within_the_same_budget() -> None:
    def make() -> Case:
        model = nn.Sequential(nn.Embedding(30, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, 4))
        return case(model, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]))

    def words() -> Any:
        return torch.randint(0, 30, (16, 4)), torch.randint(0, 4, (16,))

    planned = check_followed(make, lambda own: own.model.double(), make_batch=words)
    assert len(planned.plans) == 2
    own = make()
    step = memfit.fit(own.model, own.loss, words(), optimizer=own.optimizer, budget="100%", planner="none")
    step(words())
    own.model.double()
    with pytest.raises(InfeasibleBudgetError):
        step(words())


class Averaging(nn.Module):
    """Normalizes by a buffer that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) - self.mean


def test_a_buffer_that_is_replaced_between_steps() -> None:
    def change(own: Case) -> None:
        own.model.mean = torch.arange(4.0)

    planned = check_followed(lambda: case(Averaging()), change)
    assert len(planned.plans) == 1


# --- attributes that forward reads


class Settings(nn.Module):
    """Reads numbers, texts, containers and objects that it holds; `calls` and `seen` it only adds to."""

    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.temperature = 1.0
        self.kind = "gelu"
        self.factors = [1.0, 1.0]
        self.named = {"scale": 1.0}
        self.config = SimpleNamespace(scale=1.0, unread=0)
        self.array = np.ones(3)
        self.offset = torch.zeros(4)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.unread = 0
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs = self.inner(inputs) / self.temperature + self.shift + self.offset
        if self.kind == "relu":
            outputs = outputs.relu()
        if getattr(self, "is_wide", False):
            outputs = outputs * 3
        outputs = outputs * self.factors[0] * self.named["scale"] * float(self.array[0])
        return self.activation(outputs) * self.scaled

    @property
    def scaled(self) -> float:
        return self.config.scale * 1.5


def _reset_shift(_own: Case) -> None:
    Settings.shift = 0.0


ATTRIBUTE_CHANGES: dict[str, tuple[Change, Change]] = {
    "dropout": (lambda own: setattr(own.model.inner[2], "p", 0.1), lambda own: setattr(own.model.inner[2], "p", 0.5)),
    "number": (lambda own: setattr(own.model, "temperature", 2.0), lambda own: setattr(own.model, "temperature", 1.0)),
    "text": (lambda own: setattr(own.model, "kind", "relu"), lambda own: setattr(own.model, "kind", "gelu")),
    "list": (lambda own: own.model.factors.__setitem__(0, 3.0), lambda own: own.model.factors.__setitem__(0, 1.0)),
    "dict": (lambda own: own.model.named.update(scale=3.0), lambda own: own.model.named.update(scale=1.0)),
    "object": (
        lambda own: setattr(own.model.config, "scale", 3.0),
        lambda own: setattr(own.model.config, "scale", 1.0),
    ),
    "array": (lambda own: own.model.array.fill(3.0), lambda own: own.model.array.fill(1.0)),
    "function": (
        lambda own: setattr(own.model, "activation", torch.sigmoid),
        lambda own: setattr(own.model, "activation", torch.tanh),
    ),
    "absent": (lambda own: setattr(own.model, "is_wide", True), lambda own: delattr(own.model, "is_wide")),
    "class": (lambda _own: setattr(Settings, "shift", 2.0), _reset_shift),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ATTRIBUTE_CHANGES))
def test_an_attribute_that_changes(name: str) -> None:
    change, back = ATTRIBUTE_CHANGES[name]
    planned = check_followed(lambda: case(Settings()), change, back=back)
    assert len(planned.plans) == 2
    Settings.shift = 0.0


def test_a_tensor_attribute_that_is_replaced_is_read_anew() -> None:
    def change(own: Case) -> None:
        own.model.offset = torch.arange(4.0)

    planned = check_followed(lambda: case(Settings()), change)
    assert len(planned.plans) == 1

    def longer(own: Case) -> None:
        own.model.offset = torch.ones(32, 4)

    assert len(check_followed(lambda: case(Settings()), longer).plans) == 2


def test_a_tensor_that_is_replaced_while_another_plan_runs() -> None:
    def change(own: Case) -> None:
        own.model.offset = torch.arange(4.0)
        own.model.temperature = 2.0

    def back(own: Case) -> None:
        own.model.temperature = 1.0

    check_followed(lambda: case(Settings()), change, back=back)


def test_what_forward_does_not_read_may_change_in_every_step() -> None:
    def change(own: Case) -> None:
        own.model.unread += 1
        own.model.calls = 7
        own.model.inner[0].note = "new"

    planned = check_followed(lambda: case(Settings()), change, back=change)
    assert len(planned.plans) == 1


class Mapping:
    """Settings whose names are other names, as those of transformers may be."""

    names = {"scale": "width"}  # noqa: RUF012

    def __init__(self) -> None:
        self.width = 1.0

    def __getattribute__(self, name: str) -> Any:
        names = object.__getattribute__(self, "names")
        return object.__getattribute__(self, names.get(name, name))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.config = Mapping()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.config.scale  # pyright: ignore[reportAttributeAccessIssue]


def test_an_object_with_a_way_of_its_own_to_attributes() -> None:
    check_followed(
        lambda: case(Mapped()),
        lambda own: setattr(own.model.config, "width", 2.0),
        back=lambda own: setattr(own.model.config, "width", 1.0),
    )


class Logging(nn.Module):
    """Leaves numbers for a log, and says once that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.log: dict[str, torch.Tensor] = {}
        self.history: list[torch.Size] = []
        self.has_said = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(inputs)
        self.log["mean"] = outputs.detach().mean()
        self.history.append(outputs.shape)
        if not self.has_said:
            self.has_said = True
        return outputs


def test_what_eager_steps_leave_for_a_log_costs_no_plan() -> None:
    own = case(Logging())
    assert isinstance(own.model, Logging)
    batch = dense_batch()
    step = memfit.fit(own.model, own.loss, batch, optimizer=own.optimizer, budget="64MiB", planner="none", verify=True)
    assert len(own.model.history) == 0  # capture and verification undo what their own steps log
    step.step.run_eager(batch)
    step(batch)
    step.verify()
    own.model.log.clear()
    step(batch)
    assert len(step.plans) == 1


def test_a_forward_that_is_replaced() -> None:
    def change(own: Case) -> None:
        model = own.model
        model.forward = lambda inputs: model.inner(inputs) * 5

    check_followed(lambda: case(Settings()), change, back=lambda own: delattr(own.model, "forward"))


def test_a_method_of_the_class_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Settings, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * 5

    original = Settings.forward

    def change(_own: Case) -> None:
        monkeypatch.setattr(Settings, "forward", other)

    def make() -> Case:
        monkeypatch.setattr(Settings, "forward", original)
        return case(Settings())

    check_followed(make, change)


def test_a_module_that_is_given_another_class() -> None:
    class Other(Settings):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * 5

    def change(own: Case) -> None:
        own.model.__class__ = Other

    check_followed(lambda: case(Settings()), change, back=lambda own: setattr(own.model, "__class__", Settings))


# --- what the loss reads


def _helper(outputs: torch.Tensor) -> torch.Tensor:
    return outputs * SCALE


def global_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(_helper(model(batch[0])), batch[1])


def settings_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]) * SETTINGS["weights"][0] / Config.temperature, batch[1])


def default_loss(model: nn.Module, batch: Any, weight: float = 1.0) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1]) * weight


def _set_global(name: str, value: Any) -> Change:
    return lambda _own: globals().__setitem__(name, value)


def test_a_global_number_that_a_helper_reads() -> None:
    planned = check_followed(lambda: case(loss=global_loss), _set_global("SCALE", 2.0), back=_set_global("SCALE", 1.0))
    assert len(planned.plans) == 2


def test_containers_and_classes_among_the_globals() -> None:
    def change(_own: Case) -> None:
        SETTINGS["weights"][0] = 3.0

    def back(_own: Case) -> None:
        SETTINGS["weights"][0] = 1.0

    check_followed(lambda: case(loss=settings_loss), change, back=back, start=back)
    check_followed(
        lambda: case(loss=settings_loss),
        lambda _own: setattr(Config, "temperature", 2.0),
        back=lambda _own: setattr(Config, "temperature", 1.0),
    )


OWN_FILE = ModuleType("memfit_test_settings")


def file_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1]) * OWN_FILE.scale


def importing_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    from memfit_test_settings import scale  # pyright: ignore[reportMissingImports]

    return functional.cross_entropy(model(batch[0]), batch[1]) * scale


@pytest.mark.parametrize("loss", [file_loss, importing_loss])
def test_the_globals_of_another_file(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, OWN_FILE.__name__, OWN_FILE)

    def set_scale(scale: float) -> Change:
        return lambda _own: setattr(OWN_FILE, "scale", scale)

    check_followed(lambda: case(loss=loss), set_scale(2.0), back=set_scale(1.0), start=set_scale(1.0))


class _OfNoFile:
    __module__ = property(str)  # type: ignore[assignment]


def test_a_class_that_does_not_say_where_it_is_from() -> None:
    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).mean() if isinstance(model, nn.Module | _OfNoFile) else rows.mean()

    step = memfit.fit(nn.Linear(8, 4), loss, torch.randn(16, 8), budget="1MiB", verify=True)
    assert isinstance(step, PlannedStep)


def test_functions_that_name_one_another_in_a_chain_longer_than_pythons_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = [f"def f{n}(x, deep=False):\n    return f{n + 1}(x) if deep else x\n" for n in range(600)]
    (tmp_path / "chained.py").write_text("".join(links) + "def f600(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    f0 = import_module("chained").f0
    step = memfit.fit(
        nn.Linear(8, 4), lambda model, rows: f0(model(rows).mean()), torch.randn(16, 8), budget="1MiB", verify=True
    )
    assert isinstance(step, PlannedStep)


def test_the_defaults_and_the_arguments_of_a_partial_loss() -> None:
    def make() -> Case:
        return case(loss=partial(default_loss, weight=1.0))

    check_followed(make, lambda own: own.loss.keywords.__setitem__("weight", 2.0))

    def set_default(value: float) -> Change:
        return lambda _own: setattr(default_loss, "__defaults__", (value,))

    check_followed(lambda: case(loss=default_loss), set_default(2.0), back=set_default(1.0), start=set_default(1.0))


def _with_closure(value: Any, use: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Case:
    """Return a loop whose loss reads a variable of this function, which `box.set` sets."""
    held = value

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return use(held, model(batch[0]), batch[1])

    def set_held(new: Any) -> None:
        nonlocal held
        held = new

    own = case(loss=loss)
    own.box.set = set_held
    return own


def test_a_number_in_the_closure() -> None:
    def make() -> Case:
        return _with_closure(1.0, lambda held, outputs, labels: functional.cross_entropy(outputs, labels) * held)

    planned = check_followed(make, lambda own: own.box.set(2.0), back=lambda own: own.box.set(1.0))
    assert len(planned.plans) == 2


def test_class_weights_that_are_replaced_are_read_anew() -> None:
    def make() -> Case:
        return _with_closure(
            torch.ones(4), lambda held, outputs, labels: functional.cross_entropy(outputs, labels, weight=held)
        )

    planned = check_followed(make, lambda own: own.box.set(torch.arange(1.0, 5.0)))
    assert len(planned.plans) == 1
    for other in (None, torch.arange(1.0, 5.0)[::2].repeat_interleave(2), torch.ones(8)[::2]):
        planned = check_followed(make, lambda own, other=other: own.box.set(other))
        assert len(planned.plans) == (2 if other is None or other.stride() != (1,) else 1)


class _Teaching:
    """A loss that is an object, with a teacher that the loop replaces."""

    def __init__(self) -> None:
        self.teacher: nn.Module = dense().eval()
        self.share = 0.5

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return functional.cross_entropy(outputs, batch[1]) + self.share * functional.mse_loss(outputs, wanted)


def test_a_teacher_that_is_replaced_and_its_share() -> None:
    def replace(own: Case) -> None:
        torch.manual_seed(8)
        own.loss.teacher = dense().eval()

    check_followed(lambda: case(loss=_Teaching()), replace)
    check_followed(
        lambda: case(loss=_Teaching()),
        lambda own: setattr(own.loss, "share", 0.1),
        back=lambda own: setattr(own.loss, "share", 0.5),
    )

    def replace_weight(own: Case) -> None:
        own.loss.teacher[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    assert len(check_followed(lambda: case(loss=_Teaching()), replace_weight).plans) == 1


def test_a_method_as_loss() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight = 1.0
            self.epoch = 0

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return functional.cross_entropy(model(batch[0]), batch[1]) * self.weight

    def make() -> Case:
        trainer = Trainer()
        own = case(loss=trainer.loss)
        own.box = trainer
        return own

    def change(own: Case) -> None:
        own.box.weight = 2.0

    assert len(check_followed(make, change).plans) == 2
    assert len(check_followed(make, lambda own: setattr(own.box, "epoch", 3)).plans) == 1


# --- counters


COUNT = 0


def counting_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return functional.cross_entropy(model(batch[0]), batch[1]) / COUNT


def rarely_counting_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    global COUNT
    COUNT += 1
    weight = 2.0 if COUNT % 10 == 0 else 1.0
    return functional.cross_entropy(model(batch[0]), batch[1]) * weight


@pytest.mark.parametrize("loss", [counting_loss, rarely_counting_loss])
def test_a_step_whose_loss_sets_and_reads_a_counter_is_no_graph(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    globals()["COUNT"] = 0
    model, losses = dense(), list[list[float]]()
    with caplog.at_level(logging.WARNING):
        step = memfit.fit(model, loss, dense_batch(), budget="64MiB", planner="none")
    assert "COUNT' and reads it in the next step" in caplog.text
    assert COUNT == 0
    for run in (step, lambda given: loss(model, given)):
        globals()["COUNT"] = 0
        torch.manual_seed(0)
        losses.append([run(dense_batch()).item() for _ in range(12)])
    assert losses[0] == losses[1]


def test_a_counter_that_the_loop_sets_is_captured_each_time_and_said_twice(caplog: pytest.LogCaptureFixture) -> None:
    def raise_temperature(own: Case) -> None:
        own.model.temperature += 0.25

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            check_followed(lambda: case(Settings()), raise_temperature, back=None, steps=1)
            assert len(caplog.messages) == number + 1
        caplog.clear()
        own = case(Settings())
        batch = dense_batch()
        step = memfit.fit(own.model, own.loss, batch, optimizer=own.optimizer, budget="64MiB", planner="none")
        for _ in range(12):
            raise_temperature(own)
            step(batch)
    first, second = caplog.messages
    assert "model.temperature changed since the step was captured" in first
    assert "model.temperature changed again" in second
    assert len(step.plans) == 8


# --- contexts, copies, accumulation


def _planned(**options: Any) -> tuple[nn.Module, PlannedStep, Any]:
    torch.manual_seed(1)
    model, batch = dense(), dense_batch()
    options = {"budget": "64MiB", "planner": "none", "optimizer": sgd(model), **options}
    step = memfit.fit(model, nn.CrossEntropyLoss(), batch, **options)
    assert isinstance(step, PlannedStep)
    return model, step, batch


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast belongs in the loss"),
        (torch.no_grad, "where nothing is trained"),
        (torch.inference_mode, "where nothing is trained"),
    ],
)
def test_contexts_around_a_step_are_refused(context: Callable[[], Any], message: str) -> None:
    with context(), pytest.raises(UnsupportedStepError, match=message):
        _planned()
    model, step, batch = _planned()
    before = copy.deepcopy(model.state_dict())
    with context(), pytest.raises(UnsupportedStepError, match=message):
        step(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(batch)
    assert len(step.plans) == 1


SETTINGS_OF_TORCH: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, lambda _before: torch.float64),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        lambda before: not before,
    ),
    # ops are measured anew for other threads, which leaves the generators where they are
    "threads": (torch.get_num_threads, torch.set_num_threads, lambda before: before + 1),
}


@pytest.mark.parametrize("name", list(SETTINGS_OF_TORCH))
def test_the_settings_of_torch_are_guarded(name: str) -> None:
    read, set_to, other = SETTINGS_OF_TORCH[name]
    before = read()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * torch.tensor([0.1]).element_size()

    def back(_own: Case) -> None:
        set_to(before)

    try:
        planned = check_followed(lambda: case(loss=loss), lambda _own: set_to(other(before)), back=back, start=back)
    finally:
        set_to(before)
    assert len(planned.plans) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_of_a_step_are_refused(copied: Callable[[Any], Any]) -> None:
    _, step, _ = _planned()
    with pytest.raises(UnsupportedStepError, match="a PlannedStep cannot be copied or pickled"):
        copied(step)


def test_micro_batches_accumulate_within_their_share() -> None:
    model, step, batch = _planned(optimizer=None, budget="100%")
    other = copy.deepcopy(model)
    eager = memfit.TrainingStep(model=other, loss=nn.CrossEntropyLoss(), batch=batch)
    for _ in range(2):
        torch.manual_seed(6)
        losses = [step(batch) for _ in range(3)]
        torch.manual_seed(6)
        assert all(map(torch.equal, losses, [eager.run_eager(batch) for _ in range(3)]))
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None
    without, adding = step.plans
    assert without.budget_bytes < adding.budget_bytes
    assert all(plan.predicted.peak_bytes <= plan.budget_bytes for plan in step.plans)


def test_a_step_whose_first_variant_was_dropped_still_names_its_plan() -> None:
    model, step, batch = _planned()
    model[3] = nn.Linear(WIDTH, 4)
    step(batch)
    assert step.plan is step.plans[0]
    assert all(parameter.grad is None for parameter in model[0].parameters())
