"""How often the shortest path over the states of a graph of up to 10 ops is found, with a host and without.

Random graphs of ops with several reads and writes, reuses, workspace, generators and ops that may not be computed
again; budgets between the proved least and what the unplanned step takes; a link on which a copy takes as long as an
op. A state is what is on the device, what is on the host, and which ops are done. Planner `auto` plans each graph, and
its plan is held against the path; seconds are those of the process on its processor. With a host, the path of graphs 30
and 224 has many more states than that of the others: it takes longest, and may be left unproved.

    python benchmarks/prove_tiny_graphs.py                # 300 graphs, some 20 minutes
    python benchmarks/prove_tiny_graphs.py --graphs 30
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from typing import Any

from _record import store

from memfit.checker import check
from memfit.device import Device
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem, Status
from memfit.planners import make_planner
from memfit.planners.ask import unplanned_peak_bytes
from memfit.planners.bounds import least_budget_bound
from memfit.simulate import simulate

MOST_OPS = 10
SHARES = (0.1, 0.3, 0.5, 0.8)  # of the way from the proved least budget to what the unplanned step takes
HOST_BUDGET_BYTES = 1 << 30
MOVES = 20_000
LINKED = Device(
    name="linked",
    alignment_bytes=64,
    to_host_bytes_per_second=1000.0,
    to_device_bytes_per_second=700.0,
    source="slow enough that copies of a few hundred bytes take as long as an op",
)
_SIZES = (0, 1, 64, 100, 100, 256)


def random_graph(seed: int) -> Graph:
    """Return a graph of 1 to 10 ops."""
    pick = random.Random(seed)

    def storage(role: Role) -> Storage:
        needed = role is Role.ACTIVATION and pick.random() < 0.2
        number = len(storages)
        return Storage(id=number, name=f"s{number}", bytes=pick.choice(_SIZES), role=role, required_at_end=needed)

    storages: list[Storage] = []
    for _ in range(pick.randint(1, 3)):
        storages.append(storage(Role.INPUT))
    ops: list[Op] = []
    for number in range(pick.randint(1, MOST_OPS)):
        reads = pick.sample(range(len(storages)), pick.randint(0, min(3, len(storages))))
        first = len(storages)
        for _ in range(pick.randint(1, 2)):
            storages.append(storage(Role.ACTIVATION))
        writes = range(first, len(storages))
        equal = [(r, w) for r in reads for w in writes if storages[r].bytes == storages[w].bytes]
        ops.append(
            Op(
                id=number,
                name=f"op{number}",
                phase=Phase.FORWARD,
                reads=tuple(reads),
                writes=tuple(writes),
                seconds=pick.choice((0.0, 0.125, 0.5)),
                workspace_bytes=pick.choice((0, 30)),
                recomputable=pick.random() < 0.85,
                random="cpu" if pick.random() < 0.2 else None,
                reuses=tuple(pair for pair in equal if pick.random() < 0.7),
            )
        )
    return Graph.build(name=f"random{seed}", storages=storages, ops=ops)


def prove_point(seed: int, host_budget_bytes: int) -> dict[str, Any]:
    """Plan one graph, replay the plan, and return whether it was proved to be the fastest, or that there is none."""
    graph, share = random_graph(seed), SHARES[seed % len(SHARES)]
    task = Problem(graph=graph, device=LINKED, budget_bytes=1, host_budget_bytes=host_budget_bytes)
    least_bytes, _ = least_budget_bound(task)
    most_bytes = unplanned_peak_bytes(graph, LINKED)
    task = replace(task, budget_bytes=least_bytes + int(share * (most_bytes - least_bytes)))
    began = time.process_time()
    result = make_planner("auto", iterations=MOVES).plan(task)
    point: dict[str, Any] = {"seed": seed, "ops": len(graph.ops), "share": share, "status": str(result.status)}
    point["process_seconds"] = round(time.process_time() - began, 2)
    if result.plan is not None:
        check(graph, result.plan.schedule)
        timeline = simulate(graph, result.plan.schedule, LINKED)
        assert timeline.peak_bytes <= task.budget_bytes
        point |= {"overhead": result.plan.overhead, "offloaded_bytes": result.plan.offloaded_bytes}
    return point


def main() -> None:
    """Plan all graphs, print and store what was proved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=300)
    options = parser.parse_args()
    for host, host_budget_bytes in (("none", 0), ("host", HOST_BUDGET_BYTES)):
        points = [prove_point(seed, host_budget_bytes) for seed in range(options.graphs)]
        store(f"prove_tiny_graphs/{host}", {"moves": MOVES, "points": points})
        proved = sum(point["status"] == Status.OPTIMAL for point in points)
        left = sum(point["status"] == Status.FEASIBLE for point in points)
        longest = max(point["process_seconds"] for point in points)
        print(
            f"host {host}: {proved} of {options.graphs} planned and proved, {left} planned and not proved, "
            f"{options.graphs - proved - left} with no plan; {longest:.1f} s at most"
        )


if __name__ == "__main__":
    main()
