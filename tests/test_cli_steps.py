"""The commands on training steps: built-in ones and a user's own file, right and wrong, whole and interrupted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import MOVES, Run, json_of, without_progress
from steps import hungry

from memfit.plan import Plan
from memfit.report.formatting import change_text

OWN_FILE = """
import time

import torch
from torch import nn

import memfit


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[l for _ in range(4) for l in (nn.Linear(64, 64), nn.GELU())], nn.Dropout(0.1))
        self.head = nn.Linear(64, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs))


class Raising(Model):
    def forward(self, inputs):
        return self.head(self.body(inputs)) + self.missing_bias


class Breaking(Model):
    def forward(self, inputs):
        hidden = self.body(inputs)
        if hidden.sum().item() > 1e30:
            hidden = hidden * 2
        return self.head(hidden)


def made(model=None, batch=None, optimizer=None):
    torch.manual_seed(0)
    model = Model() if model is None else model
    batch = (torch.randn(512, 64), torch.randint(0, 4, (512,))) if batch is None else batch
    return memfit.TrainingStep(model=model, loss=nn.CrossEntropyLoss(), batch=batch, optimizer=optimizer)


def step():
    return made()


def trained():
    model = Model()
    return made(model, optimizer=torch.optim.AdamW(model.parameters()))


def wider():
    return made(batch=(torch.randn(600, 64), torch.randint(0, 4, (600,))))


def raises():
    return made(Raising())


def breaks():
    return made(Breaking())


def elsewhere():
    return made(batch=(torch.randn(8, 64, device="meta"), torch.randint(0, 4, (8,))))


def number():
    return 42


def nothing():
    pass


def needs(argument):
    return made()


def fails():
    raise KeyError("no such data set")


