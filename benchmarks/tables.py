"""The tables of the README and the docs, in Markdown, from what the benchmarks stored: no figure is typed by hand.

    python benchmarks/tables.py                          # print every table that there are results for
    python benchmarks/tables.py compare sweep            # only these
    python benchmarks/tables.py --into README.md         # between <!-- table: NAME --> and <!-- end of table -->
    python benchmarks/tables.py --gpu-page               # docs/gpu.md, from what `make gpu` stored

Predictions and measurements never share a column. Memory is in MiB.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from _ablation_tables import ABLATION_TABLES
from _arena_tables import ARENA_NAMES, ARENA_RESULT_TABLES, ARENA_TABLES
from _baseline_tables import BASELINE_RESULT_TABLES, BASELINE_TABLES
from _cells import memory, overhead, ratio, yes
from _claim_tables import EVIDENCE, claim_by_claim
from _cuda_tables import CUDA_SET_TABLES, CUDA_TABLES
from _door_tables import DOOR_SET_TABLES, DOOR_TABLES
from _gpu_tables import DOCS, NAVIGATION, PAGE, documents, first_table, write_page
from _gpu_tables import NAME as GPU
from _measure import EIGHT, MIB
from _offloading_tables import OFFLOADING_SET_TABLES, OFFLOADING_TABLES
from _paper_tables import PAPER_TABLES
from _record import RESULTS, load, machine_name
from _scale_tables import SCALE_SET_TABLES, SCALE_TABLES
from _tested_tables import TESTED_SET_TABLES, TESTED_TABLES

from memfit.errors import InvalidOptionError
from memfit.system.files import write_atomically

_MARKED = re.compile(r"(<!-- table: (?P<name>[\w -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Stored = dict[str, dict[str, Any]]
"""What a script stored, by workload: the payload with its `machine` beside it."""


def sweep(stored: Stored) -> str:
    """The promises over ten budgets of each workload."""
    head = ["workload", "budgets met", "infeasible", "no plan found", "not measured", "measured within budget"]
    head += [
        "predicted peak off by at most",
        "predicted overhead monotone",
        "same bits as eager",
        "`none` against eager",
    ]
    rows = [_verdict(workload, payload["verdict"], len(payload["points"]) - 1) for workload, payload in stored.items()]
    return _table(
        head, rows, "Ten budgets, from the unplanned peak down to the least that any plan could need.", stored
    )


def sweep_points(stored: Stored) -> str:
    """Every budget of every workload."""
    head = ["workload", "budget MiB", "predicted peak MiB", "measured peak MiB"]
    head += ["predicted overhead", "measured overhead", "same bits as eager"]
    rows = [_point(workload, point) for workload, payload in stored.items() for point in payload["points"]]
    return _table(head, rows, "Whole peaks: parameters, buffers and inputs are in them.", stored)


def planning(stored: Stored) -> str:
    """How long it takes to get to a plan."""
    head = ["workload", "ops", "capture, s", "measurement of ops, s", "planning, s"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        unplanned, *points = payload["points"]
        searched = [point["plan_seconds"] for point in points if "plan_seconds" in point]
        if searched:
            seconds = (unplanned["capture_seconds"], unplanned["measure_seconds"], max(searched))
            rows.append([workload, str(unplanned["ops"]), *(f"{each:.1f}" for each in seconds)])
    return _table(head, rows, "Planning: the longest of the sweep's budgets. Each op is measured anew.", stored)


def published(stored: Stored) -> str:
    """Plans of graphs by others, beside what their own systems reached."""
    head = ["graph", "budget, bytes", "planned seconds", "overhead", "proved bound", "published overhead", "plan, s"]
    rows = [
        [
            name,
            f"{point['budget_bytes']:,}",
            f"{point['seconds']:.5f}",
            f"{point['overhead']:.3%}",
            f"{point['bound']:.3%}",
            f"{point['published_overhead']:.3%}",
            f"{point['plan_seconds']:.0f}",
        ]
        for name, payload in stored.items()
        for point in payload["points"]
        if "overhead" in point
    ]
    return _table(head, rows, "All predicted: a replay of the schedule. The bound holds for any order of ops.", stored)


def _of_one(make: Callable[[dict[str, Any]], tuple[list[str], list[list[str]], str]]) -> Callable[[Stored], str]:
    """Return what renders the table of a script that stores a single result."""

    def render_one(stored: Stored) -> str:
        (payload,) = stored.values()
        return _table(*make(payload), stored)

    return render_one


def _drawn_by(make: Callable[[Stored], tuple[list[str], list[list[str]], str]]) -> Callable[[Stored], str]:
    return lambda stored: _table(*make(stored), stored)


def offloading(stored: Stored) -> str:
    """The overhead of recomputation, of offloading, and of both, at the same budgets."""
    head = [
        "graph",
        "device",
        "budget, GiB",
        "recomputed",
        "offloaded",
        "both",
        "proved bound",
        "moved, GiB",
    ]
    rows = [
        [
            name,
            point["device"],
            f"{point['budget_bytes'] / 2**30:g}",
            *(
                f"{point[way]['overhead']:.2%}" if "overhead" in point[way] else point[way]["status"]
                for way in ("recomputation", "offloading", "both")
            ),
            f"{point['both'].get('bound', 0.0):.2%}",
            f"{point['both'].get('offloaded_bytes', 0) / 2**30:.1f}",
        ]
        for name, payload in stored.items()
        for point in payload["points"]
    ]
    note = "All predicted, by the simulator, with the graphs' own op times and the link of the device named."
    return _table(head, rows, note, stored)


def inplace(stored: Stored) -> str:
    """What writing over inputs that die saves of the step's peak, unplanned and at the least budget found."""
    kinds, variants = ("unplanned", "least"), ("apart", "promised", "seen")
    head = ["workload", "eager", "unplanned: apart", "what schemas promise", "and what was seen", "then the peak is at"]
    head += ["least found: apart", "what schemas promise", "and what was seen", "then the peak is at", "same bits"]
    rows = [
        [
            *[workload, f"{payload['eager_peak_bytes'] / MIB:.1f}"],
            *(cell for kind in kinds for cell in _peaks([payload[variant][kind] for variant in variants])),
            yes(all(payload[variant][kind]["first_difference"] is None for variant in variants for kind in kinds)),
        ]
        for workload, payload in stored.items()
    ]
    note = "Measured, MiB above what is resident; the operator at the peak is the prediction's."
    return _table(head, rows, note, stored)


