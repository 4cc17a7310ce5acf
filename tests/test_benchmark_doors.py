"""Own loops in several ways: rows of those that train and of those that refuse, and the tables of what is stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the scripts import one another as scripts do

import _loop_ways
import _record
import doors
import tables
from _loop_cases import BROKEN, CASES, WHOLE


class Ended:
    """Stands in the place of a child process."""

    def __init__(self, peaks: list[int], seconds: list[float], bits: str = "the bare loop's", error: str = "") -> None:
        self.peaks, self.bits, self.error, self.settled = peaks, bits, error or None, {"seconds": 1.0}
        self.seconds: list[float] = []
        self.to_come = seconds

    def turn(self, steps: int) -> None:
        self.seconds += self.to_come[:steps]
        del self.to_come[:steps]

    def end(self) -> dict[str, Any]:
        return {"error": self.error} if self.error else {"peaks_bytes": self.peaks, "bits": self.bits}


def test_steps_over_the_budget_count_from_the_third_and_its_use_from_the_fifth():
    children: dict[str, Any] = {
        "bare": Ended([90, 100, 100, 100, 100, 100], [1.0, 2.0, 1.0, 1.0]),
        "kept": Ended([80, 80, 70, 60, 68, 69], [2.0, 3.0, 1.0, 2.0]),
        "over": Ended([60, 60, 71, 60, 70, 72], [1.0, 2.0, 1.0, 1.0], bits="others"),
        "refusing": Ended([], [], error="refused: UnsupportedStepError: no"),
    }
    rows = _loop_ways.in_turns(children, dict.fromkeys(["kept", "over", "refusing"], 70), turns=2, steps=2)
    bare, kept, over, refusing = rows
    assert bare["time_ratio"] == 1.0 and "over" not in bare
    assert (kept["over"], kept["over_at_first"], kept["same_bits"]) == (0, 2, True)
    assert kept["use"] == [68 / 70, 69 / 70] and kept["peak_share"] == 0.7
    assert kept["time_ratio"] == 1.75 and kept["whole_time_ratio"] == 1.6
    assert (over["over"], over["over_at_first"], over["same_bits"]) == (2, 0, False)
    assert refusing == {"way": "refusing", "budget_share": 0.7, "error": "refused: UnsupportedStepError: no"}


def test_tables_of_doors_name_what_was_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = {"peak_share": 0.7, "time_ratio": 1.25, "same_bits": True, "over": 0}
    rows = [
        {"way": "checkpoint", **held},
        {"way": "fit", **held, "over": 3, "same_bits": False},
        {"way": "compile", "error": "refused: UnsupportedStepError: a | b"},
        {"way": "eager", "error": "broke off: TypeError: c"},
    ]
    point = {"share": 0.7, "bare_bytes": 1 << 20, "bare_seconds": 0.1, "rows": rows}
    _record.store(
        doors.result_name("hubert"), {"case": "hubert", "kind": "broken", "budgets": [point]}, folder=tmp_path
    )
    own = [{"way": "by hand", **held, "same_bits": False}, {"way": "memfit.checkpoint 70%", **held}]
    payload = {"model": "unet", "bare_bytes": 40 << 20, "bare_seconds": 0.1, "rows": own}
    _record.store("checkpoint/unet", payload, folder=tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path.parent)
    found, why, loops = (tables.render(name, tmp_path.name) for name in ("doors", "doors-refusals", "own-loops"))
    assert found is not None and why is not None and loops is not None
    cells = "1.25, 0.700 | 1.25, 0.700, **over in 3, other bits** | refused | **broke off** |"
    assert f"| hubert | broken | 70% | {cells}" in found
    assert "checkpoint 1, fit 0, compile 0, eager 0" in found
    assert r"| hubert | 70% | compile | refused: UnsupportedStepError: a \| b |" in why
    assert "| unet | 40 | 100 | 1.25, 0.700, other bits |  | 1.25, 0.700 |" in loops


def test_doors_are_tried_on_enough_loops_each_stored_in_its_own_file():
    assert len(BROKEN) >= 12 and len(WHOLE) >= 8
    assert set(doors.KINDS) <= set(CASES)
    assert len({doors.result_name(name) for name in doors.KINDS}) == len(doors.KINDS)
