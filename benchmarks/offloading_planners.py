"""dqn2020, Figure 5: overhead against memory reduction, for every planner that offloads and those that only recompute.

Steps of the paper's networks at its two image sizes, predicted for its machine (a GTX 1080 Ti on PCI Express 3.0) and
for an H100 by roofline, and for this CPU with its disk by its own measured ops. Each planner is asked for the same
budgets; planners that make single plans give these. Beside the overhead stands the share of the step in which compute
works (the paper compares GPU utilization). Points are stored as they come, and a run goes on where it stopped.

Of stochastic depth, one draw of the blocks that run stands for all.

Planner `dqn` trains one network for each workload and machine, with a budget drawn anew in each episode; each point
goes on from it.

    python benchmarks/offloading_planners.py                          # everything: hours
    python benchmarks/offloading_planners.py resnet50 --machines gtx1080ti --planners dqn auto
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from _record import load, result_path, store

from memfit.capture import Captured, capture, finish
from memfit.capture.row_chunks import COUNTS, RowChunks, in_row_chunks
from memfit.cost.calibration import linked_device
from memfit.cost.device_profiles import load_device
from memfit.cost.measurement import measure
from memfit.cost.rooflines import roofline
from memfit.device import Device
from memfit.graph import Graph
from memfit.plan import Prediction, Problem, Result
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.results import predict, unplanned_schedule
from memfit.simulate import simulate
from memfit.workloads import build

FOLDER = "offloading_planners"
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)  # of the way from the least budget that is proved to the unplanned peak
HOST_BUDGET_BYTES = 64 << 30
SECONDS = 5.0
TRAIN_SECONDS, GO_ON_SECONDS = 60.0, 10.0  # of planner dqn: one network, and from there each point
MACHINES = ("gtx1080ti", "h100", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A workload of the paper: its name in memfit, its options, and those that differ on a CPU."""

    name: str
    options: dict[str, Any]
    on_cpu: dict[str, Any]


WORKLOADS: dict[str, Network] = {
    "vgg16": Network(name="vgg16", options={"depth": 16, "batch": 64}, on_cpu={"batch": 4}),
    "vgg19": Network(name="vgg16", options={"depth": 19, "batch": 64}, on_cpu={"batch": 4}),
    "resnet50": Network(name="resnet50", options={"depth": 50, "batch": 64}, on_cpu={"batch": 8}),
    "resnet101": Network(name="resnet50", options={"depth": 101, "batch": 64}, on_cpu={"batch": 8}),
    "vgg16_cifar": Network(
        name="vgg16", options={"depth": 16, "size": 32, "classes": 10, "batch": 512}, on_cpu={"batch": 64}
    ),
    "resnet50_cifar": Network(
        name="resnet50", options={"depth": 50, "size": 32, "classes": 10, "batch": 512}, on_cpu={"batch": 64}
    ),
    "unet": Network(name="unet", options={"batch": 16}, on_cpu={"batch": 2}),
    "char_lstm": Network(name="char_lstm", options={"batch": 256}, on_cpu={"batch": 32}),
    "stochastic_depth": Network(name="stochastic_depth", options={"batch": 128, "draw": 1}, on_cpu={"batch": 16}),
    "kmeans": Network(name="kmeans", options={"points": 1_000_000}, on_cpu={"points": 200_000}),
}
# Planner -> (planner's name, options) of each of its curves; a planner without a curve of its own gives single plans.
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "sublinear": ("sublinear", {}),
    "vdnn_all": ("vdnn", {"policy": "all"}),
    "vdnn_conv": ("vdnn", {"policy": "conv"}),
    "tflms": ("tflms", {}),
    "superneurons_swap": ("superneurons", {"mode": "swap"}),
    "superneurons_recompute": ("superneurons", {"mode": "recompute"}),
    "superneurons_both": ("superneurons", {"mode": "both"}),
    "autoswap": ("autoswap", {}),
    "capuchin": ("capuchin", {}),
    "dqn": ("dqn", {}),
    "search": ("search", {}),
    "auto": ("auto", {}),
}


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A step on a machine: its graph with the seconds of its ops; of a function also with its ops in chunks of rows."""

    device: Device
    graphs: tuple[Graph, ...]

    @cached_property
    def unplanned(self) -> Prediction:
        """The step as it is."""
        problem = Problem(graph=self.graphs[0], device=self.device, budget_bytes=0)
        return predict(problem, unplanned_schedule(problem))

    @cached_property
    def least_bytes(self) -> int:
        """What no plan can go below."""
        problems = (Problem(graph=graph, device=self.device, budget_bytes=1) for graph in self.graphs)
        return min(least_budget_bound(problem)[0] for problem in problems)


def costed(network: Network, machine: str) -> Costed:
    """Return the step with the seconds of its ops."""
    is_cpu = machine == "cpu"
    device = linked_device("cpu", HOST_BUDGET_BYTES) if is_cpu else load_device(machine)
    step = build(network.name, **(network.options | network.on_cpu if is_cpu else network.options))
    captured = capture(step) if is_cpu or step.has_backward else finish(capture(step))
    chunked = () if step.has_backward else (in_row_chunks(captured, count) for count in COUNTS)
    forms = [captured, *(form for form in chunked if form is not None)]
    if is_cpu:
        finished = [finish(form) for form in forms]
        return Costed(device=device, graphs=tuple(measure(f.graph, f.binding, f.observed) for f in finished))
    whole = roofline(captured.graph, captured.binding, device)
    return Costed(device=device, graphs=(whole, *(in_chunks(whole, form, device) for form in forms[1:])))


def in_chunks(whole: Graph, form: Captured, device: Device) -> Graph:
    """Return a function in chunks of rows with rooflines: the chains' calls as in the whole, each with its launch."""
    graph = roofline(form.graph, form.binding, device)
    chains = {call.op: call.target for call in form.binding.calls if isinstance(call.target, RowChunks)}
    in_chains = sum(op.seconds for op in whole.ops) - sum(
        op.seconds for number, op in enumerate(graph.ops) if number not in chains
    )
    calls = {number: chain.count * len(chain.parts) for number, chain in chains.items()}
    ops = list(graph.ops)
    for number, count in calls.items():
        seconds = in_chains * count / sum(calls.values()) + count * device.launch_seconds
        ops[number] = msgspec.structs.replace(ops[number], seconds=seconds)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def problem_of(step: Costed, graph: Graph, name: str, share: float) -> Problem:
    """Return what a planner is asked for."""
    unplanned_bytes, least_bytes, device = step.unplanned.peak_bytes, step.least_bytes, step.device
    return Problem(
        graph=graph,
        device=device,
        budget_bytes=least_bytes + int(share * (unplanned_bytes - least_bytes)),
        host_budget_bytes=0 if name in ("search", "sublinear") else HOST_BUDGET_BYTES,
        time_limit_seconds=GO_ON_SECONDS if name == "dqn" else SECONDS,
    )


