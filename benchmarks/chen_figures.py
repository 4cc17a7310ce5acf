"""Chen et al. 2016, Figures 5 to 7: feature map memory against depth and length, and what it costs in time.

Figures 5 and 6 are predicted: the real models at full size are captured with fake tensors, and each strategy's memory
is that of its schedule, parameters left out (5a and 6a), or what a model of torch's allocator reserves (5b and 6b).
Weight gradients are used up at once by plain SGD, as the paper's are not feature maps. Beyond 256 steps the LSTM's
graph repeats the captured step, which is proved equal to the real capture at 128 and at 256. Figure 7 is measured on
this machine at a smaller size, in processor seconds of one thread, planned against unplanned in turns.
`_chen_strategies.py` says what the strategies are.

`plans` stands for the largest network of each of the first two figures, planned as a user would, from the graph to a
checked schedule with an address for every storage, in a process of its own: what that takes in time and memory.

    python benchmarks/chen_figures.py                                    # all three figures, and the plans
    python benchmarks/chen_figures.py 5 6 plans                          # predicted: on a busy machine too
    python benchmarks/chen_figures.py 7 --networks lstm --repeats 7      # measured: on a quiet one
"""

from __future__ import annotations

import argparse
import itertools
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _chen_models import LSTMSizes, RepeatedLSTM, lstm_step, resnet_step
from _chen_strategies import NO_LIMIT, beyond_the_paper, strategies, with_reuses
from _loglog import loglog_svg, slope
from _measure import outcome, same_bits
from _process import answer_if_child, in_fresh_process
from _processor import processor_seconds
from _record import load, result_path, store

from memfit import TrainingStep
from memfit.capture import capture
from memfit.device import GENERIC
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError
from memfit.packing import PackingProblem, check_layout, make_packer
from memfit.packing.from_schedule import blocks_of
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.planning import Settings
from memfit.system.recorder import allocated_bytes

NAME, MEASURED = "chen_figures", "chen_figures_measured"  # figures 5 and 6; figure 7 and the plans
DOCS = Path(__file__).parents[1] / "docs"
GB = 1e9
LAYOUT_PACKERS, LAYOUT_SECONDS = ("first_fit",), 60.0
CHILD_SECONDS = 1800
LAYERS = (128, 256, 512, 1024)
STEPS = (64, 128, 256, 512, 1024, 2048)
PROVED_STEPS = (128, 256)
MEASURED_LAYERS, MEASURED_STEPS = (32, 62, 122), (32, 64, 128, 256)
MEASURED_IMAGES = {"batch": 8, "size": 96, "width": 32}
MEASURED_SIZES = LSTMSizes(layers=2, hidden=256, batch=32, inputs=50, classes=200)


def full_plan(network: str, size: int, budget_bytes: int) -> dict[str, Any]:
    """Plan within the budget, check, simulate and lay out, as a user would; return what it took and the layout.

    Called in a process of its own, whose peak is that of all this together.
    """
    clocks = [("", time.perf_counter(), time.process_time())]

    def done(what: str) -> None:
        clocks.append((what, time.perf_counter(), time.process_time()))

    if network == "resnet":
        graph = with_reuses(capture(resnet_step(size, 32, 224)).graph)
    else:
        graph = with_reuses(RepeatedLSTM(LSTMSizes()).graph_of(size))
    done("graph")
    plan = make_planner("sublinear").plan(Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes)).plan
    assert plan is not None
    done("plan")
    step = blocks_of(graph, plan.schedule, GENERIC)
    problem = PackingProblem(blocks=step.blocks, time_limit_seconds=LAYOUT_SECONDS, seed=0)
    layouts = [make_packer(name).pack(problem) for name in LAYOUT_PACKERS]
    layout = min(layouts, key=lambda layout: layout.height_bytes)
    check_layout(step.blocks, layout)
    done("layout")
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": plan.predicted.peak_bytes,
        "instructions": len(plan.schedule),
        "blocks": len(step.blocks),
        "height_bytes": layout.height_bytes,
        "height_bound_bytes": layout.lower_bound_bytes,
        "seconds": {what: now - before for (_, before, _), (what, now, _) in itertools.pairwise(clocks)},
        "processor_seconds": {what: now - before for (_, _, before), (what, _, now) in itertools.pairwise(clocks)},
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def full_plans(figures: dict[str, Any]) -> dict[str, Any]:
    """Return `full_plan` of the largest networks at the least memory of `sublinear`, each from its own process."""
    plans: dict[str, Any] = {}
    for name, figure, size in (("resnet", "5", LAYERS[-1]), ("lstm", "6", STEPS[-1])):
        point = figures[figure]["points"][str(size)]
        budget_bytes = point["bytes"]["sublinear"] + point["resident_bytes"]
        request = {"network": name, "size": size, "budget_bytes": budget_bytes}
        plan = plans[f"{name}{size}"] = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
        print(f"{name}{size}: {plan['error'] if 'error' in plan else said_of_plan(plan)}", flush=True)
    return plans


