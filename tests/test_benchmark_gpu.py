"""The benchmark of the machine with the GPU, without one: what it runs, stores and skips, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from events import Event, time_out_at

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import one another as scripts do

import _gpu_carried as carried  # noqa: E402
import _gpu_machine  # noqa: E402
import _gpu_queue as queue  # noqa: E402
import _gpu_tables  # noqa: E402
import make_gpu  # noqa: E402
from _gpu_doors import CASES, DOORS  # noqa: E402
from _gpu_limits import extrapolated  # noqa: E402
from _gpu_measure import over  # noqa: E402
from _gpu_rows import CHILDREN, ROWS, Child  # noqa: E402
from _gpu_ways import HALF, THERE, NotThereYetError, _budget_bytes  # noqa: E402

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


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_other.py").write_text("import a_package_that_is_not_there")
    monkeypatch.setattr(queue, "FOLDER", tmp_path / "benchmarks")
    return tmp_path / "tests" / "test_on_a_gpu.py"


def test_the_outcome_of_each_gpu_test_is_kept(checkout: Path) -> None:
    checkout.write_text(GPU_TESTS.format(passes=True, last="pass"))
    found = queue.run_tests(60.0)
    outcomes = {test.partition("::")[2]: outcome for test, outcome in found["outcomes"].items()}
    assert found["status"] == "passed"
    assert outcomes == {
        "test_that_passes": "passed",
        "test_of[a b]": "passed",
        "test_that_skips": "skipped",
        "test_that_takes_long": "passed",
    }
    assert [each.partition("::")[2] for each in queue.failures_of_tests(found)] == ["test_that_skips was not passed"]
    checkout.write_text(GPU_TESTS.format(passes=False, last="pass"))
    found = queue.run_tests(60.0)
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
    found = queue.run_tests(8.0)
    assert found["status"] == "cut off after 8 s"
    assert len(found["outcomes"]) == 3
    assert queue.failures_of_tests(found) == ["tests: cut off after 8 s"]


def answers(*given: dict[str, Any], then: str = "") -> Iterator[dict[str, Any]]:
    """What a child yields: the given answers, and then it fails, hangs or ends."""
    yield from given
    if then == "hangs":
        threading.Event().wait()
    if then == "fails":
        raise ValueError("what went wrong")


def child(name: str = "one", *given: dict[str, Any], then: str = "", **how: Any) -> Child:
    arguments = {"then": then}
    how = {"rows": {2: "", 3: "hard"}, "seconds": 20.0} | how
    return Child(name=name, measure=lambda **kept: answers(*given, **kept), arguments=arguments, **how)


def records_of(*children: Child, seconds: float = 60.0, **how: Any) -> dict[str, dict[str, Any]]:
    stop = time.monotonic() + seconds
    return {each.name: record for each, record in queue.run_queue(children, stop, **how)}


def test_a_child_runs_in_a_fork_and_its_last_answer_counts() -> None:
    (record,) = records_of(child("one", {"a": 1}, {"a": 2, "pid": os.getpid()})).values()
    assert record["answer"]["a"] == 2
    assert record["rows"] == {2: "", 3: "hard"}
    assert record["failures"] == []
    assert record["seconds"] > 0 and record["host_seconds"] >= 0


def test_a_child_that_breaks_off_has_given_what_it_had_and_the_rest_runs() -> None:
    found = records_of(child("one", {"a": 1}, then="fails"), child("two", {"b": 1}))
    assert found["one"]["answer"]["a"] == 1
    assert found["one"]["failures"] == ["one: ValueError: what went wrong"]
    assert found["two"]["failures"] == []


def test_a_child_is_stopped_when_its_time_is_up() -> None:
    found = records_of(child("one", {"a": 1}, then="hangs", seconds=0.5), least_seconds=0.0)
    assert found["one"]["answer"] == {"a": 1, "error": "took more than 1 s", "timed_out": True}
    assert found["one"]["failures"] == ["one: took more than 1 s"]


def test_no_child_begins_when_all_the_time_is_up() -> None:
    found = records_of(child(), seconds=1.0)
    assert found["one"]["failures"] == [f"one: {queue.NOT_BEGUN}"]


def test_a_rehearsal_has_sizes_of_its_own() -> None:
    two = child("one", {"a": 1}, then="fails", rehearsal={"then": ""})
    assert records_of(two, rehearsal=True)["one"]["failures"] == []
    assert records_of(two)["one"]["failures"] != []


def test_a_known_fault_must_fail_in_a_rehearsal_and_counts_on_a_gpu() -> None:
    fails = child("one", {"failures": ["one: over"]}, fails="the account")
    mended = child("one", {"failures": []}, fails="the account")
    assert records_of(fails)["one"]["failures"] == ["one: over"]
    assert records_of(fails, rehearsal=True)["one"]["failures"] == []
    (line,) = records_of(mended, rehearsal=True)["one"]["failures"]
    assert line == "one: did not fail, so that the reason for it goes: the account"


def test_failures_under_a_hard_cap_count() -> None:
    found = records_of(child("one", {"failures": ["ways"], "hard": {"failures": ["hard cap: 1 retries"]}}))
    assert found["one"]["failures"] == ["ways", "hard cap: 1 retries"]


def test_what_breaks_off_replaces_nothing_that_came_through() -> None:
    good, better, broken = ({"answer": answer} for answer in ({"a": 1}, {"a": 2}, {"error": "took more than 9 s"}))
    stored = {"children": {"one": good, "two": good, "three": broken}}
    found = queue.merged(stored, {"one": broken, "two": better, "three": broken | {"seconds": 1.0}, "four": broken})
    assert found == {"one": good, "two": better, "three": broken | {"seconds": 1.0}, "four": broken}


def test_seconds_are_added_up_by_row() -> None:
    one = child("one", rows={2: "", 3: "hard"})
    two, three = child("two", rows={1: ""}), child("three", rows={1: ""})
    records = {name: {"seconds": 2.0, "host_seconds": 1.0} for name in ("one", "two", "three")}
    assert queue.seconds_by_row([two, three, one], records) == {1: (4.0, 2.0), 2: (2.0, 1.0)}


def test_a_line_says_what_matters() -> None:
    record = {"answer": {"line": "6 of 7", "hard": {"line": "no retries"}, "error": "took 3 s"}, "seconds": 3.0}
    line = queue.line_of(child("one"), record)
    assert re.search(r"2\+3 one +6 of 7; no retries -- took 3 s \(3 s\)", line)


def test_steps_over_a_budget_are_named() -> None:
    steps = [{"reserved_bytes": count << 20} for count in (5, 7, 6)]
    assert over("one", steps, 7 << 20) == []
    assert over("one", steps, 5 << 20) == ["one: steps [1, 2] reserved up to 7.0 MiB of a budget of 5.0"]


def test_tokens_are_extrapolated_to_a_cap() -> None:
    assert extrapolated({1024: 2_000_000, 2048: 3_000_000}, 5_000_000) == 4096
    assert extrapolated({1024: 2_000_000, 2048: 3_000_000}, 4_900_000) == 3840  # a multiple of 256 below
    assert extrapolated({1024: 2_000_000, 2048: 3_000_000}, 100) == 256
    assert extrapolated({1024: 2_000_000, 2048: 2_000_000}, 5_000_000) == 2048  # bytes that do not grow say nothing


def test_a_budget_is_a_share_of_the_first_way_or_the_bytes_of_another() -> None:
    known = {"eager": 1000, "checkpoints": 400}
    assert _budget_bytes(HALF, known) == 500
    assert _budget_bytes(THERE, known) == 400
    with pytest.raises(NotThereYetError, match="'checkpoints' did not run"):
        _budget_bytes(THERE, {"eager": 1000})


def test_the_table_is_whole() -> None:
    answered = {row for each in CHILDREN for row in each.rows}
    assert answered == set(ROWS)
    assert len({each.name for each in CHILDREN}) == len(CHILDREN)
    assert sum(each.seconds for each in CHILDREN) < 600


def test_every_door_has_a_case() -> None:
    assert {case.door for case in CASES} == set(DOORS)
    assert len({case.name for case in CASES}) == len(CASES)


def test_archives_come_back_and_plans_and_what_is_too_large_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("MEMFIT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
    one, other, home = (tmp_path / name for name in ("one", "other", "home"))
    carried.use_caches(one)
    assert os.environ["MEMFIT_CACHE"] == str(one / "memfit")
    for name in ("memfit/costs/cuda.json", "memfit/plans/a.json", "memfit/torch-2/a.so", "inductor/a.py"):
        (one / name).parent.mkdir(exist_ok=True)
        (one / name).write_bytes(os.urandom(1000))
    assert carried.pack(one, home) == []
    carried.use_caches(other)
    assert carried.unpack(other, [tmp_path / "nowhere", home]) == ["carried.tar.gz", "inductor.tar.gz"]
    there = {str(path.relative_to(other)) for path in other.rglob("*.*") if path.is_file()}
    assert there == {"memfit/costs/cuda.json", "memfit/torch-2/a.so", "inductor/a.py"}
    (one / "inductor" / "b.py").write_bytes(os.urandom(9000))
    monkeypatch.setattr(carried, "MOST_BYTES", 5000)
    (line,) = carried.pack(one, tmp_path / "again")
    assert line.startswith("inductor.tar.gz has ")
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["carried.tar.gz"]


def test_a_rehearsal_is_never_stored_among_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert _gpu_machine.payload_path("a-gpu", rehearsal=False) == BENCHMARKS / "results" / "a-gpu" / "gpu.json"
    assert BENCHMARKS / "results" not in _gpu_machine.payload_path("a-gpu", rehearsal=True).parents
    monkeypatch.setenv("OUT", str(tmp_path))
    assert _gpu_machine.payload_path("a-gpu", rehearsal=False) == tmp_path / "gpu.json"


def stored_file(results: Path, *, rehearsal: bool = False, date: str = "2026-11-27T10:00:00+00:00") -> None:
    """Store what a device gave: one model in three ways, and a door that did not hold."""
    ways = {
        "eager": {"reserved_bytes": 30 << 30, "time_ratio": 1.0},
        "checkpoints": {"reserved_bytes": 10 << 30, "time_ratio": 1.31},
        "memfit at their bytes": {"reserved_bytes": 10 << 30, "time_ratio": 1.042},
        "memfit at 50%": {"error": "InfeasibleBudgetError: too little"},
        "memfit.checkpoint at their bytes": {"not_there": "no such option"},
    }
    answer = {"ways": ways, "line": "eager 30 | memfit 10", "hard": {"line": "0 retries"}}
    steps = [{"reserved_bytes": 7 << 20}]
    door = {"budget_bytes": 6 << 20, "steps": steps}
    payload = {
        "titles": {"1": "doors", "2": "GPT-2"},
        "rehearsal": rehearsal,
        "children": {
            "gpt2-medium": {"rows": {"2": "", "3": "hard"}, "answer": answer, "failures": []},
            "compile": {"rows": {"1": ""}, "answer": door, "failures": ["compile: steps [0] reserved up to 7.0 MiB"]},
        },
    }
    machine = {"gpu": "A GPU", "folder": "a-gpu", "torch": "2.11.0", "date": date}
    _gpu_machine.write(results / "a-gpu" / "gpu.json", payload, machine)


def test_the_first_table_is_made_from_the_file_of_a_device_alone(tmp_path: Path) -> None:
    assert _gpu_tables.first_table(_gpu_tables.documents(tmp_path)) == ""
    stored_file(tmp_path, rehearsal=True)
    assert _gpu_tables.first_table(_gpu_tables.documents(tmp_path)) == ""
    stored_file(tmp_path)
    table = _gpu_tables.first_table(_gpu_tables.documents(tmp_path))
    assert "| GPT-2 medium, 8 x 1,024 tokens | 30.0, 1.00 | 10.0, 1.31 |  | 10.0, 1.04 | failed |" in table
    assert table.endswith("(A GPU; torch 2.11.0; 2026-11-27)\n")


def test_the_page_is_there_with_its_line_of_the_navigation_while_a_device_has_a_file(tmp_path: Path) -> None:
    navigation, docs, results = tmp_path / "mkdocs.yml", tmp_path / "docs", tmp_path / "results"
    before = _gpu_tables.NAVIGATION.read_text().replace(_gpu_tables.NAV_LINE, "")
    navigation.write_text(before)
    docs.mkdir()
    assert not _gpu_tables.write_page(docs, navigation, results)
    assert navigation.read_text() == before and not list(docs.iterdir())
    stored_file(results)
    for _ in range(2):
        assert _gpu_tables.write_page(docs, navigation, results)
        assert navigation.read_text().count(_gpu_tables.NAV_LINE) == 1
    page = (docs / "gpu.md").read_text()
    assert "| compile | 6 | 7 | **no**: compile: steps [0] reserved up to 7.0 MiB |" in page
    assert "| 2, 3 | gpt2-medium | eager 30 · memfit 10; 0 retries | none |" in page
    (picture,) = docs.glob("*.svg")
    assert f"]({picture.name})" in page
    assert "memfit at their bytes (10.0, 1.04)" in picture.read_text()
    (results / "a-gpu" / "gpu.json").unlink()
    assert not _gpu_tables.write_page(docs, navigation, results)
    assert navigation.read_text() == before and not list(docs.iterdir())


def test_the_readme_has_a_place_for_the_first_table() -> None:
    assert "<!-- table: gpu -->\n" in (BENCHMARKS.parent / "README.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_make_gpu_says_so_in_a_line_and_exits_0() -> None:
    for script in ("make_gpu.py", "gpu.py"):
        done = subprocess.run(
            [sys.executable, str(BENCHMARKS / script)], capture_output=True, text=True, check=False, timeout=110
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("no CUDA device here: nothing to measure") and done.stdout.count("\n") == 1


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA, which may be rehearsed with")
def test_a_rehearsal_needs_the_build_without_a_gpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearsal"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 1
    assert "run `make gpu-rehearsal`" in done.stderr


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
