"""Steps whose Python code depends on a tensor's value, which are no graphs: `fit` runs them under checkpoints."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Run, json_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.checkpointing.step import CheckpointedStep
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError, InvalidOptionError, UnsupportedStepError
from memfit.memory.snapshot import StepState
from memfit.planning import Settings
from memfit.step.backward_updates import run_updating, updates_in_backward
from memfit.step.measure import measured_eager_peak
from memfit.torch_private.modules import module_hooks

_WIDTH = 32
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def batch_of(rows: int, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, _WIDTH, generator=generator) + shift
    return values, torch.randint(0, 5, (rows,), generator=generator)


def planned_within(step: memfit.TrainingStep, budget: int | str, **settings: Any) -> CheckpointedStep:
    planned = fit_step(step, Settings(budget=budget, **settings))
    assert isinstance(planned, CheckpointedStep)
    return planned


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH), nn.GELU())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = block(), block(), nn.Linear(_WIDTH, 5)
        self.blocks = nn.ModuleList(block() for _ in range(3))


class Experts(Model):
    """A mixture of experts that routes by indices."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weights, choice = values[:, :3].softmax(-1).max(-1)
        mixed = torch.zeros_like(values)
        for number in choice.unique().tolist():
            rows = (choice == number).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, self.blocks[number](values[rows]) * weights[rows, None])
        return self.last(self.first(mixed))


class MaskedExperts(Model):
    """A mixture of experts that writes to the rows of masks."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        choice = values[:, :3].argmax(-1)
        mixed = torch.zeros_like(values)
        for number, expert in enumerate(self.blocks):
            mask = choice == number
            if mask.any():
                mixed[mask] = expert(values[mask])
        return self.last(self.first(mixed))


class StochasticDepth(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            if torch.rand(()).item() < 0.7:
                values = values + each(values)
        return self.last(values)


class EarlyExit(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            values = each(values)
            if values.abs().mean().item() < 0.02:
                break
        return self.last(values)


class Numpy(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        scale = float(np.clip(hidden.detach().numpy().std(), 0.1, 10.0))
        return self.last(self.second(hidden / scale))


class Formats(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        self.seen = f"{hidden.detach().mean():.3f}"
        return self.last(self.second(hidden))


class Teacher(Model):
    """A teacher, the moving average of a block, answers in between, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            gap = (self.teacher(values) - hidden).abs().mean().item()
        return self.last(self.second(hidden)) * (1.0 + gap)


class Dropout(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.norm(self.first(values)), 0.3)
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        return self.last(functional.dropout(self.norm(self.second(hidden)), 0.3))


