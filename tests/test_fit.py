"""Planned steps: the same bits as eager, inside the budget, through everything a training loop does."""

from __future__ import annotations

import copy
import gc
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from chains import counted
from planned_steps import computed_ops, plan_at_least_memory
from steps import MODELS, autocast_cross_entropy, conv_batch, cross_entropy, make_pair, unusual_batch
from torch import nn
from torch.utils.checkpoint import checkpoint
from workspace import Workspace, hungry_pair

import memfit
from memfit import TrainingStep
from memfit.checkpointing.step import CheckpointedStep
from memfit.doors.step import fit_step
from memfit.errors import (
    InfeasibleBudgetError,
    InvalidBudgetError,
    PlanMismatchError,
    VerificationError,
)
from memfit.memory.snapshot import StepState
from memfit.planners import PLANNERS
from memfit.planning import Settings
from memfit.step import proof
from memfit.step.measure import resident_bytes
from memfit.step.planned_step import PlannedStep
from memfit.step.verify import first_difference
from memfit.system.recorder import Usage, allocated_bytes, record

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
FEW_MOVES = {"iterations": 30_000}  # in place of seconds, which a busy machine fills with less
TIGHT = Settings(budget="91%", options=FEW_MOVES)
# The first by definition, the second without a user's marks, the others without a host.
RECOMPUTES_NOTHING = {"none", "mirror", "vdnn", "tflms", "autoswap"}


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def make_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = list(parameters)
    groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.0}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


OPTIMIZERS: dict[str, MakeOptimizer | None] = {
    "none": None,
    "sgd": make_sgd,
    "adam": make_adam,
    "adamw": make_adamw,
    "groups": make_groups,
}


def planned_and_eager(
    name: str, make_optimizer: MakeOptimizer | None = None, settings: Settings = TIGHT, **fields: Any
) -> tuple[PlannedStep, TrainingStep]:
    step, eager = make_pair(name, make_optimizer, **fields)
    return fit_step(step, settings), eager


def hungry_and_eager(make_optimizer: MakeOptimizer, settings: Settings) -> tuple[PlannedStep, TrainingStep]:
    step, eager = hungry_pair("conv", make_optimizer)
    return fit_step(step, settings), eager


def assert_same(planned: PlannedStep | CheckpointedStep, eager: TrainingStep) -> None:
    """Everything that a step changes has the same bits on both sides."""
    difference = StepState.take(eager).first_difference(StepState.take(planned.step))
    assert difference is None, difference


def step_both(planned: PlannedStep | CheckpointedStep, eager: TrainingStep, batch: Any, seed: int = 7) -> None:
    torch.manual_seed(seed)
    loss = planned(batch)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    expected = eager.run_eager(batch)
    assert torch.equal(loss, expected)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_have_eagers_bits(name: str, optimizer: str) -> None:
    planned, eager = planned_and_eager(name, OPTIMIZERS[optimizer])
    assert planned.plan.schedule.codes.tolist().count(0) > len(planned.plan.graph.ops), "nothing is rematerialized"
    for seed in range(3):
        torch.manual_seed(seed)
        step_both(planned, eager, MODELS[name][1]())
    assert_same(planned, eager)


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_runs_with_eagers_bits_at_its_least_memory(planner: str) -> None:
    step, eager = make_pair("unusual", make_adamw)
    few = counted(planner, FEW_MOVES["iterations"], episodes=8)
    planned = plan_at_least_memory(step, planner, **({"room": 1.2, **few} if "iterations" in few else few))
    assert (computed_ops(planned) > len(planned.plan.graph.ops)) == (planner not in RECOMPUTES_NOTHING)
    for seed in range(2):
        step_both(planned, eager, unusual_batch(), seed)
    assert_same(planned, eager)


def test_measured_peak_is_within_the_budget_and_near_the_prediction() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)), nn.Linear(256, 4))
    step = TrainingStep(
        model=model, loss=cross_entropy, batch=(torch.randn(2048, 256), torch.zeros(2048, dtype=torch.long))
    )
    planned = fit_step(step, Settings(budget="60%", options=FEW_MOVES))
    with record("cpu") as usage:
        planned(step.batch)
    measured = resident_bytes(planned, step.batch) + usage.peak_bytes
    assert measured <= planned.plan.budget_bytes
    assert abs(measured - planned.plan.predicted.peak_bytes) < 0.02 * measured
    with record("cpu") as usage:
        step.run_eager(step.batch)
    assert resident_bytes(planned, step.batch) + usage.peak_bytes > planned.plan.budget_bytes


