"""The planners of five papers that offload: cases solved by hand, and what holds for every plan."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from chains import chain, network
from devices import LINKED, linked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_steps import small_step
from strategies import graphs

from memfit.capture.whole_step import capture_whole_step
from memfit.checker import check
from memfit.device import GENERIC, Device
from memfit.doors.step import fit_step
from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Phase
from memfit.papers.planners.layers import is_convolution, is_fully_connected, layer_of_backward
from memfit.papers.planners.recompute_seconds import RecomputeSeconds
from memfit.plan import Plan, Problem
from memfit.planners import make_planner
from memfit.planners.engine.offloading.absences import HostRoom
from memfit.planners.engine.offloading.intervals import find_offload_intervals
from memfit.planners.engine.order import original_order
from memfit.planners.engine.results import unplanned_peak_bytes, unplanned_schedule
from memfit.planners.engine.retention.instance import build_instance
from memfit.planning import Settings
from memfit.schedule import Code
from memfit.simulate import simulate
from memfit.step.planned_step import PlannedStep

PLENTY = 1 << 40
CONVOLUTION = "aten.convolution.default"
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("vdnn", {"policy": "all"}),
    ("vdnn", {"policy": "conv"}),
    ("vdnn", {}),
    ("tflms", {}),
    ("tflms", {"threshold": 0, "n_tensors": 3}),
    ("tflms", {"threshold": 0, "trigger": "chain_rule", "lower_bound": 2, "upper_bound": 4}),
    ("superneurons", {"mode": "swap"}),
    ("superneurons", {"mode": "recompute"}),
    ("superneurons", {}),
    ("autoswap", {"evaluations": 6}),
    ("autoswap", {"weights": "1,0,0,1", "threshold": 60}),
    ("capuchin", {}),
]


def with_targets(graph: Graph, targets: dict[str, str]) -> Graph:
    """The graph with these targets, by op name."""
    ops = [msgspec.structs.replace(op, target=targets.get(op.name, op.target)) for op in graph.ops]
    return Graph.build(name=graph.name, storages=graph.storages, ops=ops, boundaries=graph.boundaries)


def convolving(graph: Graph, *names: str) -> Graph:
    return with_targets(graph, dict.fromkeys(names, CONVOLUTION))


def planned(graph: Graph, device: Device, budget_bytes: int, name: str, host: int = PLENTY, **options: object) -> Plan:
    task = Problem(graph=graph, device=device, budget_bytes=budget_bytes, host_budget_bytes=host)
    plan = make_planner(name, **options).plan(task).plan
    assert plan is not None
    return plan


def outcome(plan: Plan) -> tuple[int, float, int]:
    return plan.predicted.peak_bytes, plan.predicted.seconds, plan.predicted.host_peak_bytes


def copies(plan: Plan, kind: str = "prefetch") -> dict[str, str]:
    """Storage -> the next op or boundary, for each instruction of a kind."""
    lines = plan.schedule.lines()
    found: dict[str, str] = {}
    for position, line in enumerate(lines):
        if line.startswith(f"{kind} "):
            found[line.split()[1]] = next(after for after in lines[position:] if after.startswith("compute"))
    return found


# All chains below: op i < n writes storage i + 1, ops n to 2n - 1 are the backward of layers n - 1 to 0. Each op takes
# a second, each storage has 100 bytes, the input too. The backward of layer k reads storage k and the gradient; that of
# the last layer also reads the output of forward, storage n. So a chain of 4 holds 200, 300, 400, 500, 600, 500, 400
# and 300 bytes at its ops, with the peak at op 4, the backward of layer 3.

HALF = linked(50.0, 50.0)  # a copy takes two seconds
ONE = linked(100.0, 100.0)


# vDNN


def test_vdnn_copies_inputs_beside_their_layers_and_fetches_them_ahead() -> None:
    """X of layer 1 is storage 1, of layer 2 storage 2; that of layer 3 is read again by the next op.

    Copies take 2 s. Layer 1 runs from 1 to 2, the next waits for its X to 3. X of layer 2 follows from 3 to 5, after
    the layer (3 to 4). Layer 3: 5 to 6. Its backward, 6 to 7, fetches storage 2 (6 to 8); that of layer 2, 8 to 9, has
    fetched storage 1 (8 to 10) for that of layer 1, 10 to 11; the end is 12. The peak is at op 4 with 3, 4, 5, and 2 on
    its way, and the input.
    """
    plan = planned(chain(4), HALF, 600, "vdnn", policy="all")
    assert plan.schedule.text().split("\n")[:13] == [
        "compute 0",
        "offload 1",
        "compute 1",
        "offload 2",
        "wait 1",
        "drop 1",
        "compute 2",
        "wait 2",
        "drop 2",
        "compute 3",
        "prefetch 2",
        "compute 4",
        "drop 3",
    ]
    assert copies(plan) == {"2": "compute 4", "1": "compute 5"}
    assert outcome(plan) == (500, 12.0, 200)
    assert outcome(planned(chain(4), ONE, 600, "vdnn", policy="all")) == (500, 8.0, 200)


def test_vdnn_dyn_takes_the_first_policy_that_fits() -> None:
    """With layer 2 as the only convolution, storage 1 stays, and the peak is that of keeping everything."""
    graph = convolving(chain(4), "f2")
    assert planned(graph, HALF, 600, "vdnn").offloaded_bytes == 0
    assert copies(planned(graph, HALF, 600, "vdnn", policy="conv")) == {"2": "compute 4"}
    assert planned(graph, HALF, 599, "vdnn").schedule == planned(graph, HALF, 599, "vdnn", policy="all").schedule
    # With a longer chain, `conv` saves: of 1000 bytes at op 8, storages 3 and 5; the latter is back beside op 8.
    longer = convolving(chain(8), "f3", "f5")
    assert outcome(planned(longer, ONE, 900, "vdnn"))[::2] == (900, 200)


def test_vdnn_looks_for_an_input_no_farther_than_the_last_convolution() -> None:
    """The host has room for the first X only. The backward of layer 3 finds layer 2, a convolution, and stops."""
    graph = chain(4)
    assert copies(planned(graph, ONE, 600, "vdnn", host=100, policy="all")) == {"1": "compute 4"}
    assert copies(planned(convolving(graph, "f2"), ONE, 600, "vdnn", host=100, policy="all")) == {"1": "compute 5"}


# TFLMS


def test_tflms_raises_the_tensors_until_the_plan_fits() -> None:
    """The levels are 1 to 8 along the chain. Storage 1 spans six levels, 2 four; the others are read again at once.

    Storage 1 leaves from 1 to 3 and is enough for 500 bytes. Its swap-in begins after the op one level before its
    reader: right before it, at 6, so that the reader waits to 8. With two levels it begins at 5 and the reader runs at
    7. The chain rule finds the backward of layer 2 two steps below the producer, and that of layer 3 three steps below.
    """
    graph = chain(4)
    plan = planned(graph, HALF, 500, "tflms")
    assert copies(plan, "offload") == {"1": "compute 1"}
    assert outcome(plan) == (500, 10.0, 100)
    assert outcome(planned(graph, HALF, 500, "tflms", lower_bound=2)) == (500, 9.0, 100)
    assert outcome(planned(graph, HALF, 500, "tflms", trigger="chain_rule")) == (500, 10.0, 100)
    assert outcome(planned(graph, HALF, 500, "tflms", trigger="chain_rule", lower_bound=3)) == (500, 9.0, 100)
    assert planned(graph, HALF, 600, "tflms").offloaded_bytes == 0
    assert planned(graph, ONE, 600, "tflms", n_tensors=2).offloaded_bytes == 200
    assert planned(graph, ONE, 600, "tflms", n_tensors=9, threshold=4).offloaded_bytes == 100
    # The second tensor: out from 3 to 5, so that op 4 waits to 5. The swap-ins are right before their readers.
    assert outcome(planned(graph, HALF, 400, "tflms")) == (400, 13.0, 200)


def test_tflms_fuses_the_swap_ins_of_near_readers() -> None:
    """Storage 1 is read by ops 4 and 6 in backward, two levels apart: one swap-in, or two if only one level is near."""
    graph = chain(4)
    ops = [msgspec.structs.replace(op, reads=(*op.reads, 1) if op.name == "b3" else op.reads) for op in graph.ops]
    graph = Graph.build(name="twice", storages=graph.storages, ops=ops)
    lines = planned(graph, ONE, 700, "tflms", n_tensors=1).schedule.lines()
    assert lines.count("prefetch 1") == 2 and lines.count("offload 1") == 1
    assert planned(graph, ONE, 700, "tflms", n_tensors=1, threshold=2).schedule.lines().count("prefetch 1") == 1


# SuperNeurons


def test_superneurons_recomputes_a_small_segment_once() -> None:
    """f1 and f2 lie behind the convolution f0. Their 200 bytes are fewer than the 400 of g1, so they run once more."""
    graph = convolving(network([100] * 3), "f0")
    plan = planned(graph, GENERIC, 1000, "superneurons", host=0)
    computed = [line.split()[1] for line in plan.schedule.lines() if line.startswith("compute")]
    assert computed == list("012312456")
    assert plan.predicted.seconds == 9.0
    # The input, both results, the gradient, its predecessor, and the loss.
    assert plan.predicted.peak_bytes == 64 + 4 * 100 + 1


def test_superneurons_recomputes_a_large_segment_for_each_reader() -> None:
    """Five results of 100 bytes, and 400 bytes at most in an op: g5 to g1 recompute 5, 4, 3, 2 and 1 of them."""
    graph = network([100] * 6)
    plan = planned(convolving(graph, "f0"), GENERIC, 2000, "superneurons", mode="recompute")
    assert plan.predicted.seconds == 13 + 5 + 4 + 3 + 2 + 1
    # Another checkpoint in the middle leaves two segments of two results, each recomputed once.
    halves = with_targets(graph, {"f0": CONVOLUTION, "f3": "aten.addmm.default"})
    assert planned(halves, GENERIC, 2000, "superneurons").predicted.seconds == 13 + 4


def test_superneurons_evicts_the_least_recently_used_convolution() -> None:
    """With outputs of f0 and f1 in the cache, op 4 needs 100 bytes more than 500: storage 1 leaves, from 4 to 6.

    It is back on demand, from 8 to 10, for the backward of layer 1. If f2 is a convolution too, its backward fetches
    ahead what that of f1 reads: from 7 to 9, while it runs from 7 to 8.
    """
    plan = planned(convolving(chain(4), "f0", "f1"), HALF, 500, "superneurons", mode="swap")
    assert copies(plan, "offload") == {"1": "compute 4"}
    assert copies(plan) == {"1": "compute 6"}
    assert outcome(plan) == (500, 12.0, 100)
    ahead = planned(convolving(chain(4), "f0", "f1", "f2"), HALF, 500, "superneurons", mode="swap")
    assert copies(ahead) == {"1": "compute 5"}
    assert outcome(ahead) == (500, 11.0, 100)
    assert (
        planned(convolving(chain(4), "f1"), HALF, 500, "superneurons", mode="swap").schedule.lines()[4] == "offload 2"
    )


# AutoSwap


def test_autoswap_swaps_by_score_and_hides_the_copies() -> None:
    """Storages 1 and 2 are absent across op 4, for 4 s and 2 s. The first leaves at 2 to 3, and returns at 5 to 6."""
    for options in ({}, {"weights": "1,0,0,0"}, {"weights": "0,0,0,1"}):
        plan = planned(chain(4), ONE, 500, "autoswap", **options)
        assert outcome(plan) == (500, 8.0, 100)
        assert copies(plan, "offload") == {"1": "compute 2"}
    assert planned(chain(4), ONE, 400, "autoswap").offloaded_bytes == 200


def test_autoswap_by_duration_or_by_area_of_absence() -> None:
    """A storage of 100 bytes is absent for 6 s, one of 300 bytes for 4 s; each alone is enough."""
    graph = chain(5)
    storages = [msgspec.structs.replace(s, bytes=300) if s.id == 2 else s for s in graph.storages]
    graph = Graph.build(name="areas", storages=storages, ops=graph.ops)
    fast = linked(1000.0, 1000.0)
    budget_bytes = unplanned_peak_bytes(graph, fast) - 100
    assert list(copies(planned(graph, fast, budget_bytes, "autoswap", weights="1,0,0,0"))) == ["1"]
    assert list(copies(planned(graph, fast, budget_bytes, "autoswap", weights="0,1,0,0"))) == ["2"]
    assert list(copies(planned(graph, fast, budget_bytes, "autoswap", weights="1,0,0,0", threshold=100))) == ["2"]


# Capuchin


def test_capuchin_triggers_a_swap_in_before_those_that_the_link_brings_after_it() -> None:
    """In a chain of 8, storages 1 and 2 have the most free time: 8 s and 6 s. Copies take 2 s.

    Storage 1, read at 14, is triggered at 12. Storage 2, read at 13, would be at 11, and the copies would follow one
    another from 11 to 13 and from 13 to 15, so that the last but one op waits a second. It is triggered at 10.
    """
    plan = planned(chain(8), HALF, 800, "capuchin")
    assert copies(plan) == {"2": "compute 10", "1": "compute 12"}
    assert outcome(plan) == (800, 16.0, 200)


def test_capuchin_recomputes_where_the_link_is_full() -> None:
    """Of a chain of 12, two copies of 5 s are alone hidden, by 7 s and 5 s; together the second comes a second late."""
    graph, slow = chain(12), linked(20.0, 20.0)
    whole_bytes = unplanned_peak_bytes(graph, slow)
    one, two = (planned(graph, slow, whole_bytes - less, "capuchin") for less in (100, 200))
    assert outcome(one) == (whole_bytes - 100, one.unplanned.seconds, 100)
    assert outcome(two) == (whole_bytes - 200, two.unplanned.seconds + 1.0, 200)
    tight = planned(graph, slow, whole_bytes - 600, "capuchin")
    assert tight.offloaded_bytes == 200, "the other four are recomputed: each in a second, and the link takes 10"


def test_capuchin_recomputes_what_costs_less_than_its_swap() -> None:
    """At 10 bytes a second, a swap of storage 1 costs 16 s, its recomputation by op 0 one second."""
    plan = planned(chain(4), linked(10.0, 10.0), 500, "capuchin")
    assert plan.offloaded_bytes == 0
    assert plan.schedule.lines().count("compute 0") == 2
    assert outcome(plan) == (500, 9.0, 0)
    # Free times of 2 s and 0 s: both are swapped, and nothing is recomputed.
    assert outcome(planned(chain(4), ONE, 500, "capuchin")) == (500, 8.0, 100)


def test_the_seconds_of_sources_count_once_they_are_dropped() -> None:
    task = Problem(graph=chain(4), device=GENERIC, budget_bytes=1)
    seconds = RecomputeSeconds(build_instance(task, original_order(task.graph)))
    assert (seconds.of(0, 6), seconds.of(1, 5)) == (1.0, 1.0)  # managed storages: ids from 1, the input left out
    seconds.drop(0, 1, 6)
    assert seconds.of(1, 5) == 2.0


# What they share


def test_layers_are_those_that_share_the_most_with_a_backward_op() -> None:
    assert layer_of_backward(chain(4)) == {4: 3, 5: 2, 6: 1, 7: 0}
    graph = with_targets(chain(2), {"f0": CONVOLUTION, "f1": "aten::addmm"})
    assert [is_convolution(op) for op in graph.ops] == [True, False, False, False]
    assert [is_fully_connected(op) for op in graph.ops] == [False, True, False, False]


def test_one_host_copy_takes_room_from_the_first_copy_to_the_last_read() -> None:
    task = Problem(graph=chain(4), device=ONE, budget_bytes=1)
    found = find_offload_intervals(task, unplanned_schedule(task))
    assert found.intervals[["storage", "start", "end"]].tolist() == [(1, 1, 6), (2, 2, 5)]
    room = HostRoom(found, 150)
    assert room.take(0, 1) and not room.take(1, 2)
    assert HostRoom(found, 200).take(1, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vdnn", {"policy": "some"}, "policy is 'some', expected one of all, conv, dyn"),
        ("tflms", {"n_tensors": -1}, "n_tensors is -1"),
        ("tflms", {"lower_bound": 3, "upper_bound": 2}, "upper_bound is 2, expected a number of 3 or more"),
        ("tflms", {"trigger": "any"}, "trigger is 'any'"),
        ("superneurons", {"mode": "none"}, "mode is 'none'"),
        ("autoswap", {"weights": "1,2"}, "weights is '1,2', expected four numbers"),
        ("autoswap", {"weights": "1,2,x,4"}, "expected four numbers"),
        ("autoswap", {"evaluations": 0}, "evaluations is 0"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        make_planner(name, **options).plan(Problem(graph=chain(4), device=ONE, budget_bytes=600))


@pytest.mark.parametrize("name", ["vdnn", "tflms", "autoswap"])
def test_without_a_host_everything_is_kept(name: str) -> None:
    plan = planned(chain(4), ONE, 600, name, host=0)
    assert plan.schedule == planned(chain(4), ONE, 600, "none").schedule
    result = make_planner(name).plan(
        Problem(graph=chain(4), device=GENERIC, budget_bytes=599, host_budget_bytes=PLENTY)
    )
    assert result.plan is None and result.tried_all


def drawn(graph: Graph, pick: random.Random) -> Graph:
    """The graph with a random backward part and random targets."""
    split = pick.randint(0, len(graph.ops))
    targets = (CONVOLUTION, "aten.addmm.default", "aten.relu.default")
    ops = [
        msgspec.structs.replace(
            op, phase=Phase.FORWARD if op.id < split else Phase.BACKWARD, target=pick.choice(targets)
        )
        for op in graph.ops
    ]
    return Graph.build(name=graph.name, storages=graph.storages, ops=ops, boundaries=graph.boundaries)


def check_sound(task: Problem, name: str, options: dict[str, Any]) -> Plan:
    """Plan, check the plan or the leanest one, and that the least budget reported works."""
    planner = make_planner(name, **options)
    result = planner.plan(task)
    plan = result.plan or result.leanest
    assert plan is not None
    check(task.graph, plan.schedule)
    timeline = simulate(task.graph, plan.schedule, task.device)
    outside = 0 if task.graph.boundaries else task.bytes_outside
    assert plan.predicted.peak_bytes == timeline.peak_bytes + outside <= plan.budget_bytes
    assert plan.predicted.host_peak_bytes == timeline.host_peak_bytes <= task.host_budget_bytes
    assert plan.predicted.seconds == pytest.approx(timeline.makespan_seconds)
    if result.plan is None:
        least_bytes = result.bounds.least_budget_found_bytes
        assert least_bytes is not None and least_bytes > task.budget_bytes
        assert planner.plan(replace(task, budget_bytes=least_bytes)).plan is not None
    return plan


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=14), seed=st.integers(0, 1 << 30))
def test_every_plan_is_legal_and_within_both_budgets(graph: Graph, seed: int) -> None:
    pick = random.Random(seed)
    graph = drawn(graph, pick)
    task = Problem(
        graph=graph,
        device=LINKED,
        budget_bytes=1,
        host_budget_bytes=pick.choice((0, 200, 500, PLENTY)),
        bytes_outside=pick.choice((0, 300)),
    )
    most_bytes = unplanned_peak_bytes(graph, LINKED, task.bytes_outside)
    task = replace(task, budget_bytes=int(most_bytes * pick.uniform(0.4, 1.0)))
    for name, options in pick.sample(VARIANTS, 4):
        check_sound(task, name, options)


def captured(workload: str) -> Graph:
    """The graph of a small step, with equal seconds for all ops."""
    graph = capture_whole_step(small_step(workload)).graph
    return msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(op, seconds=1e-4) for op in graph.ops))


@pytest.mark.parametrize("workload", ["cnn", "transformer"])
def test_plans_of_captured_steps(workload: str) -> None:
    """Convolutions of a CNN and products of a transformer: every planner frees bytes, and is sound at each budget."""
    graph = captured(workload)
    device = linked(2e9, 2e9, alignment_bytes=64)
    most_bytes = unplanned_peak_bytes(graph, device)
    assert any(is_convolution(op) or is_fully_connected(op) for op in graph.ops)
    for name, options in VARIANTS:
        for share in (0.9, 0.7):
            task = Problem(graph=graph, device=device, budget_bytes=int(share * most_bytes), host_budget_bytes=PLENTY)
            plan = check_sound(task, name, options)
            can_copy = options.get("policy") != "conv" and name != "superneurons" and options.get("n_tensors") is None
            assert plan.predicted.peak_bytes < most_bytes or not can_copy, (name, options)


@pytest.mark.parametrize(("name", "options"), [("vdnn", {"policy": "all"}), ("tflms", {}), ("capuchin", {})])
def test_a_step_that_copies_gives_the_same_bits(name: str, options: dict[str, Any]) -> None:
    graph = captured("cnn")
    device = linked(2e9, 2e9, alignment_bytes=64)
    budget_bytes = int(0.9 * unplanned_peak_bytes(graph, device))
    plan = planned(graph, device, budget_bytes, name, **options)
    assert (plan.schedule.codes == Code.PREFETCH).any()
    step = fit_step(small_step("cnn"), Settings(budget=budget_bytes, device=device, budget_is="soft"), plan=plan)
    assert isinstance(step, PlannedStep)
    step.verify()