class Checkpointed(Model):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(checkpoint(self.looks, values, use_reentrant=False)))

    def looks(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        return hidden if hidden.sum().item() < 1e9 else -hidden


class Chunks(Model):
    """Views of one tensor cross the break, so that gradients of views come back."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        upper, lower = self.first(values).chunk(2)
        if upper.sum().item() > 1e9:
            upper = -upper
        return self.last(self.second(torch.cat([lower.flip(0), 2.0 * upper])))


class Caches(Model):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        key = round(hidden.detach().mean().item())
        if key not in self.cache:
            self.cache[key] = torch.linspace(0.0, 1.0, _WIDTH)
        return self.last(self.second(hidden * self.cache[key]))


class Averages(Model):
    """Keeps averages in plain tensors, which are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.kept = torch.zeros(_WIDTH), {"square": [torch.zeros(_WIDTH)]}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            values = values + each(values)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(values.mean(0), alpha=0.1)
            self.kept["square"][0].mul_(0.9).add_(values.square().mean(0), alpha=0.1)
        if self.mean.norm().item() > 1e9:
            values = -values
        return self.last((values - self.mean) / (self.kept["square"][0] + 1).sqrt())


class Counts(Model):
    """Counts its steps in an array, and takes values from an iterator over a list."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rates = np.zeros(1), iter([0.1 * number for number in range(99)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.count[0] += 1
        rate = next(self.rates)
        for each in self.blocks:
            values = values + each(values)
        if values.sum().item() > 1e9:
            values = -values
        return self.last(values) * (1 + rate * float(self.count[0]))


class Observes(Model):
    """Gives a buffer and a plain tensor their sizes in the first step, in place, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.empty(0))
        self.high = torch.empty(0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            values = values + each(values)
        with torch.no_grad():
            for held, now in ((self.low, values.amin(0)), (self.high, values.amax(0))):
                held.resize_(now.shape).copy_(now) if not len(held) else held.lerp_(now, 0.1)
        return self.last((values - self.low) / (self.high - self.low))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return 2.0 * loss if loss > 1.65 else loss


def step_of(kind: type[Model]) -> memfit.TrainingStep:
    torch.manual_seed(0)
    random.seed(0)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return memfit.TrainingStep(model=model, loss=loss_of, batch=batch_of(256), optimizer=optimizer)


def states_of_training(kind: type[Model], share: float | None) -> list[Any]:
    """Return the losses and the last state of six steps: eager's, or planned within a share of eager's peak."""
    step = step_of(kind)
    run: Any = step.run_eager
    if share is not None:
        budget_is = "soft" if kind in CHANGING else "firm"
        run = planned_within(step, int(share * measured_eager_peak(step, CPU)), budget_is=budget_is)
    torch.manual_seed(5)
    losses = [run(batch_of(256, shift=shift)) for shift in (0.0, 0.1, 0.0, -0.1, 0.1, 0.0)]
    state = StepState.take(step)
    if share is not None:
        assert kind in CHANGING or run.measure(repeats=1).peak_bytes <= run.budget_bytes
        run.close()
    return [*losses, state]


CHANGING = (StochasticDepth, Experts, MaskedExperts)  # a step may have more than any before it
FAST = (MaskedExperts, StochasticDepth, Numpy, Averages, Counts, Observes)
SLOW = (Experts, Teacher, Dropout, Checkpointed, Chunks, Caches, Formats, EarlyExit)


@pytest.mark.parametrize(
    "kind",
    [
        MaskedExperts,
        StochasticDepth,
        Numpy,
        Averages,
        Counts,
        Observes,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW),
    ],
)
def test_models_as_users_write_them(kind: type[Model]) -> None:
    *losses, state = states_of_training(kind, None)
    for share in (1.2, 1.1) if kind is Checkpointed else (1.0, 0.9):
        *planned_losses, planned_state = states_of_training(kind, share)
        assert all(map(torch.equal, losses, planned_losses)), share
        assert state.first_difference(planned_state) is None, share


