"""Planners of Chen 2016 and of Feng 2018 on networks that are no convolutional classifiers: least memory, overhead.

Feng and Huang 2018 name networks for video and GANs as what their planner is for, and measure neither; recurrent
networks and transformers are graphs with other shapes again. Each workload is captured with fake tensors at its default
options (the LSTM with 64 steps), and its ops take what a roofline of the paper's Titan Xp says. Memory is the peak of
the planner's plan of least memory, parameters and batch left out. memfit's search is given the least memory of all.

    python benchmarks/feng_others.py                          # a few minutes
    python benchmarks/feng_others.py lstm                     # this one anew
    python benchmarks/tables.py --into docs/papers.md         # then, the page
"""

from __future__ import annotations

import argparse
from typing import Any

from _record import load, result_path, store
from feng_table1 import CARD, NO_LIMIT, least_plan, searched

from memfit.capture import capture
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import roofline
from memfit.plan import Problem
from memfit.workloads import build

NAME = "feng_others"
MOVES = 100_000
NETWORKS: dict[str, dict[str, int]] = {
    "lstm": {"steps": 64},
    "gpt2": {},
    "encoder": {},
    "unet": {},
    "dcgan": {},
    "c3d": {},
}
PLANNERS: dict[str, tuple[str, dict[str, bool]]] = {
    "sublinear": ("sublinear", {}),
    "sublinear costly": ("sublinear", {"costly": True}),
    "recursive": ("recursive", {}),
    "linear_split": ("linear_split", {}),
    "division_tree": ("division_tree", {}),
}


def predict(name: str) -> dict[str, Any]:
    """Return the row of a workload."""
    device = load_device(CARD)
    captured = capture(build(name, **NETWORKS[name]))
    graph = roofline(captured.graph, captured.binding, device)
    problem = Problem(graph=graph, device=device, budget_bytes=NO_LIMIT)
    resident_bytes = sum(device.aligned(storage.bytes) for storage in graph.storages if storage.resident)
    unplanned, _ = least_plan(problem, "none")
    row: dict[str, Any] = {
        "options": NETWORKS[name],
        "ops": len(graph.ops),
        "resident_bytes": resident_bytes,
        "unplanned_bytes": unplanned.predicted.peak_bytes - resident_bytes,
    }
    for label, (planner, options) in PLANNERS.items():
        plan, seconds = least_plan(problem, planner, **options)
        row[label] = {
            "bytes": plan.predicted.peak_bytes - resident_bytes,
            "overhead": plan.overhead,
            "plan_seconds": seconds,
        }
    row["best_bytes"] = min(row[label]["bytes"] for label in PLANNERS)
    row["memfit"] = searched(problem, row["best_bytes"] + resident_bytes, MOVES)
    return row


def main() -> None:
    """Predict the workloads named on the command line, or all; store each as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="WORKLOAD")
    options = parser.parse_args()
    path = result_path(NAME)
    rows: dict[str, Any] = load(path)["payload"]["networks"] if path.exists() else {}
    for name in options.networks:
        rows[name] = predict(name)
        ordered = {each: rows[each] for each in NETWORKS if each in rows}
        store(NAME, {"card": CARD, "moves": MOVES, "planners": list(PLANNERS), "networks": ordered})
        cells = ", ".join(f"{label} {rows[name][label]['bytes'] / (1 << 20):.1f}" for label in PLANNERS)
        print(f"{name:10} MiB {rows[name]['unplanned_bytes'] / (1 << 20):.1f}: {cells}", flush=True)


if __name__ == "__main__":
    main()
