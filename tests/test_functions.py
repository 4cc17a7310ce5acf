"""`memfit.fit_function`: iterative functions within a budget, with the bits of eager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.capture import capture, finish
from memfit.capture.function_step import FunctionStep
from memfit.capture.row_chunks import RowChunks, in_row_chunks
from memfit.cli import main
from memfit.errors import (
    CaptureError,
    GraphBreakError,
    InfeasibleBudgetError,
    InvalidOptionError,
    InvalidTargetError,
    UnsupportedStepError,
    VerificationError,
)
from memfit.plan import Plan
from memfit.system.recorder import record
from memfit.workloads import build
from memfit.workloads.iterations import lloyd, subspace

POINTS, CENTRES = 20_000, 32


@pytest.fixture
def points() -> torch.Tensor:
    return torch.randn(POINTS, 8, generator=torch.Generator().manual_seed(3))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _run(function: Any, state: Any, batch: Any, calls: int) -> Any:
    for _ in range(calls):
        state = function(state, batch)
    return state


def _chunked(function: Any, state: Any, batch: Any, count: int) -> list[RowChunks]:
    """Return what runs in chunks when a function is cut into `count`."""
    found = in_row_chunks(finish(capture(FunctionStep.of(function, state, batch))), count)
    return [] if found is None else [c.target for c in found.binding.calls if isinstance(c.target, RowChunks)]


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "50%", "40%"])
def test_k_means_gives_the_same_centres_within_its_budget(points: torch.Tensor, budget: str) -> None:
    centres = points[:CENTRES].clone()
    planned = memfit.fit_function(lloyd, centres, points, budget=budget, verify=True)
    measured = planned.measure(repeats=1)
    assert measured.peak_bytes <= planned.plan.budget_bytes
    assert measured.peak_bytes == planned.plan.predicted.peak_bytes
    assert _same(_run(planned, centres, points, 5), _run(lloyd, centres, points, 5))
    assert len(planned.step.plans) == 1 and not planned.step.corrections
    assert ("row_chunks" in str([op.target for op in planned.plan.graph.ops])) == (budget != "100%")


def test_a_kernel_of_all_pairs_is_never_there_as_a_whole() -> None:
    torch.manual_seed(0)
    points, vectors = torch.randn(1024, 4), torch.randn(1024, 3)
    planned = memfit.fit_function(subspace, vectors, points, budget="30%", verify=True)
    assert planned.measure(repeats=1).peak_bytes <= planned.plan.budget_bytes < 4 * 1024 * 1024
    assert _same(_run(planned, vectors, points, 3), _run(subspace, vectors, points, 3))


def test_a_plan_that_was_saved_is_run_again_in_its_chunks(points: torch.Tensor, tmp_path: Path) -> None:
    centres = points[:CENTRES].clone()
    planned = memfit.fit_function(lloyd, centres, points, budget="50%")
    planned.plan.save(tmp_path / "k.plan.json")
    again = memfit.fit_function(lloyd, centres, points, budget="50%", plan=tmp_path / "k.plan.json", verify=True)
    assert again.plan.graph == Plan.load(tmp_path / "k.plan.json").graph


def test_a_budget_that_no_form_fits_is_refused(points: torch.Tensor) -> None:
    with pytest.raises(InfeasibleBudgetError) as raised:
        memfit.fit_function(lloyd, points[:CENTRES].clone(), points, budget=points.nbytes // 2)
    found = raised.value.least_budget_found_bytes
    assert found is not None and found < 2 * points.nbytes


def test_a_state_may_be_nested_and_its_leaves_may_stay() -> None:
    def step(state: dict[str, Any], batch: tuple[torch.Tensor, float]) -> dict[str, Any]:
        rows, rate = batch
        mean = state["mean"] + rate * (rows.mean(0) - state["mean"])
        return {"mean": mean, "steps": state["steps"] + 1, "kept": state["kept"], "pair": (mean * 2, state["pair"][0])}

    state = {
        "mean": torch.zeros(4),
        "steps": torch.tensor(0),
        "kept": torch.ones(2),
        "pair": (torch.zeros(4), torch.zeros(4)),
    }
    batch = torch.randn(16, 4), 0.1
    planned = memfit.fit_function(step, state, batch, budget="100%", verify=True)
    mine, theirs = _run(planned, state, batch, 4), _run(step, state, batch, 4)
    assert int(mine["steps"]) == 4 and mine.keys() == theirs.keys()
    for one, other in zip(torch.utils._pytree.tree_leaves(mine), torch.utils._pytree.tree_leaves(theirs), strict=True):
        assert _same(one, other)


def test_a_state_that_is_written_in_place_is_written_in_place() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return state.add_(batch).mul_(0.5)

    state, batch = torch.ones(64), torch.arange(64.0)
    planned = memfit.fit_function(step, state, batch, budget="100%", verify=True)
    assert torch.equal(state, torch.ones(64))
    after = planned(state, batch)
    assert torch.equal(after, state) and torch.equal(state, (1 + batch) / 2)
    assert after.data_ptr() == state.data_ptr()


def test_a_state_whose_leaves_share_memory_and_are_written_to_is_refused_and_stays() -> None:
    def step(state: Any, _batch: None) -> Any:
        return state[0].mul_(0.5), state[1].add_(1)

    for columns in (lambda t: (t[:, 0], t[:, 1]), lambda t: (t[:6], t[2:]), lambda t: (t, t.view(-1))):
        whole = torch.arange(16.0).view(8, 2)
        with pytest.raises(InvalidOptionError, match=r"'batch_0'.* shares memory with 'batch_1': give a clone"):
            memfit.fit_function(step, columns(whole), budget="100%")
        assert torch.equal(whole, torch.arange(16.0).view(8, 2))
    halves = torch.arange(16.0)
    state = halves[:8], halves[8:]
    expected = step((state[0].clone(), state[1].clone()), None)
    planned = memfit.fit_function(step, state, budget="100%", verify=True)
    assert all(map(_same, planned(state), expected))


def test_recurrent_layers_without_gradients() -> None:
    layer = torch.nn.LSTM(4, 8, 2)

    def step(state: Any, batch: torch.Tensor) -> Any:
        return layer(batch, state)[1]

    state, batch = (torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)), torch.randn(5, 3, 4)
    planned = memfit.fit_function(step, state, batch, budget="100%", verify=True)
    with torch.no_grad():
        assert all(map(_same, _run(planned, state, batch, 2), _run(step, state, batch, 2)))


def test_what_it_closes_over_may_change_and_modules_need_no_gradients() -> None:
    layer, scale = torch.nn.Linear(8, 8), torch.tensor(2.0)

    def step(state: torch.Tensor, _batch: None) -> torch.Tensor:
        return torch.tanh(layer(state)) * scale

    state = torch.randn(16, 8)
    planned = memfit.fit_function(step, state, budget="100%", verify=True)
    with torch.no_grad():
        layer.weight.mul_(3)
    scale.fill_(0.5)
    assert not planned(state).requires_grad
    assert _same(planned(state), step(state, None).detach())


def test_random_draws_follow_the_stream() -> None:
    def step(state: torch.Tensor, _batch: None) -> torch.Tensor:
        return state + torch.rand_like(state)

    planned = memfit.fit_function(step, torch.zeros(32), budget="100%", verify=True)
    torch.manual_seed(4)
    mine = _run(planned, torch.zeros(32), None, 3)
    torch.manual_seed(4)
    assert _same(mine, _run(step, torch.zeros(32), None, 3))


def test_another_shape_is_planned_at_its_first_call(points: torch.Tensor) -> None:
    centres = points[:CENTRES].clone()
    planned = memfit.fit_function(lloyd, centres, points, budget="60%")
    assert _same(planned(centres, points[:7777]), lloyd(centres, points[:7777]))
    assert len(planned.step.plans) == 2


def test_gradients_may_be_off_and_inference_mode_is_refused() -> None:
    matrix, vector = torch.randn(8, 8), torch.randn(8)
    with torch.no_grad():
        planned = memfit.fit_function(lambda v, m: m @ v, vector, matrix, budget="100%", verify=True)
        assert _same(planned(vector, matrix), matrix @ vector)
    with torch.inference_mode(), pytest.raises(UnsupportedStepError, match="inference_mode"):
        memfit.fit_function(lambda v, m: m @ v, vector, matrix, budget="100%")


def _reads_a_value(state: torch.Tensor, _batch: None) -> torch.Tensor:
    return state * state.argmax().item()


@pytest.mark.parametrize(
    ("function", "state", "error", "words"),
    [
        ("no function", torch.ones(2), InvalidTargetError, "expected a function"),
        (lambda s, _: s, (torch.ones(2), 3), InvalidTargetError, r"leaf 1 of the state is a int.*torch\.tensor"),
        (lambda s, _: s, (), InvalidTargetError, "holds no tensor"),
        (lambda s, _: (s, s), torch.ones(2), CaptureError, "nested"),
        (lambda s, _: s[:1], torch.ones(2), CaptureError, r"float32\[1\] on cpu for leaf 0.*float32\[2\]"),
        (lambda s, _: s.double(), torch.ones(2), CaptureError, "float64"),
        (lambda s, _: s.shape, torch.ones(2), CaptureError, "nested|int"),
        (_reads_a_value, torch.ones(2), GraphBreakError, "between two calls"),
        (lambda s, _: s + undefined, torch.ones(2), CaptureError, "NameError"),  # noqa: F821
    ],
)
def test_what_cannot_be_planned_is_refused(function: Any, state: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        memfit.fit_function(function, state, budget="100%")


def test_a_number_that_was_frozen_is_found() -> None:
    calls: list[int] = []

    def step(state: torch.Tensor, _batch: None) -> torch.Tensor:
        calls.append(1)
        return state + len(calls)

    with pytest.raises((UnsupportedStepError, CaptureError, VerificationError)):
        memfit.fit_function(step, torch.zeros(4), budget="100%", verify=True)


ROWS = 4096
F = torch.nn.functional


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax over rows", lambda s, b: s + torch.softmax(b.exp(), 0).sum(1)),
        ("running sums", lambda s, b: s + b.exp().cumsum(0).sum(1)),
        ("sorted rows", lambda s, b: s + b.exp().sort(0).values.sum(1)),
        ("rolled rows", lambda s, b: s + b.exp().roll(1, 0).sum(1)),
        ("flipped rows", lambda s, b: s + b.exp().flip(0).sum(1)),
        ("gathered rows", lambda s, b: s + b.exp()[torch.arange(ROWS - 1, -1, -1)].sum(1)),
        ("normalized by all", lambda s, b: s + (b.exp() / b.exp().sum()).sum(1)),
        ("running sums of a mask", lambda s, b: s + (b * (b < 0).cumsum(0)).sum(1)),
        ("running sums of floors", lambda s, b: s + (b.floor().cumsum(0) * 2).sum(1)),
        ("running products", lambda s, b: s + ((b > 0).float().cumprod(0) + b).sum(1)),
        ("a table of whole numbers", lambda s, b: s + torch.gather(b.long(), 0, (b > 0).long()).sum(1)),
        ("a triangle", lambda s, b: s + b.exp().tril().sum(1)),
        ("largest so far", lambda s, b: s + b.exp().cummax(0).values.sum(1)),
        ("scaled rows", lambda s, b: s + torch.renorm(b.exp(), 2, 1, 1.0).sum(1)),
        ("layers of all", lambda s, b: s + F.layer_norm(b.exp(), (ROWS, 64)).sum(1)),
        ("padded rows", lambda s, b: s + F.pad(b.exp(), (0, 0, 1, 1))[1:-1].sum(1)),
        ("differences of rows", lambda s, b: s + torch.diff(b.exp(), dim=0, prepend=b[:1]).sum(1)),
    ],
)
def test_what_mixes_rows_keeps_its_bits(name: str, function: Any) -> None:
    state, batch = torch.zeros(ROWS), torch.randn(ROWS, 64)
    expected = _run(function, state, batch, 2)
    for budget in ("75%", "60%"):
        try:
            planned = memfit.fit_function(function, state, batch, budget=budget, time_limit_seconds=1)
        except memfit.MemfitError:
            continue
        assert _same(_run(planned, state, batch, 2), expected), name


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b: s + b.exp().sum(1),
        lambda s, b: s + torch.softmax(b.exp(), 1).amax(1),
        lambda s, b: s + (b.exp().unsqueeze(2) * 2).flatten(1).sum(1),
        lambda s, b: s + torch.where(b > 0, b, -b).sum(1),
        lambda s, b: s + torch.cat([b, b * 2], 1).sum(1),
        lambda s, b: s + (b.exp() * s.unsqueeze(1)).mean(1),
        lambda s, b: s + b.exp().topk(3, 1).values.sum(1),
        lambda s, b: s + b.sort(1).values[:, 0],
        lambda s, b: s + torch.cdist(b, b[:7]).amin(1),
        lambda s, b: s + (b @ b[:64].T).relu().sum(1),
        lambda s, b: s + (F.normalize(b) @ F.normalize(b[:64]).T).argmax(1),
        lambda s, b: s + F.layer_norm(b.exp(), (64,), b[0], b[1]).amax(1),
        lambda s, b: s + b.exp().sort().values.cumsum(1).amax(1) + b.exp().topk(3).indices.sum(1),
        lambda s, b: s + b.exp().gather(1, b.argsort(1)).logsumexp(1),
        lambda s, b: s + F.pad(b.exp(), (1, 2)).view(ROWS, 67).log_softmax(-1).amax(1),
        lambda s, b: s + torch.bmm(b.exp().view(-1, 8, 8), b.view(-1, 8, 8)).sum((1, 2)),
        lambda s, b: s + F.max_pool2d(b.exp().view(-1, 1, 8, 8), 2).amax((1, 2, 3)),
        lambda s, b: s + torch.fft.rfft(b.exp()).abs().amax(1),
    ],
)
@pytest.mark.parametrize("count", [2, 16])
def test_chains_of_rows_are_found(function: Any, count: int) -> None:
    state, batch = torch.zeros(ROWS), torch.randn(ROWS, 64)
    (found,) = _chunked(function, state, batch, count)
    assert found.rows == ROWS and found.count == count


@pytest.mark.parametrize("scatter", [torch.scatter, torch.scatter_add])
def test_rows_are_scattered_in_chunks(scatter: Any) -> None:
    state, batch = torch.zeros(ROWS), torch.randn(ROWS, 64)
    found = _chunked(lambda s, b: s + scatter(torch.zeros_like(b), 1, b.argsort(1), b).amax(1), state, batch, 16)
    assert [[str(part.target) for part in each.parts][-2] for each in found] == ["aten.amax.default"]


def test_one_hot_is_planned_and_its_classes_are_checked() -> None:
    batch = torch.arange(32) % 8
    planned = memfit.fit_function(lambda s, b: s + F.one_hot(b, num_classes=8).sum(0), batch[:8], batch, budget="100%")
    assert planned(batch[:8], batch).tolist() == [4 + number for number in range(8)]
    with pytest.raises(RuntimeError, match=r"test_functions\.py:\d+: Class values must be smaller than num_classes"):
        planned(batch[:8], batch + 1)
    with pytest.raises(RuntimeError, match=r"test_functions\.py:\d+: Class values must be non-negative"):
        planned(batch[:8], batch - 1)


def test_counts_are_planned_for_the_size_that_they_are_asked_for() -> None:
    batch = torch.arange(32) % 8
    weights = torch.rand(32)

    def counts(state: Any, values: torch.Tensor) -> Any:
        weighed = torch.bincount(values, weights, 10) + torch.bincount(values, weights.double(), 10)
        return state[0] + torch.bincount(values, minlength=10), state[1] + weighed

    state = torch.zeros(10, dtype=torch.int64), torch.zeros(10, dtype=torch.float64)
    planned = memfit.fit_function(counts, state, batch, budget="100%")
    expected = counts(state, batch)
    assert all(torch.equal(one, other) for one, other in zip(planned(state, batch), expected, strict=True))
    with pytest.raises(UnsupportedStepError, match=r"functions\.py:\d+: bincount found the value 16.*minlength=10"):
        planned(state, batch + 9)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda x: x.to_sparse(), r"a tensor of layout sparse_coo.*to_dense"),
        (lambda x: x.to_sparse_csr(), r"a tensor of layout sparse_csr.*to_dense"),
        (lambda x: x.to_mkldnn(), r"a tensor of layout _mkldnn.*to_dense"),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), r"a nested tensor.*padded"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"a quantized tensor \(qint8\).*dequantize"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:torch.quantize:UserWarning")
def test_what_is_not_dense_is_refused_by_name(made: Any, words: str) -> None:
    x = torch.ones(3, 4)
    with pytest.raises(UnsupportedStepError, match=rf"batch\['x'\] is {words}.*memfit\.eager"):
        memfit.fit_function(lambda s, _: s, x, {"x": made(x)}, budget="100%")
    with pytest.raises(UnsupportedStepError, match=rf"memfit\.fit: batch\[0\] is {words}"):
        memfit.fit(torch.nn.Linear(4, 1), lambda model, batch: model(batch[1]).sum(), (made(x), x), budget="100%")
    planned = memfit.fit_function(lambda s, b: s + b, x, x, budget="100%", planner="none")
    with pytest.raises(UnsupportedStepError, match=rf"batch\[1\] is {words}"):
        planned(x, made(x))


def test_two_chains_with_a_sum_over_all_rows_between_them() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        largest = batch.exp().amax(1)
        return state + (batch.exp() / largest.sum()).cos().sum(1)

    state, batch = torch.zeros(ROWS), torch.randn(ROWS, 64)
    assert len(_chunked(step, state, batch, 4)) == 2
    planned = memfit.fit_function(step, state, batch, budget=2 * batch.nbytes, verify=True)
    assert planned.measure(repeats=1).peak_bytes <= 2 * batch.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda s, b: (b @ b.T).exp() @ s,
        lambda s, b: torch.cdist(b, b).amin(1) + s,
        lambda s, b: ((b @ b.T) / s.shape[0] + b[:, 0]).exp().mean(1) + s,
        lambda s, b: ((b @ b.T).softmax(1) @ b).sum(1) + s,
    ],
)
def test_all_pairs_of_rows(function: Any) -> None:
    state, batch = torch.rand(1024), torch.randn(1024, 32)
    expected = _run(function, state, batch, 2)
    planned = memfit.fit_function(function, state, batch, budget="60%", verify=True, time_limit_seconds=1)
    assert planned.measure(repeats=1).peak_bytes <= planned.plan.budget_bytes
    assert _same(_run(planned, state, batch, 2), expected)


def test_rows_that_no_count_divides() -> None:
    state, batch = torch.zeros(4099), torch.randn(4099, 64)
    planned = memfit.fit_function(lambda s, b: s + b.exp().sum(1), state, batch, budget="70%", verify=True)
    assert planned.measure(repeats=1).peak_bytes <= planned.plan.budget_bytes


def test_the_workloads_are_functions() -> None:
    for name, options in {"kmeans": {"points": 500}, "power_iteration": {"points": 200}}.items():
        step = build(name, **options)
        assert isinstance(step, FunctionStep) and not step.has_backward
        after = step.run_eager(step.batch)
        assert after.shape == step.batch[0].shape and torch.isfinite(after).all()
        graph = capture(step).graph
        assert {op.phase for op in graph.ops} == {"forward"}


def test_lloyd_finds_the_clusters() -> None:
    step = build("kmeans", points=4000, centres=4, features=2)
    centres, data = step.batch

    def spread(state: torch.Tensor) -> float:
        return float(torch.cdist(data, state).amin(1).square().mean())

    assert spread(_run(lloyd, centres, data, 10)) < spread(centres)


FUNCTION_FILE = """
import torch
from memfit.capture.function_step import FunctionStep

