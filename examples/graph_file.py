"""A graph from anywhere, without torch: write it to a file, plan it, and look at the schedule."""

from __future__ import annotations

import sys
from pathlib import Path

from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.system.budget import format_bytes

LAYERS = 12
LAYER_BYTES = 1 << 20


def chain() -> Graph:
    """Return forward and backward of a chain of layers; each backward op reads what its layer read."""
    storages = [Storage(id=0, name="input", bytes=LAYER_BYTES, role=Role.INPUT)]
    ops: list[Op] = []

    def add(name: str, phase: Phase, role: Role, reads: tuple[int, ...], seconds: float) -> int:
        storages.append(Storage(id=len(storages), name=name, bytes=LAYER_BYTES, role=role))
        written = len(storages) - 1
        ops.append(Op(id=len(ops), name=name, phase=phase, reads=reads, writes=(written,), seconds=seconds))
        return written

    read_by_layer = [0]
    for layer in range(LAYERS):
        output = add(f"layer{layer}", Phase.FORWARD, Role.ACTIVATION, (read_by_layer[-1],), 1e-3)
        read_by_layer.append(output)
    gradient = read_by_layer.pop()
    for layer in reversed(range(LAYERS)):
        role = Role.GRADIENT if layer else Role.OUTPUT
        gradient = add(f"layer{layer}_backward", Phase.BACKWARD, role, (gradient, read_by_layer[layer]), 2e-3)
    return Graph.build(name="chain", storages=storages, ops=ops)


def main() -> None:
    """Plan the chain within half of what it takes unplanned."""
    graph = chain()
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()
    graph.save(folder / "chain.graph.json")
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=8 * LAYER_BYTES, time_limit_seconds=2)
    result = make_planner("search").plan(problem)
    if result.plan is None:
        sys.exit(f"{result.status}: {result.status.remedy}")
    plan = result.plan
    print(f"unplanned: {format_bytes(plan.unplanned.peak_bytes)}, {plan.unplanned.seconds:.3f} s")
    print(f"planned:   {format_bytes(plan.predicted.peak_bytes)}, {plan.predicted.seconds:.3f} s")
    print(plan.schedule.text())


if __name__ == "__main__":
    main()
