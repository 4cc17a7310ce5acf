"""The tables of the README and the docs, in Markdown, from what the benchmarks stored: no figure is typed by hand.

    python benchmarks/tables.py                          # print every table that there are results for
    python benchmarks/tables.py compare sweep            # only these
    python benchmarks/tables.py --into README.md         # between <!-- table: NAME --> and <!-- end of table -->

Predictions and measurements never share a column. Memory is in MiB.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from _arena_tables import ARENA_NAMES, ARENA_TABLES
from _measure import MIB
from _paper_tables import PAPER_TABLES
from _record import RESULTS, load, machine_name
from torch_baselines import RIVALS, best

from memfit.errors import InvalidOptionError
from memfit.files import write_atomically
from memfit.workloads import WORKLOADS

_MARKED = re.compile(r"(<!-- table: (?P<name>[\w -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Stored = dict[str, dict[str, Any]]
"""What a script stored, by workload: the payload with its `machine` beside it."""


def compare(stored: Stored) -> str:
    """memfit beside both rivals, at their memory and at its own least."""
    head = ["workload", "eager", "torch's budget, best", "memfit there"]
    head += ["checkpoints, best", "memfit there", "memfit, least memory"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        results = payload["results"]
        cells = [workload, _memory(results.get("against budget", {}), "eager_bytes")]
        for kind in RIVALS:
            result = results.get(f"against {kind}", {})
            cells.append(_memory_and_time(result, "rival_bytes", "rival_time_ratio"))
            cells.append(_memory_and_time(result, "memfit_bytes", "memfit_time_ratio"))
        cells.append(_memory_and_time(results.get("least", {}), "measured_above_start_bytes", "time_ratio"))
        rows.append(cells)
    note = "Peak MiB above parameters, buffers and inputs, and time against eager; measured in turns in the same run."
    return _table(head, rows, note, stored)


def baselines(stored: Stored) -> str:
    """Every point of torch's own, the ones with other bits than eager's marked."""
    head = ["workload", "configuration", "peak MiB", "time against eager", "first difference from eager"]
    rows = [
        [
            workload,
            _configuration(point),
            _memory(point, "peak_bytes"),
            _ratio(point, "time_ratio"),
            point.get("error") or point["first_difference"] or "none",
        ]
        for workload, payload in stored.items()
        for point in payload["points"]
    ]
    return _table(head, rows, "Peak above parameters, buffers and inputs; all measured.", stored)


def rivals(stored: Stored) -> str:
    """The best points of torch's own, as `torch_baselines.py` measured them."""
    head = ["workload", "eager", "torch's budget, best with eager's gradients", "checkpoints, best"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        points = payload["points"]
        chosen = [best(points, kind) or {} for kind in ("eager", *RIVALS)]
        eager, *others = chosen
        memories = [_memory_and_time(point, "peak_bytes", "time_ratio") for point in others]
        rows.append([workload, _memory(eager, "peak_bytes"), *memories])
    return _table(head, rows, "Peak MiB above parameters, buffers and inputs, and time against eager.", stored)


def sweep(stored: Stored) -> str:
    """The promises over ten budgets of each workload."""
    head = ["workload", "budgets met", "infeasible", "not measured", "measured within budget"]
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


def targets(stored: Stored) -> str:
    """memfit at the memory of the published rows of ResNet-50."""
    head = ["workload", "given above resident", "measured peak MiB", "time against eager", "predicted overhead"]
    rows = [
        [workload, what, _memory(result, "measured_above_start_bytes"), _ratio(result, "time_ratio"), _overhead(result)]
        for workload, payload in stored.items()
        for what, result in payload["results"].items()
        if what.endswith(" MiB")
    ]
    return _table(head, rows, "Peak above parameters, buffers and inputs.", stored)


def halves(stored: Stored) -> str:
    """memfit at the memory of torch's best budget, where half of its overhead and one percentage point are allowed."""
    head = ["workload", "torch's budget, best", "its overhead", "memfit's there", "half of it and 1 point", "met"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        result = payload["results"].get("against budget", {})
        cells = [workload, _memory(result, "rival_bytes")]
        if "memfit_time_ratio" in result:
            rival, ours = result["rival_time_ratio"] - 1, result["memfit_time_ratio"] - 1
            allowed = max(0.0, rival) / 2 + 0.01
            cells += [f"{rival:.1%}", f"{ours:.1%}", f"{allowed:.1%}", _yes(ours <= allowed)]
        rows.append(cells + [""] * (len(head) - len(cells)))
    return _table(
        head, rows, "Peak MiB above parameters, buffers and inputs; times against eager in the same run.", stored
    )


def margins(stored: Stored) -> str:
    """How far the least budgets that were found are above the proved least."""
    head = ["workload", "proved least", "memfit", "`sublinear`", "checkpoints, best", "at most half of both"]
    rows: list[list[str]] = []
    for workload, payload in stored.items():
        results = payload["results"]
        least = results.get("least", {})
        bound_bytes = least.get("least_budget_bound_bytes")
        if bound_bytes is None:
            continue
        found = [results.get(what, {}) for what in ("least", "least sublinear", "against checkpoint")]
        above = [result["budget_bytes"] - bound_bytes if "budget_bytes" in result else None for result in found]
        others = [each for each in above[1:] if each is not None]
        met = _yes(bool(others) and above[0] is not None and all(2 * above[0] <= other for other in others))
        cells = ["" if each is None else f"+{each / MIB:.1f}" for each in above]
        rows.append([workload, f"{bound_bytes / MIB:.1f}", *cells, met])
    note = "Whole MiB of the proved least budget, and how many more each needs."
    return _table(head, rows, note, stored)


def whole_step(stored: Stored) -> str:
    """The step whose gradients never live all at once."""
    head = ["workload", "parameters + gradients MiB", "measured peak MiB, everything included", "time against eager"]
    rows = [
        [
            workload,
            _memory(result, "parameters_and_gradients_bytes"),
            _memory(result, "measured_peak_bytes"),
            _ratio(result, "time_ratio"),
        ]
        for workload, payload in stored.items()
        if (result := payload["results"].get("whole step"))
    ]
    return _table(head, rows, "Forward, loss, backward and SGD's update as one step.", stored)


def gpu(stored: Stored) -> str:
    """The sweep at real sizes on a GPU."""
    head = ["workload", "budgets met", "infeasible", "not measured", "measured within budget"]
    head += [
        "predicted peak off by at most",
        "predicted overhead monotone",
        "same bits as eager",
        "`none` against eager",
    ]
    rows: list[list[str]] = []
    for payload in stored.values():
        for workload, result in payload["sweeps"].items():
            name = f"{workload} ({', '.join(f'{key} {value}' for key, value in result['options'].items())})"
            rows.append(_verdict(name, result["verdict"], len(result["points"]) - 1))
    return _table(head, rows, "Real sizes; the figure is torch.cuda.max_memory_allocated.", stored)


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
    """The overhead of computing again, of sending to the host, and of both, at the same budgets."""
    head = [
        "graph",
        "device",
        "budget, GiB",
        "computed again",
        "sent to the host",
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


TABLES: dict[str, tuple[str, Callable[[Stored], str]]] = {
    "compare": ("compare_baselines", compare),
    "targets": ("compare_baselines", targets),
    "halves": ("compare_baselines", halves),
    "margins": ("compare_baselines", margins),
    "whole-step": ("compare_baselines", whole_step),
    "sweep": ("sweep", sweep),
    "sweep-points": ("sweep", sweep_points),
    "planning": ("sweep", planning),
    "rivals": ("torch_baselines", rivals),
    "baselines": ("torch_baselines", baselines),
    "gpu": ("gpu", gpu),
    "published": ("plan_shared_graphs", published),
    "offloading": ("offloading", offloading),
    **{name: (script, _of_one(make)) for name, (script, make) in PAPER_TABLES.items()},
    **{
        name: (script, lambda stored, make=make: _table(*make(stored), stored))
        for name, (script, make) in ARENA_TABLES.items()
    },
}
"""Each table by name: the script whose results it shows, and what renders it."""


def results_of(script: str, machine: str) -> Stored:
    """Return what `script` stored on a machine, in the usual order; empty where nothing. A GPU has its own folder."""
    if script == "gpu":
        paths = sorted(RESULTS.glob("*/gpu.json"))
        found = {path.parent.name: path for path in paths}
    elif script in ("plan_shared_graphs", "offloading"):
        found = {path.stem: path for path in sorted((RESULTS / machine / script).glob("*.json"))}
    elif script in {script for script, _ in PAPER_TABLES.values()}:
        found = {script: RESULTS / machine / f"{script}.json"}
    else:
        names = ARENA_NAMES if script.startswith("arena") else WORKLOADS
        found = {name: RESULTS / machine / script / f"{name}.json" for name in names}
    documents = {name: load(path) for name, path in found.items() if path.exists()}
    return {name: {**document["payload"], "machine": document["machine"]} for name, document in documents.items()}


def render(name: str, machine: str) -> str | None:
    """Return the table `name`, or None where there are no results for it; InvalidOptionError: no such table."""
    if name not in TABLES:
        raise InvalidOptionError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
    script, table = TABLES[name]
    stored = results_of(script, machine)
    return table(stored) if stored else None


def put_into(path: Path, machine: str) -> None:
    """Write the tables between the markers of a Markdown file.

    Raises:
        InvalidOptionError: a marker names a table that does not exist, or one without results.
    """

    def rendered(match: re.Match[str]) -> str:
        table = render(match["name"], machine)
        if table is None:
            raise InvalidOptionError(
                f"{path}: nothing is stored for the table {match['name']!r}; run its benchmark first"
            )
        return f"{match[1]}{table}{match[3]}"

    write_atomically(path, _MARKED.sub(rendered, path.read_text()).encode())


def _verdict(name: str, verdict: dict[str, Any], budgets: int) -> list[str]:
    not_measured = budgets - verdict["feasible"] - verdict["infeasible"]
    error = verdict["prediction_error"]
    return [
        name,
        str(verdict["feasible"]),
        str(verdict["infeasible"]),
        str(not_measured),
        _yes(verdict["within_budget"]),
        "" if error is None else f"{error:.2%}",
        _yes(verdict["monotone"]),
        _yes(verdict["same_bits"]),
        _ratio(verdict, "unplanned_time_ratio"),
    ]


def _point(workload: str, point: dict[str, Any]) -> list[str]:
    budget = "no limit (`none`)" if point["planner"] == "none" else _memory(point, "budget_bytes")
    if "measured_peak_bytes" not in point:
        return [workload, budget, point.get("status") or point["error"], "", "", "", ""]
    return [
        workload,
        budget,
        _memory(point, "predicted_peak_bytes"),
        _memory(point, "measured_peak_bytes"),
        _overhead(point),
        f"{point['time_ratio'] - 1:.1%}",
        _yes(point["first_difference"] is None),
    ]


def _memory(result: dict[str, Any], key: str) -> str:
    return f"{result[key] / MIB:.1f}" if key in result else _why_not(result)


def _memory_and_time(result: dict[str, Any], memory: str, time: str) -> str:
    if memory not in result:
        return _why_not(result)
    return f"{result[memory] / MIB:.1f}, {f'{result[time]:.2f}' if time in result else 'untimed'}"


def _ratio(result: dict[str, Any], key: str) -> str:
    return f"{result[key]:.3f}" if result.get(key) is not None else ""


def _overhead(result: dict[str, Any]) -> str:
    return f"{result['predicted_overhead']:.1%}" if "predicted_overhead" in result else ""


def _why_not(result: dict[str, Any]) -> str:
    return "failed" if "error" in result else result.get("status", "")


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[value]


def _configuration(point: dict[str, Any]) -> str:
    if point["kind"] == "budget":
        return f"activation_memory_budget {point['budget']}"
    return f"checkpoint every {point['granularity']}" if point["kind"] == "checkpoint" else "eager"


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
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; all if none is named")
    parser.add_argument("--machine", default=machine_name(), help="folder of benchmarks/results to read")
    parser.add_argument("--into", nargs="+", type=Path, default=[], help="Markdown files to put the tables into")
    options = parser.parse_args()
    for path in options.into:
        put_into(path, options.machine)
    if options.into:
        return
    for name in options.tables or TABLES:
        table = render(name, options.machine)
        if table is None:
            print(f"{name}: nothing is stored for {options.machine}", file=sys.stderr)
        else:
            print(f"### {name}\n\n{table}")


if __name__ == "__main__":
    main()
