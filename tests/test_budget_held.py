"""A budget is a contract: what a step takes is measured until its plan is proved, corrected, and then refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from steps import conv_batch, make_pair
from workspace import Workspace, hungry_pair

import memfit
from memfit import TrainingStep
from memfit.capture import capture
from memfit.commands.options import Search
from memfit.cost import warming
from memfit.doors.step import fit_step
from memfit.dynamo import account, window
from memfit.dynamo.account import Account
from memfit.dynamo.settings import read_options
from memfit.errors import (
    BudgetNotHeldError,
    InfeasibleBudgetError,
    InvalidOptionError,
    OverBudgetError,
)
from memfit.memory import hard_cap
from memfit.memory.hard_cap import require_cap
from memfit.memory.snapshot import StepState
from memfit.planning import Settings
from memfit.step import proof
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import Usage, record

FEW_MOVES = {"iterations": 30_000}  # in place of seconds, which a busy machine fills with less


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def make_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def planned_and_eager(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], settings: Settings
) -> tuple[PlannedStep, TrainingStep]:
    step, eager = hungry_pair("conv", make_optimizer)
    planned = fit_step(step, settings)
    assert isinstance(planned, PlannedStep)
    return planned, eager


def step_both(planned: PlannedStep, eager: TrainingStep, batch: Any, seed: int = 7) -> None:
    torch.manual_seed(seed)
    loss = planned(batch)
    torch.manual_seed(seed)
    assert torch.equal(loss, eager.run_eager(batch))


def assert_same(planned: PlannedStep, eager: TrainingStep) -> None:
    difference = StepState.take(eager).first_difference(StepState.take(planned.step))
    assert difference is None, difference


def test_a_step_that_no_plan_can_keep_to_a_soft_budget_is_said_once(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(budget="100%", time_limit_seconds=0.5, budget_is="soft")
    planned, _ = planned_and_eager(make_sgd, settings)
    batch, plan = conv_batch(), planned.plan
    workspace.bytes = 64 << 20
    with caplog.at_level("WARNING"):
        for _ in range(4):
            planned(batch)
    assert planned.plan == plan
    assert len(planned.corrections) <= 2  # the second time, the optimizer has its state, and the step takes more
    assert all(correction.aim_bytes is None for correction in planned.corrections)
    assert caplog.text.count("a plan that allows for it was not found") == len(planned.corrections)


def test_a_step_that_no_plan_can_keep_to_a_firm_budget_is_an_error_that_says_by_how_much(
    workspace: Workspace,
) -> None:
    planned, eager = planned_and_eager(make_sgd, Settings(budget="100%", time_limit_seconds=0.5))
    workspace.bytes = 64 << 20
    for seed in range(2):
        batch = conv_batch()
        with pytest.raises(
            BudgetNotHeldError, match=r"more than its budget of .* no plan .*; the step is complete"
        ) as e:
            step_both(planned, eager, batch, seed)
        assert 63 << 20 < e.value.over_bytes <= 64 << 20
        torch.manual_seed(seed)
        eager.run_eager(batch)
    assert_same(planned, eager)  # the steps were carried out


def test_a_correction_measures_no_op_again_beside_all_that_a_step_holds(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned, _ = planned_and_eager(make_adam, Settings(budget="100%", options=FEW_MOVES))
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))  # where no op has been measured
    workspace.bytes, runs = 64 << 10, workspace.runs
    planned(conv_batch())
    (correction,) = planned.corrections
    assert correction.aim_bytes is not None
    assert workspace.runs == runs + 1, "by the step alone"


def test_after_three_corrections_in_a_row_there_is_an_error_and_two_good_steps_start_anew(
    workspace: Workspace,
) -> None:
    planned, _ = planned_and_eager(make_sgd, Settings(budget="100%", options=FEW_MOVES))
    batch = conv_batch()

    def take(more_bytes: int, corrections: int) -> None:
        workspace.bytes = more_bytes
        planned(batch)
        assert len(planned.corrections) == corrections

    take(32 << 10, 1)
    take(64 << 10, 2)  # more than the first correction allows for
    take(0, 2)
    take(112 << 10, 3)  # one good step is not two in a row
    with pytest.raises(BudgetNotHeldError, match="so did 3 plans before it"):
        take(200 << 10, 3)
    with pytest.raises(BudgetNotHeldError, match="so did 3 plans before it"):
        take(200 << 10, 3)
    take(0, 4)
    take(0, 4)
    take(160 << 10, 5)
    assert planned.corrections[3].aim_bytes is None


@pytest.mark.parametrize(
    ("make_optimizer", "proving"),
    [(make_adam, [False] * 3 + [True]), (lambda parameters: torch.optim.SGD(parameters, lr=0.1), [False] * 2 + [True])],
)
def test_two_steps_prove_a_plan_once_the_optimizer_has_its_state(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], proving: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, _ = planned_and_eager(make_optimizer, Settings(budget="100%", planner="none"))
    seen: list[bool] = []
    run = proof.Meter.run

    def noted(meter: proof.Meter, *given: Any, is_proved: bool) -> Any:
        seen.append(is_proved)
        return run(meter, *given, is_proved=is_proved)

    monkeypatch.setattr(proof.Meter, "run", noted)
    for _ in proving:
        planned(conv_batch())
    assert seen == proving, "Adam's first step makes its state, and does not count"


def test_a_hard_budget_is_refused_where_nothing_can_cap_the_process() -> None:
    step = make_pair("conv", make_sgd)[0]
    with pytest.raises(InvalidOptionError, match="hard=True caps what a process takes of a GPU, and the step runs on"):
        fit_step(step, Settings(budget="100%", hard=True))
    require_cap(Settings(budget="100%", hard=True, arena=True), torch.device("cuda"))
    with pytest.raises(InvalidOptionError, match="not soft"):
        Settings(budget="100%", hard=True, budget_is="soft")
    with pytest.raises(InvalidOptionError, match="expected 'firm' or 'soft'"):
        Settings(budget="100%", budget_is="hard")


def test_a_hard_budget_caps_the_process_while_a_step_runs_and_puts_the_cap_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that is not here: of 1000 bytes, 300 are the step's before it runs, and 100 another model's."""
    set_to: list[float] = []
    monkeypatch.setattr(hard_cap, "allocated_bytes", lambda _device: 400)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: type("Properties", (), {"total_memory": 1000})
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 0.9)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, _device: set_to.append(fraction)
    )
    device = torch.device("cuda")
    with pytest.raises(torch.OutOfMemoryError) as raised, hard_cap.capped(device, 500, 300):
        assert set_to == [0.6]
        raise torch.OutOfMemoryError("no room")
    assert "capped at its budget of 500 B (hard=True)" in raised.value.__notes__[0]
    assert set_to == [0.6, 0.9]
    with hard_cap.capped(device, 5000, 300):
        assert set_to[-1] == 0.9, "a cap of the user's stays"


