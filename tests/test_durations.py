"""Stored durations: what makes a test slow, and which fifth of the slow ones it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from durations import Durations, fixture_key


def item(name: str, *fixtures: str) -> Any:
    return SimpleNamespace(nodeid=f"tests/test_a.py::{name}", fixturenames=fixtures)


def test_a_test_is_as_slow_as_what_it_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    path.write_text(json.dumps({"tests/test_a.py::one": 2.0, fixture_key("tests/test_a.py", "ranks"): 40.0}))
    durations = Durations(path)
    assert durations.slowest(item("one")) == ("tests/test_a.py::one", 2.0)
    assert durations.slowest(item("one", "ranks", "tmp_path"))[1] == 40.0
    assert durations.slowest(item("other"))[1] == 0.0


def test_tests_that_share_a_slow_fixture_run_in_one_fifth(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    path.write_text(json.dumps({fixture_key("tests/test_a.py", "ranks"): 40.0}))
    durations = Durations(path)
    names = [f"test {number}" for number in range(20)]
    own = {tuple(durations.is_of_fifth(item(name), fifth) for fifth in range(5)) for name in names}
    shared = {tuple(durations.is_of_fifth(item(name, "ranks"), fifth) for fifth in range(5)) for name in names}
    assert len(own) > 1 and len(shared) == 1
    assert all(sum(fifths) == 1 for fifths in own | shared)


def test_what_was_not_run_stays(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    Durations(path).store({"a": 5.04, "b": 2.0})
    Durations(path).store({"b": 0.3, "c": 1.0})
    assert json.loads(path.read_text()) == {"a": 5.0, "c": 1.0}
