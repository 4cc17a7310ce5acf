"""The planners of Chen 2016: the paper's algorithms on chains solved by hand, and Algorithm 2 against its own text."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from chains import chain, counted, network, problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import graphs

import memfit
from memfit.checker import check
from memfit.device import GENERIC
from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Phase
from memfit.papers.planners.mirror import Mirror, read_mirrors, with_mirrors
from memfit.papers.planners.recompute_counts import counts_keeping, counts_of, evaluate_counts, evaluate_sequence
from memfit.papers.planners.recursive import recursive_counts
from memfit.papers.planners.sublinear import appendix_a_splits
from memfit.plan import Status
from memfit.planners import PLANNERS, Marked, make_planner
from memfit.planners.engine.order import original_order, update_at_once_order
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import Instance, build_instance
from memfit.planners.engine.starts.forward_part import ForwardPart
from memfit.schedule import Code, Schedule
from memfit.simulate import simulate


def program_of(graph: Graph) -> Instance:
    return build_instance(problem(graph), original_order(graph))


def names(instance: Instance, sequence: tuple[int, ...]) -> list[str]:
    return [instance.graph.ops[instance.op_at[p]].name for p in sequence if instance.op_at[p] >= 0]


def words(text: str) -> list[str]:
    return text.split()


# Algorithm 2, as its text has it


def algorithm_2(graph: Graph, mirror_count: list[int]) -> list[str]:
    """The published construction on nodes (op, copy), with g[v] the backward op of v; returns names in order V'."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    writer = graph.writer_of
    newest = {op.id: (op.id, 0) for op in forward}
    before = {(op.id, 0): {(writer[s], 0) for s in op.reads if s in writer} for op in forward}
    for turn in range(1, max(mirror_count, default=0) + 1):
        for op in forward:
            if turn <= mirror_count[op.id]:
                newest[op.id] = (op.id, turn)
                before[op.id, turn] = {newest[writer[s]] for s in op.reads if s in writer}
    order = [(op.id, 0) for op in forward]
    for op in backward:
        newest[op.id] = (op.id, 0)
        before[op.id, 0] = {newest[writer[s]] for s in op.reads if s in writer}
        ancestors, waiting = set(), [(op.id, 0)]
        while waiting:
            node = waiting.pop()
            if node not in ancestors and node not in order:
                ancestors.add(node)
                waiting += before[node]
        order += [*sorted(ancestors - {(op.id, 0)}, key=lambda node: (node[1], node[0])), (op.id, 0)]
    return [graph.ops[op].name for op, _ in order]


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32), length=st.integers(1, 9))
def test_the_mirror_construction_is_algorithm_2_for_any_counts(seed: int, length: int) -> None:
    pick = random.Random(seed)
    reads = [[n - 1, *pick.sample(range(-1, n), pick.randint(0, min(2, n)))] for n in range(length)]
    graph = network([pick.choice((1, 64, 100)) for _ in range(length)], [sorted(set(r)) for r in reads])
    counts = [pick.randint(0, 4) for _ in range(length)] + [0]
    instance = program_of(graph)
    evaluation = evaluate_counts(instance, counts_of(instance, dict(enumerate(counts))))
    assert names(instance, evaluation.sequence) == algorithm_2(graph, counts)


def test_counts_of_zero_are_the_normal_gradient_graph() -> None:
    instance = program_of(network([100] * 4))
    evaluation = evaluate_counts(instance, counts_of(instance, {}))
    assert evaluation.sequence == tuple(range(len(instance.op_at)))


def test_a_count_of_two_recomputes_twice() -> None:
    graph = chain(4)
    instance = program_of(graph)
    evaluation = evaluate_counts(instance, counts_of(instance, {0: 2, 1: 1, 2: 2, 3: 0}))
    # f1 is stored by the first round; f0 runs once for it, and once more for its own gradient's sake.
    assert names(instance, evaluation.sequence) == words("f0 f1 f2 f3  f0 f1 f2 b3 b2  f0 b1 b0")


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(graph=graphs(), seed=st.integers(0, 1 << 32))
def test_mirror_plans_are_legal_and_weighed_as_the_simulator_does(graph: Graph, seed: int) -> None:
    pick = random.Random(seed)
    for order in (original_order(graph), update_at_once_order(graph)):
        instance = build_instance(problem(graph), order)
        evaluation = evaluate_counts(instance, np.array([pick.randint(0, 3) for _ in instance.op_at], np.int64))
        schedule = emit(instance, evaluation.sequence)
        check(graph, schedule)
        timeline = simulate(graph, schedule, GENERIC)
        assert timeline.peak_bytes == evaluation.peak_bytes
        assert timeline.makespan_seconds == pytest.approx(evaluation.seconds)
        assert evaluate_sequence(instance, np.array(evaluation.sequence)) == evaluation


