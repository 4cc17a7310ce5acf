"""What the loop of a planned step costs an op: eager's step, the planned one and its bare kernels, in turns.

Counted are the processor seconds of one thread, so that other processes disturb little. The columns:

    eager       plain PyTorch: forward, loss and backward
    planned     planner `none`, with all that a call does: guards, recorder, arguments, views, frees, gradients set
    overloads   the calls of the planned step in its order, by the operators' overloads, on tensors that are ready
    functions   the same by the functions that the planned step calls (`memfit.kernels.direct_calls`)

The last two columns keep no result, and their arguments all stay alive. Gradients are dropped between steps, which
counts for nobody. What the loop costs is `planned` less one of the last two.

    python benchmarks/loop_cost.py
    python benchmarks/loop_cost.py lstm --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from _planned import NO_BUDGET_BYTES, build_for_measurement
from _record import store

from memfit import PlannedStep
from memfit.binding import Call, Value, map_values
from memfit.capture.fuse import Fused, calls_of
from memfit.capture.generators import SaveGeneratorState
from memfit.doors.step import fit_step
from memfit.kernels.direct_calls import DirectCalls
from memfit.planning import Settings
from memfit.schedule import Compute
from memfit.torch_private.tensors import tree_flatten

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # short kernels, so that the loop shows; the LSTM also as it is
    "lstm": ("lstm", {}),
    "lstm-small": ("lstm", {"batch": 1, "width": 8}),
    "gpt2-small": ("gpt2", {"batch": 1, "tokens": 32, "width": 64, "vocabulary": 1000}),
    "resnet50-small": ("resnet50", {"batch": 2, "size": 32}),
}
REPEATS = 21
Ready = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def ready_calls(planned: PlannedStep) -> tuple[list[Ready], list[Ready]]:
    """Run a step once; return its calls with their tensors, by overloads and by the functions of the planned step."""
    captured, program = planned.captured, planned._programs.first
    leaves, (half,) = tree_flatten(planned.step.batch)[0], program.prepared.program.halves
    tensors = {s: fetch(leaves) for s, fetch in zip(half.takes, program.fetchers, strict=True)}
    direct_calls = DirectCalls()
    overloads: list[Ready] = []
    functions: list[Ready] = []
    with torch.no_grad():
        for instruction in (each for each in planned.plan.schedule if isinstance(each, Compute)):
            for call in _as_run(captured.binding.calls[instruction.op], instruction.in_place_of):
                args, kwargs = map_values((call.args, call.kwargs), lambda value: _tensor(tensors, value))
                returned = call.target(*args, **kwargs)
                overloads.append((call.target, args, kwargs))
                functions.append((direct_calls.find(call.target, call.args, call.kwargs), args, kwargs))
                for value, result in zip(call.results, tree_flatten(returned)[0], strict=False):
                    if value is not None:
                        tensors.setdefault(value.storage, result)
    return overloads, functions


def _as_run(call: Call, over: int | None) -> Sequence[Call]:
    if isinstance(call.target, SaveGeneratorState):
        return []  # nothing is recomputed
    if isinstance(call.target, Fused):
        return calls_of(call)
    if over is None:
        return [call]
    form = call.in_place_forms[over]
    return [replace(call, target=form.target, kwargs={**call.kwargs, **form.extra})]


def _tensor(tensors: dict[int, torch.Tensor], value: Value) -> torch.Tensor:
    base = tensors[value.storage]
    same = (base.dtype, tuple(base.shape), base.stride(), base.storage_offset()) == (
        value.dtype,
        value.shape,
        value.stride,
        value.offset,
    )
    return base if same else value.on(base)


def replay(calls: Sequence[Ready]) -> Callable[[], None]:
    """Return what makes the calls one after the other, and drops their results."""

    @torch.no_grad()
    def run() -> None:
        for function, args, kwargs in calls:
            function(*args, **kwargs)

    return run


def measure(case: str, repeats: int) -> dict[str, Any]:
    """Return the median processor microseconds an op of each column, over turns in both orders."""
    workload, options = CASES[case]
    step = build_for_measurement(workload, options)
    planned = fit_step(step, Settings(budget=NO_BUDGET_BYTES, planner="none"))
    assert isinstance(planned, PlannedStep)
    planned.verify()
    overloads, functions = ready_calls(planned)
    runs = {
        "eager": lambda: step.run_eager(step.batch),
        "planned": lambda: planned(step.batch),
        "overloads": replay(overloads),
        "functions": replay(functions),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name in list(runs)[:: 1 if repeat % 2 else -1]:
            step.model.zero_grad(set_to_none=True)
            started = time.process_time()
            runs[name]()
            if repeat:
                seconds[name].append(time.process_time() - started)
    ops = len(planned.captured.graph.ops)
    ratio = statistics.median(p / e for p, e in zip(seconds["planned"], seconds["eager"], strict=True))
    microseconds = {name: statistics.median(each) / ops * 1e6 for name, each in seconds.items()}
    return {"options": options, "ops": ops, "repeats": repeats, "time_ratio": ratio, "microseconds": microseconds}


def main() -> None:
    """Measure the cases named on the command line, or all; print and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns that count (%(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for case in asked.cases:
        found = measure(case, asked.repeats)
        columns = ", ".join(f"{name} {each:.2f}" for name, each in found["microseconds"].items())
        print(f"{case:15} {found['ops']:5} ops; us an op: {columns}; {found['time_ratio']:.3f} of eager", flush=True)
        store(f"loop_cost/{case}", found)


if __name__ == "__main__":
    main()
