"""Every door to a planned step, in a few seconds each: ten steps, of which none may reserve more than the budget.

`CASES` is what `make test-cuda` runs over the CUDA build of torch without a GPU, and row 1 of `make gpu` on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from _gpu_measure import Run, each_step, let_go, over, timed
from _gpu_models import lay_together, make_model
from _measure import MIB
from _planned import eager_run

import memfit
from memfit import TrainingStep
from memfit.torch_private.cuda import allocator_settings_text, release_cublas_workspaces

STEPS = 10
MICRO_BATCHES = 4
SIDE_STREAM_FROM = 3  # the steps before it run on the current stream
TIME_LIMIT_SECONDS = 1.0
USERS_SEGMENTS = "expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One door.

    Attributes:
        name: of the case.
        door: a key of `DOORS`.
        share: of the bytes that eager reserves, which is the budget.
        model, options: see `make_model`.
        optimizer: arguments of AdamW.
        given: more arguments of the door.
        allocator: settings of torch's allocator that the user has made.
        cudnn_benchmark: let cuDNN try its engines.
        timed: compare the seconds with eager's.
        rehearsal: options of the model that replace others where nothing is computed.
    """

    name: str
    door: str
    share: float = 0.7
    model: str = "mlp"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    optimizer: dict[str, Any] | None = None
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    allocator: str = ""
    cudnn_benchmark: bool = False
    timed: bool = False
    rehearsal: dict[str, Any] = field(default_factory=dict[str, Any])


CASES = (
    Case(name="fit", door="fit"),
    Case(name="fit, hard", door="fit", given={"hard": True}),
    Case(name="compile", door="compile"),
    Case(name="backend", door="backend"),
    Case(name="eager", door="eager"),
    Case(name="graph break", door="fit", model="broken mlp", share=0.85),
    Case(name="graph break, compile", door="compile", model="broken mlp", share=0.85),
    Case(name="accumulation by percentage", door="accumulation", optimizer={"none": True}),
    Case(name="side stream", door="side stream"),
    Case(name="fit, torch's allocator", door="fit", given={"arena": False}),
    Case(name="fit, the user's expandable segments", door="fit", allocator=USERS_SEGMENTS, given={"hard": True}),
    Case(name="compile, the user's expandable segments", door="compile", allocator=USERS_SEGMENTS),
    Case(name="fit, offloading", door="fit", given={"planner": "offload", "host_budget": "1GiB"}),
    Case(name="fit, batches of three sizes", door="sizes"),
    Case(name="fit, GradScaler", door="fit", given={"scaler": True}),
    Case(name="fit, clipped, foreach", door="fit", optimizer={"foreach": True}, given={"clip_norm": 1.0}),
)
"""The doors that are tried in row 1, the likeliest to break first."""


def measure_case(case: Case, *, steps: int = STEPS, rehearsal: bool = False) -> Iterator[dict[str, Any]]:
    """Yield what is known of a case after each stage: `budget_bytes`, `steps`, `failures` and more.

    Args:
        case: the case.
        steps: to run.
        rehearsal: at the sizes for a device that computes nothing.
    """
    if case.allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = case.allocator  # where memfit reads it
        torch._C._accelerator_setAllocatorSettings(case.allocator)
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    step = make_model(
        case.model, case.options | (case.rehearsal if rehearsal else {}), optimizer=case.optimizer, with_state=False
    ).step
    found: dict[str, Any] = {"allocator": allocator_settings_text(), "failures": []}
    accumulates = case.door == "accumulation"
    eager = accumulating(step, step.run_eager) if accumulates else eager_run(step)
    found |= {"eager_steps": each_step(eager, 3)}
    found |= {"eager_seconds": [timed(eager)[0] for _ in range(5)]} if case.timed else {}
    _forget(step)
    budget_bytes = int(case.share * max(each["reserved_bytes"] for each in found["eager_steps"]))
    before = torch.cuda.memory_stats()
    with ExitStack() as inside:
        run, doors_bytes, end = DOORS[case.door](step, budget_bytes, dict(case.given), inside)
        found |= {"budget_bytes": doors_bytes or budget_bytes}
        yield found
        found["steps"] = []
        for _ in range(steps):  # one by one: those before an error count, too
            found["steps"] += each_step(run, 1)
            found["failures"] = over(case.name, found["steps"], found["budget_bytes"])
            most = max(each["reserved_bytes"] for each in found["steps"])
            found["line"] = f"{most / MIB:,.0f} of {found['budget_bytes'] / MIB:,.0f} MiB"
        found |= {"seconds": [timed(run)[0] for _ in range(5)]} if case.timed else {}
        found |= end()
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before["num_alloc_retries"]
    found["retries"] = retries
    found["failures"] += [f"{case.name}: {retries} retries of the allocator"] if retries else []
    yield found


