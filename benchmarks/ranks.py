"""Steps on several ranks beside DistributedDataParallel, each in fresh processes, many times: bits, budgets, peaks.

python benchmarks/ranks.py                     # two and four ranks, ten runs of each, stored
python benchmarks/ranks.py --ranks 2 --runs 1 --steps plain
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import store

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import rank_steps
from rank_runs import on_ranks

STEPS = ("plain", "default_buckets", "clipped_in_bfloat16", "with_buffers")
RANKS = (2, 4)
RUNS = 10


def run(ranks: int, names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each step and rank."""
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks([getattr(rank_steps, name) for name in names], ranks, Path(folder))
    every = ((rank, name, each[name]) for rank, each in enumerate(found) for name in names)
    return [{"ranks": ranks, "rank": rank, "step": name, **result} for rank, name, result in every]


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        for number in range(arguments.runs):
            rows += [{"run": number, **row} for row in run(ranks, list(arguments.steps))]
        for name in arguments.steps:
            own = [row for row in rows if row["ranks"] == ranks and row["step"] == name]
            same, over = sum(row["is_same"] for row in own), sum(row["measured"] > row["budget"] for row in own)
            error = max(abs(row["predicted"] / row["measured"] - 1) for row in own)
            runs = f"{ranks} ranks, {name}, {len(own)} results: {same} with the same bits, {over} over budget"
            print(f"{runs}, prediction off by at most {error:.2%}", flush=True)
    print(store("ranks", {"steps": rank_steps.STEPS, "rows": rows}))


if __name__ == "__main__":
    main()
