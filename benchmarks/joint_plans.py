"""Plans that recompute and offload, at half of the unplanned peak, on machines that are not here.

Of each step the overhead of the best plan that only recomputes (`search`), of the best that may offload too (`auto`),
and the bounds that are proved for both. Seconds are those of a roofline. The targets of such plans: on a GTX 1080 Ti
(PCI Express 3.0) at most two thirds of recomputation's overhead, on an H100 at least half of the way to the bound.

    python benchmarks/joint_plans.py        # stored: five minutes
"""

from __future__ import annotations

import argparse
from typing import Any

from _record import store

from memfit.capture import capture
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import roofline
from memfit.device import Device
from memfit.graph import Graph
from memfit.plan import Plan, Problem
from memfit.planners import make_planner
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.workloads import build

MACHINES = ("gtx1080ti", "h100")
WORKLOADS = ("resnet50", "unet", "gpt2")
BATCH = 16
SHARE = 0.5
HOST_BUDGET_BYTES = 64 << 30
SECONDS = 20.0


def planned(planner: str, graph: Graph, device: Device, host_budget_bytes: int) -> Plan:
    """Return the planner's plan at half of the unplanned peak."""
    problem = Problem(
        graph=graph,
        device=device,
        budget_bytes=int(SHARE * unplanned_peak_bytes(graph, device)),
        host_budget_bytes=host_budget_bytes,
        time_limit_seconds=SECONDS,
    )
    plan = make_planner(planner).plan(problem).plan
    assert plan is not None, (planner, graph.name, device.name)
    return plan


def row(machine: str, workload: str) -> dict[str, Any]:
    """Return the overheads of a step on a machine, and their bounds."""
    device = load_device(machine)
    captured = capture(build(workload, batch=BATCH))
    graph = roofline(captured.graph, captured.binding, device)
    alone = planned("search", graph, device, 0)
    joint = planned("auto", graph, device, HOST_BUDGET_BYTES)
    return {
        "machine": machine,
        "workload": workload,
        "batch": BATCH,
        "budget_bytes": alone.budget_bytes,
        "recompute": {"overhead": alone.overhead, "bound": alone.bounds.overhead, "status": str(alone.status)},
        "joint": {"overhead": joint.overhead, "bound": joint.bounds.overhead, "status": str(joint.status)},
        "offloaded_bytes": joint.offloaded_bytes,
    }


def main() -> None:
    """Plan all steps, print a line for each, and store them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: list[dict[str, Any]] = []
    for machine in MACHINES:
        for workload in WORKLOADS:
            rows.append(row(machine, workload))
            alone, joint = rows[-1]["recompute"], rows[-1]["joint"]
            print(
                f"{machine} {workload}: {alone['overhead']:.2%} (bound {alone['bound']:.2%}), with copies "
                f"{joint['overhead']:.2%} (bound {joint['bound']:.2%}, {joint['status']})",
                flush=True,
            )
    print(store("joint_plans", {"share": SHARE, "seconds": SECONDS, "plans": rows}))


if __name__ == "__main__":
    main()
