"""Clusters on a laptop: the step of one rank of so many, none of which is there, and nothing allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import absent_steps
import pytest
import torch
import torch.distributed as dist
from rank_runs import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memfit
from memfit.capture import capture
from memfit.cli import main
from memfit.cost.device_profiles import load_device
from memfit.cost.links import Link
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.options import Cluster, RanksOptions, help_texts
from memfit.plan import Problem
from memfit.planners.engine.overlapping import with_overlap
from memfit.planners.engine.results import keeping_schedule
from memfit.system.recorder import record

H100 = load_device("h100")
WIDTH = 1 << 14  # a layer of 1 GiB
STEP = """
import torch, memfit
from torch import nn

def make_step(layers=4, batch=8):
    model = nn.Sequential(*(nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(layers)))
    loss = lambda model, batch: model(batch).square().mean()
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.TrainingStep(model=model, loss=loss, batch=torch.randn(batch, 1 << 14), optimizer=optimizer)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(STEP)
    return f"{path}:make_step"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    return capsys.readouterr().err


def wide(layers: int = 4) -> memfit.TrainingStep:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    loss: Any = lambda model, batch: model(batch).square().mean()  # noqa: E731
    return memfit.TrainingStep(
        model=model, loss=loss, batch=torch.randn(8, WIDTH), optimizer=torch.optim.SGD(model.parameters())
    )


def test_a_step_of_64_ranks_is_planned_without_its_memory(capsys: pytest.CaptureFixture[str], target: str) -> None:
    with record("cpu") as usage:
        found = answer(
            capsys, "plan", target, "--ranks", "64", "--shard", "--device-profile", "h100", "--budget", "70%", "-t", "1"
        )
    assert usage.peak_bytes < 64 << 20
    rank = found["rank"]
    assert (rank["ranks"], rank["shards"]) == (64, 64)
    assert sum(rank["by_kind"].values()) == found["predicted"]["peak_bytes"] <= found["budget_bytes"]
    assert rank["by_kind"]["parameters"] == 4 * (1 << 30) // 64
    assert rank["by_kind"]["state"] == 2 * rank["by_kind"]["parameters"] + 4 * 512  # step counts are rounded up
    assert rank["seconds"] == found["predicted"]["seconds"] >= rank["communication_seconds"] > 0


