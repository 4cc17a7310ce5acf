"""The rows of "What the papers claim" in docs/papers.md: code that exists, and a script or tests that run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from evidence import PAGE, Row, arguments_of, read_rows  # noqa: E402

ROWS = read_rows(PAGE.read_text(encoding="utf-8"))


def test_every_paper_has_rows() -> None:
    assert {row.name.split("-")[0] for row in ROWS} == {"chen", "mxnet", "feng", "sekiyama", "dqn"}
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_what_is_there(row: Row) -> None:
    for place in row.where:
        assert (ROOT / "memfit" / place).exists(), place
    script = row.command[0]
    assert (ROOT / ("tests" if script.startswith("test_") else "benchmarks") / script).exists(), script
    assert row.claim


def test_rows_of_tests_choose_some() -> None:
    chosen = [row for row in ROWS if row.command[0].startswith("test_") and "-k" in row.command]
    assert chosen
    for row in chosen:
        found = subprocess.run(
            [*arguments_of(row), "--collect-only", "-n", "0"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, f"{row.name}: {found.stdout[-300:]}"


def test_a_table_without_rows_of_its_width_ends() -> None:
    head = "| row | claim | where in the code | reproduced as | held against | verdict |"
    text = f"{head}\n| - | - | - | - | - | - |\n| a-1 | c | `x.py`, y | `s.py --n 3` | h | v |\n\n| other | table |\n"
    assert read_rows(text) == [Row(name="a-1", claim="c", where=("x.py", "y"), command=("s.py", "--n", "3"))]
