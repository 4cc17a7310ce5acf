"""Verification: what it compares, with what copies, on which engines, and when equal bits are no evidence."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from steps import conv_batch, make_pair
from torch import nn

from memfit import TrainingStep
from memfit.capture import capture
from memfit.capture.hidden_state import refuse_hidden_state
from memfit.doors.step import fit_step
from memfit.errors import UnsupportedStepError, VerificationError
from memfit.memory import saved_on_host
from memfit.memory.snapshot import StepState
from memfit.planning import Settings
from memfit.step import verify
from memfit.step.planned_step import PlannedStep
from memfit.step.programs import Programs

FAST = Settings(budget="100%", planner="none")


def planned_of(step: TrainingStep) -> PlannedStep:
    planned = fit_step(step, FAST)
    assert isinstance(planned, PlannedStep)
    return planned


def test_an_optimizer_whose_rate_is_0_hides_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the first step of a warm-up: the update leaves parameters as they are, whatever the gradients were."""
    planned = planned_of(make_pair("conv", lambda p: torch.optim.SGD(p, lr=0.0))[0])
    before = StepState.take(planned.step)
    planned.verify()
    assert before.first_difference(StepState.take(planned.step)) is None
    run = Programs.run

    def wrong(*given: Any) -> Any:
        loss = run(*given)
        assert planned.step.optimizer is not None
        parameter, rate = next(planned.step.model.parameters()), planned.step.optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            parameter.sub_(1e-3 * rate)  # a gradient that is off by a thousandth
        return loss

    monkeypatch.setattr(Programs, "run", wrong)
    with pytest.raises(VerificationError, match="after the parameters were changed"):
        planned.verify()


@pytest.mark.parametrize("optimizer", [None, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_gradients_that_are_not_finite_are_no_evidence(optimizer: Any) -> None:
    step = make_pair("conv", optimizer)[0]
    loss = step.loss
    broken = TrainingStep(
        model=step.model,
        loss=lambda model, batch: loss(model, batch) * torch.tensor(float("inf")),
        batch=step.batch,
        optimizer=step.optimizer,
    )
    with pytest.raises(VerificationError, match=r"show nothing of \d+ of \d+ gradients.*not finite"):
        planned_of(broken).verify()


def test_an_update_that_the_scaler_skipped_is_no_evidence_but_one_at_scale_1_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # at which gradients overflow
    step = TrainingStep(
        model=model,
        loss=lambda m, b: m(b).square().mean() * 100,
        batch=torch.randn(16, 8),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scaler=scaler,
    )
    planned = planned_of(step)
    first = verify._compared(planned, step.batch, planned)
    assert first.difference is None and len(first.left_out) == 4, "all parameters: the update was skipped"
    planned.verify()
    assert scaler.get_scale() == 2.0**127


def test_eager_runs_with_saved_tensors_on_the_host_where_the_device_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = planned_of(make_pair("conv", lambda p: torch.optim.Adam(p, lr=0.1))[0])
    asked: list[int] = []
    entered: list[bool] = []
    real = saved_on_host.saved_on_host

    def noted() -> Any:
        entered.append(True)
        return real()

    def no_room(_device: torch.device, more_bytes: int) -> bool:
        asked.append(more_bytes)
        return False

    monkeypatch.setattr(saved_on_host, "has_room", no_room)
    monkeypatch.setattr(saved_on_host, "saved_on_host", noted)
    planned.verify()
    assert len(entered) == 2
    unplanned_bytes = planned.plan.unplanned.peak_bytes
    assert all(unplanned_bytes // 4 < more_bytes < unplanned_bytes for more_bytes in asked)
    measured = planned.measure(repeats=1)
    assert measured.overhead is measured.baseline_step_seconds is measured.baseline_peak_bytes is None
    assert "not compared" in measured.note
    assert measured.step_seconds > 0


@pytest.mark.slow
def test_garbage_that_python_frees_within_a_step_hides_nothing_of_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager step leaves a cycle that holds a tensor, and a planned step collects it."""
    planned = planned_of(make_pair("conv", None)[0])
    run_eager, run = TrainingStep.run_eager, Programs.run

    def leaves_garbage(step: TrainingStep, batch: Any) -> torch.Tensor:
        cycle: list[Any] = [torch.empty(1 << 20)]
        cycle.append(cycle)
        return run_eager(step, batch)

    def collects_garbage(*given: Any) -> Any:
        gc.collect()
        return run(*given)

    expected = planned.measure(repeats=1).peak_bytes
    monkeypatch.setattr(Programs, "run", collects_garbage)
    monkeypatch.setattr(TrainingStep, "run_eager", leaves_garbage)
    assert planned.measure(repeats=1).peak_bytes == expected


def test_a_device_that_runs_full_in_an_eager_step_is_told_apart_from_a_wrong_step() -> None:
    planned = planned_of(make_pair("conv", lambda p: torch.optim.Adam(p, lr=0.1))[0])
    tries: list[int] = []
    run = planned.step.run_eager

    def full_at_first(batch: Any) -> torch.Tensor:
        tries.append(1)
        if len(tries) == 1:
            with torch.no_grad():
                next(planned.step.model.parameters()).add_(1.0)  # what the failed step has done already
            raise torch.OutOfMemoryError("no room")
        return run(batch)

    put_back: list[int] = []
    eager = saved_on_host.EagerRun(full_at_first, torch.device("cpu"), 0, lambda: put_back.append(1))
    eager(conv_batch())
    assert len(tries) == 2 and put_back == [1] and eager.is_saved_on_host


@pytest.mark.parametrize("name", ["conv", "language", "recurrent"])
def test_saved_tensors_come_back_from_the_host_with_their_bits_and_strides(name: str) -> None:
    left, right = make_pair(name)
    torch.manual_seed(1)
    left.run_eager(left.batch)
    torch.manual_seed(1)
    with saved_on_host.saved_on_host():
        right.run_eager(left.batch)
    assert StepState.take(left).first_difference(StepState.take(right)) is None


def test_engines_that_trials_would_choose_are_chosen_by_rule_while_bits_are_compared() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    try:
        cudnn.benchmark = True
        with verify.comparable_engines():
            assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
        assert (cudnn.benchmark, cudnn.deterministic) == (True, before[1])
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def test_recurrent_dropout_of_a_gpu_is_refused_by_name() -> None:
    rnn = torch.ops.aten._cudnn_rnn.default
    names = [argument.name for argument in rnn._schema.arguments]

    def by_position(train: bool, dropout: float) -> None:
        values = {**dict.fromkeys(names), "train": train, "dropout": dropout}
        refuse_hidden_state(rnn, tuple(values[name] for name in names), {})

    by_position(True, 0.0)
    by_position(False, 0.5)
    with pytest.raises(UnsupportedStepError, match=r"dropout=0\.5.*torch\.nn\.Dropout between layers"):
        by_position(True, 0.5)
    with pytest.raises(UnsupportedStepError):
        refuse_hidden_state(rnn, (), {**dict.fromkeys(names), "train": True, "dropout": 0.1})
    capture(make_pair("recurrent")[0])  # a CPU's layers have no such state