def plan_point(step: Costed, curve: str, share: float, network_file: Path) -> dict[str, Any]:
    """Return what a planner makes of a budget; chunks of rows are memfit's own, so that only `auto` is given them."""
    name, options = CURVES[curve]
    points = (
        _plan_point(step, graph, name, options, share, network_file)
        for graph in (step.graphs if curve == "auto" else step.graphs[:1])
    )
    return min(points, key=lambda point: point.get("seconds", math.inf))


def _plan_point(
    step: Costed, graph: Graph, name: str, options: dict[str, Any], share: float, network_file: Path
) -> dict[str, Any]:
    problem, device = problem_of(step, graph, name, share), step.device
    if name == "dqn":
        if not network_file.exists():
            drawn = replace(problem_of(step, graph, name, min(SHARES)), time_limit_seconds=TRAIN_SECONDS)
            make_planner(name, draw_budgets=True, save_to=str(network_file)).plan(drawn)
        options = options | {"start_from": str(network_file)}
    started = time.perf_counter()
    result: Result = make_planner(name, **options).plan(problem)
    point: dict[str, Any] = {
        "status": str(result.status),
        "unplanned_bytes": step.unplanned.peak_bytes,
        "budget_bytes": problem.budget_bytes,
        "plan_seconds": time.perf_counter() - started,
        "overhead_bound": result.bounds.overhead,
    }
    if result.plan is None:
        return point
    timeline = simulate(graph, result.plan.schedule, device)
    return point | {
        "peak_bytes": result.plan.predicted.peak_bytes,
        "seconds": timeline.makespan_seconds,
        "overhead": timeline.makespan_seconds / step.unplanned.seconds - 1.0,
        "offloaded_bytes": result.plan.offloaded_bytes,
        "utilization": timeline.busy_seconds["compute"] / timeline.makespan_seconds,
    }


def run(workload: str, machine: str, curves: list[str], *, again: bool = False) -> None:
    """Fill in the points of one workload on one machine that are not stored yet; with `again` all of them."""
    name = f"{FOLDER}/{workload}_{machine}"
    path = result_path(name)
    points: dict[str, Any] = load(path)["payload"]["points"] if path.exists() else {}
    asked = [(curve, share) for curve in curves for share in SHARES]
    missing = [(curve, share) for curve, share in asked if again or f"{curve}@{share}" not in points]
    if not missing:
        return
    step = costed(WORKLOADS[workload], machine)
    with tempfile.TemporaryDirectory() as folder:
        for curve, share in missing:
            points[f"{curve}@{share}"] = point = plan_point(step, curve, share, Path(folder) / "dqn.safetensors")
            seen = f"{point['overhead']:.1%}" if "overhead" in point else point["status"]
            print(workload, machine, curve, f"{share:.0%}", seen, f"{point['plan_seconds']:.1f} s", flush=True)
            store(name, {"ops": len(step.graphs[0].ops), "points": points})


def main() -> None:
    """Fill in what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="default: " + " ".join(WORKLOADS))
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=MACHINES)
    parser.add_argument("--planners", nargs="+", default=list(CURVES), choices=list(CURVES), metavar="CURVE")
    parser.add_argument("--again", action="store_true", help="plan what is stored already, too")
    options = parser.parse_args()
    for machine in options.machines:
        for workload in options.workloads or list(WORKLOADS):
            run(workload, machine, options.planners, again=options.again)


if __name__ == "__main__":
    main()
