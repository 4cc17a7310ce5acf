"""Whether `memfit plan` and `memfit fit` give the same plan, byte for byte, from the same cache, for every workload.

For each workload the plan of `memfit plan` is made first, then that of `memfit fit` with the same settings, each for a
step that is built anew, in a cache of their own. The bytes of both plan files are compared.

    python benchmarks/same_plans.py               # all eight workloads
    python benchmarks/same_plans.py lstm unet
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

from _measure import EIGHT
from _process import fresh_cache
from _record import store

from memfit.commands.graph_with_costs import graph_with_costs
from memfit.commands.targets import resolve
from memfit.commands.work import working
from memfit.doors.step import fit_step
from memfit.planning import Settings, make_plan
from memfit.workloads import build

BUDGET = "80%"
TIME_LIMIT_SECONDS = 5.0


def digests(workload: str) -> dict[str, str]:
    """Return the SHA-256 digests of the plan files of `plan` and `fit`."""
    settings = Settings(budget=BUDGET, time_limit_seconds=TIME_LIMIT_SECONDS)
    with working() as work:
        planned = make_plan(*graph_with_costs(resolve(workload), None, work)[:2], settings)
    plans = {"plan": planned, "fit": fit_step(build(workload), settings).plan}
    found: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        for command, plan in plans.items():
            plan.save(Path(folder, command))
            found[command] = hashlib.sha256(Path(folder, command).read_bytes()).hexdigest()
    return found


def main() -> None:
    """Compare the workloads named on the command line, or all; fail if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(EIGHT), metavar="WORKLOAD")
    differ: list[str] = []
    for workload in parser.parse_args().workloads:
        with fresh_cache():
            found = digests(workload)
        same = found["plan"] == found["fit"]
        store(f"same_plans/{workload}", {"workload": workload, "budget": BUDGET, "same": same, **found})
        print(f"{workload}: {'the same bytes' if same else 'DIFFERENT'}", flush=True)
        differ += [] if same else [workload]
    if differ:
        raise SystemExit(f"different plans: {', '.join(differ)}")


if __name__ == "__main__":
    main()
