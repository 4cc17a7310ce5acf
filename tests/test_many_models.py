"""A fifth of the models of `benchmarks/models.py`, through one door each: another fifth and other doors each commit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pytorchcv")

ROOT = Path(__file__).parents[1]
KNOWN = {
    ("decision transformer", "checkpoint"): "transformers' flag turns use_cache off, and keys are no longer contiguous",
    (
        "switch transformer",
        "backend",
    ): "a gradient at a graph break has other strides, as a warning says (docs/limits.md)",
}
"""Other bits, and why."""


def commits() -> int:
    """Return how many commits there are; 0 outside a checkout."""
    try:
        command = ["git", "rev-list", "--count", "HEAD"]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return 0


def is_broken(row: dict[str, Any]) -> bool:
    """Return whether a run ended as memfit promises that none does."""
    if row["ended"] == "refused":
        return row["lines"] > 1
    return row["ended"] in ("error", "other bits") or row.get("unsaid", False)


@pytest.mark.slow
def test_models_keep_their_bits_and_their_budget_or_are_refused() -> None:
    number = str(commits())
    command = [sys.executable, "benchmarks/models.py", "NEW", "--fifth", number, "--one", number]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(rows) > 2
    assert [row for row in rows if is_broken(row) and (row["model"], row["door"]) not in KNOWN] == []


def test_each_way_to_end_is_told_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from models import judge

    bare = {"losses": [(1.0).hex(), (2.0).hex(), (3.0).hex()], "left": {"weight": "a"}}
    held = {"peaks_bytes": [90, 90, 90], "losses": bare["losses"], "left": bare["left"], "said": []}
    cases: dict[str, dict[str, Any]] = {
        "held": {},
        "over": {"peaks_bytes": [90, 90, 101]},
        "other bits": {"left": {"weight": "b"}},
        "refused": {"refused": "OverBudgetError: no", "lines": 1, "losses": bare["losses"][:1]},
        "error": {"error": "KeyError: 3"},
        "slow": {"error": "took more than 75 s", "timed_out": True},
    }
    ended = {kind: judge({**held, **more}, bare, 100, has_bits=True) for kind, more in cases.items()}
    assert [row["ended"] for row in ended.values()] == list(cases)
    assert [kind for kind, row in ended.items() if is_broken(row)] == ["over", "other bits", "error"]
    assert not is_broken(judge({**held, **cases["over"], "said": ["took more than"]}, bare, 100, has_bits=True))
    other = judge({**held, "losses": [(1.0).hex(), (2.5).hex()], "refused": "no", "lines": 1}, bare, 100, has_bits=True)
    assert other["ended"] == "other bits"
    assert judge({**held, "left": {}}, bare, 100, has_bits=False)["ended"] == "held"
