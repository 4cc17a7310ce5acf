"""What the benchmarks stand on: comparison of bits, timing in turns, storing, verdicts, tables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from events import Event, time_out_at
from torch import nn

from memfit import TrainingStep
from memfit.capture import capture
from memfit.errors import InvalidOptionError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import one another as scripts do

import _chen_models  # noqa: E402
import _measure  # noqa: E402
import _planned  # noqa: E402
import _process  # noqa: E402
import _record  # noqa: E402
import planning_time  # noqa: E402
import sweep  # noqa: E402
import tables  # noqa: E402
import torch_baselines  # noqa: E402

FAILING_CHILD = "import sys\nsys.exit('the reason')\n"
HANGING_CHILD = f"""
import subprocess, sys, threading
sys.path.insert(0, {str(BENCHMARKS)!r})
from _process import answer_if_child
def answers(event, held):
    code = "import sys, threading; file = open(sys.argv[1], 'w'); print(flush=True); threading.Event().wait()"
    grandchild = subprocess.Popen([sys.executable, "-c", code, held], stdout=subprocess.PIPE)
    grandchild.stdout.readline()
    yield {{"so far": 1}}
    open(event, "w").write("answered")
    threading.Event().wait()
answer_if_child(answers)
"""
ANSWERING_CHILD = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from _process import answer_if_child
assert answer_if_child(lambda number: {{"double": number * 2}})
"""
BUDGET_CHILD = """
import sys, torch
from memfit.torch_private.dynamo import compile_with_budget
from memfit.system.recorder import record
torch.set_num_threads(1)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Sigmoid(), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
rows = torch.randn(1024, 64)
compiled = compile_with_budget(model, float(sys.argv[1]), "dp")
for _ in range(2):
    model.zero_grad(set_to_none=True)
    with record("cpu") as usage:
        compiled(rows).sum().backward()
print(usage.peak_bytes)
"""


def small_step(optimizer: bool = False) -> TrainingStep:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    batch = torch.randn(6, 4), torch.randint(2, (6,))
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer else None
    return TrainingStep(model=model, loss=nn.CrossEntropyLoss(), batch=batch, optimizer=update)


