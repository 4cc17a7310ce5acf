"""The benchmark of the machine with the GPU, without one: what it runs, stores and skips, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from events import Event, time_out_at

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import one another as scripts do

import gpu  # noqa: E402
import make_gpu  # noqa: E402
import sweep  # noqa: E402

GPU_TESTS = """
import threading
import pytest
pytestmark = pytest.mark.gpu
def test_that_passes(): pass
@pytest.mark.parametrize("word", ["a b"])
def test_of(word): assert {passes}
def test_that_skips(): pytest.skip("no")
def test_that_takes_long(): {last}
"""
POINT = {
    "budget_bytes": 100 << 20,
    "planner": "auto",
    "status": "feasible",
    "predicted_peak_bytes": 90 << 20,
    "measured_peak_bytes": 90 << 20,
    "within_budget": True,
    "prediction_error": 0.0,
    "predicted_overhead": 0.1,
    "first_difference": None,
    "time_ratio": 1.1,
}
UNPLANNED = POINT | {"planner": "none"}
LATE = {"budget_bytes": 50 << 20, "planner": "auto", "status": sweep.TIME_WAS_UP}
STOPPED = {"budget_bytes": 1 << 60, "planner": "none", "error": "took more than 9 s", "timed_out": True}
FAILED = {"budget_bytes": 1 << 60, "planner": "none", "error": "exit status 1: why"}
PASSED = {"status": "passed", "outcomes": {}}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_other.py").write_text("import a_package_that_is_not_there")
    monkeypatch.setattr(gpu, "FOLDER", tmp_path / "benchmarks")
    return tmp_path / "tests" / "test_on_a_gpu.py"


def test_the_outcome_of_each_gpu_test_is_kept(checkout: Path) -> None:
    checkout.write_text(GPU_TESTS.format(passes=True, last="pass"))
    found = gpu.run_tests(60.0)
    outcomes = {test.partition("::")[2]: outcome for test, outcome in found["outcomes"].items()}
    assert found["status"] == "passed"
    assert outcomes == {
        "test_that_passes": "passed",
        "test_of[a b]": "passed",
        "test_that_skips": "skipped",
        "test_that_takes_long": "passed",
    }
    checkout.write_text(GPU_TESTS.format(passes=False, last="pass"))
    found = gpu.run_tests(60.0)
    assert found["status"] == "failed"
    assert list(found["outcomes"].values()).count("failed") == 1
    assert "assert False" in found["end_of_output"]


@pytest.mark.parametrize(("passes", "status"), [(True, "stopped after 8 s"), (False, "failed")])
def test_gpu_tests_that_take_too_long_are_stopped(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool, status: str
) -> None:
    event = Event(tmp_path)
    last = f"open({str(event.path)!r}, 'w').write('begun'), threading.Event().wait()"
    checkout.write_text(GPU_TESTS.format(passes=passes, last=last))
    time_out_at(event, monkeypatch)
    found = gpu.run_tests(8.0)
    assert found["status"] == status
    assert len(found["outcomes"]) == 3


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, tests: dict[str, Any], answers: list[Any]) -> int:
    """Run gpu.main on a GPU that is not there; each sweep gives the next answer, and sees what is stored so far."""
    left: Iterator[Any] = iter(answers)

    def faked(*_arguments: Any, **_how: Any) -> list[dict[str, Any]]:
        seen.append(stored(folder))
        return [dict(point) for point in next(left)]

    seen: list[dict[str, Any]] = []
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "run_tests", lambda _seconds: tests)
    monkeypatch.setattr(gpu, "sweep", faked)
    real_store = gpu.store
    monkeypatch.setattr(gpu, "store", lambda *args, **how: real_store(*args, **how | {"device": "cpu"}))
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    status = gpu.main()
    assert [len(document["sweeps"]) for document in seen] == list(range(len(seen))), "stored before each sweep"
    return status


def stored(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "gpu.json").read_text())["payload"]


def test_what_time_did_not_allow_is_said_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[UNPLANNED, POINT, LATE], [UNPLANNED, STOPPED], [STOPPED]]
    late = {"status": "stopped after 9 s", "outcomes": {}}
    assert run_main(monkeypatch, tmp_path, late, answers) == 0
    payload = stored(tmp_path)
    assert payload["keeps_promises"]
    tests, point, second, third = payload["not_measured"]
    assert tests == "tests: stopped after 9 s"
    assert point == f"resnet50 at {50 << 20} bytes: not measured: time was up"
    assert second.startswith("gpt2: stopped after ") and second.endswith(", 1 points")
    assert third.startswith("unet: stopped after ") and third.endswith(", 0 points")


@pytest.mark.parametrize(
    ("tests", "first"),
    [
        ({"status": "failed", "outcomes": {}}, [UNPLANNED, POINT]),
        (PASSED, [UNPLANNED, POINT | {"within_budget": False}]),
        (PASSED, [UNPLANNED, POINT | {"first_difference": "loss"}]),
        (PASSED, [FAILED]),
        (PASSED, [UNPLANNED, POINT, FAILED]),
    ],
)
def test_what_failed_is_said_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tests: dict[str, Any], first: list[dict[str, Any]]
) -> None:
    assert run_main(monkeypatch, tmp_path, tests, [first, [UNPLANNED, POINT], [UNPLANNED, POINT]]) == 1
    assert list(stored(tmp_path)["sweeps"]) == ["resnet50", "gpt2", "unet"], "all the same, the rest was measured"


def test_nothing_measured_keeps_no_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_main(monkeypatch, tmp_path, PASSED, [[STOPPED], [STOPPED], [STOPPED]]) == 1


def test_no_sweep_begins_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(minutes=1.0, budgets=3, time_limit=1.0, only=["unet", "gpt2"])
    monkeypatch.setattr(gpu, "run_tests", lambda _seconds: PASSED)
    *_, payload = gpu.stages(options, 0.0)
    assert payload["not_measured"] == [f"{name}: not measured: time was up, 0 points" for name in ("unet", "gpt2")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_make_gpu_says_so_in_a_line_and_exits_0() -> None:
    for script in ("make_gpu.py", "gpu.py"):
        done = subprocess.run(
            [sys.executable, str(BENCHMARKS / script)], capture_output=True, text=True, check=False, timeout=110
        )
        assert done.returncode == 0
        assert done.stdout.startswith("no CUDA device here: nothing to measure") and done.stdout.count("\n") == 1


def test_what_a_python_lacks_comes_from_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder in ("WHEELS", "SITE"):
        monkeypatch.setattr(make_gpu, folder, tmp_path / folder)
    monkeypatch.setattr(make_gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(make_gpu, "NEEDED", {"a_module": ("a-package",)})
    monkeypatch.setattr(sys, "argv", ["make_gpu.py"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    (tmp_path / "WHEELS").mkdir()
    (tmp_path / "WHEELS" / "broken-1-py3-none-any.whl").write_text("no wheel")
    assert make_gpu.main() == 2
    assert f"{sys.executable} lacks a_module" in capfd.readouterr().err
    (tmp_path / "WHEELS" / "broken-1-py3-none-any.whl").unlink()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    make_wheel(tmp_path / "WHEELS", "a_module")
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _python, command: ran.append(command) or 0)
    assert make_gpu.main() == 0
    assert ran == [[sys.executable, str(BENCHMARKS / "gpu.py")]]
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(BENCHMARKS.parent), str(tmp_path / "SITE"), str(tmp_path / "mine")]
    assert (tmp_path / "SITE" / "a_module.py").exists()


def make_wheel(folder: Path, module: str) -> None:
    from zipfile import ZipFile

    with ZipFile(folder / f"{module}-1-py3-none-any.whl", "w") as wheel:
        info = f"{module}-1.dist-info"
        wheel.writestr(f"{module}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