def test_twenty_steps_under_a_scheduler_end_in_eagers_bits() -> None:
    planned, eager = planned_and_eager("conv", make_adamw)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(step.optimizer, max_lr=0.1, total_steps=25)
        for step in (planned.step, eager)
    ]
    for seed in range(20):
        torch.manual_seed(seed)
        step_both(planned, eager, conv_batch())
        for scheduler in schedulers:
            scheduler.step()
    assert_same(planned, eager)
    assert len(planned.plans) == 1


def test_a_scheduler_made_before_fit_keeps_working() -> None:
    step, eager = make_pair("conv", make_sgd)
    schedulers = [torch.optim.lr_scheduler.StepLR(s.optimizer, 1, 0.5) for s in (step, eager)]
    planned = fit_step(step, TIGHT)
    for seed in range(4):
        step_both(planned, eager, conv_batch(), seed)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(planned, eager)


def test_gradients_accumulate_over_micro_batches() -> None:
    planned, eager = planned_and_eager("conv")
    for seed in range(3):
        torch.manual_seed(seed)
        step_both(planned, eager, conv_batch())
    assert_same(planned, eager)
    assert len(planned.plans) == 2  # without gradients there, and with


def test_accumulated_gradients_then_an_update() -> None:
    planned, eager = planned_and_eager("conv", make_sgd)
    torch.manual_seed(0)
    batch = conv_batch()
    for step in (planned.step, eager):
        torch.manual_seed(1)
        cross_entropy(step.model, batch).backward()
    step_both(planned, eager, batch)
    assert_same(planned, eager)
    assert all(p.grad is None for p in planned.step.model.parameters())


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_by_the_global_norm(scaled: bool) -> None:
    step, eager = make_pair("unusual", make_adamw, clip_norm=0.1)
    if scaled:
        step, eager = (
            TrainingStep(
                model=s.model,
                loss=s.loss,
                batch=s.batch,
                optimizer=s.optimizer,
                clip_norm=0.1,
                scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
            )
            for s in (step, eager)
        )
    planned = fit_step(step, Settings(budget="80%", options=FEW_MOVES))
    for seed in range(4):
        step_both(planned, eager, unusual_batch(), seed)
    assert_same(planned, eager)


def test_a_scaler_skips_a_step_whose_gradients_overflow() -> None:
    def large_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return 1e6 * cross_entropy(model, batch)

    scalers = [torch.amp.GradScaler("cpu", init_scale=3e38) for _ in range(2)]
    step, eager = make_pair("conv", make_sgd, loss=large_loss)
    step, eager = (
        TrainingStep(model=s.model, loss=s.loss, batch=s.batch, optimizer=s.optimizer, scaler=scaler)
        for s, scaler in zip((step, eager), scalers, strict=True)
    )
    before = copy.deepcopy(dict(step.model.named_parameters()))
    planned = fit_step(step, Settings(budget="100%", options=FEW_MOVES))
    step_both(planned, eager, conv_batch())
    assert_same(planned, eager)
    assert all(torch.equal(before[n], p) for n, p in step.model.named_parameters())
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2e38


def test_autocast_and_channels_last() -> None:
    torch.manual_seed(0)
    images, labels = conv_batch()
    batch = images.to(memory_format=torch.channels_last), labels
    settings = Settings(budget="98%", options=FEW_MOVES)
    planned, eager = planned_and_eager("conv", make_sgd, settings, loss=autocast_cross_entropy, batch=batch)
    for step in (planned.step, eager):
        step.model.to(memory_format=torch.channels_last)
    for seed in range(2):
        step_both(planned, eager, batch, seed)
    assert_same(planned, eager)


def test_train_and_eval_get_plans_of_their_own() -> None:
    planned, eager = planned_and_eager("conv", make_sgd)
    for training in (True, False, True, False):
        planned.step.model.train(training)
        eager.model.train(training)
        step_both(planned, eager, conv_batch())
    assert_same(planned, eager)
    assert len(planned.plans) == 2


def test_freezing_a_layer_between_steps_keeps_its_meaning() -> None:
    planned, eager = planned_and_eager("conv", make_sgd)
    step_both(planned, eager, conv_batch())
    for step in (planned.step, eager):
        step.model.stem.requires_grad_(False)
    step_both(planned, eager, conv_batch())
    assert_same(planned, eager)


