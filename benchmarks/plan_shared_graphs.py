"""Plans of training-step graphs published by others, beside what their own systems reached.

Each graph at each of its budgets: planner `auto` within a time limit (the planner's own time, all included), the bound
that it proves, and the curve of best-so-far over time. Checkmate's figures are its MILP's under Gurobi in 24 hours;
DTR's are the compute overhead that it measured. Every plan is replayed by the checker and the simulator before it
counts.

    python benchmarks/plan_shared_graphs.py                        # all four graphs, 60 s a point: 20 minutes
    python benchmarks/plan_shared_graphs.py --time-limit 10 monet_unet_11_checkmate
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _record import store

from memfit.checker import check
from memfit.device import GENERIC
from memfit.graph import Graph
from memfit.plan import Problem, Progress
from memfit.planners import make_planner
from memfit.simulate import simulate

GRAPHS = Path(__file__).parents[1] / "tests" / "data" / "graphs"
GIB, GB = 1 << 30, 10**9
# Seconds of Checkmate's schedules, and overheads of DTR's, by budget (tests/data/graphs/README.md).
CHECKMATE = {
    "monet_resnet50_184_checkmate": {5: 1.22812, 6: 1.13578, 7: 1.12154, 8: 1.10355, 9: 1.09042, 10: 1.08048},
    "monet_unet_11_checkmate": {5: 2.09265, 6: 1.99613, 7: 1.96567, 8: 1.94811, 9: 1.93700, 10: 1.92809},
}
DTR = {
    "dtr_inceptionv4_64_functional": {10: 0.014, 8: 0.045, 6: 0.084, 4: 0.177},
    "dtr_tv_densenet121_84_functional": {10: 0.028, 8: 0.092, 6: 0.163, 4: 0.362},
}


def plan_point(graph: Graph, budget_bytes: int, time_limit_seconds: float, seed: int) -> dict[str, Any]:
    """Plan one graph within one budget, replay the plan, and return what it is worth."""
    curve: list[tuple[float, float]] = []

    def hear(progress: Progress) -> None:
        better = progress.best_overhead is not None and (not curve or progress.best_overhead < curve[-1][1])
        if better and progress.best_overhead is not None:
            curve.append((round(progress.elapsed_seconds, 3), progress.best_overhead))

    problem = Problem(
        graph=graph,
        device=GENERIC,
        budget_bytes=budget_bytes,
        time_limit_seconds=time_limit_seconds,
        seed=seed,
        progress=hear,
    )
    result = make_planner("auto").plan(problem)
    point: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "status": str(result.status),
        "bound": result.bounds.overhead,
    }
    if result.plan is None:
        return point | {"least_budget_found_bytes": result.bounds.least_budget_found_bytes}
    check(graph, result.plan.schedule)
    timeline = simulate(graph, result.plan.schedule, GENERIC)
    assert timeline.peak_bytes <= budget_bytes
    return point | {
        "seconds": timeline.makespan_seconds,
        "overhead": result.plan.overhead,
        "peak_bytes": timeline.peak_bytes,
        "plan_seconds": result.plan.plan_seconds,
        "best_so_far": curve,
    }


def plan_graph(name: str, time_limit_seconds: float, seed: int) -> None:
    """Plan one graph at all of its budgets; print and store the points as they come."""
    path = GRAPHS / f"{name}.graph.json.gz"
    if not path.exists():
        print(f"{name}: skipped, {path} is not here")
        return
    graph = Graph.load(path)
    unit, published = (GIB, CHECKMATE[name]) if name in CHECKMATE else (GB, DTR[name])
    once_seconds = sum(op.seconds for op in graph.ops)
    points: list[dict[str, Any]] = []
    for budget, theirs in published.items():
        overhead = theirs / once_seconds - 1 if name in CHECKMATE else theirs
        point = {"published_overhead": overhead} | plan_point(graph, budget * unit, time_limit_seconds, seed)
        points.append(point)
        store(f"plan_shared_graphs/{name}", {"graph": name, "time_limit_seconds": time_limit_seconds, "points": points})
        print(f"{name:32} {budget:3} {described(point)}", flush=True)


def described(point: dict[str, Any]) -> str:
    """One line of a point for the terminal."""
    if "overhead" not in point:
        return point["status"]
    return (
        f"{point['seconds']:.5f} s, overhead {point['overhead']:7.3%}, no plan below {point['bound']:7.3%}, "
        f"published {point['published_overhead']:7.3%}, in {point['plan_seconds']:.1f} s"
    )


def main() -> None:
    """Plan the graphs named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", default=[*CHECKMATE, *DTR], metavar="GRAPH")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds that the planner may search")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.graphs:
        plan_graph(name, options.time_limit, options.seed)


if __name__ == "__main__":
    main()