def test_before_a_step_is_capped_it_has_kept_its_budget_twice_in_a_row_and_left_no_trace(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, eager = planned_and_eager(make_adam, Settings(budget="100%", options=FEW_MOVES))
    workspace.bytes = 64 << 10
    caps: list[int] = []

    @contextmanager
    def capped(_device: torch.device, budget_bytes: int, bytes_before: int) -> Iterator[None]:
        assert bytes_before > 0
        caps.append(budget_bytes)
        yield

    monkeypatch.setattr("memfit.step.proof.capped", capped)
    asked_bytes = planned.plan.budget_bytes
    planned._proof.is_capped = True
    planned.prove()
    assert len(planned.corrections) == 1 and not caps
    step_both(planned, eager, conv_batch())
    assert caps == [asked_bytes]
    assert_same(planned, eager)


def test_a_step_counts_from_an_empty_cache_on_and_the_next_beside_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of a device that is not here; the second step reserves more than the first."""
    held, emptied = [700], []
    reserved_by_step = iter([500, 600, 900])

    @contextmanager
    def counters(_device: torch.device) -> Iterator[Usage]:
        usage = Usage(source="cuda", start_bytes=100)
        yield usage
        usage.peak_bytes = 300
        usage.reserved_bytes = held[0] = next(reserved_by_step)

    def empty(_device: torch.device) -> None:
        emptied.append(held[0])
        held[0] = 100

    monkeypatch.setattr(proof, "record", counters)
    monkeypatch.setattr(proof, "empty_cache", empty)
    monkeypatch.setattr(proof, "held_bytes", lambda _device: held[0])
    meter = proof.Meter(torch.device("cuda"))
    loss = torch.zeros(())
    assert meter.run(lambda: loss, 50, is_proved=False) == (loss, 450)
    assert emptied == [700], "what eager had left unused is not the step's"
    assert meter.run(lambda: loss, 50, is_proved=False) == (loss, 550)
    assert emptied == [700], "what the step itself left counts"
    held[0] = 800  # an evaluation in between
    assert meter.run(lambda: loss, 50, is_proved=False) == (loss, 850)
    assert emptied == [700, 800]


def test_older_garbage_hides_nothing_of_what_a_step_takes() -> None:
    def step() -> torch.Tensor:
        objects = [[] for _ in range(400_000)]  # more than a full collection waits for
        return torch.zeros(1 << 20)[: len(objects)].sum()

    meter = proof.Meter(torch.device("cpu"))
    taken = [meter.run(step, 0, is_proved=False)[1]]
    cycle: list[Any] = [torch.zeros(1 << 20)]
    cycle.append(cycle)
    gc.collect()
    del cycle
    taken.append(meter.run(step, 0, is_proved=False)[1])
    assert taken[0] == taken[1] > 4 << 20


def test_ops_are_run_once_before_a_step_counts_and_what_libraries_keep_is_known() -> None:
    captured = capture(make_pair("conv", make_sgd)[0])
    graph, binding = captured.graph, captured.binding
    kept: list[torch.Tensor] = []
    runs: list[str] = []

    class Library:
        def __init__(self, call: Any) -> None:
            self.target, self._schema = call.target, getattr(call.target, "_schema", None)
            self.measurable = getattr(call.target, "measurable", True)
            self.__qualname__ = f"library.{call.target}"

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            runs.append(self.__qualname__)
            if not kept:
                kept.append(torch.empty(1 << 20, dtype=torch.uint8))
            return self.target(*args, **kwargs)

    calls = tuple(replace(call, target=Library(call)) for call in binding.calls)
    binding = replace(binding, calls=calls)
    before_bytes = warming.warm(msgspec.structs.replace(graph, ops=()), replace(binding, calls=()))
    state = torch.get_rng_state()
    assert warming.warm(graph, binding) == before_bytes + (1 << 20)
    assert torch.equal(torch.get_rng_state(), state)
    first_runs = len(runs)
    assert 10 < first_runs < len(calls), "equal calls are run once, updates never"
    assert not any("optimizer_update" in name for name in runs)
    assert warming.warm(graph, binding) == before_bytes + (1 << 20)
    assert len(runs) == first_runs, "each op once"


@pytest.mark.parametrize("budget_is", ["firm", "soft"])
def test_a_compiled_models_fourth_step_over_a_firm_budget_is_an_error(
    budget_is: str, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # accounts of earlier tests whose backward passes have yet to come
    own = Account(1000, torch.device("cpu"), budget_is)
    own._judge(2000)
    own._judge(900)
    own._judge(2000)
    own._judge(2000)
    with pytest.raises(BudgetNotHeldError, match="1000 bytes") if budget_is == "firm" else nullcontext():
        own._judge(2000)
    for taken_bytes in (900, 900, 2000):
        own._judge(taken_bytes)
    own.contract = own.contract.of_budget(1)
    with pytest.raises(OverBudgetError) if budget_is == "firm" else nullcontext():
        assert own.evaluate(lambda: torch.zeros(1 << 16).sum()) == 0
    assert ("a call without gradients took" in caplog.text) == (budget_is == "soft")


def test_an_evaluation_is_judged_beside_a_call_whose_backward_pass_cannot_come() -> None:
    other = memfit.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), budget="1GiB")
    batch = torch.ones(8, 64)
    own = Account(1, torch.device("cpu"))
    returned = other(batch)
    own.evaluate(lambda: torch.zeros(1 << 16).sum())  # part of the step of the other model, whose backward may come
    del returned
    for _ in range(3):
        other(batch)
        with pytest.raises(OverBudgetError, match="a call without gradients took"):
            own.evaluate(lambda: torch.zeros(1 << 16).sum())
    other(batch).sum().backward()


def test_the_command_line_and_the_backend_take_a_soft_budget() -> None:
    assert Search().settings("1MiB", budget_is="soft").budget_is == "soft"
    assert read_options({"budget": 1000, "budget_is": "soft"}).settings.budget_is == "soft"
    with pytest.raises(InvalidOptionError, match="expected 'firm' or 'soft'"):
        read_options({"budget": 1000, "budget_is": "hard"})


class CachingDevice:
    """Torch's allocator on a GPU, as an account sees it: what it holds stays until its cache is emptied.

    Args:
        monkeypatch: puts it in the place of the recorder.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live_bytes = self.held_bytes = 200
        monkeypatch.setattr(account, "Uncounted", lambda _device: SimpleNamespace(live_bytes=lambda: 0))
        monkeypatch.setattr(account, "allocated_bytes", lambda _device: 0)
        monkeypatch.setattr(account, "held_bytes", lambda _device: self.held_bytes)
        monkeypatch.setattr(account, "empty_cache", lambda _device: setattr(self, "held_bytes", self.live_bytes))
        monkeypatch.setattr(window, "record", lambda _device: self)

    def begin(self) -> CachingDevice:
        """Begin a record, as the recorder does."""
        self._usage = Usage(source="a test", start_bytes=self.live_bytes, reserved_bytes=self.held_bytes)
        return self

    def close(self) -> Usage:
        """End it."""
        return self._usage

    def take(self, live_bytes: int, more_bytes: int) -> None:
        """Have so many bytes more live for a while, and as many more held from then on."""
        self.held_bytes += more_bytes
        self._usage.peak_bytes, self._usage.reserved_bytes = live_bytes, self.held_bytes


def test_memory_that_torchs_allocator_keeps_after_backward_is_returned_before_an_update_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, own = CachingDevice(monkeypatch), Account(1000, torch.device("cpu"))

    def step(update_more_bytes: int, update_live_bytes: int = 300) -> None:
        own.begin()
        device.take(600, 700)
        own._end_backward()
        device.take(update_live_bytes, update_more_bytes)
        own._end_update()

    step(200)
    assert own._returns_cache
    assert "of which 500 B were in use" in caplog.text
    step(200)
    with pytest.raises(InfeasibleBudgetError, match=r"took .* \(1100 bytes\)"):
        step(900, 900)


def test_what_torchs_allocator_keeps_counts_but_not_what_other_code_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, own = CachingDevice(monkeypatch), Account(1000, torch.device("cpu"))

    def step(more_bytes: int) -> None:
        own.begin()
        device.take(600, more_bytes)
        own._end_backward()
        device.take(300, 0)
        own._end_update()
        device.held_bytes += 10_000  # of other code's

    step(900)
    assert own.excess_bytes == 100
    assert not own._returns_cache, "what backward has left is no update's fault"
    step(700)
    step(700)
    step(0)  # in what the steps before have left
    step(0)
    assert device.held_bytes > 20_000, "the cache is no longer returned"
    assert own.excess_bytes == 100
    own.begin()
    device.take(600, 0)
    own._end_backward()
    device.take(900, 0)
    with pytest.raises(InfeasibleBudgetError, match=r"took .* \(1100 bytes\)"):  # all of it in use
        own._end_update()


def test_what_a_step_over_the_budget_has_left_is_returned_before_its_plan_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, own = CachingDevice(monkeypatch), Account(1000, torch.device("cpu"))
    held: list[int] = []
    for more_bytes in (900, 700, 50):  # the first takes 1100
        own.begin()
        held.append(device.held_bytes)
        device.take(600, more_bytes)
        own._end_backward()
        own._end_update()
    assert held == [200, 200, 900], "what a step within the budget has left stays, and counts"
    assert own.excess_bytes == 100


def test_a_loss_that_the_caller_keeps_is_a_number() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model, batch = torch.nn.Sequential(*layers), (torch.randn(2048, 64), torch.randn(2048, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = Settings(budget=int(5.2 * 2**20), options=FEW_MOVES)
    step = fit_step(TrainingStep(model=model, loss=_squares, batch=batch, optimizer=optimizer), settings)
    assert isinstance(step, PlannedStep)
    resident_bytes = sum(each.nbytes for each in (*model.parameters(), *batch))
    for _ in range(3):
        with record("cpu") as usage:
            loss = step(batch)
        assert resident_bytes + usage.peak_bytes <= int(5.2 * 2**20)
    assert loss.untyped_storage().nbytes() == loss.nbytes  # torch's has the memory of the whole difference


def _ema(model: torch.nn.Module) -> Any:
    return copy.deepcopy(model)


def _average(model: torch.nn.Module) -> Any:
    return torch.optim.swa_utils.AveragedModel(model)


def _teacher_with_adam(model: torch.nn.Module) -> Any:
    teacher = copy.deepcopy(model)
    adam = torch.optim.Adam(teacher.parameters())
    teacher(torch.randn(2, 64)).sum().backward()
    adam.step()
    return teacher, adam


@pytest.mark.parametrize(
    ("make", "named"),
    [(_ema, "Sequential"), (_average, "AveragedModel"), (_teacher_with_adam, "state of Adam")],
)
@pytest.mark.parametrize("made_before", ["fit", "the first step", "the fourth step"])
def test_what_is_beside_a_planned_step_is_said_once_where_it_does_not_fit(
    make: Callable[[torch.nn.Module], Any], named: str, made_before: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), (torch.randn(64, 64),) * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = [make(model)] if made_before == "fit" else []
    step = fit_step(
        TrainingStep(model=model, loss=_squares, batch=batch, optimizer=optimizer), Settings(budget=1 << 20)
    )
    needed_bytes = step.plan.predicted.peak_bytes
    gc.collect()
    step = fit_step(
        TrainingStep(model=model, loss=_squares, batch=batch, optimizer=optimizer), Settings(budget=needed_bytes + 4096)
    )
    assert isinstance(step, PlannedStep)
    step.verify()  # what this copies is no other code's
    for number in range(6):
        if number == (0 if made_before == "the first step" else 3) and not made:
            made.append(make(model))
        step(batch)
    said = [record.getMessage() for record in caplog.records if "not the planned step's" in record.getMessage()]
    assert len([text for text in said if named in text]) == 1
    assert named in said[-1] and len(said) <= 2, "what earlier tests have left may be told before"


def _squares(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