def test_the_smaller_last_batch_gets_a_plan_within_the_same_budget() -> None:
    planned, eager = planned_and_eager("conv", make_sgd)
    for size in (48, 20, 48, 20):
        step_both(planned, eager, conv_batch(size))
    assert_same(planned, eager)
    assert len(planned.plans) == 2
    budgets = [plan.budget_bytes for plan in planned.plans]
    held_bytes = sum(each.nbytes for each in conv_batch(48))  # the larger batch, which the step holds
    assert max(budgets) - held_bytes <= min(budgets) <= max(budgets) == planned.settings.budget
    assert all(plan.predicted.peak_bytes <= plan.budget_bytes for plan in planned.plans)


def test_a_batch_cut_out_of_a_larger_tensor_needs_no_plan_of_its_own() -> None:
    planned, eager = planned_and_eager("conv", make_sgd)
    images, labels = conv_batch(192)
    for start in (0, 48, 96, 144):
        step_both(planned, eager, (images[start : start + 48], labels[start : start + 48]))
    assert_same(planned, eager)
    assert len(planned.plans) == 1


def test_planned_and_unplanned_steps_mix_and_checkpoint_files_resume(tmp_path: Any) -> None:
    planned, eager = planned_and_eager("conv", make_adamw)
    step_both(planned, eager, conv_batch())
    torch.manual_seed(3)
    planned.step.run_eager(conv_batch())
    torch.manual_seed(3)
    eager.run_eager(conv_batch())
    state = {"model": planned.step.model.state_dict(), "optimizer": planned.step.optimizer.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    step_both(planned, eager, conv_batch())
    loaded = torch.load(tmp_path / "checkpoint.pt")
    for step in (planned.step, eager):
        step.model.load_state_dict(copy.deepcopy(loaded["model"]))
        step.optimizer.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    step_both(planned, eager, conv_batch())
    assert_same(planned, eager)


def test_views_and_dicts_in_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    values = torch.randn(8, 7)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["values"][:, batch["skip"] :]) * batch["weights"][0]).pow(2).mean()

    batch = {"values": values, "skip": 1, "weights": [torch.tensor(2.0)]}
    step = TrainingStep(model=model, loss=loss, batch=batch)
    fit_step(step, Settings(budget="100%", options=FEW_MOVES)).verify()


def test_verify_names_the_first_tensor_that_differs() -> None:
    planned, _ = planned_and_eager("conv", make_sgd)
    planned.verify()
    before = copy.deepcopy(planned.step.model.state_dict())
    honest = planned.step.run_eager

    class Dishonest:
        """A planned step that also moves a parameter."""

        step = planned.step
        generators = ()

        def __call__(self, batch: Any) -> torch.Tensor:
            loss = honest(batch)
            with torch.no_grad():
                planned.step.model.head.bias[0] += 1e-6
            return loss

    assert first_difference(Dishonest(), planned.step.batch) == "head.bias"  # type: ignore[arg-type]
    for name, tensor in planned.step.model.state_dict().items():
        assert torch.equal(tensor, before[name])


_restless = random.SystemRandom()  # without a state that could be put back


@torch.library.custom_op("memfit_tests::restless", mutates_args=())
def restless(values: torch.Tensor) -> torch.Tensor:
    """A kernel that is not deterministic: each call gives other bits."""
    return values + _restless.random()


@restless.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


restless.register_autograd(lambda _context, gradient: gradient)


