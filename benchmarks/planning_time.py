"""How long `auto` takes on long graphs: the best overhead so far over time, the bound, and the process's memory.

Chen's two families, captured with fake tensors and timed by the roofline of a built-in device: residual networks with
batch 32 at 224 x 224, and the unrolled LSTM. A budget is a share of the way from the step's peak without any forward
results (parameters, gradients and whatever else backward holds) to its unplanned peak. Each point is planned in a
process of its own, from the graph's file; its `plan_seconds` run from the problem to the checked plan, compiling (once
on a machine) left out by a first plan of a small graph.

    2,000 ops     in 5 s, against 60 s
    10,000 ops    in 60 s
    50,000 ops    in 5 minutes, all included: the planner is given 3

    python benchmarks/planning_time.py                     # all points: 16 minutes
    python benchmarks/planning_time.py resnet155 lstm72    # some networks
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _chen_models import LSTMSizes, RepeatedLSTM, lstm_step, resnet_step
from _process import answer_if_child, in_fresh_process
from _record import load, result_path, store

from memfit.capture import capture
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import roofline
from memfit.graph import Graph, Phase
from memfit.plan import Problem, Progress
from memfit.planners import make_planner
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.peak_reducing_order import peak_reducing_order
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.planners.engine.retention.instance import build_instance
from memfit.planners.engine.starts.blocks import Blocks

NAME = "planning_time"
DEVICE = "t4"
BATCH, SIZE = 32, 224
MOST_SECONDS = 900.0  # of one point, before it is given up
# Network -> (depth or steps, time limits in seconds, shares of the way to the unplanned peak).
POINTS: dict[str, tuple[int, tuple[float, ...], tuple[float, ...]]] = {
    "resnet155": (155, (5.0, 60.0), (0.1, 0.3)),
    "lstm14": (14, (5.0, 60.0), (0.1, 0.3)),
    "resnet790": (790, (60.0,), (0.3,)),
    "lstm72": (72, (60.0,), (0.3,)),
    "resnet3970": (3970, (180.0,), (0.3,)),
    "lstm362": (362, (180.0,), (0.3,)),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """What a planner reported: seconds, and the best overhead so far."""

    points: list[tuple[float, float]]

    def hear(self, progress: Progress) -> None:
        """Take a report."""
        overhead = progress.best_overhead
        if overhead is not None and (not self.points or overhead < self.points[-1][1]):
            self.points.append((round(progress.elapsed_seconds, 2), overhead))


def graph_of(network: str) -> Graph:
    """Return the captured graph of a network with roofline times; the LSTM's repeats the captured steps."""
    count, device = POINTS[network][0], load_device(DEVICE)
    if network.startswith("resnet"):
        captured = capture(resnet_step(count, BATCH, SIZE))
        return roofline(captured.graph, captured.binding, device)
    repeated = RepeatedLSTM(LSTMSizes())
    captured = capture(lstm_step(repeated.captured_steps, LSTMSizes()))
    repeated.graph = roofline(captured.graph, captured.binding, device)
    return repeated.graph_of(count)


def budget_of(graph: Graph, share: float) -> int:
    """Return the bytes that lie `share` of the way from what backward holds by itself to the unplanned peak."""
    device = load_device(DEVICE)
    managed = {s.id: device.aligned(s.bytes) for s in graph.storages if not s.resident}
    own = {s for op in graph.ops if op.phase != Phase.FORWARD for s in op.writes if s in managed}
    order = update_at_once_order(graph)
    last = {s: place for place, op in enumerate(order) for s, _ in graph.read_versions[op] if s in own}
    change = np.zeros(len(order) + 1, np.int64)
    for place, op in enumerate(order):
        for storage in own.intersection(graph.ops[op].writes):
            end = len(order) if graph.storages[storage].required_at_end else last.get(storage, place) + 1
            change[place] += managed[storage]
            change[end] -= managed[storage]
    resident_bytes = sum(device.aligned(s.bytes) for s in graph.storages if s.resident)
    least = resident_bytes + int(np.cumsum(change).max())
    return least + int(share * (unplanned_peak_bytes(graph, device) - least))


def blocks_of(graph: Graph) -> int:
    """Return into how many blocks the search cuts a graph."""
    device = load_device(DEVICE)
    problem = Problem(graph=graph, device=device, budget_bytes=1)
    return Blocks.of(build_instance(problem, peak_reducing_order(graph, device))).count


