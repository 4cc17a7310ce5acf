"""Chen et al. 2016, Figures 5 to 7: feature map memory against depth and length, and what it costs in time.

Figures 5 and 6 are predicted: the real models at full size are captured with fake tensors, and each strategy's memory
is that of its schedule, parameters left out. Weight gradients are used up at once by plain SGD, as the paper's are not
feature maps. Beyond 256 steps the LSTM's graph repeats the captured step, which is proved equal to the real capture at
128 and at 256. Figure 7 is measured on this machine at a smaller size, in processor seconds of one thread, planned
against unplanned in turns. The strategies:

    none       every node has memory of its own
    inplace    an op's result takes over an input of equal size that nothing reads later
    sharing    inplace, and memory is used again once nothing reads it (section 3)
    drop       sharing, batch normalization and ReLU are computed again (section 4.2)
    sublinear  sharing, and Algorithm 3 with the search of appendix A

Beside them, of the ResNet, stand Algorithm 3 with the best of 250 budgets B in place of appendix A's (`best B`), and
the optimal split of Feng 2018 (`linear_split`).

`plans` stands for the largest network of each of the first two figures, planned as a user would, from the graph to a
checked schedule with an address for every storage, in a process of its own: what that takes in time and memory.

    python benchmarks/chen_figures.py                                    # all three figures, and the plans
    python benchmarks/chen_figures.py 5 6 plans                          # predicted: on a busy machine too
    python benchmarks/chen_figures.py 7 --networks lstm --repeats 7      # measured: on a quiet one
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from _chen_models import LSTMSizes, RepeatedLSTM, lstm_step, resnet_step
from _loglog import loglog_svg, slope
from _measure import outcome, same_bits
from _process import answer_if_child, in_fresh_process
from _processor import processor_seconds
from _record import load, result_path, store

from memfit import TrainingStep
from memfit.capture import capture
from memfit.cost.recorder import allocated_bytes
from memfit.device import GENERIC
from memfit.errors import InfeasibleBudgetError
from memfit.graph import Graph, Op, Phase
from memfit.packing import PackingProblem, check_layout, make_packer
from memfit.packing.from_schedule import blocks_of
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.planners.emit import emit
from memfit.planners.linear_split import linear_chain, solve_chain
from memfit.planners.mirrored import evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import Program, build_program
from memfit.planners.sublinear import Frontier, Split, appendix_a_splits, judged
from memfit.planners.vertices import vertices_of
from memfit.planners.windows import Evaluation
from memfit.report.live import play
from memfit.runtime.fit import fit_step
from memfit.runtime.planning import Settings

NAME = "chen_figures"
DOCS = Path(__file__).parents[1] / "docs"
GB = 1e9
NO_LIMIT = 1 << 60
LAYOUT_PACKERS, LAYOUT_SECONDS = ("first_fit",), 60.0
CHILD_SECONDS = 1800
LAYERS = (128, 256, 512, 1024)
STEPS = (64, 128, 256, 512, 1024, 2048)
PROVED_STEPS = (128, 256)
MANY_BUDGETS = (0.35, math.sqrt(2), 250)  # of sqrt(x y): from, to, how many
MEASURED_LAYERS, MEASURED_STEPS = (32, 62, 122), (32, 64, 128, 256)
MEASURED_IMAGES = {"batch": 8, "size": 96, "width": 32}
MEASURED_SIZES = LSTMSizes(layers=2, hidden=256, batch=32, inputs=50, classes=200)

# Kernels that may write over an input: MXNet's FInplaceOption of the same operators, and their gradients.
_IN_PLACE = (
    "relu",
    "add",
    "mul",
    "sigmoid",
    "tanh",
    "threshold_backward",
    "sigmoid_backward",
    "tanh_backward",
)
_DROPPED = ("native_batch_norm", "relu")


def kind(op: Op) -> str:
    """The operator's name: `relu` of `aten.relu.default`."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else op.target


def with_reuses(graph: Graph) -> Graph:
    """Say of each op whose kernel may write in place which input it may take over."""
    size = [storage.bytes for storage in graph.storages]
    resident = [storage.resident for storage in graph.storages]

    def reuses(op: Op) -> tuple[tuple[int, int], ...]:
        if kind(op) not in _IN_PLACE:
            return ()
        return tuple((r, w) for r in op.reads for w in op.writes if size[r] == size[w] and not resident[r])

    return msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(op, reuses=reuses(op)) for op in graph.ops))


