"""Bytes that plans take from a GPU beyond their live bytes: the eight workloads at GPU sizes, nothing allocated.

For half of the unplanned peak, for the least peak that was found, and for the step as it stands: the planned peak, the
height of an arena, and what torch's allocator reserves by the model of it (`memfit.simulate.reserved`), with expandable
segments and without, over three steps. Then plans whose reserved bytes are within the half themselves, in each of the
three modes, and their cost. Residents are in all figures. Seconds of ops are from a roofline of an H100; workspaces of
libraries are left out, since a capture does not know them. Nothing depends on this machine but the planner's time.

    python benchmarks/cuda_reserved.py
    python benchmarks/cuda_reserved.py resnet50 gpt2 --save /tmp/plans   # plans for `cuda_allocator.py --plans`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _measure import EIGHT, MIB
from _record import result_path, store

from memfit.capture import capture
from memfit.compile_ahead import compile_ahead
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import roofline
from memfit.device import Device
from memfit.errors import NoPlanError
from memfit.graph import Graph
from memfit.memory.fit_by import Sizes, fit_by
from memfit.memory.placed_plans import MOST_PLANS
from memfit.packing import PackingProblem, make_packer
from memfit.packing.from_schedule import blocks_of
from memfit.plan import Plan
from memfit.planning import Settings, make_plan
from memfit.schedule import Schedule
from memfit.simulate.cuda_allocator import AllocatorSettings
from memfit.simulate.reserved import reserved
from memfit.workloads import OptionValue, build

SIZES: dict[str, dict[str, OptionValue]] = {
    **{name: {"batch": 128} for name in EIGHT},
    "unet": {"batch": 8, "size": 512, "width": 64},
    "gpt2": {"batch": 16, "layers": 12, "width": 768, "tokens": 1024},
}
MODES = ("arena", "expandable", "default")
PACKING_SECONDS = 5.0


def taken_bytes(mode: str, graph: Graph, schedule: Schedule, device: Device) -> int:
    """Return what a schedule takes from the device in a mode, residents included."""
    if mode != "arena":
        return reserved(graph, schedule, _settings(mode, device)).peak_bytes
    step = blocks_of(graph, schedule, device)
    layout = make_packer("auto").pack(PackingProblem(blocks=step.blocks, time_limit_seconds=PACKING_SECONDS))
    residents = sum(device.aligned(storage.bytes) for storage in graph.storages if storage.resident)
    return residents + layout.height_bytes + int(step.outside_bytes.max(initial=0))


def plan_within(mode: str, half: Plan, settings: Settings) -> dict[str, Any]:
    """Plan for less until what the mode takes is within the budget of `half`; return the figures of what was found."""
    graph, device = half.graph, half.device

    def make(aim_bytes: int) -> Plan:
        return half if aim_bytes == half.budget_bytes else make_plan(graph, device, settings.within(aim_bytes))

    def sizes_of(plan: Plan) -> Sizes:
        return Sizes(
            planned_bytes=min(plan.budget_bytes, plan.predicted.peak_bytes),
            taken_bytes=taken_bytes(mode, graph, plan.schedule, device),
            budget_bytes=half.budget_bytes,
        )

    placed = fit_by(make, sizes_of, half.budget_bytes, most_plans=MOST_PLANS)
    plan = placed.made
    found = {"taken_bytes": placed.sizes.taken_bytes, "overhead": plan.overhead, "aim_bytes": plan.budget_bytes}
    return {**found, "plans": placed.plans} if placed.fits else {**found, "error": f"above after {MOST_PLANS} plans"}


def figures(plan: Plan) -> dict[str, Any]:
    """Return what a plan takes in each mode, and whether torch's allocator can run it under a cap of its budget."""
    graph, schedule, device = plan.graph, plan.schedule, plan.device
    cap_bytes = max(plan.budget_bytes, plan.predicted.peak_bytes)
    capped = {
        mode: reserved(graph, schedule, _settings(mode, device, allowed_bytes=cap_bytes))
        for mode in MODES
        if mode != "arena"
    }
    return {
        "peak_bytes": plan.predicted.peak_bytes,
        "overhead": plan.overhead,
        **{f"{mode}_bytes": taken_bytes(mode, graph, schedule, device) for mode in MODES},
        "runs_under_cap": {mode: not found.is_refused for mode, found in capped.items()},
    }


def _settings(mode: str, device: Device, allowed_bytes: int | None = None) -> AllocatorSettings:
    return AllocatorSettings(
        expandable_segments=mode == "expandable", capacity_bytes=device.memory_bytes, allowed_bytes=allowed_bytes
    )


def workload(name: str, seconds: float, save: Callable[[str, Plan], None]) -> dict[str, Any]:
    """Capture one workload at its size, plan it, and return its figures."""
    device = load_device("h100")
    captured = capture(build(name, **SIZES[name]))
    graph = roofline(captured.graph, captured.binding, device)
    settings = Settings(budget="50%", time_limit_seconds=seconds, reads_kept_plans=False)
    whole = make_plan(graph, device, Settings(budget="100%", planner="none"))
    try:
        least = make_plan(graph, device, settings.within(1))
    except NoPlanError as error:
        assert error.least_budget_found_bytes is not None
        least = make_plan(graph, device, settings.within(error.least_budget_found_bytes))
    budget_bytes = max(whole.predicted.peak_bytes // 2, least.predicted.peak_bytes)  # vgg16's gradients are above half
    half = make_plan(graph, device, settings.within(budget_bytes))
    plans = {"unplanned": whole, "half": half, "least": least}
    points: dict[str, Any] = {}
    for kind, plan in plans.items():
        save(f"{name}-{kind}", plan)
        points[kind] = figures(plan)
        print(f"{name:12} {kind:10} {described(points[kind])}", flush=True)
    within = {mode: plan_within(mode, half, settings) for mode in MODES}
    prices = ", ".join(f"{mode} {each['overhead']:.2%}{' over' * ('error' in each)}" for mode, each in within.items())
    print(f"{name:12} within     {prices}", flush=True)
    return {
        "options": SIZES[name],
        "ops": len(graph.ops),
        "seconds": seconds,
        "budget_bytes": budget_bytes,
        **points,
        "within": within,
    }


def described(point: dict[str, Any]) -> str:
    """One line of a schedule's figures for the terminal."""
    shares = ", ".join(f"{mode} {point[f'{mode}_bytes'] / point['peak_bytes'] - 1:+.2%}" for mode in MODES)
    text = f"peak {point['peak_bytes'] / MIB:.0f} MiB, overhead {point['overhead']:.2%}, {shares}"
    return f"{text}, under cap {point['runs_under_cap']}"


def main() -> None:
    """Plan what is not stored yet; print and store each workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("workloads", nargs="*", default=EIGHT, help="default: all eight")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each plan")
    parser.add_argument("--again", action="store_true", help="also what is stored already")
    parser.add_argument("--save", type=Path, help="folder for the plans")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    options = parser.parse_args()

    def save(name: str, plan: Plan) -> None:
        if options.save is not None:
            options.save.mkdir(parents=True, exist_ok=True)
            plan.save(options.save / f"{name}.plan.json.gz")

    compile_ahead()
    for name in options.workloads:
        path = f"cuda_reserved/{name}"
        if options.again or options.dry_run or not result_path(path).exists():
            found = workload(name, options.seconds, save)
            if not options.dry_run:
                store(path, found)


if __name__ == "__main__":
    main()
