"""The commands on graph files and listings: JSON keys, exit statuses, one line for every bad input, and no torch."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chains import chain, network
from command_line import MOVES, Run, json_of, without_progress

import memfit
from memfit.plan import Plan

LAYERS = 6
COMMON_KEYS = {"target", "device", "memfit_version"}


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "chain.graph.json"
    chain(LAYERS, 4096).save(path)
    return path


def test_plan_answers_with_the_keys_of_the_contract(run: Run, graph_file: Path) -> None:
    status, out, err = run("plan", graph_file, "--budget", "80%", *MOVES, "--json")
    document = json_of(out)
    assert (status, err) == (0, "")
    assert set(document) == COMMON_KEYS | {
        "budget_bytes", "planner", "status", "plan_seconds", "age_seconds",
        "predicted", "unplanned", "overhead", "bounds",
        "counts",
    }  # fmt: skip
    assert set(document["predicted"]) == set(document["unplanned"]) == {"peak_bytes", "seconds"}
    assert set(document["bounds"]) == {
        "least_budget_found_bytes", "least_budget_bound_bytes", "overhead", "overhead_in_order",
    }  # fmt: skip
    assert set(document["counts"]) == {"computed", "rematerialized", "offloaded", "dropped"}
    assert document["predicted"]["peak_bytes"] <= document["budget_bytes"] < document["unplanned"]["peak_bytes"]
    assert document["counts"]["rematerialized"] == document["counts"]["computed"] - 2 * LAYERS > 0
    assert document["overhead"] == pytest.approx(document["predicted"]["seconds"] / (2 * LAYERS) - 1)
    assert document["target"] == str(graph_file)


def test_a_plan_for_a_gpu_says_what_torch_reserves(run: Run, graph_file: Path) -> None:
    status, out, _ = run("plan", graph_file, "--budget", "100%", "--device-profile", "h100", *MOVES, "--json")
    document = json_of(out)
    assert status == 0
    taken = document["reserved"]
    parts = taken["resident_bytes"] + taken["plan_bytes"]
    assert parts == document["predicted"]["peak_bytes"]
    assert taken["reserved_bytes"] == document["predicted"]["reserved_bytes"]
    assert parts + taken["fragmentation_bytes"] == taken["reserved_bytes"] == taken["arena_bytes"]
    assert taken["library_bytes"] == 0
    assert taken["expandable_segments_bytes"] == taken["default_bytes"] == 2 << 20  # one segment of small blocks
    assert taken["arena_bytes"] == 2 << 20  # the arena, beside what the layout does not know
    _, text, _ = run("plan", graph_file, "--budget", "100%", "--device-profile", "h100", *MOVES)
    for part in ("residents", "plan", "library workspaces", "fragmentation", "outside of the budget", "context"):
        assert part in text


def test_plan_in_words(run: Run, graph_file: Path) -> None:
    status, out, _ = run("plan", graph_file, "--budget", "100%", "--planner", "none")
    assert status == 0
    assert "chain" in out
    assert "predicted peak" in out


def test_a_budget_above_the_unplanned_peak_is_planned(run: Run, graph_file: Path) -> None:
    document = json_of(run("plan", graph_file, "--budget", "125%", "--planner", "none", "--json")[1])
    assert document["budget_bytes"] == document["unplanned"]["peak_bytes"] * 5 // 4
    assert document["predicted"]["peak_bytes"] == document["unplanned"]["peak_bytes"]
    assert document["overhead"] == 0


@pytest.mark.parametrize("budget", ["0", "-1", "12XB", "nan", "inf", "", "1.5", "1e9", "GiB"])
def test_bad_budget_is_one_line_and_status_2(run: Run, graph_file: Path, budget: str) -> None:
    status, out, err = run("plan", graph_file, "--budget", budget)
    assert (status, out) == (2, "")
    assert err.startswith(f"memfit: error: budget {budget!r} ")
    assert err.count("\n") == 1


def test_bad_budget_is_refused_before_any_work(run: Run) -> None:
    status, _, err = run("plan", "no-such-target", "--budget", "12XB")
    assert status == 2
    assert "12XB" in err


def test_infeasible_budget_on_a_device_with_a_link_names_the_host(run: Run, graph_file: Path) -> None:
    without = run("plan", graph_file, "--budget", "5kB", "--device-profile", "t4")
    assert "raise the budget, give a host budget for storages to go to, or make the batch smaller" in without[2]
    given = run("plan", graph_file, "--budget", "5kB", "--device-profile", "t4", "--host-budget", "1kB")
    assert (without[0], given[0]) == (3, 3)
    assert "raise the budget or make the batch smaller" in given[2]


def test_infeasible_budget_says_what_would_do(run: Run, graph_file: Path) -> None:
    status, out, err = run("plan", graph_file, "--budget", "5kB", "--json")
    document = json_of(out)
    assert status == 3
    assert document["status"] == "infeasible"
    assert 5000 < document["least_budget_bound_bytes"] <= document["least_budget_found_bytes"]
    assert err.startswith("memfit: error: no plan fits 4.883 KiB (5000 bytes)")
    assert err.count("\n") == 1
    least = document["least_budget_found_bytes"]
    assert run("plan", graph_file, "--budget", least)[0] == 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["plan", "{graph}"], "--budget"),
        (["plan"], "TARGET"),
        (["plan", "{graph}", "--budget", "1MiB", "--colour"], "--colour"),
        (["plan", "{graph}", "--budget", "1MiB", "--planner", "magic"], "magic"),
        (["plan", "{graph}", "--budget", "1MiB", "--option", "depth=3", "--planner", "none"], "depth"),
        (["plan", "{graph}", "--budget", "1MiB", "--option", "depth"], "NAME=VALUE"),
        (["plan", "{graph}", "--budget", "1MiB", "--time-limit", "0"], "--time-limit"),
        (["plan", "{graph}", "--budget", "1MiB", "--time-limit", "nan"], "--time-limit"),
        (["plan", "{graph}", "--budget", "1MiB", "--time-limit", "soon"], "--time-limit"),
        (["plan", "{graph}", "--budget", "1MiB", "--seed", "x"], "--seed"),
        (["plan", "{graph}", "--budget", "1MiB", "--set", "batch=4"], "batch"),
        (["plan", "{graph}", "--budget", "1MiB", "--save", "no/such/folder/p.json"], "no folder"),
        (["plan", "{graph}", "--budget", "1MiB", "--device-profile", "abacus"], "abacus"),
        (["plan", "missing.graph.json", "--budget", "1MiB"], "missing.graph.json"),
        (["plan", "resnet51", "--budget", "1MiB"], "resnet51"),
        (["fit", "{graph}", "--budget", "1MiB"], "graph file"),
        (["fit", "{graph}"], "--plan"),
        (["check", "{graph}", "missing.plan.json"], "missing.plan.json"),
        (["check", "{graph}", "{graph}"], "chain.graph.json"),
        (["report", "missing.plan.json"], "missing.plan.json"),
        (["report", "{graph}", "-o", "page.docx"], ".docx"),
        (["fly", "{graph}"], "fly"),
        (["--fly"], "--fly"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_one_line_and_status_2(
    run: Run, graph_file: Path, words: list[str], what: str, as_json: bool
) -> None:
    words = [word.replace("{graph}", str(graph_file)) for word in words]
    status, out, err = run(*words, *(["--json"] if as_json else []))
    assert status == 2
    assert err.startswith("memfit: error: ")
    assert err.count("\n") == 1
    assert what in err
    if as_json:
        assert what in json_of(out)["error"]
    else:
        assert out == ""


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b"\x00\xff\xfe", "malformed"),
        (b'{"format": "memfit-graph", "version": 1}', "name"),
        (b"[" * 100_000, "malformed.graph.json"),
        (gzip.compress(b'{"format": ', mtime=0)[:-12], "malformed.graph.json"),
        (
            b'{"format": "memfit-graph", "version": 1, "name": "x", "storages": [], "ops": [], "__class__": 1}',
            "__class__",
        ),
        (
            b'{"format": "memfit-graph", "version": 1, "name": "x", "ops": [], '
            b'"storages": [{"id": 0, "name": "\\u001b[2J\\n", "bytes": -1, "role": "input"}]}',
            "$.storages",
        ),
    ],
)
def test_hostile_file_is_one_line_and_status_2(run: Run, tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "malformed.graph.json"
    path.write_bytes(content)
    for words in (["plan", path, "--budget", "1MiB"], ["estimate", path], ["check", path, path], ["report", path]):
        status, out, err = run(*words)
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert "malformed.graph.json" in err
        assert "\x1b" not in err
    assert what in run("plan", path, "--budget", "1MiB")[2]


def test_check_accepts_what_plan_saved(run: Run, graph_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "chain.plan.json"
    assert run("plan", graph_file, "--budget", "80%", *MOVES, "--save", plan_file)[0] == 0
    status, out, _ = run("check", graph_file, plan_file, "--json")
    document = json_of(out)
    assert status == 0
    assert set(document) == COMMON_KEYS | {"valid", "peak_bytes", "seconds"}
    plan = Plan.load(plan_file)
    assert document["valid"] is True
    assert (document["peak_bytes"], document["seconds"]) == (plan.predicted.peak_bytes, plan.predicted.seconds)
    assert run("check", graph_file, plan_file)[0] == 0


def _tampered(plan_file: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(plan_file.read_text(encoding="utf-8"))
    change(document)
    path = plan_file.with_name("tampered.plan.json")
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "status", "what"),
    [
        (lambda d: d["schedule"].remove("compute 0"), 4, "f0"),
        (lambda d: d["schedule"].insert(2, "drop 0"), 4, "resident"),
        (lambda d: d["schedule"].append("launch 3"), 4, "launch 3"),
        (lambda d: d["predicted"].update(peak_bytes=1), 4, "claims 1"),
        (lambda d: d.update(budget_bytes=1), 4, "budget of 1;"),
        (lambda d: d["graph"]["storages"][1].update(bytes=8), 2, "fingerprint"),
        (lambda d: d.update(version=99), 2, "99"),
        (lambda d: d.update(surprise=1), 2, "surprise"),
        (lambda d: d.pop("bounds"), 2, "bounds"),
    ],
)
def test_check_refuses_a_plan_that_was_changed(
    run: Run, graph_file: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], status: int, what: str
) -> None:
    plan_file = tmp_path / "chain.plan.json"
    assert run("plan", graph_file, "--budget", "100%", "--planner", "none", "--save", plan_file)[0] == 0
    tampered = _tampered(plan_file, change)
    found, out, err = run("check", graph_file, tampered, "--json")
    document = json_of(out)
    assert found == status
    assert what in document["error"]
    if status == 4:
        assert document["valid"] is False
    else:
        assert err.count("\n") == 1


def test_check_refuses_a_plan_for_another_graph(run: Run, graph_file: Path, tmp_path: Path) -> None:
    plan_file, other = tmp_path / "chain.plan.json", tmp_path / "other.graph.json"
    assert run("plan", graph_file, "--budget", "100%", "--planner", "none", "--save", plan_file)[0] == 0
    chain(3).save(other)
    status, out, err = run("check", other, plan_file)
    assert (status, out) == (2, "")
    assert "plan was made for graph 'chain6'" in err


def test_estimate_answers_with_the_keys_of_the_contract(run: Run, graph_file: Path) -> None:
    status, out, err = run("estimate", graph_file, "--json")
    document = json_of(out)
    assert (status, err) == (0, "")
    assert set(document) == COMMON_KEYS | {"peak_bytes", "by_role", "peak_op", "storages_at_peak", "strategies"}
    assert document["peak_bytes"] == sum(document["by_role"].values()) == (LAYERS + 2) * 4096
    assert document["peak_op"] == "b5"
    assert sum(s["bytes"] for s in document["storages_at_peak"]) == document["peak_bytes"]
    assert {s["module"] for s in document["storages_at_peak"]} >= {"model.layers.0", "model.layers.5", ""}


def test_estimate_of_the_forward_pass_alone(run: Run, graph_file: Path) -> None:
    document = json_of(run("estimate", graph_file, "--forward-only", "--json")[1])
    assert document["peak_bytes"] == 3 * 4096  # the input, and the two ends of a layer
    assert set(document["by_role"]) == {"input", "activation"}
    status, out, _ = run("estimate", graph_file, "--forward-only")
    assert status == 0
    assert "12 KiB" in out


def test_report_writes_what_its_suffix_says(run: Run, graph_file: Path, tmp_path: Path) -> None:
    plan_file, page, trace = (tmp_path / name for name in ("chain.plan.json", "chain.html", "chain.trace.json"))
    assert run("plan", graph_file, "--budget", "80%", *MOVES, "--save", plan_file)[0] == 0
    status, out, _ = run("report", plan_file, "-o", page, "-o", trace, "--curve", 3, "--time-limit", 1, "--json")
    assert status == 0
    assert json_of(out)["files"] == [str(page), str(trace)]
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")
    assert json.loads(trace.read_text(encoding="utf-8"))
    status, out, _ = run("report", plan_file, "--curve", 0)
    assert status == 0
    assert "at the peak" in out
    assert "why no plan needs less" in out
    status, out, _ = run("report", plan_file, "--curve", 2, "--time-limit", 1, "--json")
    explanation = json_of(out)["explanation"]
    assert explanation["storages"][0]["why"]
    assert explanation["more_memory"]["bound_overhead"] <= explanation["more_memory"]["found_overhead"]
    assert explanation["least_budget"]["ops"]


def test_plan_writes_a_report(run: Run, graph_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "chain.html"
    words = ["plan", graph_file, "--budget", "80%", *MOVES, "--curve", 2, "--report", page]
    assert run(*words)[0] == 0
    assert page.stat().st_size > 1000


@pytest.mark.parametrize("noun", ["planners", "workloads", "devices"])
def test_listings(run: Run, noun: str) -> None:
    status, out, err = run(noun, "--json")
    document = json_of(out)
    assert (status, err) == (0, "")
    names = {entry["name"] for entry in document[noun]}
    expected = {
        "planners": {"none", "sublinear", "search"},
        "workloads": {"resnet50", "vgg16", "densenet121", "inceptionv3", "unet", "gpt2", "lstm", "encoder"},
        "devices": {"t4", "a10", "a100-40", "a100-80", "h100", "h200", "rtx4090", "gtx1080ti", "titan-xp"},
    }[noun]
    assert {name.lower() for name in names} >= expected
    assert all(entry["source"] for entry in document[noun])
    shown = run(noun)[1]
    assert all(name in shown for name in names)


@pytest.mark.parametrize(
    "command",
    ["fit", "estimate", "plan", "compare", "check", "report", "calibrate", "planners", "workloads", "devices"],
)
def test_help_has_examples(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert f"memfit {command}" in out.split("Usage", 1)[1].split("\n", 1)[1]


def test_no_words_show_the_help(run: Run) -> None:
    status, out, _ = run()
    assert status == 0
    assert "estimate" in out
    assert run("--version")[1] == f"memfit {memfit.__version__}\n"


TORCH_FREE = """
import sys
from memfit.cli import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(status)
"""

# Interrupts itself at the first plan that fits, as Ctrl-C in a terminal would.
INTERRUPTED = """
import os, signal, sys
from memfit.cli import main
from memfit.commands.work import Work
seen = Work.on_search
def on_search(self, progress):
    if progress.best_overhead is not None and Work.on_search is not seen:
        Work.on_search = seen
        os.kill(os.getpid(), signal.SIGINT)
    seen(self, progress)