def figure_5() -> dict[str, Any]:
    """ResNet by layers, batch 32, 3x224x224."""
    points: dict[str, Any] = {}
    for layers in LAYERS:
        started = time.perf_counter()
        graph = capture(resnet_step(layers, 32, 224)).graph
        seconds = time.perf_counter() - started
        points[str(layers)] = {"capture_seconds": seconds, **strategies(graph, of_resnet=True)}
        points[str(layers)]["bytes"] |= beyond_the_paper(graph)
        say(f"resnet {layers:5} layers", points[str(layers)])
    return {"points": points, "slopes": slopes(points), "title": "ResNet, batch 32, 3x224x224"}


def figure_6() -> dict[str, Any]:
    """LSTM by steps: captured to 256 steps, beyond by repetition."""
    sizes = LSTMSizes()
    repeated = RepeatedLSTM(sizes)
    proved = {
        str(steps): repeated.graph_of(steps).fingerprint == capture(lstm_step(steps, sizes)).graph.fingerprint
        for steps in PROVED_STEPS
    }
    print(f"repetition equals the real capture: {proved}", flush=True)
    points: dict[str, Any] = {}
    for steps in STEPS:
        graph = repeated.graph_of(steps)
        points[str(steps)] = strategies(graph, of_resnet=False)
        say(f"lstm {steps:7} steps", points[str(steps)])
    return {"proved": proved, "points": points, "slopes": slopes(points), "title": "LSTM, 4 x 1024, batch 64"}


def slopes(points: dict[str, Any]) -> dict[str, float]:
    """Return the fitted exponent of each strategy."""
    names = next(iter(points.values()))["bytes"]
    return {name: slope([(int(x), point["bytes"][name]) for x, point in points.items()]) for name in names}


def say(what: str, point: dict[str, Any]) -> None:
    """Print one point."""
    words = ", ".join(f"{name} {size / GB:.2f}" for name, size in point["bytes"].items())
    print(f"{what}: GB {words}; {point['ops']:,} ops, {point['search_seconds']:.1f} s", flush=True)


def said_of_plan(planned: dict[str, Any]) -> str:
    """The words for what a whole plan took."""
    seconds, processor = sum(planned["seconds"].values()), sum(planned["processor_seconds"].values())
    above = planned["height_bytes"] / planned["height_bound_bytes"] - 1
    return (
        f"planned and laid out in {seconds:.0f} s ({processor:.0f} of a processor), "
        f"{planned['process_peak_bytes'] / GB:.1f} GB; {planned['blocks']:,} blocks in "
        f"{planned['height_bytes'] / GB:.2f} GB, {above:.2%} above the bound"
    )


