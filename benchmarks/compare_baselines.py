"""memfit beside what torch offers, in the same run: at the memory of the baselines' best points, and at its own least.

For each workload, the best point of `activation_memory_budget` and of hand-placed checkpoints (least memory among
those with eager's gradients, as `torch_baselines.py` stored them) is measured again, and memfit is given the memory
that it took: eager, the baseline and memfit run in turns. Then memfit's least memory beside planner `sublinear`'s,
what planner `none` costs, and for VGG-16 the whole step with SGD, whose peak has to fall below parameters plus
gradients. Memory is counted above what is resident (parameters, buffers, inputs) wherever it is not said to be the
whole. Each result is stored as soon as it is there, and kept unless `--again` is given.

    python benchmarks/compare_baselines.py
    python benchmarks/compare_baselines.py resnet50 --repeats 3
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import torch
from _measure import EIGHT, MIB, outcome, resident_bytes, same_bits, storage_bytes, usage_of
from _planned import NO_BUDGET_BYTES, both, eager_run, measure_planned, measurements, planned_run, predictions
from _process import answer_if_child, fresh_cache, in_fresh_process
from _record import interleaved_seconds, load, result_path, store
from torch_baselines import BASELINE_KINDS, baseline, best

from memfit import PlannedStep, TrainingStep
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError, MemfitError
from memfit.planning import DEFAULT_PLANNER, Settings
from memfit.system.recorder import allocated_bytes
from memfit.workloads import build

CHILD_SECONDS = 900

# Peaks of torch's budget and of checkpoints at every block, and a goal below both.
TARGETS_MIB = {"resnet50": (439, 286, 255)}
WHOLE_STEP = "vgg16"  # three quarters of its peak are gradients, which only an update at once can let go of
LEARNING_RATE = 1e-3


def against(workload: str, configuration: dict[str, Any], time_limit_seconds: float, repeats: int) -> dict[str, Any]:
    """Measure a baseline, give memfit the memory that it took, and time eager, the baseline and memfit in turns."""
    allocated_bytes("cpu")
    step = build(workload)
    run_baseline = baseline(step, configuration)
    run_baseline()
    baseline_bytes = usage_of(run_baseline, step).peak_bytes
    step.model.zero_grad(set_to_none=True)
    budget_bytes = resident_bytes(step) + baseline_bytes
    asked = {"baseline": configuration, "baseline_bytes": baseline_bytes, "budget_bytes": budget_bytes}
    try:
        planned = fit_step(step, Settings(budget=budget_bytes, time_limit_seconds=time_limit_seconds))
    except InfeasibleBudgetError as error:
        return asked | {"status": "infeasible", "least_budget_found_bytes": error.least_budget_found_bytes}
    run, eager = planned_run(planned), eager_run(step)
    run()
    memfit_bytes, eager_bytes = usage_of(run, step).peak_bytes, usage_of(eager, step).peak_bytes
    bits = same_bits(outcome(run, step), outcome(eager, step))
    eager_seconds, baseline_seconds, memfit_seconds = interleaved_seconds([eager, run_baseline, run], repeats)
    return {
        **asked,
        "eager_bytes": eager_bytes,
        "memfit_bytes": memfit_bytes,
        "baseline_time_ratio": _ratio(baseline_seconds, eager_seconds),
        "memfit_time_ratio": _ratio(memfit_seconds, eager_seconds),
        "memfit_over_baseline": _ratio(memfit_seconds, baseline_seconds),
        "eager_seconds": min(eager_seconds),
        "repeats": repeats,
        **bits,
        **predictions(planned),
    }


def target(workload: str, above_resident_bytes: int, time_limit_seconds: float, repeats: int) -> dict[str, Any]:
    """Measure memfit with so many bytes above what is resident."""
    budget_bytes = resident_bytes(build(workload)) + above_resident_bytes
    return measure_planned(workload, {}, budget_bytes, time_limit_seconds=time_limit_seconds, repeats=repeats)


def unplanned(workload: str, repeats: int, **_how: Any) -> dict[str, Any]:
    """Measure what planner `none` costs over eager."""
    return measure_planned(workload, {}, NO_BUDGET_BYTES, planner="none", repeats=repeats)


def least(workload: str, time_limit_seconds: float, repeats: int, planner: str = DEFAULT_PLANNER) -> dict[str, Any]:
    """Measure memfit at the least budget for which a planner finds a plan."""
    allocated_bytes("cpu")
    planned = fit_least(build(workload), time_limit_seconds, planner)
    above_resident_bytes = planned.plan.budget_bytes - resident_bytes(planned.step)
    return {
        "budget_bytes": planned.plan.budget_bytes,
        "above_resident_bytes": above_resident_bytes,
        **both(planned, repeats),
    }


def whole_step(workload: str, time_limit_seconds: float, repeats: int) -> dict[str, Any]:
    """Measure forward, loss, backward and SGD's update as one step, at the least budget for which there is a plan."""
    allocated_bytes("cpu")
    step = build(workload)
    parameters = list(step.model.parameters())
    step = dataclasses.replace(step, optimizer=torch.optim.SGD(parameters, lr=LEARNING_RATE))
    planned = fit_least(step, time_limit_seconds, DEFAULT_PLANNER)
    measured = measurements(planned, repeats)
    both_bytes = 2 * storage_bytes(parameters)
    return {
        "budget_bytes": planned.plan.budget_bytes,
        "parameters_and_gradients_bytes": both_bytes,
        "below_parameters_and_gradients": measured["measured_peak_bytes"] < both_bytes,
        **predictions(planned),
        **measured,
    }


