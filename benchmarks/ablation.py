"""What each part of the search and of the packers gains: each is switched off, one at a time, and the rest is measured.

Points are the four shared graphs at three budgets, the eight workloads at two, two graphs with a host, and the packing
traces (`_ablation_points.py`); each with several seeds. Searches have equal moves, so that a figure does not depend on
the load of the machine; packers, and with `--seconds` searches too, have equal processor seconds. The spread of the
full search over its seeds says how much of a difference is chance.

    python benchmarks/ablation.py                        # all parts at all points: about an hour
    python benchmarks/ablation.py --only exchange support  # these parts
    python benchmarks/ablation.py --eliminate            # then switch needless parts off, one after the other, for good
    python benchmarks/ablation.py --only flush --seeds 6 --eliminate  # the same for a doubtful part
    python benchmarks/ablation.py --show                 # run nothing: store and print what the cells say

A cell is one run: a point, what is switched off, a seed. Cells are kept in FOLDER as they are done, beside the captured
graphs of the workloads, and a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from _ablation_gains import DOUBTFUL, FULL, NEEDED, NEEDLESS, UNTOUCHED, Gain, answer_of, gains_of, summarize
from _ablation_once import computed_once
from _ablation_points import (
    PackPoint,
    PlanPoint,
    capture_missing,
    long_points,
    pack_points,
    plan_points,
    small_points,
    timed_points,
)
from _made_traces import made_trace
from _record import load, result_path, store

from memfit.checker import check
from memfit.graph import Graph
from memfit.packing import PackingProblem, check_layout, make_packer
from memfit.packing.parts import NAMES as PACK_PARTS
from memfit.packing.parts import RULES
from memfit.plan import Result
from memfit.planners.auto import AutoPlanner
from memfit.planners.engine.parts import Parts
from memfit.planners.search import SearchPlanner

FOLDER = Path.home() / ".cache" / "memfit-ablation"
SEEDS = (0, 1, 2)
PACK_SECONDS, LONG_SECONDS = 1.0, 2.0  # of a packer; and of one of few blocks, where proofs are in reach
LONGEST_SECONDS = 8.0  # of one of few blocks that is not proved by then
EARLY_SECONDS = 0.25  # when the best layout so far is looked at
WARM_BLOCKS, WARM_WORK = (300, 1_000, 5_000), 2_000_000_000  # packed beforehand, so that no cell compiles anything
PLAN_PARTS = tuple(field.name for field in fields(Parts))
MOVES = {"lstm": 8_000}  # of one search, by graph
MOST_MOVES, MOVES_TIMES_OPS = 60_000, 40_000_000  # for the others: so many, but fewer for graphs of many ops
CUT = (  # what the stored results leave out, for want of processor time
    "searches of equal seconds",
    "moves: 60,000 a search at most, where a search of 5 s makes several hundred thousand",
    "longer packings of traces D, E and K",
)
NO_LIMIT_SECONDS = 1e9  # where moves or work are counted
STORED = ("overhead", "bound", "found_bytes", "bound_bytes", "ratio", "early_ratio", "proven", "pack_seconds")
PROOF = "cpsat_proof"  # of planning up to 64 ops
BOUNDS = ("boundary_candidates", "last_large_op", "exact_per_op")

Point = PlanPoint | PackPoint
Cell = dict[str, Any]
Key = tuple[str, str, int]
"""A point's name, what is switched off there, and the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The cells of one point that are missing, each by what is switched off and by its seed.

    No cell begins after `until`, in seconds of `time.time`.
    """

    point: Point
    cells: tuple[tuple[str, int], ...]
    folder: Path
    until: float


def measure_cells(work: Work) -> str:
    """Measure the cells of one point, append each to the file of cells, and return the point's name.

    A search that gives the first seed's full answer to the last digit is not run again with other seeds: the part that
    is switched off has no say at this point, and these cells are the full search's.
    """
    warm_up(work)
    is_counted = isinstance(work.point, PlanPoint) and not work.point.seconds
    done = {key[1:]: cell for key, cell in read_cells(work.folder).items() if key[0] == work.point.name}
    known: dict[tuple[Any, ...], Any] = {}
    for without, seed in work.cells:
        if time.time() > work.until:
            break
        if (without, seed) in done:
            continue
        base = done.get((FULL, seed))
        first, base_first = done.get((without, SEEDS[0])), done.get((FULL, SEEDS[0]))
        if is_counted and base and first and base_first and answer_of(first) == answer_of(base_first):
            cell = base | {"same": True}
        else:
            begun = time.process_time()
            is_packed = isinstance(work.point, PackPoint)
            cell = pack_cell(work, without, seed) if is_packed else plan_cell(work, without, seed, known)
            cell["processor_seconds"] = round(time.process_time() - begun, 3)
        done[(without, seed)] = cell
        append(work.folder, (work.point.name, without, seed), cell)
    return work.point.name


def warm_up(work: Work) -> None:
    """Compile all that the cells run."""
    if isinstance(work.point, PackPoint):
        for blocks in WARM_BLOCKS:
            problem = PackingProblem(blocks=made_trace(blocks, seed=9), time_limit_seconds=NO_LIMIT_SECONDS)
            make_packer("auto", work=WARM_WORK).pack(problem)


def pack_cell(work: Work, without: str, seed: int) -> Cell:
    """Pack once; return the height over the lower bound, early and in the end, and whether it was proved."""
    assert isinstance(work.point, PackPoint)
    blocks = work.point.blocks(work.folder)
    heights: list[tuple[float, int]] = []
    problem = PackingProblem(
        blocks=blocks,
        time_limit_seconds=pack_seconds(work.point),
        seed=seed,
        clock=time.process_time,
        progress=lambda progress: heights.append((progress.seconds, progress.height_bytes)),
    )
    begun = time.process_time()
    layout = make_packer("auto", without=without).pack(problem)
    seconds = time.process_time() - begun
    check_layout(blocks, layout)
    early = [height for moment, height in heights if moment <= EARLY_SECONDS] or [heights[0][1]]
    return {
        "early_ratio": early[-1] / blocks.lower_bound_bytes,
        "ratio": layout.ratio,
        "proven": layout.proven,
        "pack_seconds": round(seconds, 4),
    }


def plan_cell(work: Work, without: str, seed: int, known: dict[tuple[Any, ...], Any]) -> Cell:
    """Plan once, replay the plan, and return its overhead, None without a plan, and what was proved."""
    assert isinstance(work.point, PlanPoint)
    point, limit_seconds = work.point, work.point.seconds or NO_LIMIT_SECONDS
    problem = point.problem(work.folder, seed=seed, clock=time.process_time, time_limit_seconds=limit_seconds)
    moves = point.times * MOVES.get(str(point.graph), min(MOST_MOVES, MOVES_TIMES_OPS // len(problem.graph.ops)))
    planner = SearchPlanner(iterations=None if point.seconds else moves, without=without)
    begun = time.process_time()
    if point.is_small:
        results = [AutoPlanner(iterations=planner.iterations, without=without).plan(problem)]
    elif point.seconds:
        results = [planner.plan(problem)]
    else:
        with computed_once(Parts.without(without), known):
            results = [planner.plan(problem)]
    return outcome(problem.graph, results) | {"plan_seconds": round(time.process_time() - begun, 4)}


def outcome(graph: Graph, results: Sequence[Result]) -> Cell:
    """Check the plans, and return the means of their overheads and bounds."""
    plans = [result.plan for result in results if result.plan is not None]
    for plan in plans:
        check(graph, plan.schedule)
    bounds = [result.bounds for result in results]
    return {
        "overhead": statistics.mean(plan.overhead for plan in plans) if len(plans) == len(results) else None,
        "bound": statistics.mean(max(each.overhead, each.overhead_in_order or 0.0) for each in bounds),
        "status": str(results[0].status),
        "found_bytes": min(each.least_budget_found_bytes or 0 for each in bounds),
        "bound_bytes": bounds[0].least_budget_bound_bytes,
        "moves": sum(int(result.stats.get("moves", 0)) for result in results),
    }


def append(folder: Path, key: Key, cell: Cell) -> None:
    """Add a cell to the file of cells, in one write: other processes add theirs."""
    with (folder / "cells.jsonl").open("a") as file:
        file.write(json.dumps([*key, cell]) + "\n")


def read_cells(folder: Path) -> dict[Key, Cell]:
    """Return the cells that are done."""
    path = folder / "cells.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {(point, without, seed): cell for point, without, seed, cell in map(json.loads, lines)}


def concerns(point: Point, part: str) -> bool:
    """Whether a part can change anything at a point: some stages pack few blocks only, or many."""
    if isinstance(point, PlanPoint):
        return part in parts_at(point)
    sizes = {"tight": {"many"}} | {part: {"few", "some"} for part in ("exact", *RULES)}
    return part in PACK_PARTS and point.size in sizes.get(part, {"few", "some", "many"})


def parts_at(point: PlanPoint) -> Sequence[str]:
    """Return the parts that are switched off at a point."""
    if point.is_small:
        return [PROOF]
    left_out = (PROOF, *(BOUNDS if point.times > 1 else ()))
    return [part for part in PLAN_PARTS if part not in left_out]


def missing(points: Iterable[Point], switched: Sequence[Sequence[str]], options: argparse.Namespace) -> list[Work]:
    """Return the work that is left at these points: the full search, and each of these lists of parts switched off."""
    done, works = read_cells(options.folder), list[Work]()
    for point in points:
        here = [joined(part for part in off if concerns(point, part)) for off in switched]
        others = [without for without in dict.fromkeys(here) if without]
        cells = [(without, seed) for seed in range(options.seeds) for without in (FULL, *others) if others]
        left = tuple(cell for cell in cells if (point.name, *cell) not in done)
        if left:
            works.append(Work(point=point, cells=left, folder=options.folder, until=options.until))
    return works


def pack_seconds(point: PackPoint) -> float:
    """Return the processor seconds that a packer has at a trace."""
    return LONGEST_SECONDS if point.is_long else LONG_SECONDS if point.size == "few" else PACK_SECONDS


def joined(parts: Iterable[str]) -> str:
    """Return parts as the option `without` takes them, in one order."""
    return ",".join(sorted(parts))


def run(works: Sequence[Work], jobs: int) -> None:
    """Measure, some points at a time."""
    left = sum(len(work.cells) for work in works)
    print(f"{left} cells at {len(works)} points", file=sys.stderr)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for number, name in enumerate(pool.imap_unordered(measure_cells, works), 1):
            print(f"{number}/{len(works)} {name}", file=sys.stderr, flush=True)


def table(cells: dict[Key, Cell], points: Sequence[Point], parts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the row of each part that was measured."""
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        gains = compared(cells, points, [], [part])
        if gains:
            rows[part] = summarize(gains)
    return rows