class Looking(nn.Module):
    """Looks at its hidden values between blocks."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(block() for _ in range(count)), nn.Linear(_WIDTH, 5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            values = each(values)
            if values.sum().item() > 1e9:
                values = -values
        return self.last(values)


def looking(rows: int = 512, optimizer: Any = torch.optim.Adam) -> memfit.TrainingStep:
    torch.manual_seed(0)
    model = Looking()
    made = optimizer(model.parameters(), lr=1e-3) if optimizer is not None else None
    return memfit.TrainingStep(model=model, loss=nn.CrossEntropyLoss(), batch=batch_of(rows), optimizer=made)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, None])
def test_the_budget_holds_in_each_step_with_eagers_bits(optimizer: Any) -> None:
    step = looking(optimizer=optimizer)
    budget = int(0.7 * measured_eager_peak(step, CPU))
    planned = planned_within(step, budget)
    states = []
    before = StepState.take(step)
    for run in (step.run_eager, planned):
        before.put_back(step)
        losses = [run(step.batch) for _ in range(4)]
        states.append((losses, StepState.take(step)))
    assert all(map(torch.equal, states[0][0], states[1][0]))
    assert states[0][1].first_difference(states[1][1]) is None
    before.put_back(step)
    planned.verify()
    assert 0.8 * budget < planned.measure(repeats=2).peak_bytes <= budget
    report = planned.report()
    assert all(window.taken_bytes <= budget for window in report.windows[-4:])
    assert report.sizes[0].planned.predicted_bytes <= budget
    assert "predicted" in str(planned.explain()[0])


def test_what_is_beside_the_step_is_said_once_where_both_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    step = looking()
    budget = int(0.7 * measured_eager_peak(step, CPU))
    planned = planned_within(step, budget)
    beside = torch.zeros(budget // 4)
    for _ in range(3):
        planned(step.batch)
    said = [text for record in caplog.records if "not the planned step's" in (text := record.getMessage())]
    assert len(said) == 1, said
    assert beside.sum() == 0


def test_a_large_plain_tensor_that_the_step_writes_to_is_refused_by_name() -> None:
    class Hoards(Averages):
        def __init__(self) -> None:
            super().__init__()
            self.history = torch.empty(1 << 22, _WIDTH)  # 512 MiB, of which one page is touched

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.history[0].copy_(values.mean(0))
            return super().forward(values)

    step = step_of(Hoards)
    with pytest.raises(UnsupportedStepError, match=r"writes to model\.history, neither a parameter nor a buffer"):
        planned_within(step, "100%")


def test_a_module_that_the_step_makes_is_refused_and_the_model_left_as_it_was() -> None:
    class MakesTeacher(Numpy):
        def __init__(self) -> None:
            super().__init__()
            self.teacher: nn.Module | None = None

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            if self.teacher is None:
                self.teacher = copy.deepcopy(self.first).requires_grad_(False)
            return super().forward(values) + 0 * self.teacher(values).sum()

    step = step_of(MakesTeacher)
    tables = {each: dict(vars(each)) for each in step.model.modules()}
    with pytest.raises(UnsupportedStepError, match=r"makes the module 'teacher.0'.*run one eager forward first"):
        planned_within(step, "80%")
    assert {each: vars(each) for each in step.model.modules()} == tables
    step.model(step.batch[0])
    planned_within(step, "90%")(step.batch)


def test_an_iterator_that_cannot_be_set_back_is_refused_by_name() -> None:
    class Streaming(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.rates = (0.1 * number for number in range(99))

    with pytest.raises(UnsupportedStepError, match=r"takes values from model\.rates, an iterator.*in the batch"):
        planned_within(step_of(Streaming), "100%")


def test_the_example_batch_is_not_kept_beside_a_later_one() -> None:
    torch.manual_seed(0)
    example = torch.randn(32, _WIDTH)
    reference = weakref.ref(example)
    step = memfit.fit(Looking(), lambda model, given: model(given).square().mean(), example, budget="200%")
    assert isinstance(step, CheckpointedStep)
    del example
    step(torch.randn(32, _WIDTH))
    assert reference() is None
    step.verify()


def test_a_percentage_is_of_the_measured_eager_step() -> None:
    step = looking()
    planned = planned_within(step, "80%")
    assert planned.settings.budget == int(0.8 * measured_eager_peak(step, CPU))
    assert planned.measure(repeats=1).peak_bytes <= planned.budget_bytes


def test_the_least_budget_that_is_named_works() -> None:
    with pytest.raises(
        InfeasibleBudgetError, match=r"needs at least .*raise the budget to \d+ bytes.*memfit\.eager"
    ) as refused:
        planned_within(looking(), 1)
    named = refused.value.least_budget_found_bytes
    assert named is not None
    step = looking()
    assert named < 0.7 * measured_eager_peak(step, CPU)
    planned = planned_within(step, named)
    planned.verify()
    assert planned.measure(repeats=2).peak_bytes <= named


@pytest.mark.parametrize("is_closed", [True, False])
def test_checkpoints_are_there_in_calls_of_the_step_alone(is_closed: bool) -> None:
    step = looking()
    forwards = [vars(module).get("forward") for module in step.model.modules()]
    planned = planned_within(step, "70%")
    count = planned.report().count
    step.compute_loss(step.model, step.batch).backward()
    step.model.zero_grad()
    assert planned.report().count == count
    twin = copy.deepcopy(step.model)
    assert torch.equal(twin(step.batch[0]), step.model(step.batch[0]))
    if is_closed:
        planned.close()
    del planned
    gc.collect()
    assert [vars(module).get("forward") for module in step.model.modules()] == forwards
    assert not any(map(len, module_hooks(step.model)))


def test_a_step_that_fails_leaves_no_checkpoints_and_the_next_one_is_as_ever() -> None:
    class FailureError(Exception):
        pass

    step = looking()
    planned = planned_within(step, "70%")
    before, count = StepState.take(step), planned.report().count
    hook = step.model.last.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(FailureError))  # type: ignore[union-attr]
    with pytest.raises(FailureError):
        planned(step.batch)
    hook.remove()
    assert planned.report().count == count
    assert planned._loop.steering.present is None
    step.model.zero_grad()
    before.put_back(step)
    planned.verify()
    assert planned(step.batch).isfinite() and planned.report().count == count + 1


def test_a_scheduler_sees_that_there_was_an_update() -> None:
    model = nn.Linear(_WIDTH, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = memfit.TrainingStep(
        model=model, loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1]), batch=batch_of(8), optimizer=optimizer
    )
    assert updates_in_backward(step)
    run_updating(step, step.batch, lambda _: False)
    scheduler.step()  # would warn
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_what_only_graphs_have_is_refused_or_named() -> None:
    for given in ({"hard": True}, {"arena": True}, {"options": {"mirror": [memfit.mirror("blocks", 1)]}}):
        with pytest.raises((InvalidOptionError, UnsupportedStepError)):
            planned_within(looking(), "70%", **given)
    planned = planned_within(looking(), "90%", options={"iterations": 7})
    for name in ("plan", "captured", "bounds"):
        with pytest.raises(AttributeError, match="is no graph, and has no plan of its storages"):
            getattr(planned, name)
    with pytest.raises(AttributeError, match="no attribute 'planned'"):
        planned.planned  # noqa: B018
    with pytest.raises(UnsupportedStepError, match="cannot be copied"):
        pickle.dumps(planned)


def test_a_loss_that_calls_parts_of_the_model_is_held_too() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        hidden = model.blocks[0](batch[0])
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        return functional.cross_entropy(model.last(hidden), batch[1])

    step = memfit.TrainingStep(model=Looking(), loss=loss, batch=batch_of(64), optimizer=None)
    planned = planned_within(step, "1GiB")
    planned.verify()
    assert planned.report().windows


_SCRIPT = """
import torch, memfit
from torch import nn
class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))
    def forward(self, values):
        for block in self.blocks:
            values = block(values)
            if values.sum().item() > 1e9:
                values = -values
        return values
