"""Every door to a planned step: ten steps, of which none may take more than the budget from the device.

`CASES` is row 1 of `make gpu`, at one budget each; `make test-cuda` runs them, and those beside them that need the GPU
that is not there, at three budgets.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from _gpu_driver import Driver
from _gpu_measure import Run, each_step, let_go, over, timed
from _gpu_models import lay_together, make_model
from _measure import MIB

import memfit
from memfit import TrainingStep
from memfit.torch_private.cuda import allocator_settings_text, release_cublas_workspaces

STEPS = 10
MICRO_BATCHES = 4
STEADY_FROM = 3  # the steps before it run on the current stream
SEARCH: dict[str, Any] = {"time_limit_seconds": 1.0}
# the same bytes on a busy machine
BY_ITERATIONS: dict[str, Any] = {"planner": "search", "options": {"iterations": 300}, "time_limit_seconds": 60.0}
USERS_SEGMENTS = "expandable_segments:True"
NO_OPTIMIZER = {"none": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One use of a door.

    Attributes:
        name: of the case.
        door: a key of `DOORS`.
        loop: a key of `LOOPS`.
        place: a key of `PLACES`; empty for the main thread and the current stream.
        share: of the bytes that eager reserves, which is the budget.
        percent: give the share itself as the budget, which is one of the peak of the step.
        model, options: see `make_model`.
        device: index of the GPU; the current one stays 0.
        optimizer: arguments of AdamW.
        scaler: whether a GradScaler guards the update.
        given: more arguments of the door.
        allocator: settings of torch's allocator that the user has made.
        cudnn_benchmark: let cuDNN try its engines.
        segments_fail: the driver maps no expandable segments, as under WSL2; only over the GPU that is not there.
        timed: compare the seconds with eager's.
        rehearsal: options of the model that replace others where nothing is computed.
    """

    name: str
    door: str = "fit"
    loop: str = "plain"
    place: str = ""
    share: float = 0.7
    percent: bool = False
    model: str = "mlp"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    device: int = 0
    optimizer: dict[str, Any] | None = None
    scaler: bool = False
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    allocator: str = ""
    cudnn_benchmark: bool = False
    segments_fail: bool = False
    timed: bool = False
    rehearsal: dict[str, Any] = field(default_factory=dict[str, Any])


GPT: dict[str, Any] = {"layers": 6, "width": 512, "tokens": 256, "batch": 8, "vocabulary": 8192}
CASES = (
    Case(name="fit"),
    Case(name="fit, hard", given={"hard": True}),
    Case(name="compile", door="compile"),
    Case(name="backend", door="backend"),
    Case(name="eager", door="eager"),
    Case(name="checkpoint", door="checkpoint", model="gpt2", options=GPT),
    Case(name="graph break", model="broken mlp", share=0.85),
    Case(name="graph break, compile", door="compile", model="broken mlp", share=0.85),
    Case(name="accumulation by percentage", loop="accumulation", percent=True, optimizer=NO_OPTIMIZER),
    Case(name="side streams", place="streams"),
    Case(name="fit, torch's allocator", given={"arena": False}),
    Case(name="fit, the user's expandable segments", allocator=USERS_SEGMENTS, given={"hard": True}),
    Case(name="compile, the user's expandable segments", door="compile", allocator=USERS_SEGMENTS),
    Case(name="fit, offloading", given={"planner": "offload", "host_budget": "1GiB"}),
    Case(name="fit, batches of three sizes", loop="sizes"),
    Case(name="fit, GradScaler", scaler=True),
    Case(name="fit, clipped, foreach", optimizer={"foreach": True}, given={"clip_norm": 1.0}),
)
"""The doors that are tried in row 1, the likeliest to break first."""


def measure_case(
    case: Case, *, steps: int = STEPS, rehearsal: bool = False, search: dict[str, Any] = SEARCH
) -> Iterator[dict[str, Any]]:
    """Yield what is known of a case after each stage: `budget_bytes`, `steps`, `failures` and more.

    Args:
        case: the case.
        steps: to run.
        rehearsal: at the sizes for a device that computes nothing.
        search: arguments of the door on how long it may search.
    """
    if case.allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = case.allocator  # where memfit reads it
        torch._C._accelerator_setAllocatorSettings(case.allocator)
    if case.device or case.segments_fail:
        Driver.of_this_process().become(devices=case.device + 1, segments_fail=case.segments_fail)
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    options = case.options | (case.rehearsal if rehearsal else {})
    step = make_model(case.model, options, optimizer=case.optimizer, device=case.device).step
    if case.scaler:
        step = replace(step, scaler=torch.amp.GradScaler("cuda", init_scale=2.0**10))
    found: dict[str, Any] = {"allocator": allocator_settings_text(), "failures": []}
    eager = LOOPS[case.loop](step, _passes(case, step, None))
    found |= {"eager_steps": each_step(eager, 3, case.device)}
    found |= {"eager_seconds": [timed(eager)[0] for _ in range(5)]} if case.timed else {}
    _forget(step, case.device)
    budget_bytes = int(case.share * max(each["reserved_bytes"] for each in found["eager_steps"]))
    before = torch.cuda.memory_stats(case.device)
    with ExitStack() as inside:
        budget = f"{case.share:.0%}" if case.percent else budget_bytes
        call, doors_bytes, end = DOORS[case.door](case, step, budget, search, inside)
        found |= {"budget_bytes": doors_bytes or budget_bytes}
        run = LOOPS[case.loop](step, call)
        run = PLACES[case.place](run) if case.place else run
        yield found
        found["steps"] = []
        for _ in range(steps):  # one by one: those before an error count, too
            found["steps"] += each_step(run, 1, case.device)
            if case.percent:  # of several variants, each has a share of its own peak
                found["budget_bytes"] = max(int(plan.budget_bytes) for plan in call.plans)
            found["failures"] = over(case.name, found["steps"], found["budget_bytes"])
            most = max(each["reserved_bytes"] for each in found["steps"])
            found["line"] = f"{most / MIB:,.0f} of {found['budget_bytes'] / MIB:,.0f} MiB"
            yield found
        found |= {"seconds": [timed(run)[0] for _ in range(5)]} if case.timed else {}
        found |= end()
    retries = torch.cuda.memory_stats(case.device)["num_alloc_retries"] - before["num_alloc_retries"]
    found["retries"] = retries
    found["failures"] += [f"{case.name}: {retries} retries of the allocator"] if retries else []
    if case.device:
        found["failures"] += [f"{case.name}: {each}" for each in Driver.of_this_process().made_beside(case.device)]
    yield found