def compared(cells: dict[Key, Cell], points: Sequence[Point], off: Sequence[str], more: Sequence[str]) -> list[Gain]:
    """Return what `more` parts gain where `off` are switched off, at the points that they concern."""
    mine = [point for point in points if any(concerns(point, part) for part in more)]
    return gains_of(cells, switched_off(mine, off), switched_off(mine, [*off, *more]))


def switched_off(points: Iterable[Point], parts: Sequence[str]) -> dict[str, str]:
    """Return what is switched off at each point when these parts are."""
    return {point.name: joined(part for part in parts if concerns(point, part)) for point in points}


def eliminate(points: Sequence[Point], parts: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Switch off the parts that look needless for good, the most needless first, and measure after each.

    Of two parts that do the same, each looks needless as long as the other is there. A part is put back where the
    search without it is worse than the one before, or than the full one. Doubtful parts are tried if `--only` names
    them.
    """
    rows = table(read_cells(options.folder), points, parts)
    tried = (NEEDLESS, UNTOUCHED, DOUBTFUL) if options.only else (NEEDLESS, UNTOUCHED)
    needless = [part for part, row in rows.items() if row["verdict"] in tried]
    needless.sort(key=lambda part: (rows[part]["largest_gain"], rows[part]["mean_gain"]))
    off, steps = list[str](), list[dict[str, Any]]()
    while len(steps) < len(needless):
        left = needless[len(steps) :]
        ahead = [[*off, *left[: count + 1]] for count in range(len(left))]  # as if all of them went
        run(missing(points, ahead, options), options.jobs)
        cells = read_cells(options.folder)
        for part in left:
            steps.append(elimination_step(cells, points, off, part))
            if not steps[-1]["goes"]:
                break
            off.append(part)
    return steps


def elimination_step(cells: dict[Key, Cell], points: Sequence[Point], off: Sequence[str], part: str) -> dict[str, Any]:
    """Return the gain of a part with `off` switched off, its gain together with them, and whether it goes."""
    alone = summarize(compared(cells, points, off, [part]))
    together = summarize(compared(cells, points, [], [*off, part]))
    goes = not any(row["likely"] or row["verdict"] == NEEDED for row in (alone, together))
    print(f"{part}: {'goes' if goes else 'stays'}", file=sys.stderr, flush=True)
    return {"part": part, "alone": alone, "together": together, "goes": goes}


def payload(folder: Path, eliminated: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored: the rows of the table, and the figures of the cells behind it."""
    cells, points, path = read_cells(folder), all_points(), result_path("ablation")
    kept = load(path)["payload"] if path.exists() else {}  # of parts that are gone, or were measured elsewhere
    by_point: dict[str, dict[str, dict[str, list[Any]]]] = kept.get("switched_off", {})
    for point, without in {(point, without) for point, without, _ in cells}:
        by_point.setdefault(point, {}).pop(without or "nothing", None)  # measured anew
    for point, without, seed in sorted(cells):
        figures = by_point.setdefault(point, {}).setdefault(without or "nothing", {"seeds": []})
        figures["seeds"].append(seed)
        for name in STORED:
            if name in cells[point, without, seed]:
                figures.setdefault(name, []).append(cells[point, without, seed][name])
    return {
        "seeds": list(SEEDS),
        "moves": {"most": MOST_MOVES, "times_ops": MOVES_TIMES_OPS, **MOVES},
        "cut": list(CUT),
        "pack_seconds": {"few": LONG_SECONDS, "others": PACK_SECONDS, "long": LONGEST_SECONDS, "early": EARLY_SECONDS},
        "search": kept.get("search", {}) | table(cells, points, PLAN_PARTS),
        "packing": kept.get("packing", {}) | table(cells, points, PACK_PARTS),
        "eliminated": eliminated,
        "switched_off": by_point,
    }


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print the rows of a table."""
    for part, row in sorted(rows.items(), key=lambda item: -item[1]["largest_gain"]):
        cells = [
            f"{part:24} mean {row['mean_gain']:+.3%}, largest {row['largest_gain']:+.3%}",
            f"spread {row['spread_there']:.3%} at {row['largest_at']}",
            f"helps at {row['helps']}, hurts at {row['hurts']}",
            f"counts at {len(row['points_that_count'])} of {row['points']}",
            f"lost {row['lost']}, won {row['won']}",
            f"closes {row['closed']:.0%}",
            f"{row['slower']:.1f} times slower",
            row["verdict"],
        ]
        print("; ".join(cells))


def main() -> None:
    """Measure what is missing, and store the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts; all if none is named")
    parser.add_argument("--points", nargs="+", default=["*"], help="points whose names match these, in this order")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where graphs and cells are kept")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="runs of each cell, with seeds from 0 on")
    parser.add_argument("--jobs", type=int, default=2, help="points measured at a time")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--eliminate", action="store_true", help="then switch needless parts off for good")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.until = time.time() + options.budget_seconds
    points = [point for start in options.points for point in all_points() if fnmatch(point.name, start)]
    parts = options.only or [*PLAN_PARTS, *PACK_PARTS]
    if not options.show:
        names = {point.graph if isinstance(point, PlanPoint) else point.trace for point in points}
        capture_missing(options.folder, names, lambda line: print(line, file=sys.stderr))
        run(missing(points, [[part] for part in parts], options), options.jobs)
    eliminated = kept_elimination()
    for room, known in (("search", PLAN_PARTS), ("packing", PACK_PARTS)) if options.eliminate else ():
        tried = [part for part in known if part in parts]
        if tried:
            before = [step for step in eliminated.get(room, []) if step["part"] not in tried]
            eliminated[room] = before + eliminate(points, tried, options)
    stored = payload(options.folder, eliminated)
    show(stored["search"])
    show(stored["packing"])
    print("stored in", store("ablation", stored))


def kept_elimination() -> dict[str, Any]:
    """Return the elimination that is stored."""
    path = result_path("ablation")
    return load(path)["payload"]["eliminated"] if path.exists() else {}


def all_points() -> list[Point]:
    """Return every point of the ablation."""
    searches = [plan_points(), small_points(), long_points(), timed_points()]
    return [*(point for points in searches for point in points), *pack_points()]


if __name__ == "__main__":
    main()
