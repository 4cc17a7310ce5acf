"""Planner dqn on ResNet-50: how its best plan falls from episode to episode, trained afresh and from a smaller network.

The step is predicted for the machine of dqn2020 (a GTX 1080 Ti), at 45% of the way from the proved least budget to the
unplanned peak. Beside it stands the best plan of the paper's three baselines there: MXNet-memonger (`sublinear`),
SuperNeurons in its three modes, and TFLMS. The smaller network is ResNet-18, trained for budgets drawn anew in each
episode. Trainings have equal episodes, so that they end alike on any machine; several seeds show how much is chance.

    python benchmarks/dqn_curves.py                # a few minutes a seed
    python benchmarks/dqn_curves.py --seeds 5 6    # further seeds, beside those that are stored
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from _record import load, result_path, store
from offloading_planners import CURVES, WORKLOADS, Network, costed, problem_of

from memfit.plan import Problem, Progress
from memfit.planners import make_planner

MACHINE, SHARE = "gtx1080ti", 0.45
BASELINES = ("sublinear", "superneurons_swap", "superneurons_recompute", "superneurons_both", "tflms")
SMALL = Network(name="resnet50", options={"depth": 18, "batch": 64}, on_cpu={"batch": 8})
EPISODES, SMALL_EPISODES, BASELINE_SECONDS = 12, 20, 10.0
NO_LIMIT_SECONDS = 1e9
SEEDS = (0, 1, 2, 3, 4)


def baselines(problem: Problem) -> dict[str, float | None]:
    """Return the overhead of each baseline of the paper at the problem's budget; None without a plan."""
    found: dict[str, float | None] = {}
    for curve in BASELINES:
        name, options = CURVES[curve]
        host_bytes = 0 if name == "sublinear" else problem.host_budget_bytes
        asked = replace(problem, host_budget_bytes=host_bytes, time_limit_seconds=BASELINE_SECONDS)
        plan = make_planner(name, **options).plan(asked).plan
        found[curve] = None if plan is None else plan.overhead
        print(curve, found[curve], flush=True)
    return found


def train(problem: Problem, options: dict[str, Any], baseline: float) -> dict[str, Any]:
    """Train a network; return the best overhead of each episode at which it fell, and when it reached the baseline."""
    falls: list[dict[str, float]] = []

    def note(progress: Progress) -> None:
        if progress.best_overhead is not None and (not falls or progress.best_overhead < falls[-1]["overhead"]):
            episode = int(progress.message.removeprefix("episode ").split(", best")[0].replace(",", ""))
            falls.append({"episode": episode, "seconds": progress.elapsed_seconds, "overhead": progress.best_overhead})

    result = make_planner("dqn", **options).plan(replace(problem, progress=note))
    reached = next((fall for fall in falls if fall["overhead"] <= baseline), None)
    found = {
        "seed": problem.seed,
        "episodes": int(result.stats["episodes"]),
        "overhead": None if result.plan is None else result.plan.overhead,
        "first": falls[0] if falls else None,
        "reached_baseline": reached,
        "falls": falls,
    }
    print({key: value for key, value in found.items() if key != "falls"}, flush=True)
    return found


def main() -> None:
    """Train with each seed, and store the curves as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    problem, small = (
        replace(problem_of(step, step.graphs[0], "dqn", SHARE), time_limit_seconds=NO_LIMIT_SECONDS)
        for step in (costed(WORKLOADS["resnet50"], MACHINE), costed(SMALL, MACHINE))
    )
    found = baselines(problem)
    best = min(overhead for overhead in found.values() if overhead is not None)
    payload: dict[str, Any] = {
        "machine": MACHINE,
        "share": SHARE,
        "budget_bytes": problem.budget_bytes,
        "episodes": EPISODES,
        "small_episodes": SMALL_EPISODES,
        "baselines": found,
        "runs": [],
    }
    path = result_path("dqn_curves")
    stored = load(path)["payload"] if path.exists() else {}
    if all(
        stored.get(key) == payload[key] for key in ("machine", "share", "budget_bytes", "episodes", "small_episodes")
    ):
        payload["runs"] = [run for run in stored["runs"] if run["seed"] not in options.seeds]
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            network = str(Path(folder) / f"{seed}.safetensors")
            trained = make_planner("dqn", draw_budgets=True, save_to=network, episodes=SMALL_EPISODES)
            trained.plan(replace(small, seed=seed))
            asked = replace(problem, seed=seed)
            for name, given in {"afresh": {}, "from_resnet18": {"start_from": network}}.items():
                options_here = {**given, "episodes": EPISODES}
                payload["runs"].append({"trained": name, **train(asked, options_here, best)})
            print(store("dqn_curves", payload), flush=True)


if __name__ == "__main__":
    main()