class Restless(nn.Module):
    """One layer, and a kernel of the user's that gives other bits at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return restless(self.layer(values))


def test_fit_verifies_when_asked_and_refuses_other_bits() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).pow(2).mean()

    batch = torch.randn(3, 2)
    memfit.fit(nn.Linear(2, 2), loss, batch, budget="100%", planner="none", verify=True)
    memfit.fit(Restless(), loss, batch, budget="100%", planner="none")
    with pytest.raises(VerificationError, match=r"two eager steps from the same state differ in the loss"):
        memfit.fit(Restless(), loss, batch, budget="100%", planner="none", verify=True)


def test_measuring_leaves_no_trace() -> None:
    planned, eager = planned_and_eager("conv", make_adamw)
    before = StepState.take(planned.step)
    measured = planned.measure(repeats=1)
    assert before.first_difference(StepState.take(planned.step)) is None
    assert measured.peak_bytes < measured.baseline_peak_bytes
    step_both(planned, eager, conv_batch())
    assert_same(planned, eager)


def test_a_plan_is_saved_and_used_again_for_its_own_graph_only(tmp_path: Any) -> None:
    planned, eager = planned_and_eager("conv", make_sgd)
    planned.plan.save(tmp_path / "plan.json")
    step = planned.step
    again = fit_step(step, TIGHT, plan=tmp_path / "plan.json")
    assert again.plan.schedule == planned.plan.schedule
    step_both(again, eager, step.batch)
    other, _ = make_pair("conv", make_sgd, batch=conv_batch(5))
    with pytest.raises(PlanMismatchError, match="plan was made for graph"):
        fit_step(other, TIGHT, plan=tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(re.sub(r'"torch": "[^"]*"', '"torch": "1.13.1"', text))
    with pytest.raises(PlanMismatchError, match=r"made with torch 1\.13\.1"):
        fit_step(step, TIGHT, plan=tmp_path / "plan.json")


def test_a_budget_that_cannot_be_met_is_refused_before_anything_runs() -> None:
    step, _ = make_pair("conv", make_sgd)
    before = StepState.take(step)
    with pytest.raises(InfeasibleBudgetError, match="no plan can go below") as caught:
        fit_step(step, Settings(budget=10_000, options=FEW_MOVES))
    assert before.first_difference(StepState.take(step)) is None
    found, bound = caught.value.least_budget_found_bytes, caught.value.least_budget_bound_bytes
    assert found is not None
    assert 10_000 < bound <= found


@pytest.mark.parametrize("budget", ["0", "-1", "12XB", 0])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    step, _ = make_pair("conv")
    with pytest.raises(InvalidBudgetError):
        fit_step(step, Settings(budget=budget, options=FEW_MOVES))


def test_an_error_in_the_middle_of_a_step_leaves_nothing_behind() -> None:
    planned, eager = planned_and_eager("conv")
    images, labels = conv_batch()
    too_large = labels + 100  # the step keeps its latest batch
    gc.collect()
    before_bytes = allocated_bytes("cpu")
    try:
        planned((images, too_large))
    except IndexError:
        pass  # and with it go the frames that hold the step's tensors
    else:
        raise AssertionError("labels out of range were expected to raise")
    gc.collect()
    assert allocated_bytes("cpu") <= before_bytes
    step_both(planned, eager, (images, labels))


class LooksAtValues(nn.Module):
    """Takes one of two ways by the value of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.before(values))
        if hidden.sum().item() > 0:
            hidden = -hidden
        return self.after(hidden)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_step_that_looks_at_values_runs_under_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = LooksAtValues()
    eager = TrainingStep(model=copy.deepcopy(model), loss=cross_entropy, batch=unusual_batch(), optimizer=None)
    planned = memfit.fit(model, cross_entropy, eager.batch, budget="1MiB", options=FEW_MOVES, verify=True)
    assert isinstance(planned, CheckpointedStep)
    assert "test_fit.py" in caplog.text
    assert "runs under memfit.checkpoint" in caplog.text
    step_both(planned, eager, eager.batch)
    assert_same(planned, eager)


