"""One case of gpu.py, in a process of its own: what ten steps took, whether bits are eager's, seconds beside eager.

A case on Inductor's kernels has Inductor without a plan in the place of eager, and how far its gradients are off.

python benchmarks/gpu_case.py "gpt2 bf16, fused, arena, capped" --dry
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from _gpu_cases import CASES, RIVALS, Case
from _measure import outcome
from _measure import resident_bytes as bytes_before
from _planned import bits_of, build_for_measurement, eager_run, let_go, let_go_of_libraries, predictions
from _process import answer_if_child
from _record import interleaved_ratio
from torch_baselines import baseline

from memfit import PlannedStep, TrainingStep
from memfit.planning import Settings
from memfit.runtime.compile.race import RUNS
from memfit.runtime.fitting import fit_step
from memfit.runtime.measure import resident_bytes
from memfit.runtime.verify import comparable_engines
from memfit.system.recorder import record
from memfit.torch_private.cuda import allocator_settings_text

STEPS = 10
MICRO_BATCHES = 4
REPEATS = 3
TIME_LIMIT_SECONDS = 2.0
DRY_HOST_BYTES = 1 << 26

Run = Callable[[], object]


def measure_case(case: dict[str, Any], *, dry: bool) -> Iterator[dict[str, Any]]:
    """Yield what is known of a case after each stage; a process that is cut off has given what it had.

    Args:
        case: the fields of a Case.
        dry: on a CPU, at small sizes.
    """
    asked = Case(**case)
    device = torch.device("cpu" if dry else "cuda")
    step = built(asked, device, dry=dry)
    torch.backends.cudnn.benchmark = asked.cudnn_benchmark
    torch.backends.cudnn.deterministic = not asked.cudnn_benchmark
    found: dict[str, Any] = {"allocator": "" if dry else allocator_settings_text()}
    if asked.how in RIVALS or asked.how == "backend":
        yield from _measured_run(found, asked, step, device)
        return
    if asked.how == "inductor":
        yield from _beside_inductor(found, asked, step, device)
        return
    planned = fit_step(step, settings_of(asked, dry=dry))
    assert isinstance(planned, PlannedStep)
    found |= predictions(planned) | {"budget_bytes": int(planned.settings.budget)}
    found |= {"served_by": str(planned.memory), "placed_bytes": planned._first.predicted_bytes}  # pyright: ignore
    yield found
    run = accumulating(planned) if asked.how == "accumulate" else lambda: planned(step.batch)

    def residents() -> int:
        return resident_bytes(planned, step.batch) + planned.held_bytes

    found |= {"steps": ten_steps(run, device, residents), "corrections": [str(each) for each in planned.corrections]}
    yield found
    with comparable_engines():
        found |= bits_of(run, eager_of(asked, step), step)
    yield found
    found |= interleaved_ratio(run, eager_of(asked, step), REPEATS, device=device).summary()
    counts = planned.arena.last_step if planned.arena else None
    found |= {"statistics": statistics_of(device), "not_served": counts.not_served if counts else 0, "done": True}
    yield found


def built(case: Case, device: torch.device, *, dry: bool) -> TrainingStep:
    """Return the case's step, with AdamW, and a scaler if it has one."""
    options = dict(case.small if dry else case.options)
    if dry and options.get("autocast") == "fp16":
        options["autocast"] = "bf16"  # which a CPU computes in, too
    step = build_for_measurement(case.workload, {**options, "device": device.type})
    if case.how in ("accumulate", "inductor", *RIVALS):
        return step
    optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-4, **case.optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10) if case.how == "scaler" else None
    return TrainingStep(
        model=step.model, loss=step.loss, batch=step.batch, optimizer=optimizer, scaler=scaler, name=step.name
    )


def settings_of(case: Case, *, dry: bool) -> Settings:
    """Return how a case's step is planned; a dry run has no cap, and little to offload to."""
    host_bytes = min(case.host_bytes, DRY_HOST_BYTES) if dry else case.host_bytes
    return Settings(
        budget="100%" if dry else f"{case.share:.0%}",  # small steps are mostly residents
        planner="offload" if host_bytes else "auto",
        time_limit_seconds=TIME_LIMIT_SECONDS,
        host_budget_bytes=host_bytes,
        arena=case.arena,
        hard=case.hard and not dry,
        budget_is="firm" if not dry else "soft",
    )


def accumulating(planned: PlannedStep) -> Run:
    """Gradients of some micro-batches, added up."""

    def run() -> torch.Tensor:
        planned.step.model.zero_grad(set_to_none=True)
        return [planned(planned.step.batch) for _ in range(MICRO_BATCHES)][-1]

    return run


def eager_of(case: Case, step: TrainingStep) -> Run:
    """The same in eager PyTorch."""
    if case.how != "accumulate":
        return eager_run(step)

    def run() -> torch.Tensor:
        step.model.zero_grad(set_to_none=True)
        return [step.run_eager(step.batch) for _ in range(MICRO_BATCHES)][-1]

    return run