def _peaks(found: Sequence[dict[str, Any]]) -> list[str]:
    operator = found[-1]["at_peak"].removeprefix("aten.").removesuffix(".default")
    return [*(memory(each, "peak_bytes") for each in found), f"`{operator}`"]


ONE_RESULT_TABLES = PAPER_TABLES | SCALE_TABLES | ABLATION_TABLES | TESTED_TABLES | OFFLOADING_TABLES | CUDA_TABLES
ONE_RESULT_TABLES |= BASELINE_RESULT_TABLES
SET_TABLES = ARENA_TABLES | TESTED_SET_TABLES | OFFLOADING_SET_TABLES | CUDA_SET_TABLES | SCALE_SET_TABLES
SET_TABLES |= DOOR_SET_TABLES
ONE_RESULT_TABLES |= DOOR_TABLES | ARENA_RESULT_TABLES
TABLES: dict[str, tuple[str, Callable[[Stored], str]]] = {
    **{name: (script, _drawn_by(make)) for name, (script, make) in BASELINE_TABLES.items()},
    "sweep": ("sweep", sweep),
    "sweep-points": ("sweep", sweep_points),
    "planning": ("sweep", planning),
    "published": ("plan_shared_graphs", published),
    "offloading": ("offloading", offloading),
    "inplace": ("inplace", inplace),
    **{name: (script, _of_one(make)) for name, (script, make) in ONE_RESULT_TABLES.items()},
    **{name: (script, _drawn_by(make)) for name, (script, make) in SET_TABLES.items()},
}
"""Each table by name: the script whose results it shows, and what renders it."""

IN_FOLDERS = (
    "disk_tier",
    "plan_shared_graphs",
    "offloading",
    "offloading_planners",
    "versions",
    "page_faults",
    "loop_cost",
    "absent_ranks",
    "many_ranks",
    "checkpoint",
    "doors",
    "models",
)
"""The scripts that store each result in a file of its own, by names that are no workloads'."""


def results_of(script: str, machine: str) -> Stored:
    """Return what `script` stored on a machine, in the usual order; empty where nothing."""
    if script in IN_FOLDERS:
        found = {path.stem: path for path in sorted((RESULTS / machine / script).glob("*.json"))}
    elif script in {script for script, _ in ONE_RESULT_TABLES.values()}:
        found = {script: RESULTS / machine / f"{script}.json"}
    else:
        names = ARENA_NAMES if script.startswith("arena") else EIGHT
        found = {name: RESULTS / machine / script / f"{name}.json" for name in names}
    documents = {name: load(path) for name, path in found.items() if path.exists()}
    return {name: {**document["payload"], "machine": document["machine"]} for name, document in documents.items()}