def figure_7(repeats: int, networks: Sequence[str]) -> dict[str, Any]:
    """Time by depth and by length, measured: planner sublinear at its least memory against the unplanned step."""
    allocated_bytes("cpu")
    made: dict[str, tuple[tuple[int, ...], Callable[[int], TrainingStep]]] = {
        "resnet": (MEASURED_LAYERS, lambda layers: resnet_step(layers, device="cpu", **MEASURED_IMAGES)),
        "lstm": (MEASURED_STEPS, lambda steps: lstm_step(steps, MEASURED_SIZES, device="cpu")),
    }
    found: dict[str, Any] = {}
    for name in networks:
        depths, make = made[name]
        points: dict[str, Any] = {}
        for depth in depths:
            point = points[str(depth)] = measured(make(depth), repeats)
            print(f"{name} {depth:5}: {point['seconds']:.3f} s, {point['time_ratio']:.2f} of unplanned", flush=True)
        found[name] = {
            "points": points,
            "slopes": {
                which: slope([(int(depth), point[which]) for depth, point in points.items()])
                for which in ("seconds", "unplanned_seconds")
            },
        }
    return found


def measured(step: TrainingStep, repeats: int) -> dict[str, Any]:
    """Time a step planned by `sublinear` against the step planned by `none`."""
    try:
        fit_step(step, Settings(budget=1, planner="sublinear"))
    except InfeasibleBudgetError as error:
        least = error.least_budget_found_bytes
    assert least is not None
    ours = fit_step(step, Settings(budget=least, planner="sublinear"))
    theirs = fit_step(step, Settings(budget=NO_LIMIT, planner="none"))
    bits = same_bits(outcome(lambda: ours(step.batch), step), outcome(lambda: theirs(step.batch), step))
    mine, other = processor_seconds([lambda: ours(step.batch), lambda: theirs(step.batch)], repeats)
    return {
        "seconds": mine,
        "unplanned_seconds": other,
        "time_ratio": mine / other,
        "peak_bytes": ours.plan.predicted.peak_bytes,
        "unplanned_peak_bytes": theirs.plan.predicted.peak_bytes,
        "predicted_overhead": ours.plan.overhead,
        **bits,
    }


def draw(figure: str, found: dict[str, Any], path: Path) -> None:
    """Write a figure's picture."""
    if figure == "7":
        lines = {
            f"{name}, {label}": [(int(depth), point[which]) for depth, point in part["points"].items()]
            for name, part in found.items()
            for which, label in (("unplanned_seconds", "sharing"), ("seconds", "sublinear"))
        }
        picture = loglog_svg("Measured on a CPU", "layers, steps", "processor seconds a step", lines)
    else:
        names = next(iter(found["points"].values()))["bytes"]
        lines = {name: [(int(x), point["bytes"][name] / GB) for x, point in found["points"].items()] for name in names}
        across = "layers" if figure == "5" else "steps"
        picture = loglog_svg(found["title"], across, "feature map memory, GB", lines)
    path.write_text(picture, encoding="utf-8")


def main() -> None:
    """Make the figures named on the command line, or all; store each with its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", default=["5", "6", "7", "plans"], metavar="FIGURE")
    parser.add_argument("--networks", nargs="*", default=["resnet", "lstm"], help="of figure 7")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of figure 7")
    options = parser.parse_args()
    stored_as = {"5": NAME, "6": NAME, "7": MEASURED, "plans": MEASURED}
    figures: dict[str, dict[str, Any]] = {}
    for name in (NAME, MEASURED):
        path = result_path(name)
        figures[name] = load(path)["payload"] if path.exists() else {}
    makers: dict[str, Callable[[], Any]] = {
        "5": figure_5,
        "6": figure_6,
        "7": lambda: figures[MEASURED].get("7", {}) | figure_7(options.repeats, options.networks),
        "plans": lambda: full_plans(figures[NAME]),
    }
    for figure in options.figures:
        name = stored_as[figure]
        found = figures[name][figure] = makers[figure]()
        stored = store(name, figures[name])
        if figure == "plans":
            continue
        picture = stored.with_name(f"{NAME}_{figure}.svg")
        draw(figure, found, picture)
        shutil.copy(picture, DOCS)
        if "slopes" in found:
            fitted = {name: round(value, 2) for name, value in found["slopes"].items()}
            print(f"figure {figure}: slopes {fitted}", flush=True)


if __name__ == "__main__" and not answer_if_child(full_plan):
    main()
