"""Steps on several ranks: the bits of DistributedDataParallel, within the budget, and one message where one fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_steps
from rank_runs import on_ranks

ALIKE = ["plain", "default_buckets", "clipped_in_bfloat16", "with_buffers"]
TOGETHER = [
    *ALIKE,
    "accumulated",
    "other_batch_on_one",
    "other_model_on_one",
    "other_setting_on_one",
    "capture_fails_on_one",
    "planning_fails_on_first",
    "graph_breaks",
    "later_calls",
    "over_budget_on_one",
    "verification_fails_on_one",
    "given_plan",
    "refused_ddp",
    "sparse_gradients",
]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two ranks found: all functions run in one pair of processes, each after errors of those before it."""
    return on_ranks([getattr(rank_steps, name) for name in TOGETHER], 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_two_ranks_train_as_ddp_within_the_budget(two: Results, name: str) -> None:
    _check_as_ddp([result[name] for result in two])


@pytest.mark.slow
def test_four_ranks_train_as_ddp_with_its_buckets(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = on_ranks([rank_steps.plain], 4, tmp_path_factory.mktemp("four"))
    _check_as_ddp([result["plain"] for result in found])


def _check_as_ddp(found: Results) -> None:
    for result in found:
        assert result["is_same"]
        assert result["corrections"] == 0
        assert result["measured"] <= result["budget"]
        assert result["measured"] == pytest.approx(result["predicted"], rel=0.01)
        assert len(set(result["computed"])) == len(result["computed"]) == result["reductions"] > 0


def test_ddps_bucket_sizes_are_taken(two: Results) -> None:
    assert two[0]["plain"]["reductions"] == 3
    assert two[0]["default_buckets"]["reductions"] == 1


def test_gradients_accumulate_as_in_no_sync(two: Results) -> None:
    for result in two:
        assert result["accumulated"]["is_same"]
        assert result["accumulated"]["plans"] == 4  # with and without gradients that are there, with and without ranks


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "other_batch_on_one",
            "RankError: the steps of rank 1 differ from those of rank 0: rank 0 has input 'batch_0' of",
        ),
        (
            "other_model_on_one",
            "RankError: model and settings of rank 1 differ from those of rank 0: rank 0 has parameter",
        ),
        ("other_setting_on_one", "rank 0 has budget: '1MiB', rank 1 budget: '2MiB'; make the same model"),
        ("capture_fails_on_one", "the step raised KeyError: 'no such column'"),
        ("planning_fails_on_first", "no plan fits 200 KiB"),
        ("graph_breaks", "across ranks memfit.checkpoint(model, budget) holds"),
        ("verification_fails_on_one", "the loss (1 and 2) on rank 1"),
        ("sparse_gradients", "the gradient of '0.weight' is sparse"),
    ],
)
def test_all_ranks_raise_what_one_raises(two: Results, name: str, text: str) -> None:
    assert all(text in result[name] for result in two), [result[name] for result in two]


def test_errors_keep_their_kind_and_name_their_rank(two: Results) -> None:
    assert two[0]["capture_fails_on_one"].startswith("CaptureError: rank 1: ")
    assert two[1]["capture_fails_on_one"].startswith("CaptureError: ")
    assert two[1]["planning_fails_on_first"].startswith("InfeasibleBudgetError: rank 0: no plan fits")
    assert "rank 0" not in two[0]["planning_fails_on_first"]


def test_later_calls_are_agreed_on(two: Results) -> None:
    for rank, result in enumerate(two):
        new, two_known, differing, failing, good = result["later_calls"]
        assert new == good == ""
        assert two_known.startswith("RankError: rank 1 calls the step with a batch of [64, 64], [64], rank 0 with a")
        assert differing.startswith("RankError: the steps of rank 1 differ from those of rank 0")
        assert failing.startswith(
            "InvalidOptionError: " + ("" if rank else "rank 1: ") + "the step was called with None"
        )


def test_a_correction_is_agreed_on(two: Results) -> None:
    one, other = (result["over_budget_on_one"] for result in two)
    assert one == other
    assert len(one["corrections"]) == 1
    assert one["is_same"]


def test_a_given_plan_is_compared(two: Results) -> None:
    for result in two:
        same, other = result["given_plan"]
        assert same == ""
        assert other.startswith("RankError: plans of rank 1 differ from those of rank 0: rank 0 has")


def test_what_is_not_carried_out_is_refused(two: Results) -> None:
    expected = [
        "wrapped in DDP with find_unused_parameters=True, which",
        "wrapped in DDP with static_graph=True, which",
        "wrapped in DDP with a communication hook, which",
        "module '0' of the model is wrapped in DDP; memfit plans only bare models",
        "the DDP model was given to torch's Join, in which ranks end at different steps",
        "the model is wrapped in DDP (replicate); memfit plans only bare models",
        "process_group is a str, expected a torch.distributed.ProcessGroup",
        "arena=True is not supported with a process_group",
        "no_sync is for steps with a process_group and without an optimizer",
        "the step is called inside no_sync, but it updates the parameters in each call",
        "the DDP model was given to torch's Join, in which ranks end at different steps",
    ]
    for result in two:
        for text, found in zip(expected, result["refused_ddp"], strict=True):
            assert text in found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [("late_rank", "meeting"), ("lost_rank", "measuring ops")])
def test_a_rank_that_is_gone_ends_the_others(tmp_path: Path, name: str, where: str) -> None:
    found = on_ranks([getattr(rank_steps, name)], 2, tmp_path, timeout_seconds=10)
    assert found[0][name].startswith(f"RankError: {where}: another rank is gone, or does not answer: ")


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_step_ends_the_others(tmp_path: Path) -> None:
    found = on_ranks([rank_steps.dying_rank], 2, tmp_path, timeout_seconds=10, dies=1)
    assert found[0]["dying_rank"].startswith("RankError: running a step: another rank is gone, or does not answer: ")


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank [01]: loss", done.stdout)) == 8  # lines of two processes may run into each other
    assert len(set(re.findall(r"budget (\d+) bytes", done.stdout))) == 1
