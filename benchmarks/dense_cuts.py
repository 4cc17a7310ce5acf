"""Packing of dense cuts of layouts, whose least height is known: how many `auto` packs at the lower bound.

    python benchmarks/dense_cuts.py                   # ten seconds each, on two cores
    python benchmarks/dense_cuts.py --work 10e9       # as much work, so that a busy machine gives the same
    python benchmarks/dense_cuts.py --seeds 5 --only K
    python benchmarks/dense_cuts.py --work 1e9 --without any_level flush   # what these parts of `exact` gain

The layouts are those that `auto` finds, at their lower bounds, for MiniMalloc's traces A to E and K, idealloc's
ResNet-50, and the unplanned steps of the four graphs in tests/data/graphs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from _dense_cuts import KINDS, Pieces, dense_cut, pieces_of
from _made_traces import made_trace
from _record import store

from memfit.device import GENERIC
from memfit.graph import Graph
from memfit.packing import Blocks, PackingProblem, check_layout, make_packer
from memfit.packing.from_schedule import blocks_of
from memfit.packing.trace_file import read_trace
from memfit.plan import Problem
from memfit.planners.engine.results import unplanned_schedule

DATA = Path(__file__).parents[1] / "tests" / "data"
TRACES = {**{letter: f"{letter}.1048576" for letter in "ABCDEK"}, "resnet50": "resnet50"}
NO_LIMIT_SECONDS = 1e9


def sources() -> dict[str, Blocks]:
    """Return the blocks whose layouts are cut."""
    found = {name: read_trace(DATA / "packing" / f"{file}.csv") for name, file in TRACES.items()}
    for path in sorted((DATA / "graphs").glob("*.graph.json.gz")):
        graph = Graph.load(path)
        schedule = unplanned_schedule(Problem(graph=graph, device=GENERIC, budget_bytes=0))
        found[path.name.partition(".")[0]] = blocks_of(graph, schedule).blocks
    return found


def layout_of(blocks: Blocks) -> Pieces:
    """Return the layout that is cut; it is at the lower bound, and the same on each machine."""
    problem = PackingProblem(blocks=blocks, time_limit_seconds=NO_LIMIT_SECONDS)
    layout = make_packer("auto", work=100_000_000_000).pack(problem)
    check_layout(blocks, layout)
    if not layout.proven:
        raise SystemExit(f"a layout of {blocks} is {layout.ratio:.4f} times its lower bound, expected 1")
    return pieces_of(blocks, layout)


def packed(cut: Pieces, seconds: float, work: int, without: str) -> dict[str, Any]:
    """Pack one cut without a part and check the layout."""
    blocks = cut.blocks()
    begun = time.perf_counter()
    problem = PackingProblem(blocks=blocks, time_limit_seconds=NO_LIMIT_SECONDS if work else seconds)
    layout = make_packer("auto", work=work, without=without).pack(problem)
    taken = time.perf_counter() - begun
    check_layout(blocks, layout)
    return {"blocks": len(blocks), "ratio": layout.ratio, "seconds": taken}


def main() -> None:
    """Cut, pack, print as it goes, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each cut")
    parser.add_argument("--work", type=float, default=0, help="operations for each cut, in place of seconds")
    parser.add_argument("--seeds", type=int, default=3, help="cuts of each kind of each layout")
    parser.add_argument("--only", nargs="*", help="layouts that are cut; nothing is stored")
    parser.add_argument("--without", nargs="*", default=[], help="parts that are switched off, one at a time")
    words = parser.parse_args()
    make_packer("auto").pack(PackingProblem(blocks=made_trace(300, seed=1), time_limit_seconds=1.0))  # compiles
    stored: list[dict[str, Any]] = []
    for name, blocks in sources().items():
        if words.only and name not in words.only:
            continue
        layout = layout_of(blocks)
        for kind, seed in ((kind, seed) for kind in KINDS for seed in range(words.seeds)):
            cut = dense_cut(layout, kind, seed)
            if cut is None:
                continue
            for without in ("", *words.without):
                result = packed(cut[0], words.seconds, int(words.work), without)
                stored.append({"source": name, "kind": kind, "seed": seed, "without": without, **result})
                shown = f"{result['ratio']:.4f}  {result['seconds']:.2f} s  {without and 'without ' + without}"
                print(f"{name:32} {kind:7} seed {seed}  {result['blocks']:4} blocks  {shown}", flush=True)
    for without, kind in ((without, kind) for without in ("", *words.without) for kind in KINDS):
        ratios = [entry["ratio"] for entry in stored if (entry["kind"], entry["without"]) == (kind, without)]
        at_bound, mean = ratios.count(1.0), statistics.mean(ratios or [1.0])
        print(f"{without or 'all parts':16} {kind:7} {at_bound} of {len(ratios)} at the lower bound, mean {mean:.4f}")
    if not words.only:
        limits = {"time_limit_seconds": words.seconds, "work": int(words.work)}
        name = "dense_cuts_parts" if words.without else "dense_cuts"
        print("stored in", store(name, {**limits, "cuts": stored}))


if __name__ == "__main__":
    main()