not_a_function = 3
"""


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "train.py"
    path.write_text(OWN_FILE, encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what is measured here out of the user's cache, and share it between the tests of this file."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE", str(folder))
        yield folder


PARTS_ON_PAGE = ("What fills the budget", "parameters, state, inputs", "Outside of the budget: the process of Python")
PARTS = ("residents", "library workspaces", "fragmentation", "reserved", "outside of the budget")


@pytest.mark.parametrize("function", ["step", "trained"])
def test_fit_plans_runs_verifies_and_measures(run: Run, own_file: Path, tmp_path: Path, function: str) -> None:
    plan_file, page = tmp_path / "step.plan.json", tmp_path / "step.html"
    status, out, err = run(
        "fit", f"{own_file}:{function}", "--budget", "75%", *MOVES, "--curve", 2, "--repeats", 1,
        "--save", plan_file, "--report", page, "--json",
    )  # fmt: skip
    document = json_of(out)
    assert status == 0, err
    assert set(document) == {
        "target", "device", "memfit_version", "budget_bytes", "resident_bytes", "planner", "status", "plan_seconds",
        "age_seconds", "baseline", "predicted", "measured", "overhead", "overhead_spread", "turns", "bitwise_equal",
        "reserved", "bounds",
    }  # fmt: skip
    assert set(document["baseline"]) == {"peak_bytes", "step_seconds"}
    for side, more in (("predicted", {"overhead"}), ("measured", set())):
        assert set(document[side]) == {"peak_bytes", "reserved_bytes", "step_seconds"} | more
        assert document[side]["reserved_bytes"] == document[side]["peak_bytes"], "a CPU keeps nothing that is not live"
    parts = dict(document["reserved"])
    assert parts.pop("reserved_bytes") == document["predicted"]["reserved_bytes"] == sum(parts.values())
    assert set(parts) == {"resident_bytes", "plan_bytes", "library_bytes", "fragmentation_bytes"}
    assert document["bitwise_equal"] is True
    assert document["measured"]["peak_bytes"] <= document["budget_bytes"] < document["baseline"]["peak_bytes"]
    assert document["predicted"]["peak_bytes"] == pytest.approx(document["measured"]["peak_bytes"], rel=0.02)
    assert document["resident_bytes"] < document["measured"]["peak_bytes"]
    assert Plan.load(plan_file).budget_bytes == document["budget_bytes"]
    assert f">{change_text(document['overhead'])} (" in page.read_text(), "the page and the answer tell one overhead"
    seconds = document["measured"]["step_seconds"], document["baseline"]["step_seconds"]
    assert document["overhead"] == seconds[0] / seconds[1] - 1, "and so do the seconds"
    assert all(part in page.read_text() for part in PARTS_ON_PAGE)


def test_fit_says_what_goes_to_the_host(run: Run, own_file: Path, tmp_path: Path) -> None:
    words = [
        "fit",
        f"{own_file}:step",
        "--budget",
        "75%",
        "--repeats",
        1,
        "--host-budget",
        "64MiB",
        "--host-dir",
        tmp_path,
    ]
    offloading = ["--planner", "offload", "--option", "rematerialize=false", *MOVES]
    status, out, err = run(*words, *offloading, "--json")
    assert status == 0, err
    host = json_of(out)["host"]
    assert set(host) == {
        "budget_bytes", "peak_bytes", "offloaded_bytes", "offloaded_storages", "tier", "directory",
    }  # fmt: skip
    assert (host["tier"], host["directory"]) == ("disk", str(tmp_path))
    assert host["offloaded_storages"] >= 1
    assert 512 * 64 * 4 <= host["peak_bytes"] <= host["offloaded_bytes"] <= 64 << 20
    text = " ".join(run(*words, *offloading)[1].split())
    assert f"offloaded {host['offloaded_storages']} storages, " in text
    assert "in each step, to a file in" in text
    assert "offloaded nothing, to a file in" in " ".join(run(*words, "--planner", "search", *MOVES)[1].split())


def test_fit_in_words_with_a_plan_made_before(run: Run, own_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "step.plan.json"
    words = ["--planner", "none", "--budget", "100%", "--save", plan_file]
    assert run("plan", f"{own_file}:step", *words)[0] == 0
    status, out, _ = run("fit", f"{own_file}:step", "--plan", plan_file, "--repeats", 1)
    assert status == 0
    assert "planned, measured" in out
    assert all(part in out for part in PARTS)
    assert "same bits as eager" in out
    assert run("check", f"{own_file}:step", plan_file)[0] == 0
    status, _, err = run("fit", f"{own_file}:wider", "--plan", plan_file)
    assert status == 2
    assert "plan was made for graph" in err
    assert run("check", f"{own_file}:wider", plan_file)[0] == 2


def test_fit_refuses_a_plan_of_another_torch(run: Run, own_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "step.plan.json"
    assert run("plan", f"{own_file}:step", "--planner", "none", "--budget", "100%", "--save", plan_file)[0] == 0
    document = json.loads(plan_file.read_text(encoding="utf-8"))
    document["versions"]["torch"] = "2.1.0"
    plan_file.write_text(json.dumps(document), encoding="utf-8")
    status, out, err = run("fit", f"{own_file}:step", "--plan", plan_file)
    assert (status, out) == (2, "")
    assert "plan was made with torch 2.1.0" in err
    assert err.count("\n") == 1


def test_a_budget_below_the_parameters_is_infeasible_before_anything_runs(run: Run, own_file: Path) -> None:
    status, out, err = run("fit", f"{own_file}:step", "--budget", "10kB", "--planner", "none", "--json")
    document = json_of(out)
    assert status == 3
    assert document["least_budget_bound_bytes"] > 64 * 64 * 4 * 4
    assert re.search("no plan fits .* none can go below|no plan can go below", err)
    assert err.count("\n") == 1


def test_a_correction_is_reported_verified_and_measured_against_the_budget_that_was_asked(
    run: Run, own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step takes 192 KiB more than its ops were measured to take, as a library's workspace may."""
    from memfit.step.programs import Programs

    monkeypatch.setattr(Programs, "run", hungry(Programs.run, 192 << 10))
    plan_file, page = tmp_path / "step.plan.json", tmp_path / "step.html"
    words = ["fit", f"{own_file}:step", "--budget", "80%", *MOVES, "--repeats", 1, "--curve", 0]
    status, out, err = run(*words, "--save", plan_file, "--report", page, "--json")
    document = json.loads(out)
    assert status == 0
    (correction,) = document["corrections"]
    assert correction["budget_bytes"] == document["budget_bytes"] < correction["measured_bytes"]
    assert document["measured"]["peak_bytes"] <= document["budget_bytes"]
    assert Plan.load(plan_file).budget_bytes == correction["aim_bytes"] < document["budget_bytes"]
    assert "later steps run a plan made for" in err
    assert "later steps run a plan made for" in page.read_text(encoding="utf-8")
    status, out, _ = run(*words)
    assert status == 0
    assert "corrected" in out