def _forget(step: TrainingStep) -> None:
    """Leave no trace of eager's steps: a door begins where training begins."""
    step.model.zero_grad(set_to_none=True)
    if step.optimizer is not None:
        step.optimizer.state.clear()
    release_cublas_workspaces()
    let_go()
    lay_together(step.model)


End = Callable[[], dict[str, Any]]
Opened = tuple[Run, int, End]
"""What runs a step; the budget in bytes, if it is another than was asked for; what tells of it in the end."""


def _fit(step: TrainingStep, budget: int | str, given: dict[str, Any], _inside: ExitStack) -> Opened:
    given = {"time_limit_seconds": TIME_LIMIT_SECONDS} | given
    if given.get("scaler"):
        given["scaler"] = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    planned = memfit.fit(step.model, step.loss, step.batch, optimizer=step.optimizer, budget=budget, **given)
    return (lambda: planned(step.batch)), int(planned.settings.budget), lambda: told(planned)


def told(planned: Any) -> dict[str, Any]:
    """What a fitted step says of itself; the step around a graph break has no plan of the whole."""
    if not isinstance(planned, memfit.PlannedStep):
        return {}
    plan = planned.plan
    return {
        "corrections": [str(each) for each in planned.corrections],
        "memory": str(planned.memory),
        "predicted_bytes": plan.predicted.peak_bytes,
        "predicted_overhead": plan.overhead,
        "unplanned_bytes": plan.unplanned.peak_bytes,
        "least_budget_found_bytes": plan.bounds.least_budget_found_bytes,
        "fit_seconds": dict(planned.seconds),
        "ops": len(planned.captured.graph.ops),
        "offloaded_bytes": plan.offloaded_bytes,
    }


def _side_stream(step: TrainingStep, budget: int, given: dict[str, Any], inside: ExitStack) -> Opened:
    run, budget_bytes, end = _fit(step, budget, given, inside)
    stream, count = torch.cuda.Stream(), 0

    def on_a_stream() -> None:
        nonlocal count
        count += 1
        if count <= SIDE_STREAM_FROM:
            run()
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)

    return on_a_stream, budget_bytes, end


def _sizes(step: TrainingStep, budget: int, given: dict[str, Any], inside: ExitStack) -> Opened:
    """Batches of the given size, of half of it, and of three quarters, in turns."""
    planned = memfit.fit(
        step.model, step.loss, step.batch, optimizer=step.optimizer, budget=budget, time_limit_seconds=1.0, **given
    )
    rows, count = len(step.batch[0]), 0

    def run() -> None:
        nonlocal count
        size = (rows, rows // 2, 3 * rows // 4)[count % 3]
        count += 1
        planned(tuple(part[:size] for part in step.batch))

    inside.callback(planned.wait_for_searches)  # no thread outlives the case
    return run, 0, lambda: told(planned)


def _accumulation(step: TrainingStep, _budget: int, given: dict[str, Any], inside: ExitStack) -> Opened:
    """Gradients of some micro-batches; the budget is a share of the unplanned peak, as users give it."""
    share = given.pop("percent", "70%")
    _, budget_bytes, end = opened = _fit(step, share, given, inside)
    planned_run = opened[0]
    return accumulating(step, lambda _batch: planned_run()), budget_bytes, end


def accumulating(step: TrainingStep, run: Callable[[Any], object]) -> Run:
    """Return what adds up the gradients of some micro-batches."""

    def cycle() -> None:
        step.model.zero_grad(set_to_none=True)
        for _ in range(MICRO_BATCHES):
            run(step.batch)

    return cycle


def _compile(step: TrainingStep, budget: int, given: dict[str, Any], _inside: ExitStack) -> Opened:
    given = {"time_limit_seconds": TIME_LIMIT_SECONDS} | given
    model = memfit.compile(step.model, budget=budget, optimizer=step.optimizer, **given)
    return eager_run(replace(step, model=model)), 0, dict


def _backend(step: TrainingStep, budget: int, given: dict[str, Any], _inside: ExitStack) -> Opened:
    from memfit.runtime.compile.lookup import memfit_backend

    options = {"budget": budget, "time_limit_seconds": TIME_LIMIT_SECONDS} | given
    compiled: Any = torch.compile(step.model, backend=memfit_backend, options=options)

    def run() -> torch.Tensor:
        step.model.zero_grad(set_to_none=True)
        return step.run_eager(step.batch, model=compiled)

    return run, 0, dict


def _eager(step: TrainingStep, budget: int, given: dict[str, Any], inside: ExitStack) -> Opened:
    inside.enter_context(memfit.eager(step.model, budget=budget, **given))
    return eager_run(step), 0, dict


DOORS: dict[str, Callable[[TrainingStep, Any, dict[str, Any], ExitStack], Opened]] = {
    "fit": _fit,
    "compile": _compile,
    "backend": _backend,
    "eager": _eager,
    "accumulation": _accumulation,
    "side stream": _side_stream,
    "sizes": _sizes,
}
"""Opens a door for a step within a budget; what is entered inside is left in the end."""