def ten_steps(run: Run, device: torch.device, residents: Callable[[], int]) -> list[dict[str, int]]:
    """What each of ten steps took, from the first on: all bytes that the process holds of the device, less its context.

    Nothing else is in the process; what cuBLAS keeps counts. On a CPU, whose allocator holds nothing back, what the
    step allocates counts, and `residents` beside it.
    """
    let_go(device)
    found: list[dict[str, int]] = []
    for _ in range(STEPS):
        there_bytes = residents()
        with record(device) as usage:
            run()
        taken = there_bytes + usage.peak_bytes if usage.reserved_bytes is None else usage.reserved_bytes
        found.append({"taken_bytes": taken, "allocated_bytes": usage.start_bytes + usage.peak_bytes})
    return found


def statistics_of(device: torch.device) -> dict[str, int]:
    """The allocator's counts of retries and of failures, of which there should be none."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: stats[name] for name in ("num_alloc_retries", "num_ooms", "num_device_alloc")}


def _measured_run(
    found: dict[str, Any], case: Case, step: TrainingStep, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield what a rival, or the backend of torch.compile, takes; the backend within a share of eager's peak."""
    eager = eager_run(step)
    if case.how != "backend":
        configurations: dict[str, dict[str, Any]] = {
            "eager": {"kind": "eager"},
            "checkpoint": {"kind": "checkpoint", "granularity": "block"},
            "torch_budget": {"kind": "budget", "budget": case.share},
        }
        run: Run = baseline(step, configurations[case.how])
        run()
    else:
        eager()
        let_go(device)
        with record(device) as usage:
            eager()
        share = 8.0 if device.type == "cpu" else case.share  # copies to compare with are on the same device there
        budget_bytes = int(share * (bytes_before(step) + usage.peak_bytes))
        found |= {"budget_bytes": budget_bytes}
        yield found
        assert step.optimizer is not None
        options = {"budget": budget_bytes, "time_limit_seconds": TIME_LIMIT_SECONDS, "reserve": 0}
        compiled = torch.compile(step.model, backend="memfit", options=options)

        def run() -> torch.Tensor:
            step.model.zero_grad(set_to_none=True)
            return step.run_eager(step.batch, model=compiled)  # type: ignore[arg-type]

        run()
    found |= {"steps": ten_steps(run, device, lambda: bytes_before(step))}
    yield found
    found |= bits_of(run, eager, step) if case.how == "backend" else {}
    found |= interleaved_ratio(run, eager, REPEATS, device=device).summary()
    found |= {"statistics": statistics_of(device), "done": True}
    yield found


def _beside_inductor(
    found: dict[str, Any], case: Case, step: TrainingStep, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield what memfit on Inductor's kernels takes within a share of what Inductor takes without a plan."""

    def run_of(compiled: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            step.model.zero_grad(set_to_none=True)
            return step.run_eager(step.batch, model=compiled)

        return run

    def residents() -> int:
        return bytes_before(step)

    alone = run_of(torch.compile(step.model))
    began = time.monotonic()
    alone()
    found |= {"inductor_compile_seconds": time.monotonic() - began}
    found |= {"inductor_steps": ten_steps(alone, device, residents)}
    share = 4.0 if device.type == "cpu" else case.share  # small steps are mostly residents
    budget_bytes = int(share * max(each["taken_bytes"] for each in found["inductor_steps"]))
    found |= {"budget_bytes": budget_bytes}
    yield found
    step.model.zero_grad(set_to_none=True)
    let_go_of_libraries(device)
    let_go(device)
    options = {"budget": budget_bytes, "time_limit_seconds": TIME_LIMIT_SECONDS, "reserve": 0, "kernels": "inductor"}
    run = run_of(torch.compile(step.model, backend="memfit", options=options))
    began = time.monotonic()
    for _ in range(2):  # it is planned once more where less is outside of the graph than was assumed
        run()
    found |= {"compile_seconds": time.monotonic() - began}
    found |= {"steps": ten_steps(run, device, residents)}
    yield found
    expected, mine = outcome(alone, step), outcome(run, step)
    errors = {
        name: float((mine[name] - value).norm() / value.norm().clamp_min(1e-30))
        for name, value in expected.items()
        if name.split()[0] in ("loss", "gradient")
    }
    worst = max(errors, key=errors.__getitem__)
    found |= {"compared": len(errors) - 1, "worst_error": errors[worst], "worst_name": worst}
    for _ in range(2 * RUNS):  # until the race is over
        run()
    found |= interleaved_ratio(run, alone, REPEATS, device=device).summary()
    found |= {"statistics": statistics_of(device), "done": True}
    yield found


def main() -> None:
    """Measure one case, and print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("--dry", action="store_true", help="on a CPU, at small sizes")
    options = parser.parse_args()
    (case,) = [case for case in CASES if case.name == options.case]
    *_, found = measure_case(asdict(case), dry=options.dry)
    print(json.dumps(found, indent=1))


if __name__ == "__main__" and not answer_if_child(measure_case):
    main()
