"""Planned steps of the workloads on a CUDA device that is not here: an arena, copies to the host, corrections.

    python tests/fake_workloads.py FOLDER resnet50 gpt2

FOLDER has the libraries of `fake_device.build_fakes`. Prints one line of JSON for each workload.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import TYPE_CHECKING, Any

import torch
from fake_device import start_with_tensors

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.step.planned_step import PlannedStep

STEPS_BEFORE, STEPS_AFTER = 3, 4  # the first three make the optimizer's state, and are recorded by the arena
MORE_BYTES = 24 << 10  # that later steps take beside what was planned, as a library might


def planned_on_fake(step: TrainingStep) -> PlannedStep:
    """Plan a step by copies to the host, within little less than its peak."""
    from memfit.device import Device
    from memfit.doors.step import fit_step
    from memfit.errors import NoPlanError
    from memfit.planning import Settings
    from memfit.step.planned_step import PlannedStep

    device = Device(
        name="fake", alignment_bytes=512, to_host_bytes_per_second=4e8, to_device_bytes_per_second=4e8, source="a test"
    )
    settings = Settings(
        budget="97%",
        planner="offload",
        options={"iterations": 1000, "threads": 1},
        time_limit_seconds=60.0,
        host_budget_bytes=1 << 28,
        arena=True,
        device=device,
        budget_is="soft",  # an arena keeps what a step leaves beside its height
    )
    try:
        planned = fit_step(step, settings)
    except NoPlanError as error:  # most of its bytes are the largest parameter's update
        assert error.least_budget_found_bytes is not None
        planned = fit_step(step, settings.within(error.least_budget_found_bytes))
    assert isinstance(planned, PlannedStep)
    return planned


def run(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train a workload planned and eagerly, in turns; return what the planned steps did."""
    from memfit.memory.snapshot import StepState
    from memfit.step.programs import Programs
    from memfit.workloads import build

    step = build(name, optimizer="sgd" if name == "vgg16" else "adamw", **options)  # of VGG's 28 million parameters
    eager = copy.deepcopy(step)
    planned = planned_on_fake(step)
    before = planned.plan

    def step_both(seed: int) -> None:
        torch.manual_seed(seed)
        loss = planned(step.batch)
        torch.manual_seed(seed)
        assert torch.equal(loss, eager.run_eager(step.batch)), (name, seed)

    def compare() -> None:
        difference = StepState.take(eager).first_difference(StepState.take(step))
        assert difference is None, (name, difference)

    for seed in range(STEPS_BEFORE):
        step_both(seed)
    compare()
    run_lean = Programs.run
    spare_bytes = int(planned.settings.budget) - planned.plan.predicted.peak_bytes

    def hungry(*given: Any) -> Any:
        held = torch.empty(spare_bytes + MORE_BYTES, dtype=torch.uint8)
        result = run_lean(*given)
        del held
        return result

    Programs.run = hungry  # type: ignore[method-assign]
    for seed in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        step_both(seed)
    compare()
    assert planned.arena is not None
    return {
        "workload": name,
        "ops": len(before.graph.ops),
        "offloaded_bytes": [plan.offloaded_bytes for plan in (before, planned.plan)],
        "recomputed": len([line for line in planned.plan.schedule.lines() if line.startswith("compute")])
        - len(planned.plan.graph.ops),
        "corrections": len(planned.corrections),
        "served": planned.arena.last_step.served,
        "not_served": planned.arena.last_step.not_served,
    }


def main(folder: str, workloads: dict[str, dict[str, Any]]) -> None:
    """Run workloads, with small options, on the fake device of this process."""
    fake = start_with_tensors(folder)
    import fake_streams

    fake_streams.install()
    for name, options in workloads.items():
        found = run(name, options)
        found["late_copies"] = sum(stream.done for stream in fake_streams.made)
        assert all(stream.done == len(stream.copies) for stream in fake_streams.made), "a copy that nobody waited for"
        print(json.dumps(found), flush=True)
    assert fake.number("misplaced_frees").value == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
