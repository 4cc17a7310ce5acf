"""How long the simulator and the checker take: 1,000 ops with drops, and 100,000 instructions.

    python benchmarks/simulate_speed.py

Prints the least and the median of many repeats, and stores them. The figures asked for: under 50 microseconds for 1,000
ops, under 0.1 s for 100,000 instructions, both without offloads and once compiled.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from _record import store

from memfit.checker import check
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.schedule import Compute, Drop, Instruction, Schedule
from memfit.simulate import simulate

READS_OF_AN_OP, READS_REACH_BACK = 3, 30


def chain_with_skips(op_count: int) -> Graph:
    """Return a graph whose ops read up to three storages among the thirty before."""
    pick = random.Random(0)
    storages = [Storage(id=0, name="x", bytes=1000, role=Role.INPUT)]
    storages += [
        Storage(id=op + 1, name=f"s{op}", bytes=pick.randrange(1, 1 << 20), role=Role.ACTIVATION)
        for op in range(op_count)
    ]
    ops = [
        Op(
            id=op,
            name=f"op{op}",
            phase=Phase.FORWARD,
            reads=tuple(sorted({max(0, op - pick.randrange(READS_REACH_BACK)) for _ in range(READS_OF_AN_OP)})),
            writes=(op + 1,),
            seconds=1e-5,
        )
        for op in range(op_count)
    ]
    return Graph.build(name=f"chain of {op_count}", storages=storages, ops=ops)


def drop_after_last_use(graph: Graph) -> Schedule:
    """Return the schedule that computes every op once and drops each storage right after its last use."""
    last_use = {storage: op.id for op in graph.ops for storage in (*op.reads, *op.writes)}
    dead_after: defaultdict[int, list[int]] = defaultdict(list)
    for storage, op in last_use.items():
        if not graph.storages[storage].resident:
            dead_after[op].append(storage)
    instructions: list[Instruction] = []
    for op in graph.ops:
        instructions.append(Compute(op=op.id))
        instructions += [Drop(storage=storage) for storage in dead_after[op.id]]
    return Schedule.of(instructions)


def seconds_of(action: Callable[[], object], repeats: int) -> list[float]:
    """Return what each of `repeats` runs took, after one that is not counted."""
    action()
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(op_count: int, repeats: int) -> dict[str, Any]:
    """Time both on a schedule of `op_count` ops and as many drops."""
    graph = chain_with_skips(op_count)
    schedule = drop_after_last_use(graph)
    simulated = seconds_of(lambda: simulate(graph, schedule), repeats)
    checked = seconds_of(lambda: check(graph, schedule), max(3, repeats // 100))
    return {
        "ops": op_count,
        "instructions": len(schedule),
        "simulate_seconds": min(simulated),
        "simulate_median_seconds": statistics.median(simulated),
        "check_seconds": min(checked),
    }


def main() -> None:
    """Measure, print, store."""
    rows = [measure(1_000, 5_000), measure(50_000, 100)]
    for row in rows:
        print(
            f"{row['ops']:>6} ops, {row['instructions']:>6} instructions: "
            f"simulate {row['simulate_seconds'] * 1e6:9.1f} us (median {row['simulate_median_seconds'] * 1e6:9.1f}), "
            f"check {row['check_seconds'] * 1e6:9.1f} us"
        )
    print(f"stored in {store('simulate_speed', rows)}")


if __name__ == "__main__":
    main()
