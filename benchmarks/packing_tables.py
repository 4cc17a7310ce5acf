"""The tables of docs/packing.md, from what benchmarks/packing.py and benchmarks/dense_cuts.py stored.

python benchmarks/packing_tables.py                        # print them
python benchmarks/packing_tables.py --into docs/packing.md # between <!-- table: NAME --> and <!-- end of table -->
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _dense_cuts import KINDS
from _record import load, result_path

from memfit.system.files import write_atomically

_MARKED = re.compile(r"(<!-- table: (?P<name>[\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def instances(payload: dict[str, Any]) -> list[list[str]]:
    """Ratio and seconds of every packer on every instance."""
    packers = list(payload["instances"][0]["packers"])
    rows = [["instance", "blocks", "auto in 0.1 s", "auto in 60 s", *packers]]
    for entry in payload["instances"]:
        name = entry["name"].partition(".")[0]
        cells = [_cell(entry["packers"][packer]) for packer in packers]
        long = entry.get("long_answer")
        first = f"{entry['first_answer']['ratio']:.4f}"
        rows.append([name, f"{entry['blocks']:,}", first, "" if long is None else f"{long['ratio']:.4f}", *cells])
    return rows


def scales(payload: dict[str, Any]) -> list[list[str]]:
    """What `auto` reaches on made traces."""
    rows = [["blocks", "time limit", "mean ratio", "worst ratio", "worst time, check included", "memory"]]
    for entry in payload["scales"]:
        memory = f"{entry['peak_process_bytes'] / 1e9:.2f} GB"
        seconds = f"{entry['worst_seconds']:.3g} s"
        ratios = [f"{entry['mean_ratio']:.4f}", f"{entry['worst_ratio']:.4f}"]
        rows.append([f"{entry['blocks']:,}", f"{entry['time_limit_seconds']:g} s", *ratios, seconds, memory])
    return rows


def compilation(payload: dict[str, Any]) -> list[list[str]]:
    """Seconds of compilation, once on a machine."""
    seconds = payload["compile_seconds"]
    return [list(seconds), [f"{value:.1f} s" for value in seconds.values()]]


def cuts(payload: dict[str, Any]) -> list[list[str]]:
    """How many cuts of each layout are packed at the lower bound, by kind."""
    rows = [["layout", *KINDS, "worst ratio"]]
    for source in dict.fromkeys(entry["source"] for entry in payload["cuts"]):
        entries = [entry for entry in payload["cuts"] if entry["source"] == source]
        worst = max(entry["ratio"] for entry in entries)
        rows.append([source, *(_at_bound(entries, kind) for kind in KINDS), f"{worst:.4f}"])
    return [*rows, ["all", *(_at_bound(payload["cuts"], kind) for kind in KINDS), ""]]


def cut_parts(payload: dict[str, Any]) -> list[list[str]]:
    """How many cuts are packed at the lower bound without each part, by kind."""
    rows = [["without", *KINDS, "mean ratio"]]
    for without in dict.fromkeys(entry["without"] for entry in payload["cuts"]):
        entries = [entry for entry in payload["cuts"] if entry["without"] == without]
        mean = statistics.mean(entry["ratio"] for entry in entries)
        name = f"`{without}`" if without else "nothing"
        rows.append([name, *(_at_bound(entries, kind) for kind in KINDS), f"{mean:.4f}"])
    return rows


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[list[str]]]]] = {
    "instances": ("packing", instances),
    "cuts": ("dense_cuts", cuts),
    "cut parts": ("dense_cuts_parts", cut_parts),
    "scales": ("packing", scales),
    "compilation": ("packing", compilation),
}


def _at_bound(entries: list[dict[str, Any]], kind: str) -> str:
    ratios = [entry["ratio"] for entry in entries if entry["kind"] == kind]
    return f"{ratios.count(1.0)} of {len(ratios)}" if ratios else ""


def _cell(result: dict[str, Any]) -> str:
    if "refused" in result:
        return "refused"
    proven = ", proven" if result["proven"] else ""
    return f"{result['ratio']:.4f} in {result['seconds']:.3g} s{proven}"


def markdown(name: str) -> str:
    """Return a table, with the machine below it."""
    file, table = TABLES[name]
    stored = load(result_path(file))
    head, *rows = table(stored["payload"])
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    machine, payload = stored["machine"], stored["payload"]
    limit = f"{payload['work'] / 1e9:g} billion operations each; " if payload.get("work") else ""
    note = f"{limit}{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}, {machine['date'][:10]}"
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    """Print the tables, or put them into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="document with marked places")
    into = parser.parse_args().into
    if into is None:
        print("\n".join(markdown(name) for name in TABLES))
        return
    text = into.read_text(encoding="utf-8")
    filled = _MARKED.sub(lambda place: f"{place[1]}{markdown(place['name'])}{place[3]}", text)
    write_atomically(into, filled.encode())


if __name__ == "__main__":
    main()