# Algorithm 1


def test_segments_of_a_chain_are_algorithm_1() -> None:
    result = make_planner("segments", count=3).plan(problem(chain(6)))
    assert result.plan is not None
    instance = program_of(chain(6))
    order = [int(line.split()[1]) for line in result.plan.schedule.lines() if line.startswith("compute")]
    # Nothing of the forward pass reads the last segment, so that its first computation is the one for its backward.
    assert names(instance, tuple(order)) == words("f0 f1 f2 f3  f4 f5 b5 b4  f2 b3 b2  f0 b1 b0")


@pytest.mark.parametrize("count", [1, 2, 5, 7, 24])
def test_equal_segments_take_the_memory_of_equation_1(count: int) -> None:
    length = 24
    result = make_planner("segments", count=count).plan(problem(chain(length)))
    assert result.plan is not None
    assert result.plan.predicted.peak_bytes <= 100 * (count + math.ceil(length / count) + 3)
    assert result.plan.predicted.seconds <= 3 * length


def test_segments_end_where_they_are_told_to() -> None:
    graph = chain(9)
    given_ends = make_planner("segments", ends="f2, 5").plan(problem(graph)).plan
    equal = make_planner("segments", count=3).plan(problem(graph)).plan
    assert given_ends is not None
    assert equal is not None
    assert given_ends.schedule == equal.schedule
    with pytest.raises(InvalidOptionError, match="ends has 'f99', which is no forward op of 'chain9'"):
        make_planner("segments", ends="f99").plan(problem(graph))
    with pytest.raises(InvalidOptionError, match="count is 0, expected 1 or more"):
        make_planner("segments", count=0).plan(problem(graph))


# Algorithm 3 and appendix A


def algorithm_3(sizes: list[int], candidates: set[int], budget: float) -> tuple[int, int, list[int]]:
    """The published loop over the vertices of a chain: x, y, m."""
    temp, x, y, m = 0, 0, 0, []
    for v, size in enumerate(sizes):
        temp += size
        if v in candidates and temp > budget:
            x, y, temp = x + size, max(y, temp), 0
            m.append(0)
        else:
            m.append(1)
    return x, y, m


@given(
    sizes=st.lists(st.integers(1, 9).map(lambda units: units * 64), min_size=2, max_size=20),
    budget=st.integers(0, 4000),
)
def test_splits_are_algorithm_3(sizes: list[int], budget: int) -> None:
    forward_part = ForwardPart.of(program_of(network(sizes)))
    candidates = {place for place, may in enumerate(forward_part.is_candidate) if may}
    split = forward_part.split(budget)
    x, y, m = algorithm_3([*sizes, 1], candidates, budget)
    assert split.between_bytes == x
    assert split.stage_bytes == y
    assert split.kept == {number + 1 for number in range(len(sizes)) if m[number] == 0}


def test_appendix_a_tries_zero_the_root_and_a_grid_of_six() -> None:
    instance = program_of(chain(64))
    splits = appendix_a_splits(ForwardPart.of(instance))
    assert len(splits) == 8
    assert splits[0].between_bytes == 6300
    assert splits[0].stage_bytes == 100
    assert splits[0].between_bytes == max(split.between_bytes for split in splits)
    root = math.sqrt(6300 * 100)
    assert splits[1] == ForwardPart.of(instance).split(int(root))
    low, high = root / math.sqrt(2), root * math.sqrt(2)
    for number in range(6):  # equal steps, both ends included
        assert splits[2 + number] == ForwardPart.of(instance).split(int(low + number * (high - low) / 5))