@pytest.mark.parametrize("command", ["fit", "plan", "estimate"])
@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raises", r"train\.py:\d+.*missing_bias"),
        ("elsewhere", "meta"),
        ("number", r"returned a int, expected memfit\.TrainingStep"),
        ("nothing", r"returned nothing, expected memfit\.TrainingStep"),
        ("needs", r"needs arguments \(argument\)"),
        ("fails", r"train\.py:\d+: fails\(\) raised KeyError"),
        ("missing", "has no function 'missing'; it has .*step"),
        ("not_a_function", "is a int, expected a function"),
    ],
)
def test_a_wrong_file_of_the_user_is_one_line(run: Run, own_file: Path, command: str, function: str, what: str) -> None:
    budget = [] if command == "estimate" else ["--budget", "1GiB"]
    status, out, err = run(command, f"{own_file}:{function}", *budget)
    assert (status, out) == (2, "")
    assert re.search(what, err), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("import no_such_package\n", r"own\.py:1: importing it raised ModuleNotFoundError"),
        ("def step(:\n", r"own\.py:1: importing it raised SyntaxError"),
        ("raise SystemExit(0)\n", r"own\.py:1: importing it raised SystemExit"),
        ("def other():\n    pass\n", "has no function 'step'; it has other"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(run: Run, tmp_path: Path, content: str, what: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(content, encoding="utf-8")
    status, out, err = run("estimate", f"{path}:step")
    assert (status, out) == (2, "")
    assert re.search(what, err), err
    assert err.count("\n") == 1


def test_a_workload_with_options(run: Run) -> None:
    status, out, err = run("estimate", "lstm", "--set", "batch=2", "--set", "steps=3", "--set", "width=8", "--json")
    assert status == 0, err
    assert json_of(out)["by_role"]["parameter"] > 0
    for setting, what in (("batch=none", "whole number"), ("batch=0", "1 or more"), ("bach=2", "did you mean 'batch'")):
        status, _, err = run("estimate", "lstm", "--set", setting)
        assert status == 2
        assert what in err


def test_estimate_tells_forward_from_the_whole_step(run: Run, own_file: Path) -> None:
    whole = json_of(run("estimate", f"{own_file}:trained", "--json")[1])
    forward = json_of(run("estimate", f"{own_file}:trained", "--forward-only", "--json")[1])
    assert forward["peak_bytes"] < whole["peak_bytes"]
    assert "gradient" not in forward["by_role"]
    assert forward["by_role"]["parameter"] == whole["by_role"]["parameter"]


def test_plan_for_a_device_that_is_not_here(run: Run, own_file: Path) -> None:
    words = ["--budget", "100%", "--planner", "none", "--device-profile", "t4", "--json"]
    status, out, err = run("plan", f"{own_file}:step", *words)
    assert status == 0, err
    document = json_of(out)
    assert document["device"] == "t4"
    assert 0 < document["predicted"]["seconds"] < 1


def _process(*words: object, before: str = "") -> subprocess.Popen[str]:
    code = f"{before}\nimport sys\nfrom memfit.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_step_without_a_graph_runs_and_says_where(own_file: Path) -> None:
    words = ["--budget", "4MiB", *MOVES, "--json"]
    with _process("fit", f"{own_file}:breaks", *words) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    document = json_of(out)
    assert re.search(r"memfit: warning: .*train\.py:\d+", err), err
    assert document["budget_bytes"] == 4 << 20
    assert document["planner"] == "checkpoint"
    assert document["bounds"]["least_budget_found_bytes"] <= 4 << 20
    assert document["measured"]["peak_bytes"] <= 4 << 20


# Interrupts itself in the sixth measured step, as Ctrl-C in a terminal would.
INTERRUPTED = """
import os, signal
from memfit.cost import gpu_timing
synchronize, left = gpu_timing.synchronize, iter(range(10, -1, -1))  # called twice a step
def interrupted(device):
    if next(left) == 0:
        os.kill(os.getpid(), signal.SIGINT)
    synchronize(device)
gpu_timing.synchronize = interrupted
"""


def test_ctrl_c_in_a_run_keeps_the_plan_and_nothing_else(own_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "step.plan.json"
    words = ["--budget", "100%", "--planner", "none", "--save", plan_file, "--report", tmp_path / "step.html"]
    with _process("fit", f"{own_file}:step", *words, "--repeats", 1_000_000, before=INTERRUPTED) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out == ""
    assert without_progress(err) == f"memfit: error: interrupted; the best plan so far is in {plan_file}\n"
    assert Plan.load(plan_file).planner == "none"
    assert [path.name for path in tmp_path.iterdir()] == ["step.plan.json"]


def test_no_space_for_the_plan_is_one_line_and_leaves_nothing(run: Run, own_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "step.plan.json"
    words = ["plan", f"{own_file}:step", "--budget", "100%", "--planner", "none"]
    assert run(*words)[0] == 0  # fills the cache, so that afterwards only the plan is written
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    with _process(*words, "--save", plan_file, before=limit) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, ""), err
    assert "step.plan.json: cannot be written: File too large" in err
    assert list(tmp_path.iterdir()) == []


def test_no_space_for_the_cache_is_a_warning_and_no_failure(own_file: Path, tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    before = f"import os; os.environ['MEMFIT_CACHE'] = {str(not_a_folder / 'cache')!r}"
    words = ["--budget", "100%", "--planner", "none", "--json"]
    with _process("plan", f"{own_file}:step", *words, before=before) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json_of(out)["status"] == "optimal"
    assert "Traceback" not in err
    assert "memfit: warning: " in err
    assert str(not_a_folder) in err
