"""`memfit.checkpoint` on two ranks: the bits of the bare loop, within a budget of each rank's own."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import rank_checkpoints
from rank_runs import on_ranks

pytestmark = pytest.mark.slow

SHARED = ["tensor_parallel", "experts", "in_operators", "in_compiled_blocks", "late_collectives"]
SHARED += ["late_collectives_of_sharded"]
LATE = ["late_collectives_of_a_plan", "late_collectives_of_two", "groups_by_thread"]
TWO = ["two_models", "two_models_of_a_script"]
WAYS = ["data_parallel", "sharded_after", "sharded_before", *TWO, *SHARED, "unlike", "beside_a_thread"]
if find_spec("transformers") and find_spec("accelerate"):
    WAYS.append("trainer")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(
        [getattr(rank_checkpoints, name) for name in (*WAYS, *LATE, "planned_operators", "gathered_over_updates")],
        2,
        tmp_path_factory.mktemp("two"),
    )


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_keep_their_own_budgets_with_the_bits_of_the_bare_loop(two: list[dict[str, Any]], way: str) -> None:
    for found in two:
        assert found[way]["same"]
        assert found[way]["over"] == 0
        assert 0.5 < found[way]["used"] <= 1


def test_models_of_a_script_share_a_plan_on_each_rank(two: list[dict[str, Any]]) -> None:
    wrapper = "DistributedDataParallel"
    assert [found["two_models_of_a_script"]["found"] for found in two] == [[f"{wrapper} and {wrapper}"]] * 2


@pytest.mark.parametrize("way", SHARED)
def test_ranks_whose_blocks_run_collectives_follow_one_policy(two: list[dict[str, Any]], way: str) -> None:
    one, other = (found[way] for found in two)
    assert one["policy"] == other["policy"]
    assert one["rules"] > {"full"}
    assert max(one["used"], other["used"]) > 0.75  # sizes differ from step to step


def test_blocks_with_collectives_that_are_not_alike_are_computed_again_on_all_ranks(two: list[dict[str, Any]]) -> None:
    assert [found["unlike"]["rules"] for found in two] == [{"full"}, {"full"}]


def test_collectives_that_begin_after_plans_that_differ_are_refused_on_all_ranks(two: list[dict[str, Any]]) -> None:
    for found in two:
        refusal = found["late_collectives_of_a_plan"]["refusal"]
        assert "layers.0' runs collectives for the first time since the ranks have made plans" in refusal
        assert "call memfit.checkpoint where these collectives begin" in refusal


def test_ranks_that_hold_two_models_by_one_plan_and_apart_compute_collectives_again(two: list[dict[str, Any]]) -> None:
    found = [each["late_collectives_of_two"] for each in two]
    assert [each["models"] for each in found] == [1, 2]
    assert all(each["same"] for each in found)


def test_collectives_of_other_threads_and_of_fully_shard_are_none_of_a_block(two: list[dict[str, Any]]) -> None:
    assert all(found["beside_a_thread"]["was_beside"] for found in two)
    for found in two:
        expected = {"own": True, "of_thread": [], "of_shards": [], "both": True, "known": (0, 1)}
        assert found["groups_by_thread"] == expected


def test_operators_with_collectives_inside_are_in_no_planned_graph(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["planned_operators"]["same"]
        assert "summed.default runs collectives in its own code" in found["planned_operators"]["refusal"]
        assert "memfit.checkpoint(model, budget) holds" in found["planned_operators"]["refusal"]


def test_parameters_that_stay_gathered_over_an_update_are_refused(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "keeps the parameters of 'layers.0' gathered over" in found["gathered_over_updates"]["refusal"]
        assert "set_reshard_after_backward(True)" in found["gathered_over_updates"]["refusal"]
