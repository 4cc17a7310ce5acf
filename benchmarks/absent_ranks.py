"""Plans that are made before there are any ranks, and what they take on two and on four real ones (gloo, CPU).

python benchmarks/absent_ranks.py              # stored; ten minutes
python benchmarks/absent_ranks.py --ranks 2 --steps ddp sharded
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import store

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import absent_steps
from rank_runs import on_ranks

RANKS = (2, 4)
LIMIT_SECONDS = 3600.0  # of a busy machine


def rows_of(ranks: int, names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each step and budget; the ranks take what the one takes that takes most."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[absent_steps.FOLDER] = folder
        with contextlib.redirect_stdout(sys.stderr):
            absent_steps.plan_all(ranks, Path(folder), names)
        meeting = Path(folder) / "ranks"
        meeting.mkdir()
        found = [
            each[absent_steps.run_planned.__name__]
            for each in on_ranks([absent_steps.run_planned], ranks, meeting, seconds=LIMIT_SECONDS)
        ]
    rows: list[dict[str, Any]] = []
    for name in found[0]:
        step, budget = name.split(" at ")
        measured = max(each[name]["measured_bytes"] for each in found)
        corrections = sum(each[name]["corrections"] for each in found)
        row = {"step": step, "budget": budget, "ranks": ranks, "corrections": corrections}
        rows.append({**row, "predicted_bytes": found[0][name]["predicted_bytes"], "measured_bytes": measured})
        print(f"{rows[-1]}, {rows[-1]['predicted_bytes'] / measured - 1:+.3%}", flush=True)
    return rows


def main() -> None:
    """Plan, run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--steps", nargs="+", choices=absent_steps.MAKERS, default=list(absent_steps.MAKERS))
    parser.add_argument("--dry", action="store_true", help="store nothing")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        rows = rows_of(ranks, list(arguments.steps))
        if not arguments.dry:
            print(store(f"absent_ranks/{ranks}", {"ranks": ranks, "rows": rows}))


if __name__ == "__main__":
    main()