def render(name: str, machine: str) -> str | None:
    """Return the table `name`, or None where there are no results for it; InvalidOptionError: no such table."""
    if name == EVIDENCE:  # of what many scripts stored
        found = claim_by_claim(lambda script: results_of(script, machine))
        return None if found is None else _table(*found)
    if name not in TABLES:
        raise InvalidOptionError(f"no table is called {name!r}; there are {', '.join([*TABLES, EVIDENCE])}")
    script, table = TABLES[name]
    stored = results_of(script, machine)
    return table(stored) if stored else None


def put_into(path: Path, machine: str) -> None:
    """Write the tables between the markers of a Markdown file.

    Raises:
        InvalidOptionError: a marker names a table that does not exist, or one without results.
    """

    def rendered(match: re.Match[str]) -> str:
        if match["name"] == GPU:  # nothing as long as no device has a file
            return f"{match[1]}{first_table(documents())}{match[3]}"
        table = render(match["name"], machine)
        if table is None:
            raise InvalidOptionError(
                f"{path}: nothing is stored for the table {match['name']!r}; run its benchmark first"
            )
        return f"{match[1]}{table}{match[3]}"

    write_atomically(path, _MARKED.sub(rendered, path.read_text()).encode())


def _verdict(name: str, verdict: dict[str, Any], budgets: int) -> list[str]:
    not_found = verdict.get("not_found", 0)
    not_measured = budgets - verdict["feasible"] - verdict["infeasible"] - not_found
    error = verdict["prediction_error"]
    return [
        name,
        str(verdict["feasible"]),
        str(verdict["infeasible"]),
        str(not_found),
        str(not_measured),
        yes(verdict["within_budget"]),
        "" if error is None else f"{error:.2%}",
        yes(verdict["monotone"]),
        yes(verdict["same_bits"]),
        ratio(verdict, "unplanned_time_ratio"),
    ]


def _point(workload: str, point: dict[str, Any]) -> list[str]:
    budget = "no limit (`none`)" if point["planner"] == "none" else memory(point, "budget_bytes")
    if "measured_peak_bytes" not in point:
        return [workload, budget, point.get("status") or point["error"], "", "", "", ""]
    return [
        workload,
        budget,
        memory(point, "predicted_peak_bytes"),
        memory(point, "measured_peak_bytes"),
        overhead(point),
        f"{point['time_ratio'] - 1:.1%}",
        yes(point["first_difference"] is None),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], note: str, stored: Stored) -> str:
    lines = [head, ["---"] * len(head), *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{body}\n{note} {_measured_on(stored)}\n"


def _measured_on(stored: Stored) -> str:
    """The machine that the figures are from; said once where all are from the same."""
    machines = [payload["machine"] for payload in stored.values()]
    chips = sorted({machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores" for machine in machines})
    torches = sorted({machine["torch"] for machine in machines})
    days = sorted({machine["date"][:10] for machine in machines})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"({'; '.join(chips)}; torch {', '.join(torches)}; {when})"


def main() -> None:
    """Print the tables named on the command line, or all; or put them into files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"{', '.join([*TABLES, EVIDENCE])}; all if none is named"
    )
    parser.add_argument("--machine", default=machine_name(), help="folder of benchmarks/results to read")
    parser.add_argument("--into", nargs="+", type=Path, default=[], help="Markdown files to put the tables into")
    parser.add_argument("--gpu-page", action="store_true", help="write docs/gpu.md, if a device has a file")
    options = parser.parse_args()
    for path in options.into:
        put_into(path, options.machine)
    if options.gpu_page:
        there = write_page(DOCS, NAVIGATION)
        print(f"docs/{PAGE} is written" if there else f"no device has a file: there is no docs/{PAGE}")
    if options.into or options.gpu_page:
        return
    for name in options.tables or [*TABLES, EVIDENCE]:
        table = render(name, options.machine)
        if table is None:
            print(f"{name}: nothing is stored for {options.machine}", file=sys.stderr)
        else:
            print(f"### {name}\n\n{table}")


if __name__ == "__main__":
    main()