@pytest.mark.parametrize("optimizer", [False, True])
def test_outcome_repeats_itself_and_leaves_no_trace(optimizer: bool):
    step = small_step(optimizer)
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    outcomes = [_measure.outcome(lambda: step.run_eager(step.batch), step) for _ in range(2)]
    assert _measure.same_bits(*outcomes)["first_difference"] is None
    assert any(name.startswith("state " if optimizer else "gradient ") for name in outcomes[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    if optimizer:
        assert not step.optimizer.state


@pytest.mark.parametrize(
    ("name", "kind"), [("loss", "loss"), ("gradient 0.weight", "gradient"), ("buffer 1.running_mean", "buffer")]
)
def test_one_changed_bit_is_found(name: str, kind: str):
    step = small_step()
    expected = _measure.outcome(lambda: step.run_eager(step.batch), step)
    found = {key: tensor.clone() for key, tensor in expected.items()}
    found[name].reshape(-1).view(torch.uint8)[0] ^= 1
    compared = _measure.same_bits(found, expected)
    assert compared["first_difference"] == name
    assert [key for key, same in compared.items() if same is False] == [f"{kind}_same_bits"]


def test_what_eager_does_not_give_twice_is_not_asked_of_a_plan():
    step = small_step()
    noise = iter(range(100))

    def eager() -> torch.Tensor:
        return step.run_eager(step.batch) + next(noise)  # as a kernel that adds in any order

    def planned() -> torch.Tensor:
        loss = eager()
        if broken:
            step.model.get_parameter("0.weight").grad.add_(1)  # type: ignore[union-attr]
        return loss

    for broken in (False, True):
        bits = _planned.bits_of(planned, eager, step)
        assert bits["not_repeated"] == ["loss"]
        assert bits["first_difference"] == ("gradient 0.weight" if broken else None)
    steady = _planned.bits_of(lambda: step.run_eager(step.batch), lambda: step.run_eager(step.batch), step)
    assert (steady["not_repeated"], steady["first_difference"]) == ([], None)


def test_bits_are_compared_not_values():
    assert _measure.same_bits({"loss": torch.tensor(float("nan"))}, {"loss": torch.tensor(float("nan"))})[
        "loss_same_bits"
    ]
    assert not _measure.same_bits({"loss": torch.tensor(0.0)}, {"loss": torch.tensor(-0.0)})["loss_same_bits"]
    missing = _measure.same_bits({}, {"gradient w": torch.zeros(2)})
    assert missing["first_difference"] == "gradient w"


def test_peak_of_the_measure_counts_gradients_and_not_parameters():
    model = nn.Linear(256, 256, bias=False)
    step = TrainingStep(model=model, loss=lambda model, batch: model(batch).sum(), batch=torch.randn(1, 256))
    _measure.forward_backward(step)  # gradients that are there before do not count
    usage = _measure.usage_of(lambda: _measure.forward_backward(step), step)
    weight_bytes = 256 * 256 * 4
    assert weight_bytes < usage.peak_bytes < 1.1 * weight_bytes
    assert _measure.resident_bytes(step) == weight_bytes + 256 * 4


def test_interleaving_turns_around_and_takes_the_median(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    clock = [0.0]
    a_seconds, b_seconds = iter([9.0, 2.0, 6.0, 30.0]), iter([9.0, 1.0, 2.0, 3.0])

    def run(name: str, seconds: Any) -> None:
        order.append(name)
        clock[0] += next(seconds)

    monkeypatch.setattr(_record.time, "perf_counter", lambda: clock[0])
    timed = _record.interleaved_ratio(lambda: run("a", a_seconds), lambda: run("b", b_seconds), 3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert timed.ratios == [2.0, 3.0, 10.0]
    assert timed.summary() == {
        "time_ratio": 3.0,
        "time_ratio_range": [2.0, 10.0],
        "seconds": 2.0,
        "eager_seconds": 1.0,
        "repeats": 3,
    }


def test_a_stored_result_names_its_machine(tmp_path: Path):
    path = _record.store("speed", {"seconds": 1.5}, folder=tmp_path)
    document = _record.load(path)
    assert document["payload"] == {"seconds": 1.5}
    assert document["machine"].keys() >= {"cpu", "cores", "torch_threads", "ram_bytes", "torch", "date", "commit"}
    assert [each.name for each in tmp_path.iterdir()] == ["speed.json"]


def test_children_answer_or_say_why_not(tmp_path: Path):
    script = tmp_path / "child.py"
    script.write_text(ANSWERING_CHILD)
    assert _process.in_fresh_process(str(script), {"number": 21}, timeout_seconds=60) == {"double": 42}
    script.write_text(FAILING_CHILD)
    answer = _process.in_fresh_process(str(script), {}, timeout_seconds=60)
    assert answer == {"error": "exit status 1: the reason"}


def test_a_child_that_is_stopped_has_given_what_it_had_and_takes_its_own_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script, event, held = tmp_path / "child.py", Event(tmp_path), Event(tmp_path, "held by the grandchild")
    script.write_text(HANGING_CHILD)
    time_out_at(event, monkeypatch)
    answer = _process.in_fresh_process(
        str(script), {"event": str(event.path), "held": str(held.path)}, timeout_seconds=5
    )
    assert answer == {"so far": 1, "error": "took more than 5 s", "timed_out": True}
    held.wait_for_the_end()


@pytest.mark.slow
def test_torchs_budget_is_really_applied():
    def peak_bytes(budget: float) -> int:
        done = subprocess.run(
            [sys.executable, "-c", BUDGET_CHILD, str(budget)], capture_output=True, text=True, check=True, timeout=110
        )
        return int(done.stdout)

    assert peak_bytes(0.5) < 0.8 * peak_bytes(1.0)


def test_budgets_of_a_sweep_include_both_ends():
    budgets = sweep.budgets_between(1000, 100, 10)
    assert budgets == [1000, 900, 800, 700, 600, 500, 400, 300, 200, 100]


def point(budget_bytes: int, **changes: Any) -> dict[str, Any]:
    return {
        "budget_bytes": budget_bytes,
        "planner": "search",
        "status": "feasible",
        "predicted_peak_bytes": budget_bytes - 10,
        "measured_peak_bytes": budget_bytes - 10,
        "predicted_overhead": 1000 / budget_bytes,
        "time_ratio": 1.2,
        "prediction_error": 0.001,
        "within_budget": True,
        "first_difference": None,
        "ops": 5,
        "capture_seconds": 1.0,
        "measure_seconds": 2.0,
        "plan_seconds": 3.0,
    } | changes


INFEASIBLE = {"budget_bytes": 50 << 20, "planner": "search", "status": "infeasible"}


def test_a_verdict_counts_and_sees_every_broken_promise():
    good = [point(1000 << 20, planner="none"), point(900 << 20), point(500 << 20), INFEASIBLE]
    assert sweep.verdict(good) == {
        "feasible": 2,
        "infeasible": 1,
        "not_found": 0,
        "failed": 0,
        "unplanned_time_ratio": 1.2,
        "within_budget": True,
        "prediction_error": 0.001,
        "monotone": True,
        "same_bits": True,
    }
    for broken, what in [
        ({"within_budget": False}, "within_budget"),
        ({"prediction_error": -0.03}, "prediction_error"),
        ({"predicted_overhead": 1e9}, "monotone"),
        ({"first_difference": "loss"}, "same_bits"),
    ]:
        seen = sweep.verdict([good[0], point(900 << 20, **broken), good[2]])
        assert seen[what] == (0.03 if what == "prediction_error" else False)
    nothing = sweep.verdict([good[0], INFEASIBLE, {**INFEASIBLE, "error": "exit status 1"}])
    assert (nothing["within_budget"], nothing["same_bits"], nothing["failed"]) == (None, None, 1)


def test_only_points_with_eagers_gradients_can_be_best():
    points = [
        {"kind": "budget", "budget": 0.1, "peak_bytes": 10, "time_ratio": 1.0, "gradient_same_bits": False},
        {"kind": "budget", "budget": 0.5, "peak_bytes": 20, "time_ratio": 1.2, "gradient_same_bits": True},
        {"kind": "budget", "budget": 0.6, "peak_bytes": 20, "time_ratio": 1.1, "gradient_same_bits": True},
        {"kind": "budget", "budget": 0.0, "error": "took more than 900 s"},
    ]
    assert torch_baselines.best(points, "budget") == points[2]
    assert torch_baselines.best(points, "checkpoint") is None


@pytest.fixture
def stored_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    points = [point(1000 << 20, planner="none"), point(800 << 20), {**INFEASIBLE}]
    payload = {"workload": "lstm", "points": points, "verdict": sweep.verdict(points)}
    _record.store("sweep/lstm", payload, folder=tmp_path / "here")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return "here"


def test_tables_show_what_is_stored(stored_sweep: str):
    summary = tables.render("sweep", stored_sweep)
    assert summary is not None
    assert "| lstm | 1 | 1 | 0 | 0 | yes | 0.10% | yes | yes | 1.200 |" in summary
    every = tables.render("sweep-points", stored_sweep)
    assert every is not None
    assert "| lstm | 800.0 | 800.0 | 800.0 | 0.0% | 20.0% | yes |" in every
    assert "| lstm | 50.0 | infeasible |  |  |  |  |" in every
    assert tables.render("compare", stored_sweep) is None
    with pytest.raises(InvalidOptionError, match="no table is called 'sweeps'; there are compare"):
        tables.render("sweeps", stored_sweep)


def test_the_margins_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results = {
        "against budget": {"baseline_bytes": 300 << 20, "baseline_time_ratio": 1.2, "memfit_time_ratio": 1.1},
        "against checkpoint": {"budget_bytes": 500 << 20},
        "least": {"budget_bytes": 300 << 20, "least_budget_bound_bytes": 200 << 20},
        "least sublinear": {"budget_bytes": 390 << 20},
    }
    _record.store("compare_baselines/lstm", {"workload": "lstm", "results": results}, folder=tmp_path / "here")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    halves, margins = tables.render("halves", "here"), tables.render("margins", "here")
    assert halves is not None and margins is not None
    assert "| lstm | 300.0 | 20.0% | 10.0% | 11.0% | yes |" in halves
    assert "| lstm | 200.0 | +100.0 | +190.0 | +300.0 | **no** |" in margins  # half of 190 is below 100


def test_long_graphs_show_their_best_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = {"ops": 2000, "blocks": 200, "kinds": 50, "share": 0.3, "bound": 0.1, "peak_rss_bytes": 500_000_000}
    curve = [[1.5, 0.3], [4.0, 0.2], [14.0, 0.16]]
    points = [
        {**found, "time_limit_seconds": 5.0, "overhead": 0.2, "plan_seconds": 5.1, "best_so_far": curve[:2]},
        {**found, "time_limit_seconds": 60.0, "overhead": 0.16, "plan_seconds": 60.2, "best_so_far": curve},
        {"share": 0.3, "time_limit_seconds": 60.0, "error": "exit status 1"},
    ]
    _record.store("planning_time", {"device": "t4", "networks": {"lstm14": points}}, folder=tmp_path / "here")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = tables.render("planning-time", "here")
    assert table is not None
    assert "| lstm14 | 2,000 | 200, 50 | 30% | 5 | 20.000% |  |  |  | 20.000% | 10.000% | 5.1 | 0.50 |" in table
    longer = (
        "| lstm14 | 2,000 | 200, 50 | 30% | 60 | 20.000% | 16.000% | 16.000% |  | 16.000% | 10.000% | 60.2 | 0.50 |"
    )
    assert longer in table
    assert "| lstm14 | failed |" in table
    (line,) = planning_time.against_longest(points)
    assert line.endswith("after 60 s: 1.2500")


def test_the_papers_tables_say_what_is_reached_and_what_no_plan_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def row(overhead: float | None, bound: float, measured: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "batch": 2,
            "paper": {
                "regular": 100,
                "chen": None,
                "re_forwarding": 50,
                "regular_seconds": 1.0,
                "re_forwarding_seconds": 1.4,
            },
            "regular": {"bytes": 110_000_000},
            "chen": {"bytes": 60_000_000},
            "re_forwarding": {"bytes": 44_000_000, "overhead": 0.3},
            "memfit": {"overhead": overhead, "overhead_bound": bound, "moves": 1000},
            **({"measured": measured} if measured else {}),
        }

    peaks = {"bitwise_equal": True, "peak_bytes": 70_000_000}
    measured = {
        "batch": 2,
        "resident_bytes": 20_000_000,
        "eager_peak_bytes": 100_000_000,
        "re_forwarding": {**peaks, "overhead": 0.31},
        "memfit": {**peaks, "bitwise_equal": False},
    }
    networks = {"a": row(0.15, 0.1), "b": row(0.2, 0.1, measured), "c": row(None, 0.16), "d": row(0.2, 0.1501)}
    payload = {"card": "a card", "networks": networks}
    _record.store("feng_table1", payload, folder=tmp_path / "here")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    predicted, small = tables.render("feng-1", "here"), tables.render("feng-1-measured", "here")
    assert predicted is not None and small is not None
    assert "| a, 2 | 110 (100) | 60 (–) | 44 (50) | 60% (50%) | 30% (40%) | 15.0% | 10.0% | yes |" in predicted
    assert "| 20.0% | 10.0% | **no** |" in predicted
    assert "| none found | 16.0% | no plan can: half is 15.0% |" in predicted
    assert "| 20.0% | 15.0% | no plan can: half is 15.0% |" in predicted
    assert "| b, 2 | 20 + 80 | 20 + 50 | 20 + 50 | **no** | +31% |  |" in small
    assert "| a, 2" not in small


def test_tables_go_between_their_markers(stored_sweep: str, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: planning -->\nold\n<!-- end of table -->\nafter\n")
    tables.put_into(page, stored_sweep)
    first = page.read_text()
    assert first.startswith("before\n<!-- table: planning -->\n| workload | ops |")
    assert "| lstm | 5 | 1.0 | 2.0 | 3.0 |" in first and "old" not in first and first.endswith("after\n")
    tables.put_into(page, stored_sweep)
    assert page.read_text() == first
    page.write_text("<!-- table: cuda-arena -->\n<!-- end of table -->\n")
    with pytest.raises(InvalidOptionError, match="nothing is stored for the table 'cuda-arena'"):
        tables.put_into(page, stored_sweep)


def test_a_fresh_cache_is_the_childrens_and_goes_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEMFIT_CACHE", "/somewhere")
    with pytest.raises(RuntimeError, match="stop"), _process.fresh_cache():
        folder = Path(os.environ["MEMFIT_CACHE"])
        assert folder.is_dir()
        raise RuntimeError("stop")
    assert os.environ["MEMFIT_CACHE"] == "/somewhere"
    assert not folder.exists()


def test_the_captured_step_of_an_lstm_repeated_is_the_longer_capture():
    sizes = _chen_models.LSTMSizes(layers=2, hidden=8, batch=3, inputs=5, classes=7)
    repeated = _chen_models.RepeatedLSTM(sizes)
    for steps in (repeated.captured_steps + 1, 40):
        real = capture(_chen_models.lstm_step(steps, sizes)).graph
        assert repeated.graph_of(steps).fingerprint == real.fingerprint


def test_a_residual_network_of_the_paper_has_the_layers_asked_for():
    graph = capture(_chen_models.resnet_step(32, 2, 32)).graph
    convolutions = [op for op in graph.ops if op.target == "aten.convolution.default"]
    shortcuts = len(_chen_models.units_of(32))
    assert len(convolutions) + 1 == 32 + shortcuts  # the last layer is linear


def test_a_cuda_build_without_a_toolkit_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "cuda_build.py"), "make"]
    environment = os.environ | {"CUDA_HOME": str(tmp_path), "MEMFIT_CUDA_BUILD": str(tmp_path / "build")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 3
    assert f"CUDA_HOME is {tmp_path}, which has no include/cuda_runtime_api.h" in done.stderr
    assert not (tmp_path / "build").exists()


def _answers(number: int, ending: str) -> Iterator[dict[str, Any]]:
    yield {"number": number}
    if ending == "raise":
        raise ValueError("the reason")
    if ending == "hang":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=False)
    if ending == "crash":
        os.abort()
    yield {"number": number + 1}


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("", {"number": 8}),
        ("raise", {"number": 7, "error": "ValueError: the reason"}),
        ("crash", {"number": 7, "error": "exit status -6"}),
        ("hang", {"number": 7, "error": "took more than 3 s", "timed_out": True}),
    ],
)
def test_a_forked_child_gives_what_it_had(ending: str, expected: dict[str, Any]) -> None:
    assert _process.in_forked_child(lambda: _answers(7, ending), timeout_seconds=3.0) == expected