def test_stages_of_a_residual_network_end_between_units_too() -> None:
    # Units of four layers, the second one narrow: within a unit that one crosses, and what skips the unit.
    sizes = [256, 64, 128, 256] * 80
    reads = [[number - 1, number - 4] if number % 4 == 3 and number > 3 else [number - 1] for number in range(320)]
    instance = program_of(network(sizes, reads))
    forward_part = ForwardPart.of(instance)
    narrow = [place for place, may in enumerate(forward_part.is_narrow) if may]
    assert narrow == [1, *range(7, 320, 4)]  # nothing skips the first unit: it ends a stage at its narrow layer
    assert sum(forward_part.is_candidate) > len(narrow)
    splits = appendix_a_splits(forward_part)
    assert len(splits) == 16
    peaks = [evaluate_counts(instance, counts_keeping(instance, split.kept)).peak_bytes for split in splits]
    assert min(peaks[8:]) < min(peaks[:8])


def test_sublinear_takes_twice_the_root_of_a_chain() -> None:
    result = make_planner("sublinear").plan(problem(chain(256), 100 * (2 * 16 + 6)))
    assert result.plan is not None
    assert result.plan.predicted.seconds <= 3 * 256


def test_costly_results_are_kept_where_they_fit() -> None:
    # Every fourth layer takes ten times as long as the others, and writes a quarter of their bytes.
    seconds = [10.0 if number % 4 == 3 else 1.0 for number in range(64)]
    sizes = [25 if number % 4 == 3 else 100 for number in range(64)]
    graph = network(sizes, seconds=seconds)
    plain, aware = (make_planner("sublinear", costly=each).plan(problem(graph, 2200)) for each in (False, True))
    assert plain.plan is not None
    assert aware.plan is not None
    assert aware.plan.predicted.seconds < plain.plan.predicted.seconds

    def recomputed(schedule: Schedule) -> set[int]:
        computed = Counter(schedule.operands[schedule.codes == Code.COMPUTE].tolist())
        return {op for op, times in computed.items() if times > 1}

    assert all(seconds[op] == 1.0 for op in recomputed(aware.plan.schedule))
    assert any(seconds[op] == 10.0 for op in recomputed(plain.plan.schedule))


def test_costs_take_no_plan_away() -> None:
    graph = network(
        [20 + 37 * number % 101 for number in range(24)], seconds=[1.0 + number % 5 for number in range(24)]
    )
    for budget in (500, 700, 1000, 1300):
        plain, aware = (
            make_planner("sublinear", costly=costly).plan(problem(graph, budget)) for costly in (False, True)
        )
        if plain.plan is not None:
            assert aware.plan is not None
            assert aware.plan.predicted.seconds <= plain.plan.predicted.seconds


# Section 4.4


