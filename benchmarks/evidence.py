"""The rows of "What the papers claim" in docs/papers.md: run the script or the test that a row names.

make evidence ROW=chen-5a
python benchmarks/evidence.py                # list all rows
python benchmarks/evidence.py chen-5a        # the same as make's
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
HEAD = ("row", "claim", "where in the code", "reproduced as", "held against", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claim of a paper.

    Attributes:
        name: by which it is run.
        claim: in a few words.
        where: the files of its code, below the folder of memfit.
        command: what reproduces it: a script of benchmarks/ or a file of tests/, with arguments.
    """

    name: str
    claim: str
    where: tuple[str, ...]
    command: tuple[str, ...]


def read_rows(text: str) -> list[Row]:
    """Return the rows of the table that has this head."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    first = next(number for number, row in enumerate(cells) if tuple(row) == HEAD)
    rows: list[Row] = []
    for row in cells[first + 2 :]:
        if len(row) != len(HEAD):
            break
        name, claim, where, command = (cell.replace("`", "") for cell in row[:4])
        rows.append(
            Row(
                name=name,
                claim=claim,
                where=tuple(each.strip() for each in where.split(",")),
                command=tuple(shlex.split(command)),
            )
        )
    return rows


def arguments_of(row: Row) -> list[str]:
    """Return the command line of a row."""
    script, *more = row.command
    runs = ["-m", "pytest", "-q", f"tests/{script}"] if script.startswith("test_") else [f"benchmarks/{script}"]
    return [sys.executable, *runs, *more]


def main() -> None:
    """Run a row, or list all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", default="", help="which; all are listed if it is left out")
    asked = parser.parse_args().row
    rows = {row.name: row for row in read_rows(PAGE.read_text(encoding="utf-8"))}
    if not asked:
        for row in rows.values():
            print(f"{row.name:14} {' '.join(row.command):50} {row.claim}")
        return
    if asked not in rows:
        parser.error(f"no row is called {asked!r}; there are {', '.join(rows)}")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    finished = subprocess.run(arguments_of(rows[asked]), cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False)
    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
