"""What commands say while they work, what is off, and how plans and steps show themselves."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MOVES, Run, json_of
from small_plans import small_graph
from torch import nn

import memfit
from memfit.commands import work
from memfit.device import GENERIC
from memfit.errors import InvalidTargetError
from memfit.integrations.metrics import Metrics, figures
from memfit.plan import Plan, Problem, Progress
from memfit.planners import make_planner
from memfit.progress import PROGRESS, TOLD_SECONDS, TellsSearch
from memfit.report import write_snapshot
from memfit.report.notebook import plan_html
from memfit.system.lines import NORMAL, QUIET, VERBOSE, choose_lines, lines_on_stderr


def planned(name: str = "small") -> Plan:
    problem = Problem(graph=small_graph(name), device=GENERIC, budget_bytes=1400)
    plan = make_planner("search", iterations=200).plan(problem).plan
    assert plan is not None
    return plan


def step_of(budget: str = "80%") -> Any:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    batch = torch.randn(256, 64), torch.randint(0, 4, (256,))
    return memfit.fit(model, nn.CrossEntropyLoss(), batch, budget=budget, planner="search", options={"iterations": 500})


def test_a_command_says_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "TOLD_SECONDS", 0.02)
    with lines_on_stderr():
        choose_lines(NORMAL, shows_progress=True)
        with work.working() as at_work:
            at_work.stage("measuring each op")
            at_work.done(1, 4)
            time.sleep(0.15)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and all(line.startswith("memfit: measuring each op: 25%, 0 s, about ") for line in lines)


@pytest.mark.parametrize("level", [QUIET, VERBOSE])
def test_levels_of_what_is_said(level: int, capsys: pytest.CaptureFixture[str]) -> None:
    logger, before = logging.getLogger("memfit.step.proof"), logging.getLogger("memfit").level
    with lines_on_stderr():
        choose_lines(level, shows_progress=True)
        logger.warning("over")
        logging.getLogger(PROGRESS).info("at work")
    is_told = level == VERBOSE
    assert capsys.readouterr().err == ("memfit: warning: over\nmemfit: at work\n" if is_told else "")
    assert logging.getLogger("memfit").level == before


@pytest.mark.parametrize(("word", "says"), [("-v", True), ("--verbose", True), ("-q", False), ("--quiet", False)])
def test_each_command_takes_verbose_and_quiet(word: str, says: bool, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "small.graph.json"
    small_graph().save(file)
    status, out, err = run("plan", file, "--budget", "1400", *MOVES, "--no-cache", "--json", word)
    assert status == 0 and json_of(out)["budget_bytes"] == 1400
    assert ("searching a plan" in err) == says


def test_verbose_and_quiet_exclude_each_other(run: Run) -> None:
    assert run("planners", "-v", "-q") == (
        2, "", "memfit: error: --verbose and --quiet exclude each other; give one of them\n"
    )  # fmt: skip


def test_a_script_run_quietly_says_nothing_of_memfits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('mine')\n")
    for words, said in (([], True), (["-q"], False)):
        command = [sys.executable, "-m", "memfit", "run", *words, "--budget", "1GiB", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "mine\n" and bool(done.stderr) == said


def test_python_logs_each_stage(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, PROGRESS):
        step_of()
    told = [record.getMessage() for record in caplog.records if record.name == PROGRESS]
    assert told[:2] == ["capturing the step", "measuring each op"]


def test_a_long_search_is_logged_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    tell = TellsSearch()
    with caplog.at_level(logging.INFO, PROGRESS):
        for _search in range(2):
            for second in range(25):
                tell(Progress(elapsed_seconds=second, best_overhead=0.1, best_peak_bytes=4096))
    assert len(caplog.records) == 2 * (24 // TOLD_SECONDS)
    assert "10 s; best +10.0% at 4 KiB" in caplog.records[0].getMessage()


def test_doctor_tells_what_is_here(run: Run) -> None:
    status, out, _ = run("doctor", "--json")
    found = json_of(out)
    assert status == 0 and found["packages"]["torch"] == torch.__version__
    (cpu,) = [each for each in found["devices"] if each["device"] == "cpu"]
    assert cpu["memory_bytes"] > 0 and cpu["threads"] == torch.get_num_threads()
    assert found["cache"]["folder"] == os.environ["MEMFIT_CACHE"] and found["cache"]["is_writable"]
    assert found["variables"]["MEMFIT_CACHE"] == os.environ["MEMFIT_CACHE"]
    status, text, _ = run("doctor")
    assert status == 0 and torch.__version__ in text


def test_doctor_names_what_is_off_and_the_remedy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", "/proc/no")
    monkeypatch.setenv("CXX", "no-such-compiler")
    _, out, _ = run("doctor", "--json")
    off = "\n".join(json_of(out)["off"])
    assert "set MEMFIT_CACHE" in off
    assert "there is no C++ compiler (no-such-compiler)" in off and "arena on cpu" in off
    assert "memfit calibrate --device cpu" in off

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    _, out, _ = run("doctor", "--json")
    assert json_of(out)["devices"] == [] and "torch is not installed" in json_of(out)["off"][0]


def test_a_shell_completes_commands() -> None:
    asked = {"_MEMFIT_COMPLETE": "complete_bash", "COMP_WORDS": "memfit estim", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "memfit"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["estimate"]


def test_reprs_are_short() -> None:
    step = step_of()
    plan = step.plan
    things = [plan, plan.graph, step, step.step, step.captured.binding, step.captured, plan.schedule]
    assert [len(repr(thing)) for thing in things if len(repr(thing)) > 400] == []
    assert repr(planned()).startswith("Plan('small', ")
    assert repr(small_graph()) == "Graph('small', 7 ops, 8 storages)"


def test_a_plan_shows_itself_in_a_notebook() -> None:
    shown = plan_html(planned("<b>&"))
    assert shown.count("<polyline") == 2 and "&lt;b&gt;&amp;" in shown and "<script" not in shown
    assert planned()._repr_html_().startswith("<div>")
    assert "predicted peak" in step_of()._repr_html_()


def test_a_step_writes_its_page(tmp_path: Path) -> None:
    step = step_of()
    step.report(tmp_path / "step.html", repeats=1)
    page = (tmp_path / "step.html").read_text()
    assert "measured" in page and torch.__version__ in page


def test_a_snapshot_for_memory_viz_has_the_plans_peak(run: Run, tmp_path: Path) -> None:
    plan = planned()
    write_snapshot(plan, tmp_path / "one.pickle")
    plan.save(tmp_path / "plan.json")
    assert run("report", tmp_path / "plan.json", "-o", tmp_path / "two.pickle", "--curve", "0")[0] == 0
    assert (tmp_path / "one.pickle").read_bytes() == (tmp_path / "two.pickle").read_bytes()
    snapshot = pickle.loads((tmp_path / "one.pickle").read_bytes())
    live, peak, there = 0, 0, set[int]()
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in there
            there.add(event["addr"])
            live += event["size"]
        elif event["action"] == "free_completed":
            there.remove(event["addr"])
            live -= event["size"]
        peak = max(peak, live)
    assert peak == plan.predicted.peak_bytes
    from torch.cuda import _memory_viz

    assert "fc1" in json.dumps(snapshot) and "peak" not in _memory_viz.trace(snapshot)


class Board:
    """As TensorBoard's writer."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))