@pytest.mark.parametrize("stored", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("exponents", [range(4, 12), pytest.param(range(12, 15), marks=pytest.mark.slow)])
def test_recursion_takes_memory_as_g_of_n(stored: int, exponents: range) -> None:
    extras = []
    for exponent in exponents:
        length = 2**exponent
        instance = program_of(chain(length))
        evaluation = evaluate_counts(instance, recursive_counts(instance, stored))
        grows = stored * math.log(length, stored + 1)  # equation 3: g(n) = k log_{k+1}(n)
        extras.append(evaluation.peak_bytes / 100 - grows)
        assert evaluation.seconds <= length * (2 + math.ceil(math.log(length, stored + 1)))
    # Beside g(n): the input, two gradients, and the paths that do not divide evenly.
    assert max(extras) <= 3 + stored / 2
    assert min(extras) >= -2 - stored / 4


def test_levels_end_the_recursion_early() -> None:
    graph = chain(27)
    instance = program_of(graph)
    assert max(recursive_counts(instance, 2, levels=1)) == 1
    assert max(recursive_counts(instance, 2)) == 3
    with pytest.raises(InvalidOptionError, match="option stored is 0, expected 1 or more"):
        make_planner("recursive", stored=0).plan(problem(graph))


def test_recursion_tries_several_k_for_a_budget() -> None:
    graph = chain(256)
    least = make_planner("recursive", stored=1).plan(problem(graph)).plan
    assert least is not None
    peak = least.predicted.peak_bytes
    results = [make_planner("recursive").plan(problem(graph, budget)).plan for budget in (peak, 2 * peak, 4 * peak)]
    seconds = [plan.predicted.seconds for plan in results if plan is not None]
    assert len(seconds) == 3
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < least.predicted.seconds
    assert make_planner("recursive").plan(problem(graph, peak - 1)).status is Status.TIMED_OUT


# Section 4.2


def test_of_conv_bn_relu_only_conv_is_kept() -> None:
    kinds = ["conv", "bn", "relu"] * 4
    graph = network([100] * 12, seconds=[{"conv": 9.0, "bn": 0.5, "relu": 0.2}[kind] for kind in kinds])
    plan = make_planner("drop_cheap", threshold=1.0).plan(problem(graph)).plan
    assert plan is not None
    again = [line for line in plan.schedule.lines() if line.startswith("compute")]
    counts = {op: again.count(f"compute {op}") for op in range(12)}
    assert [counts[op] for op in range(12)] == [1 if kind == "conv" else 2 for kind in kinds]


def test_a_tighter_budget_drops_dearer_results() -> None:
    graph = network([100] * 8, seconds=[1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0])
    most = make_planner("none").plan(problem(graph)).plan
    assert most is not None
    overheads = []
    for budget in range(most.predicted.peak_bytes, 0, -64):
        plan = make_planner("drop_cheap").plan(problem(graph, budget)).plan
        if plan is not None:
            overheads.append(plan.overhead)
    assert overheads[0] == 0.0
    assert overheads == sorted(overheads)
    assert len(set(overheads)) > 3
    with pytest.raises(InvalidOptionError, match="threshold is -1"):
        make_planner("drop_cheap", threshold=-1).plan(problem(graph))


# The user's mirror attribute


def test_a_mark_is_a_constraint_for_every_planner() -> None:
    graph = network([100] * 6)
    for name in PLANNERS:
        options = counted(name, 2000)
        marked = make_planner(name, mirror=memfit.mirror("f2", 1), **options)
        plan = marked.plan(problem(graph)).plan
        assert plan is not None, name
        assert plan.schedule.lines().count("compute 2") == 2, name
        kept = make_planner(name, mirror=[memfit.mirror(f"f{number}", 0) for number in range(6)], **options)
        plan = kept.plan(problem(graph)).plan
        assert plan is not None, name
        assert plan.overhead == 0.0, name


def test_counts_above_one_reach_the_mirror_planner() -> None:
    planner = make_planner("mirror", mirror="f0:2,f1:1,f2:2")
    assert isinstance(planner, Marked)
    plan = planner.plan(problem(chain(4))).plan
    assert plan is not None
    assert plan.schedule.lines().count("compute 0") == 3


def test_marks_are_read_from_modules_names_and_text() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU()))
    assert memfit.mirror(model[1][0], 2, of=model) == Mirror(where="1.0", count=2)
    assert read_mirrors("a.b:1, c:0") == (Mirror(where="a.b", count=1), Mirror(where="c", count=0))
    with pytest.raises(InvalidOptionError, match="give its model as `of`"):
        memfit.mirror(model[0], 1)
    with pytest.raises(InvalidOptionError, match="expected a module of the model"):
        memfit.mirror(torch.nn.ReLU(), 1, of=model)
    with pytest.raises(InvalidOptionError, match="count -1"):
        memfit.mirror("a", -1)
    with pytest.raises(InvalidOptionError, match="expected NAME:COUNT"):
        read_mirrors("a")
    with pytest.raises(InvalidOptionError, match="expected the result of memfit"):
        read_mirrors(3)
    with pytest.raises(InvalidOptionError, match="near it are f2"):
        with_mirrors(problem(chain(4)), [memfit.mirror("f22")])


def test_what_must_be_computed_once_cannot_be_marked() -> None:
    graph = chain(3)
    ops = [msgspec.structs.replace(op, recomputable=op.name != "f1") for op in graph.ops]
    graph = Graph.build(name=graph.name, storages=graph.storages, ops=ops)
    with pytest.raises(InvalidOptionError, match="none of its 1 ops can be computed more than once"):
        memfit.mirror("f1", 1).counts(graph)
    assert memfit.mirror("f1", 0).counts(graph) == {1: 0}
