"""One planned step, measured whole: its prediction, what it held, how long it took, whether the bits are eager's."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from _measure import all_same, differences, outcome, resident_bytes, same_bits, usage_of
from _record import interleaved_ratio

from memfit import PlannedStep, TrainingStep
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError, TimeLimitError
from memfit.planning import Settings
from memfit.system.recorder import allocated_bytes
from memfit.torch_private.cuda import release_cublas_workspaces
from memfit.workloads import build

NO_BUDGET_BYTES = 1 << 60  # for planner `none`, which needs what it needs
EAGER_REPEATS = 3  # where bits differ, to see which of them eager repeats
WITH_ATTENTION = ("gpt2", "encoder")  # whose kernels give the same bits twice only if they have to
CUBLAS_WORKSPACE = ":4096:8"  # what torch asks for where cuBLAS has to give the same bits twice


def measure_planned(workload: str, options: dict[str, Any], budget_bytes: int, **how: Any) -> dict[str, Any]:
    """Build a workload, fit it into a budget and measure it; `how` is the rest of `measure_at`."""
    return measure_at(build_for_measurement(workload, options), budget_bytes, **how)


def build_for_measurement(workload: str, options: dict[str, Any]) -> TrainingStep:
    """Return a workload, nothing of which escapes the recorder, on kernels that give the same bits twice."""
    device = torch.device(str(options.get("device", "cpu")))
    allocated_bytes(device)  # the CPU recorder counts from here on: before anything of the step is allocated
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=workload not in WITH_ATTENTION)
        # Which would be timed, too.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return build(workload, **options)


def measure_at(
    step: TrainingStep,
    budget_bytes: int,
    planner: str = "auto",
    time_limit_seconds: float = 5.0,
    repeats: int = 5,
) -> dict[str, Any]:
    """Fit a step into a budget and measure it; an infeasible budget is an answer too."""
    asked: dict[str, Any] = {"budget_bytes": budget_bytes, "planner": planner, "resident_bytes": resident_bytes(step)}
    settings = Settings(budget=budget_bytes, planner=planner, time_limit_seconds=time_limit_seconds)
    try:
        planned = fit_step(step, settings)
    except InfeasibleBudgetError as error:
        return asked | {
            "status": "infeasible",
            "least_budget_found_bytes": error.least_budget_found_bytes,
            "least_budget_bound_bytes": error.least_budget_bound_bytes,
        }
    except TimeLimitError as error:
        return asked | {"status": "timed_out", "why": str(error)}
    return asked | both(planned, repeats)


def both(planned: PlannedStep, repeats: int) -> dict[str, Any]:
    """What a planned step does, and what the plan that did it says: a first step may have had another one corrected."""
    measured = measurements(planned, repeats)
    return predictions(planned) | measured


def predictions(planned: PlannedStep) -> dict[str, Any]:
    """What the plan says of itself, and how long it took to make."""
    plan = planned.plan
    return {
        "status": str(plan.status),
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "predicted_overhead": plan.overhead,
        "predicted_seconds": plan.predicted.seconds,
        "unplanned_peak_bytes": plan.unplanned.peak_bytes,
        "least_budget_found_bytes": plan.bounds.least_budget_found_bytes,
        "least_budget_bound_bytes": plan.bounds.least_budget_bound_bytes,
        "overhead_bound": plan.bounds.overhead,
        "ops": len(planned.captured.graph.ops),
        "plan_seconds": plan.plan_seconds,
        **{f"{stage}_seconds": seconds for stage, seconds in planned.seconds.items() if stage != "plan"},
    }


def measurements(planned: PlannedStep, repeats: int) -> dict[str, Any]:
    """What a planned step does: its peak first, while nothing else of the benchmark is on the device.

    The peak is without `measured_library_bytes`: what cuBLAS keeps from step to step, 32 MiB on Hopper.
    """
    run, eager = planned_run(planned), eager_run(planned.step)
    device = planned.captured.binding.device
    let_go_of_libraries(device)  # of eager's, of another thread, and of earlier measurements
    run()  # the first step makes the optimizer's state and fills the kernels' caches
    let_go(device)
    usage = usage_of(run, planned.step, device)
    library_bytes = let_go_of_libraries(device)
    bits = bits_of(run, eager, planned.step)
    measured_bytes = usage.start_bytes + usage.peak_bytes - library_bytes
    return {
        "measured_peak_bytes": measured_bytes,
        "measured_library_bytes": library_bytes,
        "measured_above_start_bytes": usage.peak_bytes,
        "measured_reserved_bytes": usage.reserved_bytes,
        "measured_by": usage.source,
        "within_budget": measured_bytes <= int(planned.settings.budget),  # as asked for; a correction aims at less
        "corrections": [str(correction) for correction in planned.corrections],
        "prediction_error": planned.plan.predicted.peak_bytes / measured_bytes - 1,
        **bits,
        **interleaved_ratio(run, eager, repeats, device=device).summary(),
    }


def bits_of(run: Callable[[], torch.Tensor], eager: Callable[[], torch.Tensor], step: TrainingStep) -> dict[str, Any]:
    """Compare a run with eager's bit by bit, all but `not_repeated`: what eager itself does not give twice.

    On CUDA some kernels add in whatever order their blocks end, and nll_loss2d, for one, has no other. `compared` are
    the gradients and the updated parameters, with those that are not repeated.
    """
    expected, found = outcome(eager, step), outcome(run, step)
    compared = sum(name.split()[0] in ("gradient", "parameter") for name in expected)
    bits = same_bits(found, expected) | {"compared": compared}
    if all_same(bits):
        return bits | {"not_repeated": []}
    loose = sorted({name for _ in range(EAGER_REPEATS) for name in differences(outcome(eager, step), expected)})
    return same_bits(found, expected, but=loose) | {"compared": compared, "not_repeated": loose}


def planned_run(planned: PlannedStep) -> Callable[[], torch.Tensor]:
    """zero_grad(set_to_none=True) and the planned step."""

    def run() -> torch.Tensor:
        planned.step.model.zero_grad(set_to_none=True)
        return planned(planned.step.batch)

    return run


def eager_run(step: TrainingStep) -> Callable[[], torch.Tensor]:
    """zero_grad(set_to_none=True) and the step as plain PyTorch runs it, optimizer included where there is one."""

    def run() -> torch.Tensor:
        step.model.zero_grad(set_to_none=True)
        return step.run_eager(step.batch)

    return run


def let_go(device: torch.device) -> None:
    """Give back what nobody holds any more, so that the next figure is not that of the last step."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def let_go_of_libraries(device: torch.device) -> int:
    """Give back what cuBLAS keeps on a CUDA device for its next call; return how many bytes these were."""
    if device.type != "cuda":
        return 0
    before_bytes = allocated_bytes(device)
    release_cublas_workspaces()
    return before_bytes - allocated_bytes(device)