class Runs:
    """As `wandb` or an Accelerator (`log`), or as `mlflow` or a logger of Lightning (`log_metrics`)."""

    def __init__(self, name: str) -> None:
        self.written: list[tuple[str, float, int]] = []
        setattr(self, name, self._log)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self.written += [(name, value, step) for name, value in numbers.items()]


@pytest.mark.parametrize("writer", [Board(), Runs("log"), Runs("log_metrics")], ids=["board", "wandb", "mlflow"])
def test_what_steps_take_is_written(writer: Any) -> None:
    step = step_of()
    metrics = Metrics(step, writer)
    for number in range(1, 4):
        step(step.step.batch)
        metrics(number)
    written = {(name, at): value for name, value, at in writer.written}
    assert 0 < written["memfit/peak_bytes", 3] <= written["memfit/budget_bytes", 3]
    assert ("memfit/step_seconds", 1) not in written and written["memfit/step_seconds", 3] > 0


def blocks() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])


def test_each_door_has_figures() -> None:
    model, inputs = blocks(), torch.randn(64, 32)
    with memfit.checkpoint(model, budget="4MiB") as handle:
        model(inputs).sum().backward()
        handle.end_step()
        assert figures(handle) == {
            "budget_bytes": 4 << 20,
            "peak_bytes": handle.report().windows[-1].taken_bytes,
            "most_bytes": handle.report().most_bytes,
            "steps": 1,
            "over": 0,
            "recomputed_seconds": 0.0,
        }
        assert repr(handle).startswith("Checkpointed(4 blocks, a budget of 4 MiB; 1 windows")
    with memfit.eager(blocks(), budget="8MiB") as block:
        pass
    assert figures(block)["budget_bytes"] == 8 << 20
    compiled = memfit.compile(blocks(), budget="8MiB", reserve=0)
    compiled(inputs).sum().backward()
    assert figures(compiled)["budget_bytes"] == 8 << 20 and figures(compiled)["plans"] == 1


@pytest.mark.parametrize("wrong", ["held", "writer"])
def test_what_has_no_figures_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(InvalidTargetError, match="Linear is held by no door" if wrong == "held" else "writer is a int"):
        Metrics(nn.Linear(2, 2) if wrong == "held" else step_of(), 3)


def test_the_trainers_callback_writes_as_often_as_the_trainer_logs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install memfit[transformers]")
    from memfit.integrations.transformers import MemfitCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = blocks(), nn.Linear(32, 4)

        def forward(self, inputs: Any, labels: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.head(self.net(inputs)), labels)}

    board = Board()
    callback = MemfitCallback("16MiB", door="checkpoint", log_to=board)
    rows = [{"inputs": torch.randn(32), "labels": torch.tensor(number % 4)} for number in range(32)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, logging_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert {step for name, _, step in board.written if name == "memfit/most_bytes"} == {2, 4}