def make_step():
    torch.manual_seed(0)
    model = Looking()
    return memfit.TrainingStep(
        model=model, loss=nn.CrossEntropyLoss(), batch=(torch.randn(512, 32), torch.randint(0, 5, (512,))),
        optimizer=torch.optim.Adam(model.parameters()),
    )
"""


def test_the_command_line_says_the_same(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    target, policy = f"{tmp_path / 'train.py'}:make_step", tmp_path / "policy.json"
    status, out, _ = run("fit", target, "--budget", "70%", "--repeats", "1", "--save", str(policy), "--json")
    assert status == 0
    found = json_of(out)
    assert found["planner"] == "checkpoint" and found["bitwise_equal"]
    assert found["measured"]["peak_bytes"] <= found["budget_bytes"]
    assert found["resident_bytes"] < found["bounds"]["least_budget_found_bytes"] <= found["budget_bytes"]
    assert found["predicted"]["peak_bytes"] <= found["budget_bytes"]
    assert json.loads(policy.read_text()) == found["policy"]
    assert "runs under memfit.checkpoint" in caplog.text
    status, _, error = run("fit", target, "--budget", "70%", "--report", str(tmp_path / "page.html"))
    assert status == 2 and "is no graph" in error


def test_a_parameter_is_not_updated_before_its_block_is_computed_again() -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 20)

        def forward(self, batch: Any) -> torch.Tensor:
            found = self.out(self.inner(batch[0])[0]).log_softmax(2).transpose(0, 1)
            lengths = torch.full((found.shape[1],), found.shape[0])
            return functional.ctc_loss(found, batch[1], lengths, torch.full_like(lengths, 8))

    torch.manual_seed(0)
    model: Any = Speech()
    twin, batch = copy.deepcopy(model), (torch.randn(8, 32, 16), torch.randint(1, 20, (8, 8)))
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, twin)]
    step = memfit.fit(model, lambda model, batch: model(batch), batch, optimizer=optimizers[0], budget="1MiB")
    for _ in range(3):
        loss = twin(batch)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(step(batch), loss)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_two_backward_passes_in_one_step_over_blocks_that_are_computed_again() -> None:
    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        found = model(batch[0])
        found.square().mean().backward(retain_graph=True)
        return functional.cross_entropy(found, batch[1])

    class Deriving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.pair, self.last = nn.Linear(_WIDTH, 2), nn.Bilinear(_WIDTH, _WIDTH, _WIDTH), block()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = self.pair(values, values)
            curved = torch.func.vmap(torch.func.hessian(lambda row: self.inner(row).tanh().sum()))(values[:4])
            return self.last(values + curved.diagonal(dim1=-2, dim2=-1).mean())

    torch.manual_seed(0)
    model: Any = Deriving()
    twin, batch = copy.deepcopy(model), batch_of(64)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    step = memfit.fit(model, loss_of, batch, optimizer=optimizers[0], budget="4MiB")
    for _ in range(2):
        loss = loss_of(twin, batch)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(step(batch), loss)


def test_state_of_python_that_cannot_be_put_back_is_refused() -> None:
    class Quasirandom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.engine = block(), torch.quasirandom.SobolEngine(_WIDTH)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.layer(values + self.engine.draw(len(values)))

    model = Quasirandom()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedStepError, match="two eager steps from the same state differ in the loss"):
        memfit.fit(
            model, lambda model, batch: model(batch).mean(), torch.randn(8, _WIDTH), optimizer=optimizer, budget="1MiB"
        )
