"""Feng and Huang 2018, Table 1: training memory of fifteen networks, regular, by Chen's planner, by Re-forwarding.

Each network is captured with fake tensors at the paper's batch and image size, and its ops take what a roofline of a
Titan Xp says. Memory is the paper's measure (section 6): the difference between the peaks of twice the batch and of
the batch, so that parameters do not count. memfit's own planner is given the whole memory that Re-forwarding takes at
the paper's batch, and so many moves, which end alike on any machine; beside it stands the overhead below which no plan
can come in that memory. Everything here is predicted, but for `--measure`: steps at a small batch on this machine's
CPU. Bytes and bits are the same on a busy machine, times are not: there, `--untimed` leaves them out, and a later
`--measure` without it takes them. Each network is stored as soon as it is there, and kept unless `--again` is given.

    python benchmarks/feng_table1.py                       # ten minutes
    python benchmarks/feng_table1.py --measure --untimed   # ten more
    python benchmarks/feng_table1.py --measure             # on a quiet machine: the times that are missing
    python benchmarks/feng_table1.py --only chen           # one column of what is stored, anew
    python benchmarks/tables.py --into docs/papers.md      # then, the page
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from _measure import resident_bytes, usage_of
from _process import answer_if_child, fresh_cache, in_fresh_process
from _processor import processor_seconds
from _record import load, result_path, store

from memfit import TrainingStep
from memfit.capture import capture
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import roofline
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError
from memfit.graph import Graph, Phase
from memfit.plan import Plan, Problem
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planning import Settings
from memfit.report.live import play
from memfit.workloads import build

NAME = "feng_table1"
CARD = "titan-xp"
MB = 1e6  # the paper says MB
NO_LIMIT = 1 << 60
MOVES = 300_000  # of memfit's search: ten processor seconds or so
MEASURED_MOVES = 100_000
CHILD_SECONDS = 3600
_SHOWN = 4  # of the storages at the peak, and of the operators
PAPER = ("regular", "chen", "re_forwarding", "regular_seconds", "re_forwarding_seconds")

# network: workload, its options, batch, the paper's row (memory in MB, seconds), batch to measure on a CPU
NETWORKS: dict[str, tuple[str, dict[str, int], int, tuple[float | None, ...], int]] = {
    "alexnet": ("alexnet", {}, 1024, (3550, 3108, 2620, 1.295, 1.816), 16),
    "vgg11": ("vgg16", {"depth": 11}, 64, (2976, 2292, 1802, 0.606, 0.819), 2),
    "vgg13": ("vgg16", {"depth": 13}, 64, (4152, 2586, 2586, 1.020, 1.333), 2),
    "vgg16": ("vgg16", {"depth": 16}, 64, (4470, 2894, 2586, 1.307, 1.696), 2),
    "vgg19": ("vgg16", {"depth": 19}, 64, (4788, 2894, 2502, 1.593, 2.060), 2),
    "resnet18": ("resnet50", {"depth": 18}, 256, (5402, None, 2898, 1.144, 1.599), 4),
    "resnet34": ("resnet50", {"depth": 34}, 128, (3900, None, 1544, 1.041, 1.419), 4),
    "resnet50": ("resnet50", {"depth": 50}, 64, (5206, None, 1798, 0.740, 1.027), 2),
    "resnet101": ("resnet50", {"depth": 101}, 32, (3812, None, 970, 0.624, 0.853), 2),
    "resnet152": ("resnet50", {"depth": 152}, 16, (2810, None, 564, 0.450, 0.628), 2),
    "densenet121": ("densenet121", {"depth": 121}, 32, (3984, None, 776, 0.558, 0.789), 2),
    "densenet161": ("densenet121", {"depth": 161}, 16, (3658, None, 616, 0.511, 0.708), 2),
    "densenet169": ("densenet121", {"depth": 169}, 32, (4826, None, 848, 0.714, 1.022), 2),
    "densenet201": ("densenet121", {"depth": 201}, 16, (3164, None, 582, 0.449, 0.651), 2),
    "inceptionv3": ("inceptionv3", {"size": 300}, 32, (2976, None, 910, 0.563, 0.763), 2),
}
PLANNERS = {"regular": "none", "chen": "sublinear", "re_forwarding": "division_tree"}
COLUMNS = ("regular", "chen")  # those that no other column of the table depends on


class AlexNet(torch.nn.Module):
    """The one-tower AlexNet of PyTorch's public code (Krizhevsky 2014), which the paper ran; pytorchcv's is larger."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        convolutions = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1))
        for number, (inputs, outputs, kernel, stride, padding) in enumerate((*convolutions, (256, 256, 3, 1, 1))):
            layers += [torch.nn.Conv2d(inputs, outputs, kernel, stride, padding), torch.nn.ReLU(inplace=True)]
            if number in (0, 1, 4):
                layers.append(torch.nn.MaxPool2d(3, 2))
        self.features = torch.nn.Sequential(*layers)
        self.classifier = torch.nn.Sequential(
            torch.nn.Dropout(),
            torch.nn.Linear(256 * 6 * 6, 4096),
            torch.nn.ReLU(inplace=True),
            torch.nn.Dropout(),
            torch.nn.Linear(4096, 4096),
            torch.nn.ReLU(inplace=True),
            torch.nn.Linear(4096, 1000),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


def make_step(network: str, batch: int) -> TrainingStep:
    """Return the network's step on a batch that takes no memory until it is read."""
    workload, options, *_ = NETWORKS[network]
    size = options.get("size", 224)
    if workload == "alexnet":
        step = TrainingStep(model=AlexNet(), loss=torch.nn.functional.cross_entropy, batch=(), name=network)
    else:
        step = build(workload, batch=2, **options)
    images, labels = torch.empty(batch, 3, size, size), torch.empty(batch, dtype=torch.int64)
    return dataclasses.replace(step, batch=(images, labels), name=network)


def problem_of(network: str, batch: int) -> Problem:
    """Capture the network at this batch, with the card's op times."""
    device = load_device(CARD)
    captured = capture(make_step(network, batch))
    graph = roofline(captured.graph, captured.binding, device)
    return Problem(graph=graph, device=device, budget_bytes=NO_LIMIT)


def least_plan(problem: Problem, planner: str, **options: bool) -> tuple[Plan, float]:
    """Return the planner's plan of least memory, and how long it took to find."""
    made = make_planner(planner, **options)
    started = time.perf_counter()
    least = made.plan(dataclasses.replace(problem, budget_bytes=1)).bounds.least_budget_found_bytes
    seconds = time.perf_counter() - started
    assert least is not None
    plan = made.plan(dataclasses.replace(problem, budget_bytes=least)).plan
    assert plan is not None
    return plan, seconds


def peak_of(plan: Plan) -> dict[str, Any]:
    """Return the op that runs at the peak, and the largest storages that are there then, by name and bytes."""
    run = play(plan.graph, plan.schedule, plan.device)
    position = run.timeline.peak_position
    op, live = run.op_at(position), run.live_at(position)[:_SHOWN]
    storages = [plan.graph.storages[storage] for storage in live]
    return {
        "op": None if op is None else plan.graph.ops[op].name,
        "storages": [{"name": storage.name, "bytes": storage.bytes} for storage in storages],
    }


def forward_shares(graph: Graph) -> dict[str, dict[str, float]]:
    """Return, by operator, the share of the step's seconds of its forward ops and what they write, largest first."""
    step_seconds = sum(op.seconds for op in graph.ops)
    shares: dict[str, dict[str, float]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            found = shares.setdefault(op.target, {"share_of_step": 0.0, "bytes": 0})
            found["share_of_step"] += op.seconds / step_seconds
            found["bytes"] += sum(graph.storages[storage].bytes for storage in op.writes)
    largest = sorted(shares.items(), key=lambda item: -item[1]["share_of_step"])
    return dict(largest[:_SHOWN])


def predict(network: str, moves: int) -> dict[str, Any]:
    """Return the network's row: memory by the paper's measure, overheads by roofline, memfit at the same memory."""
    batch = NETWORKS[network][2]
    started = time.perf_counter()
    once, twice = problem_of(network, batch), problem_of(network, 2 * batch)
    bounds, holding = zip(least_budget_bound(once), least_budget_bound(twice), strict=True)
    row: dict[str, Any] = {
        "batch": batch,
        "ops": len(once.graph.ops),
        "capture_seconds": time.perf_counter() - started,
        "paper": dict(zip(PAPER, NETWORKS[network][3], strict=True)),
        "forward": forward_shares(once.graph),
        "bound": {"bytes": bounds[1] - bounds[0], "ops": [once.graph.ops[op].name for op in holding[0]]},
    }
    for name, planner in PLANNERS.items():
        row[name] = cell(once, twice, planner)
    row["memfit"] = searched(once, row["re_forwarding"]["peak_bytes"], moves)
    return row


def cell(once: Problem, twice: Problem, planner: str) -> dict[str, Any]:
    """Return what a planner's least memory is by the paper's measure, its overhead, and what stands at its peak."""
    plan, seconds = least_plan(once, planner)
    double, _ = least_plan(twice, planner)
    return {
        "bytes": double.predicted.peak_bytes - plan.predicted.peak_bytes,
        "peak_bytes": plan.predicted.peak_bytes,
        "overhead": plan.overhead,
        "plan_seconds": seconds,
        "peak": peak_of(plan),
    }


def searched(problem: Problem, budget_bytes: int, moves: int) -> dict[str, Any]:
    """Return what memfit's search reaches within the budget, and the overhead that no plan there can go below."""
    started = time.process_time()
    result = make_planner("search", iterations=moves).plan(dataclasses.replace(problem, budget_bytes=budget_bytes))
    return {
        "budget_bytes": budget_bytes,
        "moves": moves,
        "processor_seconds": time.process_time() - started,
        "status": str(result.status),
        "overhead": result.plan.overhead if result.plan else None,
        "overhead_bound": result.bounds.overhead,
        "least_budget_found_bytes": result.bounds.least_budget_found_bytes,
    }


def measure(network: str, moves: int, repeats: int) -> dict[str, Any]:
    """Run Re-forwarding and memfit, at the memory of the first, beside eager on this machine at a small batch.

    Untimed where `repeats` is 0; called in a process of its own.
    """
    torch.manual_seed(0)
    batch = NETWORKS[network][4]
    step = make_step(network, batch)
    images, labels = step.batch
    step = dataclasses.replace(step, batch=(torch.randn_like(images), torch.zeros_like(labels)))
    try:
        fit_step(step, Settings(budget=1, planner="division_tree"))
    except InfeasibleBudgetError as error:
        budget = error.least_budget_found_bytes
    assert budget is not None
    search = Settings(budget=budget, planner="search", options={"iterations": moves})
    planned = {
        "re_forwarding": fit_step(step, Settings(budget=budget, planner="division_tree")),
        "memfit": fit_step(step, search),
    }
    for each in planned.values():
        each.verify()  # raises where a bit differs
    resident = resident_bytes(step)
    row: dict[str, Any] = {
        "batch": batch,
        "budget_bytes": budget,
        "resident_bytes": resident,
        "eager_peak_bytes": resident + usage_of(lambda: step.run_eager(step.batch), step).peak_bytes,
    }
    for name, each in planned.items():
        row[name] = {
            "predicted_peak_bytes": each.plan.predicted.peak_bytes,
            "peak_bytes": resident + usage_of(lambda each=each: each(step.batch), step).peak_bytes,
            "bitwise_equal": True,
        }

    def run(call: Any) -> Any:
        def once() -> None:
            step.model.zero_grad(set_to_none=True)
            call(step.batch)

        return once

    if repeats:
        calls = [run(call) for call in (step.run_eager, *planned.values())]
        eager, *seconds = processor_seconds(calls, repeats)
        row["eager_seconds"] = eager
        for name, each in zip(planned, seconds, strict=True):
            row[name]["overhead"] = each / eager - 1.0
    return row


def described(network: str, row: dict[str, Any]) -> str:
    """One line of the table: ours, and the paper's in brackets."""
    paper, regular = row["paper"], row["regular"]["bytes"]
    words = [f"{network:12} regular {regular / MB:6.0f} MB ({paper['regular']:.0f})"]
    for name in ("chen", "re_forwarding"):
        cut = 1 - row[name]["bytes"] / regular
        given = f"{1 - paper[name] / paper['regular']:.0%}" if paper[name] else "-"
        words.append(f"{name} {row[name]['bytes'] / MB:6.0f} MB, cut {cut:.0%} ({given})")
    slower = paper["re_forwarding_seconds"] / paper["regular_seconds"] - 1
    words.append(f"overhead {row['re_forwarding']['overhead']:.1%} ({slower:.0%})")
    ours = row["memfit"]["overhead"]
    words.append(f"memfit {'infeasible' if ours is None else f'{ours:.1%}'}")
    words.append(f"no plan below {row['memfit']['overhead_bound']:.1%}")
    return "; ".join([*words, *said_of_measured(row.get("measured"))])


def said_of_measured(measured: dict[str, Any] | None) -> list[str]:
    """The words for what was measured: peaks in MB, and how much slower than eager where it was timed."""
    if measured is None:
        return []
    if "error" in measured:
        return [measured["error"]]
    words = [f"batch {measured['batch']}, eager {measured['eager_peak_bytes'] / MB:.0f} MB"]
    for name in ("re_forwarding", "memfit"):
        each = measured[name]
        slower = f" {each['overhead']:+.1%}" if "overhead" in each else ""
        words.append(f"{name} {each['peak_bytes'] / MB:.0f} MB{slower}")
    return [f"measured: {', '.join(words)}"]


def main() -> None:
    """Predict the networks named on the command line, or all; measure them too where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--measure", action="store_true", help="run a small batch on this machine too")
    parser.add_argument("--untimed", action="store_true", help="measure bytes and bits only: for a busy machine")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each measurement")
    parser.add_argument("--moves", type=int, default=MOVES, help="moves that memfit's search may try")
    parser.add_argument("--again", action="store_true", help="predict and measure again what is stored already")
    parser.add_argument("--only", choices=[*COLUMNS], help="predict again this column of what is stored")
    options = parser.parse_args()
    path = result_path(NAME)
    rows: dict[str, Any] = load(path)["payload"]["networks"] if path.exists() else {}
    for network in options.networks:
        if options.again or network not in rows:
            kept = rows.get(network, {}).get("measured")
            rows[network] = predict(network, options.moves) | ({"measured": kept} if kept else {})
        elif options.only:
            batch = NETWORKS[network][2]
            both = problem_of(network, batch), problem_of(network, 2 * batch)
            rows[network][options.only] = cell(*both, PLANNERS[options.only])
        repeats = 0 if options.untimed else options.repeats
        if options.measure and (options.again or not is_measured(rows[network], timed=repeats > 0)):
            request = {"network": network, "moves": MEASURED_MOVES, "repeats": repeats}
            with fresh_cache():
                measured = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
            if "error" in measured and is_measured(rows[network], timed=False):
                print(f"{network:12} {measured['error']}; what is stored stays", flush=True)
            else:
                rows[network]["measured"] = measured
        ordered = {name: rows[name] for name in NETWORKS if name in rows}
        store(NAME, {"card": CARD, "networks": ordered})
        print(described(network, rows[network]), flush=True)


def is_measured(row: dict[str, Any], *, timed: bool) -> bool:
    """Whether the row holds a measurement, with times where they are asked for."""
    measured = row.get("measured", {})
    return "memfit" in measured and (not timed or "overhead" in measured["memfit"])


if __name__ == "__main__" and not answer_if_child(measure):
    main()
