"""Sharded models: the bits of stock `fully_shard`, within the budget; its checkpoints; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_steps
import pytest
import shard_steps
import torch
import torch.distributed as dist
from rank_runs import on_ranks
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from memfit.capture import TrainingStep, capture
from memfit.capture.fully_sharded import fully_sharded
from memfit.step.distributed.sharding import repeated_blocks
from memfit.system.recorder import record

ALIKE = ["blocks", "blocks_clipped_in_bfloat16", "mixed_precision", "bare_model", "gathers_repeated"]
TOGETHER = [*ALIKE, "odd_models", "gradients_added", "evaluated", "checkpoints", "refused"]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two ranks found: all functions run in one pair of processes."""
    return on_ranks([getattr(shard_steps, name) for name in TOGETHER], 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_two_ranks_train_as_fully_shard_within_the_budget(two: Results, name: str) -> None:
    _check_as_stock([result[name] for result in two])


@pytest.mark.slow
def test_four_ranks_train_as_fully_shard(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = on_ranks([shard_steps.blocks], 4, tmp_path_factory.mktemp("four"))
    _check_as_stock([result["blocks"] for result in found])


def _check_as_stock(found: Results) -> None:
    for result in found:
        assert result["is_same"]
        assert result["corrections"] == 0
        assert result["measured"] <= result["budget"]
        assert set(result["reductions"]) == {1}
    assert max(result["measured"] for result in found) == pytest.approx(found[0]["predicted"], rel=0.01)


def test_a_plan_gathers_again_where_memory_is_short(two: Results) -> None:
    for result in two:
        assert max(result["gathers_repeated"]["gathers"]) > 1
        assert result["gathers_repeated"]["measured"] < 0.8 * result["gathers_repeated"]["stock"]


def test_what_is_shared_or_frozen_or_computed_again_is_trained_as_by_fully_shard(two: Results) -> None:
    for result in two:
        assert all(result["odd_models"].values()), result["odd_models"]


def test_gradients_of_parts_add_up(two: Results) -> None:
    for result in two:
        assert result["gradients_added"] == {"is_same": True, "is_same_later": True, "plans": 2}


def test_evaluations_before_and_between_planned_steps_are_those_of_fully_shard(two: Results) -> None:
    for result in two:
        assert result["evaluated"] == {"is_same": True, "plans": 1, "is_held": True}


def test_checkpoints_are_those_of_fully_shard(two: Results) -> None:
    for result in two:
        assert all(result["checkpoints"].values()), result["checkpoints"]


@pytest.mark.slow
def test_checkpoints_of_two_ranks_are_read_on_one_and_on_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checkpoint_steps.FOLDER, str(tmp_path))
    for count, function in (
        (2, checkpoint_steps.written),
        (1, checkpoint_steps.read_again),
        (4, checkpoint_steps.read_again),
    ):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        for result in on_ranks([function], count, folder):
            found = result[function.__name__]
            assert all(found.values()), found


def test_a_step_of_many_ranks_is_captured_before_there_are_any_and_without_their_memory() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    try:
        mesh = init_device_mesh("cpu", (512,))
        with FakeTensorMode():
            layers = [nn.Linear(1 << 15, 1 << 15, bias=False) for _ in range(2)]
            model = fully_shard(nn.Sequential(*[fully_shard(layer, mesh=mesh) for layer in layers]), mesh=mesh)
            across = fully_sharded(model, None)
        step = TrainingStep(
            model=model,
            loss=lambda model, batch: model(batch).sum(),
            batch=torch.zeros(1, 1 << 15),
            optimizer=torch.optim.AdamW(model.parameters()),
            across=across,
        )
        with record("cpu") as usage:
            graph = capture(step).graph
    finally:
        dist.destroy_process_group()
    assert usage.peak_bytes < 1 << 20
    assert [graph.storages[op.writes[0]].bytes for op in graph.ops if op.is_gather] == [4 << 30] * 2
    assert sum(s.bytes for s in graph.storages if s.resident and s.role == "parameter") == 2 * (8 << 20)


def test_what_is_not_carried_out_is_refused(two: Results) -> None:
    expected = [
        "InvalidTargetError: memfit.fit: parameter 'blocks.0.norm.weight' is on the meta device and has no values yet",
        "set_requires_gradient_sync(False) was called on the sharded model",
        "fully_shard of the model has an all-reduce hook, which",
        "has a gradient divide factor of its own, whose sum a planned step does not make",
        "fully_shard of the model has CPU offload, which",
        "fully_shard of the model has another dimension than the first, which",
        "fully_shard of the model has a mesh of several dimensions, which",
        "fully_shard of the model has parameters of several dtypes, which",
        "the step computes with a parameter that is sharded there (a DTensor of shape",
        "memfit.fit(shard=True): the model is wrapped in FSDP (fully_shard)",
        "shard=True needs a process_group",
        "shard=True is for an optimizer that has no state yet",
        "no_sync is not for sharded models",
    ]
    for result in two:
        for text, found in zip(expected, result["refused"], strict=True):
            assert text in found


def test_blocks_that_share_a_parameter_with_the_rest_are_left_to_it() -> None:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(8, 4),
            "layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False), nn.LayerNorm(4)]),
            "other": nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU(), nn.Conv1d(1, 1, 1))),
        }
    )
    layers: Any = model["layers"]
    layers[2].weight = model["embedding"].weight
    names = {module: name for name, module in model.named_modules()}
    assert [names[block] for block in repeated_blocks(model)] == ["layers.0", "layers.1", "other.1.0", "other.1.2"]
    assert repeated_blocks(torch.nn.Linear(2, 2)) == []
