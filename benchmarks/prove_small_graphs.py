"""How often planner `auto` proves its plan of a graph of 20 to 60 ops, and how far from a proof it is elsewhere.

Random training steps (chains of layers with skip connections, their loss and backward): the time of the plan, the
bound for every order of ops, the bound for the plan's own (`memfit/planners/engine/cpsat/model.py`), and the gap to the
higher of the two, as a share of the step. Every plan is replayed by the checker and the simulator before it counts.

    python benchmarks/prove_small_graphs.py                       # ten graphs, 60 s each at most
    python benchmarks/prove_small_graphs.py --shares 0.3 0.5 0.7  # at tighter and wider budgets as well
"""

from __future__ import annotations

import argparse
from typing import Any

from _record import store
from _training_chains import training_chain

from memfit.checker import check
from memfit.device import GENERIC
from memfit.graph import Graph
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.simulate import simulate

LAYERS = (9, 11, 13, 15, 17, 19, 21, 23, 25, 26)
SHARE = 0.5  # of the way from the proved least budget to what the unplanned step takes


def prove_point(graph: Graph, share: float, time_limit_seconds: float) -> dict[str, Any]:
    """Plan one graph at one budget, replay the plan, and return what was proved of it."""
    least_bytes, _ = least_budget_bound(Problem(graph=graph, device=GENERIC, budget_bytes=1))
    most_bytes = unplanned_peak_bytes(graph, GENERIC)
    problem = Problem(
        graph=graph,
        device=GENERIC,
        budget_bytes=int(least_bytes + share * (most_bytes - least_bytes)),
        time_limit_seconds=time_limit_seconds,
    )
    started_seconds = problem.clock()
    result = make_planner("auto").plan(problem)
    point: dict[str, Any] = {
        "graph": graph.name,
        "ops": len(graph.ops),
        "budget_bytes": problem.budget_bytes,
        "share": share,
        "status": str(result.status),
        "plan_seconds": problem.clock() - started_seconds,
        "bound": result.bounds.overhead,
        "bound_in_order": result.bounds.overhead_in_order,
    }
    if result.plan is None:
        return point
    check(graph, result.plan.schedule)
    timeline = simulate(graph, result.plan.schedule, GENERIC)
    assert timeline.peak_bytes <= problem.budget_bytes
    bound = max(result.bounds.overhead, result.bounds.overhead_in_order or 0.0)
    return point | {
        "seconds": timeline.makespan_seconds,
        "overhead": result.plan.overhead,
        "gap": max(0.0, (result.plan.overhead - bound) / (1.0 + bound)),
    }


def described(point: dict[str, Any]) -> str:
    """One line of a point for the terminal."""
    line = f"{point['graph']:28} {point['ops']:3} ops, {point['share']:.0%}: {point['status']:10}"
    if "overhead" not in point:
        return line
    in_order = "none" if point["bound_in_order"] is None else f"{point['bound_in_order']:8.4%}"
    return (
        f"{line} overhead {point['overhead']:8.4%}, bounds {point['bound']:8.4%} in any order, {in_order} in its own; "
        f"gap {point['gap']:.4%}, in {point['plan_seconds']:.1f} s"
    )


def main() -> None:
    """Plan all graphs, print and store the points as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds that the planner may take for a point")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[SHARE], help="budgets, from the proved least (0) to unplanned (1)"
    )
    options = parser.parse_args()
    points: list[dict[str, Any]] = []
    for seed, layers in enumerate(LAYERS):
        graph = training_chain(layers, seed)
        for share in options.shares:
            points.append(prove_point(graph, share, options.time_limit))
            store("prove_small_graphs", {"time_limit_seconds": options.time_limit, "points": points})
            print(described(points[-1]), flush=True)
    planned = [point for point in points if "gap" in point]
    proved = sum(point["status"] == "optimal" for point in planned)
    close = sum(point["gap"] <= 0.005 for point in planned)
    print(f"{len(planned)} of {len(points)} planned: {proved} proved, {close} proved or within 0.5%")


if __name__ == "__main__":
    main()