def test_several_numbers_of_ranks_give_a_table(capsys: pytest.CaptureFixture[str], target: str) -> None:
    found = answer(capsys, "estimate", target, "--ranks", "1,8,64", "--shard", "--device-profile", "h100")
    alone, few, many = found["rows"]
    assert [row["ranks"] for row in found["rows"]] == [1, 8, 64]
    assert alone["by_kind"]["parameters"] == 8 * few["by_kind"]["parameters"] == 64 * many["by_kind"]["parameters"]
    assert alone["by_kind"]["gathers"] == alone["communication_seconds"] == 0
    assert (alone["gathers"], few["gathers"], many["gathers"]) == (None, 1.0, 1.0)
    assert few["by_kind"]["gradients"] > many["by_kind"]["gradients"] > 1 << 30  # of a layer, before it is scattered
    assert main(["estimate", target, "--ranks", "1,8", "--shard"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert head.split()[:6] == ["ranks", "parameters", "gradients", "state", "activations", "gathers"]
    assert [line.split()[0] for line in lines] == ["1", "8"]


def test_without_sharding_each_rank_has_all_and_sums_its_gradients(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    found = answer(capsys, "estimate", target, "--ranks", "8", "--device-profile", "h100")["rank"]
    assert found["by_kind"]["parameters"] == 4 << 30
    assert (found["shards"], found["gathers"]) == (1, None)
    ring = (1 << 30) * 2 * 7 / 8 / 450e9 + 8.4e-6 + 2 * 7 * 3.4e-6
    assert found["communication_seconds"] == pytest.approx(4 * ring)


def test_replicas_are_sharded_within_and_summed_across() -> None:
    with memfit.across(64, shard=True, replicas=4, link="ib") as there:
        step = there.step(wide)
        graph = capture(step).graph
        assert step.across is not None
        rings = [step.across.ring_of(kind) for kind in ("start_gather", "start_scatter", "start_sum")]
    assert [list(ring) for ring in rings] == [list(range(16)), list(range(16)), [0, 16, 32, 48]]
    sums = [op for op in graph.ops if op.target == "start_sum"]
    assert [graph.storages[op.mutates[0]].bytes for op in sums] == [(1 << 30) // 16] * 4
    assert sum(op.is_gather for op in graph.ops) == 4


def test_files_may_shard_or_wrap_their_models_themselves() -> None:
    def sharded() -> memfit.TrainingStep:
        step, mesh = wide(), init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in step.model.children():
            fully_shard(layer, mesh=mesh)
        model = fully_shard(step.model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters())
        return memfit.TrainingStep(model=model, loss=step.loss, batch=step.batch, optimizer=optimizer)

    def wrapped(width: int = 64) -> memfit.TrainingStep:
        step = narrow(width)
        model = nn.parallel.DistributedDataParallel(step.model)
        return memfit.TrainingStep(model=model, loss=step.loss, batch=step.batch, optimizer=step.optimizer)

    def narrow(width: int = 64) -> memfit.TrainingStep:
        return absent_steps.step_of(nn.Linear(width, 8), (torch.randn(4, width), torch.zeros(4, dtype=torch.int64)))

    graphs: list[Graph] = []
    for make, options in ((sharded, {}), (wide, {"shard": True}), (wrapped, {}), (narrow, {})):
        with memfit.across(8, **options) as there:
            graphs.append(capture(there.step(make)).graph)
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert [op.target for op in graphs[2].ops] == [op.target for op in graphs[3].ops]
    with (
        memfit.across(8) as there,
        pytest.raises(UnsupportedStepError, match="give the bare model, which is planned as"),
    ):
        there.step(lambda: wrapped(1 << 20))
    with memfit.across(8, shard=True) as there, pytest.raises(InvalidOptionError, match="already: leave out shard"):
        there.step(sharded)


def test_a_step_may_use_large_tensors_beside_its_model_and_small_values() -> None:
    def make() -> memfit.TrainingStep:
        rates = torch.linspace(0, 0.5, 4).tolist()
        mask = torch.ones(WIDTH, WIDTH).tril()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(rates[-1])).bfloat16()
        loss: Any = lambda model, batch: (model(batch) @ mask.bfloat16()).mean()  # noqa: E731
        return memfit.TrainingStep(model=model, loss=loss, batch=torch.randn(8, WIDTH, dtype=torch.bfloat16))

    with memfit.across(8) as there, record("cpu") as usage:
        graph = capture(there.step(make)).graph
    assert usage.peak_bytes < 16 << 20
    constants = [storage.bytes for storage in graph.storages if storage.role is Role.CONSTANT]
    assert constants == [WIDTH * WIDTH * 4]
    assert sum(s.bytes for s in graph.storages if s.resident and s.role is Role.PARAMETER) == WIDTH * WIDTH * 2


def test_values_without_memory_are_not_read() -> None:
    def make() -> memfit.TrainingStep:
        step = wide(1)
        print(next(step.model.parameters()).abs().max().item())
        return step

    with memfit.across(8) as there, pytest.raises(UnsupportedStepError, match=r"test_across.py:\d+.*have no memory"):
        there.step(make)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--shard",), "--shard is for steps across ranks: give --ranks N as well"),
        (("--replicas", "2"), "--replicas is for steps across ranks"),
        (("--link", "ib"), "--link is for steps across ranks"),
        (("--ranks", "64", "--replicas", "4"), "each of the 64 ranks has all of it: give shard"),
        (("--ranks", "64", "--shard", "--replicas", "5"), "expected a divisor of the 64 ranks"),
        (("--ranks", "8,6", "--shard", "--replicas", "4"), "expected a divisor of the 6 ranks"),
        (("--ranks", "4", "--shard", "--replicas", "4"), "leaves at least 2 of them to each replica"),
        (("--ranks", "0"), "ranks is 0, expected a whole number from 1 on"),
        (("--ranks", "8,8"), "'8,8': expected a whole number of ranks, or several"),
        (("--ranks", "8,many"), "'8,many': expected a whole number"),
        (("--ranks", "8", "--link", "fast"), "link is 'fast', expected 'nvlink', 'ib', or a rate such as 25GB/s"),
        (("--ranks", "8", "--link", "50%/s"), "link is '50%/s', expected"),
        (("--ranks", "8", "--link", "nvlink", "--device-profile", "t4"), "is not known for device 't4'"),
        (("--ranks", "2,8", "--save", "out.plan.json"), "--save is about one plan, and --ranks names several"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    capsys: pytest.CaptureFixture[str], target: str, words: tuple[str, ...], text: str
) -> None:
    assert text in refusal(capsys, "plan", target, "--budget", "60%", *words)


def test_what_is_no_step_of_ranks_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graph = Path(__file__).parent / "data" / "none.graph.json"
    assert "there is no such graph file" in refusal(capsys, "estimate", str(graph), "--ranks", "8")
    assert "has no backward pass" in refusal(capsys, "estimate", "kmeans", "--ranks", "8")
    assert "--seconds is about one plan" in refusal(capsys, "estimate", "lstm", "--ranks", "8", "--seconds")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert "has a process group already" in refusal(capsys, "estimate", "lstm", "--ranks", "8")
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_the_widest_batch_of_a_rank(capsys: pytest.CaptureFixture[str], target: str) -> None:
    search = ("--device-profile", "h100", "--planner", "none", "--largest", "65536")
    found = answer(capsys, "batch", target, "--budget", "12GiB", "--ranks", "8,64", "--shard", *search)
    few, many = found["rows"]
    assert [row["options"]["ranks"] for row in found["rows"]] == [8, 64]
    assert 8 < few["largest_batch"] < many["largest_batch"]
    point = next(point for point in many["points"] if point["batch"] == many["largest_batch"])
    assert point["rank"]["peak_bytes"] == point["peak_bytes"] <= 12 << 30
    assert point["samples_per_second"] == pytest.approx(64 * point["batch"] / point["rank"]["seconds"])


def test_the_frontier_in_python_takes_ranks() -> None:
    options: Any = {"device_profile": "h100", "planner": "none", "largest": 64}
    rows = memfit.frontier(wide, budget="12GiB", over={"layers": [2, 4]}, ranks=[8, 16], shard=True, **options)
    assert [dict(row.options) for row in rows] == [
        {"ranks": ranks, "layers": layers} for ranks in (8, 16) for layers in (2, 4)
    ]
    assert all(row.largest_batch == 64 for row in rows)
    with pytest.raises(InvalidOptionError, match="option 'shards' does not exist; did you mean 'shard'"):
        memfit.frontier(wide, budget="12GiB", ranks=8, shards=True, **options)
    with pytest.raises(InvalidOptionError, match="shard is for steps across ranks: give ranks as well"):
        memfit.frontier(wide, budget="12GiB", shard=True, **options)


def test_rings_are_as_fast_as_their_slowest_link() -> None:
    near, far = (Link.parse("nvlink", H100).rates("start_gather", range(ranks)) for ranks in (8, 64))
    assert near.seconds(1 << 30) == pytest.approx((1 << 30) * 7 / 8 / 450e9 + 8.4e-6 + 7 * 3.4e-6)
    assert far.seconds(1 << 30) == pytest.approx((1 << 30) * 63 / 64 / 400e9 + 8.4e-6 + 56 * 3.4e-6 + 7 * 9.6e-6)
    across_nodes = Link.parse(None, H100).rates("start_sum", range(0, 64, 16))
    assert across_nodes.seconds(1 << 30) == pytest.approx(2 * (1 << 30) * 3 / 4 / 50e9 + 8.4e-6 + 2 * 3 * 9.6e-6)
    own = Link.parse("12.5GB/s", load_device("t4")).rates("start_scatter", range(4))
    assert own.bytes_per_second == pytest.approx(12.5e9 * 4 / 3)
    assert Link.parse(None, load_device("t4")) == Link.parse("ib", H100)


def test_ranks_of_a_cluster() -> None:
    assert Cluster(ranks=64, shard=True, replicas=4).shards == 16
    assert Cluster(ranks=64).shards == 1
    for wrong in ({"ranks": 2.0}, {"ranks": 8, "replicas": 0}):
        with pytest.raises(InvalidOptionError):
            Cluster(**wrong)  # pyright: ignore[reportArgumentType]


def test_the_table_in_the_docs_is_made_of_the_help_texts() -> None:
    rows = [f"| `{name}` | {text} |" for name, text in help_texts(RanksOptions).items()]
    expected = "\n".join(["| option | meaning |", "| --- | --- |", *rows])
    page = (Path(__file__).parent.parent / "docs" / "ranks.md").read_text()
    assert expected in page, f"docs/ranks.md has to have:\n{expected}"


def layers_with_sums(count: int) -> Graph:
    """Return a graph of layers, each gathered, computed, and reduced by one collective, with many small ops between."""
    storages, ops = [Storage(id=0, name="x", bytes=1 << 20, role=Role.INPUT)], list[Op]()

    def add(name: str, reads: tuple[int, ...], *, group: str | None = None, phase: Phase = Phase.FORWARD) -> int:
        storages.append(Storage(id=len(storages), name=name, bytes=1 << 20, role=Role.ACTIVATION))
        written = len(storages) - 1
        once = group is not None and phase is Phase.BACKWARD
        ops.append(
            Op(
                id=len(ops),
                name=name,
                phase=phase,
                reads=reads,
                writes=(written,),
                seconds=1e-4,
                group=group,
                recomputable=not once,
            )
        )
        return written

    last = 0
    for layer in range(count):
        last = add(f"use_{layer}", (last, add(f"gather_{layer}", (0,), group="ranks")))
        for number in range(40):
            last = add(f"op_{layer}_{number}", (last,))
    for layer in range(count):
        last = add(f"back_{layer}", (last,), phase=Phase.BACKWARD)
        add(f"wait_{layer}", (add(f"sum_{layer}", (last,), group="ranks", phase=Phase.BACKWARD),), phase=Phase.BACKWARD)
        for number in range(40):
            last = add(f"back_{layer}_{number}", (last,), phase=Phase.BACKWARD)
    return Graph.build(name="layers", storages=storages, ops=ops)


def test_overlap_makes_another_order_of_the_same_instructions() -> None:
    graph = layers_with_sums(120)
    schedule = keeping_schedule(Problem(graph=graph, device=H100, budget_bytes=0))
    found = with_overlap(graph, H100, schedule, None)
    assert sorted(map(str, found)) == sorted(map(str, schedule))
    assert list(map(str, found)) != list(map(str, schedule))


def test_two_ranks_take_what_was_planned_before_they_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_predicted(2, tmp_path, monkeypatch, absent_steps.FEW)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_what_was_planned_before_they_were_there(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_predicted(ranks, tmp_path, monkeypatch, tuple(absent_steps.MAKERS))


def _check_predicted(ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    monkeypatch.setenv(absent_steps.FOLDER, str(folder))
    absent_steps.plan_all(ranks, folder, names)
    meeting = folder / "ranks"
    meeting.mkdir()
    found = [each["run_planned"] for each in on_ranks([absent_steps.run_planned], ranks, meeting)]
    assert len(found[0]) == len(names) * len(absent_steps.BUDGETS)
    for name, first in found[0].items():
        measured = max(each[name]["measured_bytes"] for each in found)
        assert measured == pytest.approx(first["predicted_bytes"], rel=0.02), name
        assert all(each[name]["corrections"] == 0 for each in found), name
