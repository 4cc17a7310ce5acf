"""The tables of docs/packing.md, from what benchmarks/packing.py stored.

python benchmarks/packing_tables.py                        # print them
python benchmarks/packing_tables.py --into docs/packing.md # between <!-- table: NAME --> and <!-- end of table -->
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from _record import load, result_path

from memfit.system.files import write_atomically

_MARKED = re.compile(r"(<!-- table: (?P<name>[\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def instances(payload: dict[str, Any]) -> list[list[str]]:
    """Ratio and seconds of every packer on every instance."""
    packers = list(payload["instances"][0]["packers"])
    rows = [["instance", "blocks", "auto in 0.1 s", *packers]]
    for entry in payload["instances"]:
        name = entry["name"].partition(".")[0]
        cells = [_cell(entry["packers"][packer]) for packer in packers]
        rows.append([name, str(entry["blocks"]), f"{entry['first_answer']['ratio']:.4f}", *cells])
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


TABLES = {"instances": instances, "scales": scales, "compilation": compilation}


def _cell(result: dict[str, Any]) -> str:
    if "refused" in result:
        return "refused"
    proven = ", proven" if result["proven"] else ""
    return f"{result['ratio']:.4f} in {result['seconds']:.3g} s{proven}"


def markdown(name: str, stored: dict[str, Any]) -> str:
    """Return a table, with the machine below it."""
    head, *rows = TABLES[name](stored["payload"])
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    machine = stored["machine"]
    note = f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}, {machine['date'][:10]}"
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    """Print the tables, or put them into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="document with marked places")
    into = parser.parse_args().into
    stored = load(result_path("packing"))
    if into is None:
        print("\n".join(markdown(name, stored) for name in TABLES))
        return
    text = into.read_text(encoding="utf-8")
    filled = _MARKED.sub(lambda place: f"{place[1]}{markdown(place['name'], stored)}{place[3]}", text)
    write_atomically(into, filled.encode())


if __name__ == "__main__":
    main()
