"""What torch offers today: eager, `activation_memory_budget` from 1.0 to 0.0, and checkpoints placed by hand.

Memory is the peak above parameters, buffers and inputs in zero_grad(set_to_none=True) + forward + loss + backward. Time
is against eager, run in turns in the same process. One process for each configuration. Each result is stored as soon as
it is there, and kept unless `--again` is given. Bytes and bits are the same on a busy machine, times are not: there,
`--untimed` leaves them out, and a later run without it measures those points again.

    python benchmarks/torch_baselines.py                      # all eight workloads: an hour on two cores
    python benchmarks/torch_baselines.py densenet121 lstm --untimed
    python benchmarks/torch_baselines.py resnet50 --repeats 3 --budgets 0.9 0.5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _measure import EIGHT, MIB, forward_backward, outcome, resident_bytes, same_bits, storage_bytes, usage_of
from _process import answer_if_child, in_fresh_process
from _record import interleaved_ratio, load, result_path, store

from memfit import TrainingStep
from memfit.torch_private.dynamo import compile_with_budget
from memfit.workloads import build
from memfit.workloads.building import GRANULARITIES, checkpoints_placed

BUDGETS = tuple(round(1 - tenth / 10, 1) for tenth in range(11))
BASELINE_KINDS = ("budget", "checkpoint")
SOLVER = "dp"  # torch's default for its activation memory budget
CHILD_SECONDS = 900  # compiling the unrolled lstm takes torch minutes


def configurations(budgets: Sequence[float] = BUDGETS) -> list[dict[str, Any]]:
    """Every configuration that a workload is measured in."""
    return [
        {"kind": "eager"},
        *({"kind": "budget", "budget": budget} for budget in budgets),
        *({"kind": "checkpoint", "granularity": granularity} for granularity in GRANULARITIES),
    ]


def baseline(step: TrainingStep, configuration: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Return the run (forward, loss, backward) of `step` under a configuration."""
    if configuration["kind"] == "checkpoint":

        def run_with_checkpoints() -> torch.Tensor:
            with checkpoints_placed(step, configuration["granularity"]):
                return forward_backward(step)

        return run_with_checkpoints
    if configuration["kind"] == "budget":
        compiled = compile_with_budget(step.model, configuration["budget"], SOLVER)
        return lambda: forward_backward(step, compiled)
    return lambda: forward_backward(step)


def measure(workload: str, configuration: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Measure one configuration of one workload, untimed where `repeats` is 0; called in a process of its own."""
    step = build(workload)
    expected = outcome(lambda: forward_backward(step), step)
    run = baseline(step, configuration)
    start = time.perf_counter()
    found = outcome(run, step)
    first_seconds = time.perf_counter() - start
    usage = usage_of(run, step)
    times = interleaved_ratio(run, lambda: forward_backward(step), repeats).summary() if repeats else {}
    return {
        **configuration,
        "peak_bytes": usage.peak_bytes,
        "peak_source": usage.source,
        "resident_bytes": resident_bytes(step),
        "gradient_bytes": storage_bytes(parameter for parameter in step.model.parameters() if parameter.requires_grad),
        **({"first_step_seconds": first_seconds} if repeats else {}),
        **same_bits(found, expected),
        **times,
    }


def measure_workload(workload: str, budgets: Sequence[float], repeats: int, *, again: bool) -> None:
    """Measure the configurations of a workload that are not stored yet; print and store each as it comes."""
    name = f"torch_baselines/{workload}"
    stored = [] if again or not result_path(name).exists() else load(result_path(name))["payload"]["points"]
    points = {
        _what(point): point for point in stored if "peak_bytes" in point and (not repeats or "time_ratio" in point)
    }
    for configuration in configurations(budgets):
        if _what(configuration) not in points:
            request = {"workload": workload, "configuration": configuration, "repeats": repeats}
            point = configuration | in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
            points[_what(configuration)] = point
            store(name, {"workload": workload, "points": list(points.values())})
        print(f"{workload:12} {_described(points[_what(configuration)])}", flush=True)


def best(points: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The point of `kind` with the least memory among those with eager's gradients; None if there is none."""
    usable = [point for point in points if point["kind"] == kind and point.get("gradient_same_bits")]
    return min(usable, key=lambda point: (point["peak_bytes"], point.get("time_ratio", 0.0)), default=None)


def _what(point: dict[str, Any]) -> str:
    return " ".join([point["kind"], *(str(point[key]) for key in ("budget", "granularity") if key in point)])


def _described(point: dict[str, Any]) -> str:
    if "error" in point:
        return f"{_what(point):20} {point['error']}"
    differing = point["first_difference"]
    bits = "same bits" if differing is None else f"differs first in {differing}"
    time = f"{point['time_ratio']:6.3f} of eager's time" if "time_ratio" in point else "untimed"
    return f"{_what(point):20} {point['peak_bytes'] / MIB:8.1f} MiB {time}, {bits}"


def main() -> None:
    """Measure the workloads named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(EIGHT), metavar="WORKLOAD")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, help="activation_memory_budget settings")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of steps for each configuration")
    parser.add_argument("--untimed", action="store_true", help="bytes and bits only: for a busy machine")
    parser.add_argument("--again", action="store_true", help="measure again what is stored already")
    options = parser.parse_args()
    for workload in options.workloads:
        repeats = 0 if options.untimed else options.repeats
        measure_workload(workload, options.budgets, repeats, again=options.again)


if __name__ == "__main__" and not answer_if_child(measure):
    main()