Work.on_search = on_search
sys.exit(main(sys.argv[1:]))
"""


def _process(*words: object, code: str = TORCH_FREE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_graph_files_need_no_torch(graph_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "chain.plan.json"
    commands: list[list[object]] = [
        ["plan", graph_file, "--budget", "80%", *MOVES, "--save", plan_file],
        ["check", graph_file, plan_file],
        ["report", plan_file, "-o", tmp_path / "chain.html", "--curve", 0],
        ["estimate", graph_file],
        ["planners"],
        ["workloads"],
        ["devices"],
    ]
    for words in commands:
        done = _process(*words)
        assert (done.returncode, without_progress(done.stderr)) == (0, ""), f"{words}: {done.stderr}"
        assert done.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = "import sys; from memfit.cli import main; sys.exit(main(['workloads', '--json']))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 0


def test_ctrl_c_in_a_search_keeps_the_best_plan(tmp_path: Path) -> None:
    graph_file, plan_file = tmp_path / "long.graph.json", tmp_path / "long.plan.json"
    chance = random.Random(0)  # no search ends early on layers of many sizes
    sizes, seconds = ([chance.randint(1, 20) for _ in range(200)] for _ in range(2))
    network(sizes, seconds=[float(each) for each in seconds]).save(graph_file)
    words = ["plan", graph_file, "--budget", "50%", "--time-limit", 60, "--save", plan_file, "--json"]
    done = _process(*words, code=INTERRUPTED)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    document = json_of(done.stdout)
    assert document["predicted"]["peak_bytes"] <= document["budget_bytes"]
    assert Plan.load(plan_file).predicted.peak_bytes == document["predicted"]["peak_bytes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.graph.json", "long.plan.json"]


def test_a_frontier_is_monotone(run: Run, graph_file: Path) -> None:
    status, out, _ = run("plan", graph_file, "--budget", "80%", "--time-limit", 0.2, "--frontier", 4, "--json")
    points = json_of(out)["frontier"]
    overheads = [point["overhead"] for point in points if point["overhead"] is not None]
    assert status == 0
    assert len(points) == 4
    assert points[0]["overhead"] == 0.0
    assert overheads == sorted(overheads)


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "memfit", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"memfit {memfit.__version__}\n")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "pack", "no.csv"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("memfit: error: no.csv: cannot be read")
