"""Published training-step graphs under a budget: recomputation, offloading, or both.

The graphs' own op times, with the links of two of the built-in devices. Moves are counted, not seconds, so that the
figures are the same on any machine; all of them are predictions of the simulator, after the checker has replayed each
plan.

    python benchmarks/offloading.py
    python benchmarks/offloading.py --moves 200000 monet_unet_11_checkmate
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from _record import store
from plan_shared_graphs import GIB, GRAPHS

from memfit.cost.device_profiles import load_device
from memfit.graph import Graph
from memfit.plan import Problem, Result
from memfit.planners.offload import OffloadPlanner
from memfit.planners.search import SearchPlanner

BUDGETS = {"monet_resnet50_184_checkmate": (4, 6, 8), "monet_unet_11_checkmate": (4, 6, 8)}
DEVICES = ("t4", "a100-40")
HOST_BUDGET_BYTES = 64 * GIB


def plan_point(problem: Problem, moves: int) -> dict[str, Any]:
    """Plan one graph within one budget in three ways."""
    return {
        "budget_bytes": problem.budget_bytes,
        "recomputation": _worth(SearchPlanner(iterations=moves).plan(replace(problem, host_budget_bytes=0))),
        "offloading": _worth(OffloadPlanner(iterations=moves, rematerialize=False).plan(problem)),
        "both": _worth(OffloadPlanner(iterations=moves).plan(problem)),
    }


def _worth(result: Result) -> dict[str, Any]:
    if result.plan is None:
        return {"status": str(result.status), "least_budget_found_bytes": result.bounds.least_budget_found_bytes}
    return {
        "status": str(result.status),
        "overhead": result.plan.overhead,
        "bound": result.bounds.overhead,
        "peak_bytes": result.plan.predicted.peak_bytes,
        "host_peak_bytes": result.plan.predicted.host_peak_bytes,
        "offloaded_bytes": result.plan.offloaded_bytes,
    }


def plan_graph(name: str, moves: int, seed: int) -> None:
    """Plan one graph at all of its budgets with each link; print and store the points as they come."""
    path = GRAPHS / f"{name}.graph.json.gz"
    if not path.exists():
        print(f"{name}: skipped, {path} is not here")
        return
    graph = Graph.load(path)
    points: list[dict[str, Any]] = []
    for device in map(load_device, DEVICES):
        for budget in BUDGETS[name]:
            problem = Problem(
                graph=graph,
                device=device,
                budget_bytes=budget * GIB,
                host_budget_bytes=HOST_BUDGET_BYTES,
                seed=seed,
            )
            point = {"device": device.name, "link_bytes_per_second": device.to_host_bytes_per_second}
            points.append(point | plan_point(problem, moves))
            store(f"offloading/{name}", {"graph": name, "moves": moves, "seed": seed, "points": points})
            print(f"{name:30} {device.name:8} {budget} GiB  {_described(points[-1])}", flush=True)


def _described(point: dict[str, Any]) -> str:
    ways = ("recomputation", "offloading", "both")
    return ", ".join(
        f"{way} {point[way]['overhead']:.2%}" if "overhead" in point[way] else f"{way} {point[way]['status']}"
        for way in ways
    )


def main() -> None:
    """Plan the graphs named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", default=[*BUDGETS], metavar="GRAPH")
    parser.add_argument("--moves", type=int, default=400_000, help="moves of the search at each point, each way")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.graphs:
        plan_graph(name, options.moves, options.seed)


if __name__ == "__main__":
    main()