def without_sharing(graph: Graph) -> tuple[int, int]:
    """Return the bytes of strategies `none` and `inplace`: all nodes, and all but those that take over an input's."""
    last_read = {storage: op.id for op in graph.ops for storage in op.reads}
    updated = {storage for op in graph.ops if op.phase == "update" for storage in op.reads}  # weight gradients
    every, fresh = 0, 0
    for op in graph.ops:
        written = sum(graph.storages[s].bytes for s in op.writes if s not in updated)
        taken = [r for r, w in op.reuses if last_read[r] == op.id and not graph.storages[r].required_at_end]
        every += written
        fresh += written - max((graph.storages[r].bytes for r in taken if op.writes[0] not in updated), default=0)
    return every, fresh


def strategies(graph: Graph, *, of_resnet: bool) -> dict[str, Any]:
    """Return feature map bytes by strategy, and what planning took; of a ResNet also what makes up the least peak."""
    graph = with_reuses(graph)
    every, fresh = without_sharing(graph)
    started = time.perf_counter()
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT)
    program = build_program(problem, update_at_once_order(graph))
    found = {"none": every, "inplace": fresh, "sharing": above_residents(program, np.zeros(len(program.op_at)))}
    if of_resnet:
        dropped = [op >= 0 and kind(graph.ops[op]) in _DROPPED for op in program.op_at]
        found["drop"] = above_residents(program, np.array(dropped))
    started_search = time.perf_counter()
    best, split = min(
        ((judged(program, split), split) for split in appendix_a_splits(program)), key=lambda pair: pair[0].peak_bytes
    )
    found["sublinear"] = best.peak_bytes - program.base_bytes
    return {
        "bytes": found,
        **({"sublinear_at_peak": at_peak(program, best, split)} if of_resnet else {}),
        "resident_bytes": program.base_bytes,
        "ops": len(graph.ops),
        "program_seconds": started_search - started,
        "search_seconds": time.perf_counter() - started_search,
    }


def beyond_the_paper(graph: Graph) -> dict[str, int]:
    """Return the feature map bytes of the best of many budgets B, and of Feng 2018's optimal split."""
    graph = with_reuses(graph)
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT)
    program = build_program(problem, update_at_once_order(graph))
    return {"best B": least_of_many_budgets(program), "linear_split": optimal_split(program)}


def least_of_many_budgets(program: Program) -> int:
    """Return the feature map bytes of Algorithm 3 with the best of many B around sqrt(x y), for each set of places."""
    frontier = Frontier.of(program)
    splits: dict[frozenset[int], Split] = {}
    for candidates in (frontier.is_candidate, frontier.is_narrow):
        first = frontier.split(0, candidates)
        root = math.sqrt(first.between_bytes * first.stage_bytes)
        found = [frontier.split(int(times * root), candidates) for times in np.geomspace(*MANY_BUDGETS)]
        splits |= {split.kept: split for split in found}
    return min(judged(program, split).peak_bytes for split in splits.values()) - program.base_bytes


def optimal_split(program: Program) -> int:
    """Return the feature map bytes of Feng 2018's optimal split."""
    vertices = vertices_of(program)
    chain, between = linear_chain(vertices)
    split = solve_chain([vertices.cost_bytes[vertex] for vertex in chain], between)
    return above_residents(program, vertices.mirror_counts(program, [chain[index] for index in split.stored]))


def at_peak(program: Program, evaluation: Evaluation, split: Split) -> dict[str, int]:
    """Return the bytes at the peak: kept between stages, of the stage that is computed again, and of backward."""
    graph = program.graph
    run = play(graph, emit(program, evaluation.sequence), GENERIC)
    found = {"kept": 0, "stage": 0, "backward": 0}
    for storage in run.live_at(run.timeline.peak_position):
        if not graph.storages[storage].resident:
            is_forward = graph.ops[graph.writer_of[storage]].phase is Phase.FORWARD
            which = "kept" if storage in split.kept else "stage" if is_forward else "backward"
            found[which] += graph.storages[storage].bytes
    return found


def above_residents(program: Program, counts: Any) -> int:
    """Return the peak of these mirror counts above parameters and batch."""
    return evaluate_mirror(program, counts.astype(np.int64)).peak_bytes - program.base_bytes


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
    path = result_path(NAME)
    figures: dict[str, Any] = load(path)["payload"] if path.exists() else {}
    makers: dict[str, Callable[[], Any]] = {
        "5": figure_5,
        "6": figure_6,
        "7": lambda: figures.get("7", {}) | figure_7(options.repeats, options.networks),
        "plans": lambda: full_plans(figures),
    }
    for figure in options.figures:
        figures[figure] = makers[figure]()
        stored = store(NAME, figures)
        if figure == "plans":
            continue
        picture = stored.with_name(f"{NAME}_{figure}.svg")
        draw(figure, figures[figure], picture)
        shutil.copy(picture, DOCS)
        if "slopes" in figures[figure]:
            fitted = {name: round(value, 2) for name, value in figures[figure]["slopes"].items()}
            print(f"figure {figure}: slopes {fitted}", flush=True)


if __name__ == "__main__" and not answer_if_child(full_plan):
    main()
