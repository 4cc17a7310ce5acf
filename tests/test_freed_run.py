"""Runs without the memory of a step: what is big is freed as it comes, and the step's tensors stay as they are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from command_line import Run, json_of

from memfit import TrainingStep
from memfit.capture import Captured, finish, with_real_results
from memfit.capture.whole_step import capture_whole_step
from memfit.cost.calibration import local_device
from memfit.cost.measurement import measure
from memfit.errors import InvalidBudgetError
from memfit.graph import Graph
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.step.freed_run import run_freed
from memfit.workloads import build

CPU = torch.device("cpu")


def captured_and_measured(step: TrainingStep) -> tuple[Captured, Graph]:
    captured = with_real_results(lambda corrections: finish(capture_whole_step(step, corrections=corrections)))
    return captured, measure(captured.graph, captured.binding, captured.observed)


def ticking(seconds_a_call: float) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * seconds_a_call


STEPS: dict[str, Callable[[], TrainingStep]] = {
    "resnet": partial(build, "resnet50", depth=18, batch=16, size=64),
    "unet": partial(build, "unet", batch=8, size=64, width=16, levels=3),
    "encoder": partial(build, "encoder", batch=4, layers=2),
    "lstm": partial(build, "lstm", steps=20),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_run_stays_within_what_it_may_take_and_leaves_the_step_alone(name: str) -> None:
    step = STEPS[name]()
    captured, graph = captured_and_measured(step)
    whole_bytes = 2 * unplanned_peak_bytes(graph, local_device(CPU))
    before, generator = copy.deepcopy(step.model.state_dict()), torch.get_rng_state()
    whole = run_freed(step, captured, graph, within_bytes=whole_bytes, runs=1)
    within_bytes = int(0.95 * whole.peak_bytes)
    freed = run_freed(step, captured, graph, within_bytes=within_bytes, runs=1)
    assert whole.freed_bytes == 0 < freed.freed_bytes
    assert freed.peak_bytes <= within_bytes
    assert len(freed.op_seconds) == len(graph.ops)
    assert all(torch.equal(value, before[key]) for key, value in step.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_all_ops_run_but_the_updates_which_count_as_measured() -> None:
    step = build("resnet50", depth=18, batch=2, size=64, optimizer="sgd")
    captured, graph = captured_and_measured(step)
    updates = [op.id for op in graph.ops if op.phase == "update"]
    run = run_freed(step, captured, graph, runs=3, clock=ticking(0.5))
    assert updates
    for op, seconds in zip(graph.ops, run.op_seconds, strict=True):
        assert seconds == (op.seconds if op.id in updates else 0.5)
    assert run.step_seconds == pytest.approx(sum(run.op_seconds))


def test_fewer_bytes_than_an_op_takes_are_refused() -> None:
    step = STEPS["unet"]()
    captured, graph = captured_and_measured(step)
    with pytest.raises(InvalidBudgetError, match="too few to run the ops of the step one by one"):
        run_freed(step, captured, graph, within_bytes=1 << 10)


def test_the_command(run: Run) -> None:
    words = ["estimate", "unet", "--set", "batch=2", "--set", "size=64", "--seconds", "--within", "90%", "--json"]
    status, out, _ = run(*words)
    found = json_of(out)["seconds"]
    assert status == 0
    assert found["freed_run"] > 0
    for more, message in ((["--forward-only"], "runs the whole step"), (["--device-profile", "h100"], "leave out")):
        status, out, _ = run(*words, *more)
        assert status == 2 and message in json_of(out)["error"]
