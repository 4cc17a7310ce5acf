"""Whether the spread that is given with a measured overhead covers it: twenty measurements on a busy machine.

Each measurement is what `step.measure()` gives by default. Meanwhile other processes multiply matrices, a share of the
time. The reference is one long measurement without these processes. The load by the machine's other users is stored
beside it, and beside each measurement.

    python benchmarks/overhead_spread.py
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from typing import Any

import torch
from _record import store

import memfit
from memfit.system.load import Load

MEASUREMENTS, OTHERS, QUIET_TURNS = 20, 1, 60
WORKS_SECONDS, RESTS_SECONDS = 0.3, 0.3  # of each of the other processes


def small_step() -> Any:
    """Fit a step of some hundredths of a second, with recomputation in it."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)) for _ in range(6)
    ]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(512, 10))
    batch = torch.randn(128, 512), torch.randint(0, 10, (128,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return memfit.fit(
        model, torch.nn.CrossEntropyLoss(), batch, optimizer=optimizer, budget="90%", time_limit_seconds=3
    )


def work_now_and_then() -> None:
    """Multiply matrices on one thread, and rest, until it is ended."""
    torch.set_num_threads(1)
    left = torch.rand(512, 512)
    while True:
        until = time.perf_counter() + WORKS_SECONDS
        while time.perf_counter() < until:
            left @ left
        time.sleep(RESTS_SECONDS)


def measured(step: Any, repeats: int | None = None) -> dict[str, Any]:
    """Measure once, and return the figures with the load of others meanwhile."""
    load, began = Load(), time.perf_counter()
    found = step.measure(repeats=repeats)
    return {
        "overhead": found.overhead,
        "spread": found.overhead_spread,
        "turns": found.turns,
        "seconds": round(time.perf_counter() - began, 2),
        "load": round(load.others(), 3),
    }


def main() -> None:
    step = small_step()
    quiet = measured(step, QUIET_TURNS)
    print(f"quiet: {quiet}", flush=True)
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=work_now_and_then, daemon=True) for _ in range(OTHERS)]
    for each in others:
        each.start()
    time.sleep(5)  # until they work
    rows = []
    try:
        for _ in range(MEASUREMENTS):
            rows.append(measured(step))
            print(rows[-1], flush=True)
    finally:
        for each in others:
            each.kill()
            each.join()
    covers = sum(row["spread"][0] <= quiet["overhead"] <= row["spread"][1] for row in rows)
    widths = statistics.median(row["spread"][1] - row["spread"][0] for row in rows)
    print(f"{covers} of {len(rows)} spreads cover {quiet['overhead']:+.1%}; median width {100 * widths:.1f} points")
    payload = {"quiet": quiet, "busy": rows, "covers": covers, "median_width": widths, "other_processes": OTHERS}
    print(f"stored in {store('overhead_spread', payload)}")


if __name__ == "__main__":
    main()