def plan_point(path: str, budget_bytes: int, time_limit_seconds: float) -> dict[str, Any]:
    """Plan one graph within one budget, in this process; return the curve and what it took."""
    graph, device = Graph.load(path), load_device(DEVICE)
    small = Graph.load(Path(path).with_name("small.graph.json"))
    for planned in (small, graph):
        curve = Curve([])
        problem = Problem(
            graph=planned,
            device=device,
            budget_bytes=budget_bytes if planned is graph else budget_of(small, 0.5),
            time_limit_seconds=time_limit_seconds if planned is graph else 1.0,
            progress=curve.hear,
        )
        started = time.monotonic()
        result = make_planner("auto").plan(problem)
        took_seconds = time.monotonic() - started
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "ops": len(graph.ops),
        "blocks": blocks_of(graph),
        "budget_bytes": budget_bytes,
        "time_limit_seconds": time_limit_seconds,
        "status": str(result.status),
        "overhead": result.plan.overhead if result.plan else None,
        "bound": result.bounds.overhead,
        "least_budget_found_bytes": result.bounds.least_budget_found_bytes,
        "plan_seconds": took_seconds,
        "moves": result.stats.get("moves", 0.0),
        "peak_rss_bytes": peak_rss_bytes,
        "best_so_far": curve.points,
    }


def points_of(network: str, folder: Path) -> Iterable[dict[str, Any]]:
    """Capture a network, and yield its points as they come."""
    graph = graph_of(network)
    path = folder / f"{network}.graph.json"
    graph.save(path)
    for share in POINTS[network][2]:
        budget_bytes = budget_of(graph, share)
        for limit in POINTS[network][1]:
            request = {"path": str(path), "budget_bytes": budget_bytes, "time_limit_seconds": limit}
            point = in_fresh_process(__file__, request, timeout_seconds=MOST_SECONDS)
            yield {"share": share, "time_limit_seconds": limit} | point


def described(network: str, point: dict[str, Any]) -> str:
    """One line of a point for the terminal."""
    if "error" in point:
        return f"{network:11} {point['share']:4.0%} {point['error']}"
    overhead = "no plan" if point["overhead"] is None else f"overhead {point['overhead']:.3%}"
    return (
        f"{network:11} {point['ops']:7,} ops {point['share']:4.0%} limit {point['time_limit_seconds']:3.0f} s: "
        f"{overhead}, "
        f"no plan below {point['bound']:.3%}, in {point['plan_seconds']:.1f} s, {point['moves']:,.0f} moves, "
        f"{point['peak_rss_bytes'] / 1e9:.2f} GB, "
        f"{point['blocks']} blocks"
    )


def against_longest(points: list[dict[str, Any]]) -> list[str]:
    """Say how the overhead of each shorter time limit compares with that of the longest, by share."""
    lines: list[str] = []
    for share in {point["share"]: None for point in points}:
        here = [point for point in points if point["share"] == share and point.get("overhead")]
        *shorter, longest = sorted(here, key=lambda point: point["time_limit_seconds"]) or [{}]
        for point in shorter:
            times = (
                f"{point['time_limit_seconds']:.0f} s, in times of those after {longest['time_limit_seconds']:.0f} s"
            )
            lines.append(f"{'':11} {share:4.0%} overheads after {times}: {point['overhead'] / longest['overhead']:.4f}")
    return lines


def main() -> None:
    """Plan the networks named on the command line, or all; store each as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(POINTS), metavar="NETWORK")
    options = parser.parse_args()
    path = result_path(NAME)
    networks: dict[str, Any] = load(path)["payload"]["networks"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        captured = capture(resnet_step(14, 2, 64, width=8))
        roofline(captured.graph, captured.binding, load_device(DEVICE)).save(Path(folder) / "small.graph.json")
        for network in options.networks:
            networks[network] = []
            for point in points_of(network, Path(folder)):
                networks[network].append(point)
                store(NAME, {"device": DEVICE, "networks": networks})
                print(described(network, point), flush=True)
            for line in against_longest(networks[network]):
                print(line, flush=True)


if __name__ == "__main__" and not answer_if_child(plan_point):
    main()
