"""The benchmark of the machine with the GPU, without one: what it runs, stores and skips, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from events import Event, time_out_at

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import one another as scripts do

import gpu  # noqa: E402
import make_gpu  # noqa: E402
from _gpu_cases import CASES, Case  # noqa: E402
from _measure import EIGHT  # noqa: E402

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
PASSED = {"status": "passed", "outcomes": {"tests/test_one.py::test_that": "passed"}}
CASE = Case(name="mlp", workload="mlp", options={}, small={}, hard=True)
RIVAL = Case(name="eager mlp", workload="mlp", options={}, small={}, how="eager")
GOOD: dict[str, Any] = {
    "budget_bytes": 100 << 20,
    "steps": [{"taken_bytes": 90 << 20, "allocated_bytes": 80 << 20}] * 10,
    "first_difference": None,
    "not_repeated": [],
    "compared": 200,
    "time_ratio": 1.1,
    "statistics": {"num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 7},
    "case_seconds": 3.0,
    "done": True,
}


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


@pytest.mark.parametrize("passes", [True, False])
def test_gpu_tests_that_take_too_long_are_stopped(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    event = Event(tmp_path)
    last = f"open({str(event.path)!r}, 'w').write('begun'), threading.Event().wait()"
    checkout.write_text(GPU_TESTS.format(passes=passes, last=last))
    time_out_at(event, monkeypatch)
    found = gpu.run_tests(8.0)
    assert found["status"] == "cut off after 8 s"
    assert len(found["outcomes"]) == 3
    assert gpu.failures_of_tests(found) == ["tests: cut off after 8 s"]


def run_main(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tests: dict[str, Any], answers: list[dict[str, Any]], *words: str
) -> int:
    """Run gpu.main on a GPU that is not there; each case gives the next answer, and sees what is stored so far."""
    left: Iterator[Any] = iter(answers)

    def faked(_script: str, request: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
        seen.append(stored(folder))
        assert timeout_seconds <= request["case"]["seconds"]
        return dict(next(left))

    seen: list[dict[str, Any]] = []
    compiled_for: list[str] = []
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(gpu, "load_arena_library", compiled_for.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "CASES", [replace(CASE, name=f"mlp {number}") for number in range(len(answers))])
    monkeypatch.setattr(gpu, "run_tests", lambda _seconds: tests)
    monkeypatch.setattr(gpu, "in_fresh_process", faked)
    real_store = gpu.store
    monkeypatch.setattr(gpu, "store", lambda *args, **how: real_store(*args, **how | {"device": "cpu"}))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    status = gpu.main()
    assert [len(document["cases"]) for document in seen] == list(range(len(seen))), "stored before each case"
    assert compiled_for == ["cuda"], "once, before tests and cases"
    return status


def stored(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "gpu.json").read_text())["payload"]


def test_cases_that_keep_all_promises_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_main(monkeypatch, tmp_path, PASSED, [GOOD, GOOD]) == 0
    payload = stored(tmp_path)
    assert payload["failures"] == []
    assert list(payload["cases"]) == ["mlp 0", "mlp 1"]
    assert "nvidia-smi" in payload["machine_now"] or "driver_version" in payload["machine_now"]


@pytest.mark.parametrize(
    ("tests", "answer", "why"),
    [
        ({"status": "failed", "outcomes": {}}, GOOD, "tests: failed"),
        ({"status": gpu.NO_PYTEST, "outcomes": {}}, GOOD, "pytest is not installed"),
        ({"status": "passed", "outcomes": {}}, GOOD, "there are none"),
        ({"status": "passed", "outcomes": {"tests/a.py::b": "skipped"}}, GOOD, "tests/a.py::b was not passed"),
        (PASSED, GOOD | {"steps": [*GOOD["steps"][:9], {"taken_bytes": 101 << 20}]}, r"steps \[9\] took up to 101.0"),
        (PASSED, GOOD | {"first_difference": "loss"}, "differ first in loss"),
        (PASSED, GOOD | {"not_repeated": ["gradient a", "gradient b", "gradient c"]}, "does not repeat 3 of 200"),
        (PASSED, GOOD | {"statistics": {"num_alloc_retries": 1}}, "num_alloc_retries"),
        (PASSED, GOOD | {"not_served": 2}, "2 requests of the last step had no place"),
        (PASSED, {"error": "took more than 45 s", "timed_out": True} | GOOD, "took more than 45 s"),
        (PASSED, {name: value for name, value in GOOD.items() if name != "done"}, "broke off"),
    ],
)
def test_what_failed_was_cut_off_or_skipped_is_said_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tests: dict[str, Any],
    answer: dict[str, Any],
    why: str,
) -> None:
    assert run_main(monkeypatch, tmp_path, tests, [answer, GOOD]) == 1
    (failure,) = stored(tmp_path)["failures"]
    assert re.search(why, failure)
    assert f"FAILED {failure}" in capsys.readouterr().out
    assert list(stored(tmp_path)["cases"]) == ["mlp 0", "mlp 1"], "all the same, the rest was measured"


def test_what_eager_does_not_repeat_may_be_one_gradient_in_a_hundred() -> None:
    assert gpu.failures_of(CASE, GOOD | {"not_repeated": ["gradient a", "gradient b", "state x"]}, dry=False) == []


def test_a_rival_has_only_to_get_through() -> None:
    assert gpu.failures_of(RIVAL, {"steps": GOOD["steps"], "done": True}, dry=False) == []
    assert gpu.failures_of(RIVAL, {"error": "exit status 1: why"}, dry=False) == ["eager mlp: exit status 1: why"]


@pytest.mark.parametrize(("error", "fails"), [(0.0, False), (0.2, True), (float("nan"), True)])
def test_a_case_on_inductors_kernels_fails_by_its_gradients(error: float, fails: bool) -> None:
    case = replace(CASE, how="inductor")
    found = {**GOOD, "worst_error": error, "worst_name": "gradient weight"}
    assert bool(gpu.failures_of(case, found, dry=False)) == fails


def test_no_case_begins_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_main(monkeypatch, tmp_path, PASSED, [GOOD], "--minutes", "0") == 1
    assert stored(tmp_path)["failures"] == [f"mlp 0: {gpu.NOT_BEGUN}"]


def test_the_cases_cover_what_they_should_within_the_time() -> None:
    names = " ".join(case.name for case in CASES)
    words = ["fp32", "bf16", "channels_last", "fused", "foreach", "GradScaler", "accumulation", "offloading 10 GiB"]
    words += [
        "arena",
        "backend",
        "inductor",
        "cudnn.benchmark",
        "eager",
        "checkpoints by hand",
        "torch's budget",
        "capped",
    ]
    assert all(word in names for word in words)
    assert {case.workload for case in CASES} == set(EIGHT)
    assert {case.arena for case in CASES} == {None, True, False}
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_dry_run_measures_a_case_on_the_cpu_and_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (case,) = [case for case in CASES if case.name == "gpt2 fp16, GradScaler"]
    monkeypatch.setattr(gpu, "CASES", [case])
    monkeypatch.setattr(gpu, "run_tests", lambda _seconds: {"status": "failed", "outcomes": {}})
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--minutes", "5"])
    assert gpu.main() == 0
    assert not list(tmp_path.iterdir())
    printed = capfd.readouterr().out
    assert "of eager's time" in printed and "nothing was run on a GPU, nothing is stored" in printed


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