def _forget(step: TrainingStep, device: int) -> None:
    """Leave no trace of eager's steps: a door begins where training begins."""
    step.model.zero_grad(set_to_none=True)
    if step.optimizer is not None:
        step.optimizer.state.clear()
    release_cublas_workspaces()
    let_go(device)
    lay_together(step.model)


Call = Callable[[Any], object]
"""Runs forward and backward of a batch, and the update of a step that has one."""


def _passes(case: Case, step: TrainingStep, model: Any) -> Call:
    """Batches in the user's own loop, which itself updates after several micro-batches."""
    part = replace(step, optimizer=None) if case.loop == "accumulation" else step
    return lambda batch: part.run_eager(batch, model=model)


def _plain(step: TrainingStep, call: Call) -> Run:
    def run() -> None:
        step.model.zero_grad(set_to_none=True)
        call(step.batch)

    return run


def _accumulating(step: TrainingStep, call: Call) -> Run:
    """Gradients of some micro-batches, and an update if the step has an optimizer."""

    def run() -> None:
        step.model.zero_grad(set_to_none=True)
        for _ in range(MICRO_BATCHES):
            call(step.batch)
        if step.optimizer is not None:
            step.update()

    return run


def _of_three_sizes(step: TrainingStep, call: Call) -> Run:
    """Batches of the given size, of half of it, and of three quarters, in turns."""
    rows, count = len(step.batch[0]), 0

    def run() -> None:
        nonlocal count
        size = (rows, rows // 2, 3 * rows // 4)[count % 3]
        count += 1
        step.model.zero_grad(set_to_none=True)
        call(tuple(part[:size] for part in step.batch))

    return run


LOOPS: dict[str, Callable[[TrainingStep, Call], Run]] = {
    "plain": _plain,
    "accumulation": _accumulating,
    "sizes": _of_three_sizes,
}


def _on_streams(run: Run) -> Run:
    """After some steps, each on a stream of its own."""
    count = 0

    def on_a_stream() -> None:
        nonlocal count
        count += 1
        if count <= STEADY_FROM:
            run()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)

    return on_a_stream


def _on_threads(run: Run) -> Run:
    """Each step on a thread of its own."""

    def on_a_thread() -> None:
        failed: list[BaseException] = []

        def body() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    return on_a_thread


PLACES: dict[str, Callable[[Run], Run]] = {"streams": _on_streams, "threads": _on_threads}

End = Callable[[], dict[str, Any]]
Opened = tuple[Call, int, End]
"""What runs a step; the budget in bytes, if it is another than was asked for; what tells of it in the end."""


def _fit(case: Case, step: TrainingStep, budget: int | str, search: dict[str, Any], inside: ExitStack) -> Opened:
    updates = {"optimizer": step.optimizer, "scaler": step.scaler}
    planned: Any = memfit.fit(step.model, step.loss, step.batch, budget=budget, **updates, **search | case.given)
    if isinstance(planned, memfit.PlannedStep):
        inside.callback(planned.wait_for_searches)  # no thread outlives the case
    return planned, int(planned.settings.budget), lambda: told(planned)


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


def _compile(case: Case, step: TrainingStep, budget: int | str, search: dict[str, Any], _inside: ExitStack) -> Opened:
    compiled = memfit.compile(step.model, budget=budget, optimizer=step.optimizer, **search | case.given)
    return _passes(case, step, compiled), 0, dict


def _backend(case: Case, step: TrainingStep, budget: int | str, search: dict[str, Any], _inside: ExitStack) -> Opened:
    from memfit.dynamo.lookup import memfit_backend

    options = {"budget": budget} | search | case.given
    return _passes(case, step, torch.compile(step.model, backend=memfit_backend, options=options)), 0, dict


def _eager(case: Case, step: TrainingStep, budget: int | str, _search: dict[str, Any], inside: ExitStack) -> Opened:
    inside.enter_context(memfit.eager(step.model, budget=budget, **case.given))
    return _passes(case, step, None), 0, dict


def _checkpoint(
    case: Case, step: TrainingStep, budget: int | str, _search: dict[str, Any], inside: ExitStack
) -> Opened:
    inside.enter_context(memfit.checkpoint(step.model, budget, budget_is="soft", **case.given))
    return _passes(case, step, None), 0, dict


DOORS: dict[str, Callable[[Case, TrainingStep, int | str, dict[str, Any], ExitStack], Opened]] = {
    "fit": _fit,
    "compile": _compile,
    "backend": _backend,
    "eager": _eager,
    "checkpoint": _checkpoint,
}
"""Opens a door for a step within a budget; what is entered inside is left in the end."""