def make():
    return FunctionStep.of(lambda state, batch: state + batch.exp().sum(1), torch.zeros(2048), torch.randn(2048, 64))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "plan", "compare", "estimate"])
def test_on_the_command_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION_FILE)
    extra = {
        "fit": ["--budget", "75%", "--report", str(tmp_path / "page.html")],
        "plan": ["--budget", "100%"],
        "compare": ["--planners", "auto,search,none", "--budgets", "2"],
        "estimate": [],
    }[command]
    for target in (f"{tmp_path / 'mine.py'}:make", "kmeans"):
        set_ = ["--set", "points=3000"] if target == "kmeans" else []
        assert main([command, target, *set_, *extra, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert command != "fit" or found["measured"]["peak_bytes"] <= found["budget_bytes"]


def test_what_needs_gradients_refuses_functions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "kmeans", "--set", "points=500", "--planners", "checkpoint:block"]) == 2
    assert "expected all or some of" in capsys.readouterr().err


@pytest.mark.slow
def test_every_command_knows_the_least_that_a_function_runs_in(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["kmeans", "--set", "points=3000"]

    def answer(*words: str) -> Any:
        assert main([words[0], *target, *words[1:], "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert main(["plan", *target, "--budget", "1KiB"]) == 3
    refusal = capsys.readouterr().err
    least_bytes = int(refusal.partition("no plan can go below ")[2].partition("(")[2].partition(" bytes")[0])
    compared = answer("compare", "--planners", "auto,none", "--budgets", "2")
    assert compared["least_budget_bound_bytes"] == least_bytes
    assert least_bytes < compared["unplanned"]["peak_bytes"] / 2
    fitted = answer("fit", "--budget", str(least_bytes))
    assert fitted["measured"]["peak_bytes"] == least_bytes == fitted["predicted"]["peak_bytes"]
    planned = answer("plan", "--budget", str(least_bytes))
    assert planned["unplanned"]["peak_bytes"] == compared["unplanned"]["peak_bytes"]
    elsewhere = answer("plan", "--budget", "40%", "--device-profile", "h100")
    assert elsewhere["predicted"]["peak_bytes"] < elsewhere["unplanned"]["peak_bytes"] / 2


def test_what_a_loop_asks_of_its_batch_is_freed_as_it_is_used() -> None:
    """Before each step the conditions of the loop are computed, of which each needs all rounds before it."""

    def root(x: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        while (x.square() - squared).abs().max() > 1e-4:
            x = 0.5 * (x + squared / x)
        return x

    start, squared = torch.full((50_000,), 50.0), torch.rand(50_000) + 1
    step = memfit.fit_function(root, start, squared, budget="16MiB", verify=False)
    wanted = root(start, squared)
    step(start, squared)
    with record("cpu") as seen:
        found = step(start, squared)
    assert torch.equal(found, wanted)
    assert seen.peak_bytes < 8 * start.nbytes