def test_a_first_step_over_its_budget_is_planned_again_and_said(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    """The step takes 64 KiB more than its ops were measured to take, as a library's workspace may."""
    planned, eager = hungry_and_eager(make_sgd, Settings(budget="100%", options=FEW_MOVES))
    asked_bytes = planned.plan.budget_bytes
    workspace.bytes = 64 << 10
    with caplog.at_level("WARNING"):
        step_both(planned, eager, conv_batch())
    assert "later steps run a plan made for" in caplog.text
    assert planned.plan.budget_bytes < asked_bytes - (50 << 10)
    (correction,) = planned.corrections
    assert (correction.budget_bytes, correction.aim_bytes) == (asked_bytes, planned.plan.budget_bytes)
    assert correction.measured_bytes > asked_bytes
    batch = conv_batch()
    before = resident_bytes(planned, batch)
    torch.manual_seed(1)
    with record("cpu") as usage:
        planned(batch)
    assert before + usage.peak_bytes <= asked_bytes
    torch.manual_seed(1)
    eager.run_eager(batch)
    assert_same(planned, eager)


def test_a_step_over_the_budget_late_in_training_is_planned_again_and_said(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    planned, eager = hungry_and_eager(make_adam, Settings(budget="100%", time_limit_seconds=0.5))
    asked_bytes = planned.plan.budget_bytes
    for seed in range(3):
        step_both(planned, eager, conv_batch(), seed)
    assert planned.corrections == []
    workspace.bytes = 64 << 10
    with caplog.at_level("WARNING"):
        step_both(planned, eager, conv_batch())
    assert "a step took" in caplog.text
    assert len(planned.corrections) == 1
    for seed in range(3):  # the corrected plan allows for the 64 KiB
        batch = conv_batch()
        before = resident_bytes(planned, batch)
        torch.manual_seed(seed)
        with record("cpu") as usage:
            planned(batch)
        assert before + usage.peak_bytes <= asked_bytes
        torch.manual_seed(seed)
        eager.run_eager(batch)
    assert_same(planned, eager)
    assert len(planned.corrections) == 1


def test_what_another_thread_allocates_is_not_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    planned, eager = planned_and_eager("conv", make_sgd, Settings(budget="100%", time_limit_seconds=0.5))
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.ones(1 << 20)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        with caplog.at_level("WARNING"):
            for seed in range(5):
                step_both(planned, eager, conv_batch(), seed)
    finally:
        stop.set()
        thread.join()
    assert planned.corrections == []
    assert caplog.text == ""


def test_a_step_planned_again_after_it_has_left_gradients_still_starts_without_them(
    workspace: Workspace,
) -> None:
    planned = fit_step(hungry_pair("conv")[0], Settings(budget="100%", options=FEW_MOVES))
    assert isinstance(planned, PlannedStep)
    workspace.bytes = 64 << 10
    asked_bytes, batch = planned.plan.budget_bytes, conv_batch()
    planned(batch)
    workspace.close()
    assert planned.plan.budget_bytes < asked_bytes
    planned.step.model.zero_grad(set_to_none=True)
    planned(batch)
    assert all(parameter.grad is not None for parameter in planned.step.model.parameters())


def test_on_cuda_the_budget_is_held_against_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of a device that is not here: a cache that holds 64 KiB in blocks that nothing fitted into."""
    planned, eager = planned_and_eager("conv", make_sgd, Settings(budget="100%", options=FEW_MOVES))
    asked_bytes, predicted_bytes = planned.plan.budget_bytes, planned.plan.predicted.peak_bytes

    @contextmanager
    def counters(_device: torch.device) -> Iterator[Usage]:
        taken_bytes = predicted_bytes - resident_bytes(planned, planned.step.batch)
        usage = Usage(source="cuda", start_bytes=1 << 20)  # of which some are another model's
        yield usage
        usage.peak_bytes = taken_bytes
        usage.reserved_bytes = usage.start_bytes + usage.peak_bytes + (64 << 10)

    monkeypatch.setattr(proof, "record", counters)
    step_both(planned, eager, conv_batch())
    assert planned.plan.budget_bytes == asked_bytes - (64 << 10)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_smaller_last_batch_with_an_optimizer_that_counts_its_steps(optimizer: str) -> None:
    """By then the optimizer has state, among it a step count that its code looks at."""
    planned, eager = planned_and_eager("conv", OPTIMIZERS[optimizer])
    images, labels = conv_batch()
    step_both(planned, eager, (images, labels))
    step_both(planned, eager, (images[:-1], labels[:-1]))
    step_both(planned, eager, (images, labels))
    assert len(planned.plans) == 2
    assert_same(planned, eager)


def test_the_batch_that_a_step_was_made_with_is_freed_once_another_one_is_given() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    example = torch.randn(32, 16), torch.randint(0, 4, (32,))
    step = memfit.fit(model, nn.CrossEntropyLoss(), example, budget="64MiB", time_limit_seconds=0.5)
    first = weakref.ref(example[0])
    step(example)
    del example
    gc.collect()
    assert first() is not None, "for step.verify()"
    step((torch.randn(32, 16), torch.randint(0, 4, (32,))))
    gc.collect()
    assert first() is None
    step.verify()


class _Reentrant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return self.last(checkpoint(self.inner, x, use_reentrant=True))


@pytest.mark.parametrize("is_used_outside", [True, False])
def test_a_sum_that_a_reentrant_region_adds_to_in_another_order_is_told(
    is_used_outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        penalty = model.inner.weight.square().sum() if is_used_outside else 0.0
        return model(batch).square().mean() + penalty

    memfit.fit(_Reentrant(), loss, torch.randn(16, 8), budget="100%")
    told = [text for text in caplog.messages if "use_reentrant=True" in text]
    assert len(told) == is_used_outside and all("inner.weight is used" in text for text in told)
