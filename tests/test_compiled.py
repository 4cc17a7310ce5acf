"""Machine code on disk: used again as long as nothing in it has changed, whichever file it came from."""

import subprocess
import sys
from pathlib import Path

import pytest

CALLEE = """
from memfit.system.compiled import compiled

FACTOR = {factor}


@compiled
def scaled(number: int) -> int:
    return FACTOR * number {more}
"""
ENTRY = """
from callee import scaled
from memfit.system.compiled import entry_point


@entry_point
def twice(number: int) -> int:
    return scaled(number) + scaled(number)


print(twice(10), sum(twice.dispatcher.stats.cache_hits.values()))
"""


def run(directory: Path, *, factor: int, more: str = "") -> tuple[int, int]:
    """Run the entry point in a process of its own; return its result, and how often machine code came from disk.

    Python keeps no bytecode of its own, which it takes for new where a file of one size is written twice in a second.
    """
    (directory / "callee.py").write_text(CALLEE.format(factor=factor, more=more))
    (directory / "entry.py").write_text(ENTRY)
    command = [sys.executable, "-B", "-c", "import sys; sys.path.insert(0, sys.argv[1]); import entry", str(directory)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result, hits = printed.split()
    return int(result), int(hits)


@pytest.mark.slow
def test_machine_code_is_used_again_until_a_callee_changes(tmp_path: Path) -> None:
    assert run(tmp_path, factor=3) == (60, 0)
    assert run(tmp_path, factor=3) == (60, 1)
    assert run(tmp_path, factor=5) == (100, 0), "a constant in another file has changed"
    assert run(tmp_path, factor=5, more="+ 1") == (102, 0), "a function in another file has changed"
