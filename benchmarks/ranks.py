"""Steps on several ranks beside stock DistributedDataParallel and `fully_shard`, each in fresh processes, many times.

Compared are losses and parameters after 20 steps (gathers_repeated: 4), to the bit, the results of all runs with each
other, and the peak of each rank with its budget and with what was predicted.

    python benchmarks/ranks.py                     # two and four ranks, ten runs of each, stored; an hour
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
import shard_steps
from rank_runs import on_ranks

STEPS = {
    "plain": (rank_steps, "DDP, AdamW"),
    "default_buckets": (rank_steps, "bare model, AdamW"),
    "clipped_in_bfloat16": (rank_steps, "bare model, AdamW, clipping, bfloat16"),
    "with_buffers": (rank_steps, "bare model, AdamW, batch normalization"),
    "blocks": (shard_steps, "fully_shard, AdamW"),
    "blocks_clipped_in_bfloat16": (shard_steps, "fully_shard, AdamW, clipping, bfloat16"),
    "gathers_repeated": (shard_steps, "fully_shard, SGD, 70% of the memory"),
}
RANKS = (2, 4)
RUNS = 10


def run(ranks: int, names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each step and rank."""
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks([getattr(STEPS[name][0], name) for name in names], ranks, Path(folder))
    every = ((rank, name, each[name]) for rank, each in enumerate(found) for name in names)
    return [{"ranks": ranks, "rank": rank, "step": name, **result} for rank, name, result in every]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all runs of a step have shown."""
    ranks = max(row["rank"] for row in rows) + 1
    results = [len({row["digest"] for row in rows if row["rank"] == rank}) for rank in range(ranks)]
    peaks = [max(row["measured"] for row in rows if row["run"] == run) for run in {row["run"] for row in rows}]
    return {
        "step": rows[0]["step"],
        "what": STEPS[rows[0]["step"]][1],
        "ranks": ranks,
        "runs": len(peaks),
        "same": sum(row["is_same"] for row in rows),
        "rows": len(rows),
        "difference": max(row["difference"] for row in rows),
        "results": max(results),
        "over": sum(row["measured"] > row["budget"] for row in rows),
        "peak_over_budget": max(row["measured"] / row["budget"] for row in rows),
        "prediction_error": max(abs(rows[0]["predicted"] / peak - 1) for peak in peaks),
        "gathers": max([0, *rows[0].get("gathers", [])]),
    }


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    arguments = parser.parse_args()
    summaries: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        rows: list[dict[str, Any]] = []
        for number in range(arguments.runs):
            rows += [{"run": number, **row} for row in run(ranks, list(arguments.steps))]
        for name in arguments.steps:
            found = summary([row for row in rows if row["step"] == name])
            summaries.append(found)
            print(
                f"{ranks} ranks, {name}, {found['rows']} results: {found['same']} with the same bits, off by at most "
                f"{found['difference']:.1e}, {found['results']} over all runs, {found['over']} over budget, prediction "
                f"off by at most {found['prediction_error']:.2%}",
                flush=True,
            )
    if arguments.runs == RUNS and set(arguments.steps) == set(STEPS):
        print(store("ranks", {"summaries": summaries}))


if __name__ == "__main__":
    main()