def fit_least(step: TrainingStep, time_limit_seconds: float, planner: str) -> PlannedStep:
    """Return the step at the least budget that a planner reaches."""

    def fitted(budget_bytes: int) -> PlannedStep:
        return fit_step(step, Settings(budget=budget_bytes, planner=planner, time_limit_seconds=time_limit_seconds))

    try:
        return fitted(resident_bytes(step) + 1)
    except InfeasibleBudgetError as error:
        if error.least_budget_found_bytes is None:
            raise
        least_bytes = error.least_budget_found_bytes
    return fitted(least_bytes)


MEASURES = {each.__name__: each for each in (against, target, unplanned, least, whole_step)}


def measure(what: str, **request: Any) -> dict[str, Any]:
    """Answer one request; called in a process of its own."""
    return MEASURES[what](**request)


def requests(workload: str) -> dict[str, dict[str, Any]]:
    """Return what is measured of a workload, by the name that it is stored under.

    Raises:
        MemfitError: `torch_baselines.py` has not stored the workload's points yet.
    """
    path = result_path(f"torch_baselines/{workload}")
    if not path.exists():
        raise MemfitError(f"{path} is not there; run benchmarks/torch_baselines.py {workload} first")
    points = load(path)["payload"]["points"]
    bests = {kind: best(points, kind) for kind in BASELINE_KINDS}
    wanted: dict[str, dict[str, Any]] = {"unplanned": {"what": "unplanned"}}
    for kind, point in bests.items():
        if point is not None:
            configuration = {key: point[key] for key in ("kind", "budget", "granularity") if key in point}
            wanted[f"against {kind}"] = {"what": "against", "configuration": configuration}
    for mib in TARGETS_MIB.get(workload, ()):
        wanted[f"{mib} MiB"] = {"what": "target", "above_resident_bytes": mib * MIB}
    wanted["least"] = {"what": "least"}
    wanted["least sublinear"] = {"what": "least", "planner": "sublinear"}
    if workload == WHOLE_STEP:
        wanted["whole step"] = {"what": "whole_step"}
    return wanted


def compare(workload: str, options: argparse.Namespace) -> None:
    """Measure what is not stored yet of a workload; print and store each result as it comes."""
    name = f"compare_baselines/{workload}"
    stored = {} if options.again or not result_path(name).exists() else load(result_path(name))["payload"]["results"]
    results = {what: result for what, result in stored.items() if "error" not in result}
    for what, request in requests(workload).items():
        if what not in results or what == options.only:
            request |= {"workload": workload, "time_limit_seconds": options.time_limit, "repeats": options.repeats}
            results[what] = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
            store(name, {"workload": workload, "results": results})
        print(f"{workload:12} {what:20} {described(results[what])}", flush=True)


def described(result: dict[str, Any]) -> str:
    """One line of a result for the terminal."""
    if "error" in result:
        return result["error"]
    if "baseline_bytes" in result and "memfit_bytes" in result:
        return (
            f"baseline {result['baseline_bytes'] / MIB:.1f} MiB, {result['baseline_time_ratio']:.3f} of eager's time; "
            f"memfit {result['memfit_bytes'] / MIB:.1f} MiB, {result['memfit_time_ratio']:.3f}; {_bits(result)}"
        )
    if "measured_above_start_bytes" in result:
        return (
            f"{result['measured_above_start_bytes'] / MIB:.1f} MiB (whole {result['measured_peak_bytes'] / MIB:.1f}), "
            f"{result['time_ratio']:.3f} of eager's time; {_bits(result)}"
        )
    return result["status"]


def _bits(result: dict[str, Any]) -> str:
    differing = result["first_difference"]
    return "same bits" if differing is None else f"differs first in {differing}"


def _ratio(ours: tuple[float, ...], theirs: tuple[float, ...]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def main() -> None:
    """Compare the workloads named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(EIGHT), metavar="WORKLOAD")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each comparison")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds that the planner may search")
    parser.add_argument("--again", action="store_true", help="measure again what is stored already")
    parser.add_argument("--only", metavar="WHAT", help="measure again this result of what is stored: 'least sublinear'")
    options = parser.parse_args()
    for workload in options.workloads:
        with fresh_cache():
            compare(workload, options)


if __name__ == "__main__" and not answer_if_child(measure):
    main()
