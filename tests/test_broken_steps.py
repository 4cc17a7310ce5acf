"""Steps that depend on a tensor's value: the graphs around each break share one budget."""

from __future__ import annotations

import copy
import functools
import gc
import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from torch import nn
from torch.nn import functional

import memfit
from memfit.errors import BudgetNotHeldError, InfeasibleBudgetError, NoPlanError, UnsupportedStepError
from memfit.planning import Settings
from memfit.runtime.fitting import fit_step
from memfit.runtime.graph_part import Shape
from memfit.runtime.measure import measured_eager_peak
from memfit.runtime.parts import PartlyPlannedStep
from memfit.runtime.state import StepState

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(width, width), nn.GELU())])


class Looking(nn.Module):
    """Three graphs: it looks at its hidden values twice."""

    def __init__(self, count: int = 4, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.last = layers(count, width), layers(count, width), nn.Linear(width, 5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        hidden = self.second(hidden)
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        return self.last(hidden)


class Choosing(Looking):
    """Goes through its second half only for batches of a positive mean."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        if values.mean().item() > 0:
            hidden = self.second(hidden)
        return self.last(hidden)


class Twice(Looking):
    """Calls the same graph twice, one inside the other."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(self.part(values)))

    def part(self, values: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        values = self.first(values)
        if values.sum().item() > 1e9:
            values = -values
        return values


def batch_of(rows: int, width: int = 32, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, width, generator=generator) + shift
    return values, torch.randint(0, 5, (rows,), generator=generator)


def step_of(model: nn.Module, batch: Any, learning_rate: float = 1e-3) -> memfit.TrainingStep:
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    return memfit.TrainingStep(model=model, loss=nn.CrossEntropyLoss(), batch=batch, optimizer=optimizer)


def planned_within(step: memfit.TrainingStep, budget: int | str, **settings: Any) -> PartlyPlannedStep:
    """Return the step planned by a search that ends by its moves, so that no clock decides what it finds."""
    searched = {"planner": "search", "options": {"iterations": 500, "threads": 1}, "time_limit_seconds": 60.0}
    planned = fit_step(step, Settings(budget=budget, **{**searched, **settings}))
    assert isinstance(planned, PartlyPlannedStep)
    return planned


def least_budget(step: memfit.TrainingStep, **settings: Any) -> NoPlanError:
    with pytest.raises(NoPlanError, match=r"graphs around .*, with what runs between them, reached") as refused:
        planned_within(step, 1, **settings)
    return refused.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Looking, Twice])
def test_the_least_budget_that_is_named_works_in_the_same_process(kind: type[Looking]) -> None:
    torch.manual_seed(0)
    step = step_of(kind(), batch_of(512))
    refused = least_budget(step)
    named = refused.least_budget_found_bytes
    assert named is not None
    assert refused.least_budget_bound_bytes <= named < 0.8 * measured_eager_peak(step, CPU)
    planned = planned_within(step, named)
    planned.verify()
    assert planned.measure(repeats=2).peak_bytes <= named


_SCRIPT = """
import sys, torch, memfit
sys.path.insert(0, {tests!r})
from test_broken_steps import Looking, batch_of, step_of, planned_within
from memfit.errors import NoPlanError
torch.manual_seed(0)
step = step_of(Looking(), batch_of(512))
try:
    planned = planned_within(step, int(sys.argv[1]))
except NoPlanError as error:
    print(error.least_budget_found_bytes)
else:
    planned.verify()
    print(planned.measure(repeats=1).peak_bytes)
"""


@pytest.mark.slow
def test_the_least_budget_that_is_named_works_in_a_fresh_process() -> None:
    def run(budget: int) -> int:
        script = _SCRIPT.format(tests=str(Path(__file__).parent))
        done = subprocess.run([sys.executable, "-c", script, str(budget)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    named = run(1)
    assert run(named) <= named


@pytest.mark.slow
def test_every_budget_holds_with_eagers_bits() -> None:
    torch.manual_seed(0)
    step = step_of(Looking(), batch_of(512))
    eager_bytes = measured_eager_peak(step, CPU)
    overheads: list[float] = []
    for share in (1.0, 0.7):
        planned = planned_within(step, int(share * eager_bytes))
        assert planned.measure(repeats=2).peak_bytes <= share * eager_bytes
        overheads.append(sum(plan.predicted.seconds for plan in planned.plans))
        states: list[StepState] = []
        before = StepState.take(step)
        for run in (step.run_eager, planned):
            before.put_back(step)
            for _ in range(3):
                run(step.batch)
            states.append(StepState.take(step))
        before.put_back(step)
        assert states[0].first_difference(states[1]) is None
    assert overheads[1] > overheads[0]


def test_a_percentage_is_of_the_measured_eager_step() -> None:
    torch.manual_seed(0)
    step = step_of(Looking(), batch_of(512))
    planned = planned_within(step, "80%")
    assert planned.settings.budget == int(0.8 * measured_eager_peak(step, CPU))
    assert planned.measure(repeats=1).peak_bytes <= planned.settings.budget


def test_another_branch_in_mid_training_is_planned_and_keeps_the_bits() -> None:
    batches = [batch_of(256, shift=shift) for shift in (1.0, 1.0, -1.0, -1.0, 1.0, -1.0)]
    states: list[StepState] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        step = step_of(Choosing(), batches[0])
        run: Any = step.run_eager
        if is_planned:
            run = planned_within(step, "75%")
            before = len(run.plans)
        for batch in batches:
            run(batch)
        states.append(StepState.take(step))
    assert len(run.plans) > before
    assert states[0].first_difference(states[1]) is None


@pytest.mark.slow
def test_models_that_are_gone_are_let_go_and_none_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # records of torch's logs hold their objects
    gone: list[Any] = []
    for number in range(10):  # Dynamo compiles the code of a class eight times unless told otherwise
        step = step_of(Looking(1, 8), batch_of(16, 8))
        gone.append(weakref.ref(step.model))
        if number % 2:
            planned = planned_within(step, "1MiB", planner="none", options={})
            assert len(planned.plans) == 3, number
            del planned
        else:
            least_budget(step, planner="none", options={})
        del step
    gc.collect()
    assert [reference() for reference in gone] == [None] * 10


WARNS = logging.getLogger("warns")


class Warns(nn.Module):
    """Logs a warning once, as transformers' models do where they compute the loss."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        WARNS.warning_once("no type of loss is set")  # type: ignore[attr-defined]
        return values


def test_what_a_model_logs_once_breaks_no_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    once = functools.lru_cache(None)(logging.Logger.warning)
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    warning = Looking()
    warning.second.insert(4, Warns())
    plans, others = (planned_within(step_of(model, batch_of(64)), "1MiB").plans for model in (warning, Looking()))
    assert len(plans) == len(others)
    assert caplog.text.count("no type of loss is set") == 1


class Nothing(nn.Module):
    """All of it is hidden from the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    @torch._dynamo.disable  # pyright: ignore[reportPrivateImportUsage, reportUntypedFunctionDecorator]
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight if values.sum().item() < 1e9 else values


def test_a_step_of_which_nothing_can_be_planned_is_refused() -> None:
    model = Nothing()
    with pytest.raises(UnsupportedStepError, match=r"test_broken_steps.py:\d+: .* there is nothing to plan"):
        memfit.fit(model, lambda model, batch: model(batch).sum(), torch.randn(3), budget="1MiB")
    assert model.weight.grad is None


@pytest.mark.parametrize("budget_is", ["firm", "soft"])
def test_a_step_over_its_budget_is_reported(caplog: pytest.LogCaptureFixture, budget_is: str) -> None:
    extra = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        held = torch.zeros(extra, dtype=torch.uint8)
        return functional.cross_entropy(model(batch[0]), batch[1]) + held.sum()

    model, batch = Looking(1, 8), batch_of(16, 8)
    step = memfit.fit(model, loss, batch, budget="1MiB", time_limit_seconds=0.5, budget_is=budget_is)
    step(batch)
    assert "more than its budget" not in caplog.text
    extra = 1 << 20
    raised: list[str] = []
    for _ in range(3):  # a step that compiles is not measured
        try:
            step(batch)
        except BudgetNotHeldError as error:
            raised.append(str(error))
    assert bool(raised) == (budget_is == "firm") and all("no leaner plans" in each for each in raised)
    assert caplog.text.count("more than its budget of 1 MiB") >= 1


def test_a_shape_on_the_way_to_another_has_no_more_than_its_share() -> None:
    lean = Shape(kept_bytes=10, forward_bytes=100, backward_bytes=90)
    full = Shape(kept_bytes=21, forward_bytes=80, backward_bytes=191)
    assert lean.towards(full, 0.0) == lean
    assert lean.towards(full, 0.5) == Shape(kept_bytes=15, forward_bytes=100, backward_bytes=140)


TARGET = """
import torch
from test_broken_steps import Looking, batch_of, step_of

def make():
    torch.manual_seed(0)
    return step_of(Looking(), batch_of(512))
"""


@pytest.mark.slow
def test_the_command_line_gives_the_bounds_of_the_whole_step(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text(TARGET, encoding="utf-8")
    search = ("--planner", "search", "--option", "iterations=500", "--json")
    status, out, err = run("fit", f"{file}:make", "--budget", "85%", *search)
    assert status == 0, err
    answer = json.loads(out)
    assert answer["measured"]["peak_bytes"] <= answer["budget_bytes"] < answer["baseline"]["peak_bytes"]
    assert answer["predicted"] == {"peak_bytes": None, "step_seconds": None}
    found, bound = (answer["bounds"][f"least_budget_{kind}_bytes"] for kind in ("found", "bound"))
    assert answer["resident_bytes"] <= bound <= found <= answer["budget_bytes"]
    status, out, err = run("fit", f"{file}:make", "--budget", bound - 1, *search)
    assert status == InfeasibleBudgetError.exit_status, err
    assert json.loads(out)["least_budget_bound_bytes"] == bound


def trained(planned: Any, model: nn.Module, batch: Any, steps: int = 3) -> list[torch.Tensor]:
    for _ in range(steps):
        planned(batch)
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_updated_in_backward_with_eagers_bits(name: str) -> None:
    batch = batch_of(64)
    found: list[list[torch.Tensor]] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Looking(count=2)
        model.last.bias.requires_grad_(requires_grad=False)
        step = memfit.TrainingStep(
            model=model, loss=nn.CrossEntropyLoss(), batch=batch, optimizer=OPTIMIZERS[name](model.parameters())
        )
        found.append(trained(planned_within(step, "90%") if is_planned else step.run_eager, model, batch))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(mine, eager) for mine, eager in zip(*found, strict=True))


@pytest.mark.slow
def test_gradients_do_not_wait_for_each_other() -> None:
    """Where parameters are most of the memory, all gradients together would be a quarter of it."""
    torch.manual_seed(0)
    held = {}
    for clip_norm in (None, 1.0):
        model = Looking(count=4, width=256)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = memfit.TrainingStep(
            model=model, loss=nn.CrossEntropyLoss(), batch=batch_of(8, 256), optimizer=optimizer, clip_norm=clip_norm
        )
        held[clip_norm] = planned_within(step, "100%").measure(repeats=1).peak_bytes
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert held[1.0] - held[None] > 0.3 * gradients


def test_a_scheduler_sees_the_updates(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, batch = Looking(count=2), batch_of(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    planned = memfit.fit(model, nn.CrossEntropyLoss(), batch, optimizer=optimizer, budget="90%", time_limit_seconds=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    recwarn.clear()
    for _ in range(2):
        before = model.last.weight.detach().clone()
        planned(batch)
        scheduler.step()
    moved = float((model.last.weight - before).abs().max())
    assert 0 < moved < 1e-2
    assert not [each for each in recwarn if "lr_scheduler.step()" in str(each.message)]


def test_a_step_that_fails_in_backward_says_what_is_left() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if fails:
                raise ValueError("on purpose")
            return gradient

    class Failing(Looking):
        @torch._dynamo.disable
        def middle(self, values: torch.Tensor) -> torch.Tensor:
            return Fails.apply(values if values.sum().item() < 1e9 else -values)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(values)))

    fails = False
    torch.manual_seed(0)
    model, batch = Failing(count=2), batch_of(64)
    planned = planned_within(step_of(model, batch), "90%")
    fails = True
    with pytest.raises(ValueError, match="on purpose") as raised:
        planned(batch)
    assert "2 of 10 parameters had been updated when the step failed" in raised.value.__notes__[0]
    assert not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())


def test_a_gradient_that_backward_does_not_reach_is_used_as_eager_does() -> None:
    batch = batch_of(64)
    found: list[list[torch.Tensor]] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Choosing(count=2)
        step = step_of(model, batch_of(64, shift=-1.0))
        run = planned_within(step, "200%") if is_planned else step.run_eager  # the other branch takes more
        for parameter in model.second.parameters():
            parameter.grad = torch.ones_like(parameter)
        run(step.batch)
        found.append(trained(run, model, batch, steps=2))
    assert all(torch.equal(mine, eager) for mine, eager in zip(*found, strict=True))


class Stopped(nn.Module):
    """Its first graph reads a weight without gradient, that a later graph gives one."""

    def __init__(self, is_kept_apart: bool) -> None:
        super().__init__()
        self.shared, self.first, self.last = nn.Linear(32, 32), layers(3, 32), nn.Linear(32, 5)
        self.constant = self.shared.weight.detach() if is_kept_apart else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weight = self.shared.weight.detach() if self.constant is None else self.constant
        hidden = torch.tanh(self.first(values) @ weight)
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        return self.last(torch.tanh(self.shared(hidden)))


@pytest.mark.slow
@pytest.mark.parametrize("is_kept_apart", [False, True])
@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_a_weight_that_an_earlier_graph_still_reads_is_updated_after_it(budget: str, is_kept_apart: bool) -> None:
    batch = batch_of(512)
    found: list[list[torch.Tensor]] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Stopped(is_kept_apart)
        step = step_of(model, batch, learning_rate=0.1)
        found.append(trained(planned_within(step, budget) if is_planned else step.run_eager, model, batch))
    assert all(torch.equal(mine, eager) for mine, eager in zip(*found, strict=True))


def test_no_search_runs_behind_a_step_with_graph_breaks() -> None:
    assert planned_within(step_of(Looking(count=1), batch_of(64)), "100%").wait_for_searches()


class Scaled(Looking):
    """Multiplies by numbers that change from batch to batch, and by one that a schedule sets."""

    scale = 1.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mean = values.mean().item()
        hidden = self.first(values) * mean / self.scale
        return self.last(self.second((1.0 - 0.5 * mean) * hidden - self.scale))


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.1 / group["count"])


def test_numbers_that_change_and_counts_in_groups_keep_the_bits_and_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Scaled()
    batches = [batch_of(512, shift=0.3 * number) for number in range(5)]
    runs: list[tuple[list[torch.Tensor], StepState]] = []
    for share in (None, 0.7):
        own = copy.deepcopy(model)
        step = memfit.TrainingStep(
            model=own, loss=nn.CrossEntropyLoss(), batch=batches[0], optimizer=Counting(own.parameters())
        )
        run: Any = step.run_eager
        if share is not None:
            run = planned_within(step, int(share * measured_eager_peak(step, CPU)))
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(batches):
            own.scale = 1.0 + 0.1 * number
            losses.append(run(batch).detach())
        runs.append((losses, StepState.take(step)))
    assert all(map(torch.equal, runs[0][0], runs[1][0]))
    assert runs[0][1].first_difference(runs[1][1]) is None
    assert not any("not planned" in message for message in caplog.messages)


@pytest.mark.parametrize("model", [Looking(), nn.Linear(32, 5)], ids=["breaks", "whole"])
def test_planning_leaves_what_the_optimizers_hooks_count(model: nn.Module) -> None:
    step, seen = step_of(model, batch_of(64)), list[int]()
    assert step.optimizer is not None
    step.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    planned = fit_step(step, Settings(budget="1GiB", planner="none"))
    assert not seen
    planned(step.batch)
    assert seen == [1]


COUNTS = {"calls": 0}


class Counted(Looking):
    """Counts its calls where every model of its class, or of its file, does."""

    calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        Counted.calls += 1
        return super().forward(values)


class Writing(Looking):
    """Writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last_mean = torch.zeros(())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.last_mean.copy_(values.mean())
        return super().forward(values)


def test_planning_leaves_what_classes_and_files_count() -> None:
    planned = fit_step(step_of(Counted(), batch_of(64)), Settings(budget="1GiB", planner="none"))
    assert (COUNTS["calls"], Counted.calls) == (0, 0)
    planned(batch_of(64))
    assert (COUNTS["calls"], Counted.calls) == (1, 1)


def test_writes_that_planning_cannot_undo_are_refused() -> None:
    with pytest.raises(UnsupportedStepError, match=r"writes in place to .*last_mean"):
        fit_step(step_of(Writing(), batch_of(64)), Settings(budget="1GiB", planner="none"))
