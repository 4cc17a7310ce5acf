"""The order of first computations: legal, never with a higher peak, and lower where branches are independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chains import problem
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

import memfit
from memfit.checker import check
from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Status
from memfit.planners.engine.order import original_order, update_at_once_order
from memfit.planners.engine.peak_reducing_order import peak_reducing_order
from memfit.planners.engine.retention.decisions import (
    Evaluation,
    Retention,
    evaluate,
    keep_everything,
    simulated,
    waiting,
)
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import build_instance
from memfit.planners.search import SearchPlanner


def branches(count: int, phase: Phase) -> Graph:
    """Branches that take turns: each widens the input to 1,000 bytes, then narrows it to 10; a last op joins them."""
    storages = [Storage(id=0, name="input", bytes=10, role=Role.INPUT)]
    ops: list[Op] = []

    def add(name: str, reads: tuple[int, ...], size_bytes: int, role: Role = Role.ACTIVATION) -> int:
        storages.append(Storage(id=len(storages), name=name, bytes=size_bytes, role=role))
        write = len(storages) - 1
        ops.append(Op(id=len(ops), name=name, phase=phase, reads=reads, writes=(write,), seconds=1.0))
        return write

    wide = [add(f"widen{number}", (0,), 1000) for number in range(count)]
    narrow = [add(f"narrow{number}", (storage,), 10) for number, storage in enumerate(wide)]
    add("join", tuple(narrow), 10, Role.OUTPUT)
    return Graph.build(name="branches", storages=storages, ops=ops)


def kept(graph: Graph, order: tuple[int, ...]) -> Evaluation:
    instance = build_instance(problem(graph), order)
    evaluation = evaluate(instance, simulated(instance, keep_everything(instance)))
    check(graph, emit(instance, evaluation.sequence))
    return evaluation


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_branches_are_computed_one_after_the_other(phase: Phase) -> None:
    graph = branches(4, phase)
    assert kept(graph, update_at_once_order(graph)).peak_bytes == 10 + 4 * 1000 + 10
    assert kept(graph, peak_reducing_order(graph, GENERIC)).peak_bytes == 10 + 1000 + 4 * 10


def test_search_computes_nothing_again_where_another_order_fits() -> None:
    result = SearchPlanner(iterations=1_000).plan(problem(branches(4, Phase.FORWARD), 1050))
    assert result.plan is not None
    assert result.status is Status.OPTIMAL
    assert result.plan.overhead == 0.0


def test_what_is_needed_late_is_computed_late() -> None:
    sizes = [10, 1000, 800, 10, 10]  # the input; what the last op wants; a branch that ends in little
    storages = [Storage(id=i, name=f"s{i}", bytes=size, role=Role.ACTIVATION) for i, size in enumerate(sizes)]
    storages[0] = Storage(id=0, name="input", bytes=10, role=Role.INPUT)
    reads, writes = [(0,), (0,), (2,), (1, 3)], [1, 2, 3, 4]
    ops = [
        Op(id=i, name=f"op{i}", phase=Phase.FORWARD, reads=read, writes=(write,), seconds=1.0)
        for i, (read, write) in enumerate(zip(reads, writes, strict=True))
    ]
    graph = Graph.build(name="late", storages=storages, ops=ops)
    assert peak_reducing_order(graph, GENERIC) == (1, 2, 0, 3)


def adding_up(steps: int) -> Graph:
    """As an unrolled recurrent network: each step's gradient of 50 bytes is added to those of later steps; what forward
    wrote takes 10 bytes a step, and what backward passes on takes one.
    """
    storages = [Storage(id=0, name="input", bytes=10, role=Role.INPUT, resident=True)]
    ops: list[Op] = []

    def add(name: str, phase: Phase, reads: tuple[int, ...], size_bytes: int, *, at_end: bool = False) -> int:
        number = len(storages)
        role = Role.ACTIVATION if phase is Phase.FORWARD else Role.GRADIENT
        storages.append(Storage(id=number, name=name, bytes=size_bytes, role=role, required_at_end=at_end))
        ops.append(Op(id=len(ops), name=name, phase=phase, reads=reads, writes=(number,), seconds=1.0))
        return number

    values = [0]
    for number in range(steps):
        values.append(add(f"f{number}", Phase.FORWARD, (values[-1],), 10))
    passed, total = values[-1], -1
    for number in reversed(range(steps)):
        passed = add(f"b{number}", Phase.BACKWARD, (values[number], values[number + 1], passed), 1)
        own = add(f"own{number}", Phase.BACKWARD, (passed,), 50)
        total = own if total < 0 else add(f"sum{number}", Phase.BACKWARD, (total, own), 50, at_end=number == 0)
    return Graph.build(name="adding up", storages=storages, ops=ops)


def test_gradients_that_add_up_may_wait_at_no_cost() -> None:
    graph = adding_up(12)
    instance = build_instance(problem(graph), original_order(graph))
    everything = keep_everything(instance)
    evaluation = evaluate(instance, simulated(instance, waiting(instance, everything, 50)))
    check(graph, emit(instance, evaluation.sequence))
    assert evaluation.seconds == len(graph.ops)
    assert evaluation.peak_bytes == 10 + 10 + 3 * 50  # the input, what backward passed on, two gradients and their sum
    assert evaluate(instance, simulated(instance, everything)).peak_bytes > 250


def test_what_a_waiting_op_alone_reads_waits_with_it_or_is_kept() -> None:
    graph = adding_up(12)
    instance = build_instance(problem(graph), original_order(graph))
    gaps, everything = instance.tables.intervals, keep_everything(instance)
    large = np.array([graph.storages[storage].bytes == 50 for storage in instance.storage_of])[gaps["storage"]]
    peaks: list[int] = []
    for leaves in (False, True):  # what is read from each step's own gradient on
        dropped = large & (gaps["end"] > gaps["start"] + 1) & (gaps["closed"] | leaves)
        release = np.where(dropped, gaps["start"], everything.release)
        hold = np.where(dropped, gaps["start"] + 1, everything.hold)
        evaluation = evaluate(instance, simulated(instance, Retention(release=release, hold=hold)))
        check(graph, emit(instance, evaluation.sequence))
        assert evaluation.seconds == len(graph.ops)
        peaks.append(evaluation.peak_bytes)
    assert peaks[0] > 12 * 50
    assert peaks[1] < 10 + 12 + 4 * 50


@given(graphs(most_ops=12, collectives=True))
def test_waiting_computes_nothing_twice(graph: Graph) -> None:
    instance = build_instance(problem(graph), update_at_once_order(graph))
    evaluation = evaluate(instance, simulated(instance, waiting(instance, keep_everything(instance), 1)))
    check(graph, emit(instance, evaluation.sequence))
    assert sorted(evaluation.sequence) == list(range(len(instance.op_at)))


@given(st.data())
def test_no_order_is_illegal_or_has_a_higher_peak(data: st.DataObject) -> None:
    graph = data.draw(graphs(most_ops=12))
    order = peak_reducing_order(graph, GENERIC)
    assert sorted(order) == list(range(len(graph.ops)))
    assert kept(graph, order).peak_bytes <= kept(graph, update_at_once_order(graph)).peak_bytes


class _Branches(torch.nn.Module):
    """Four branches whose wide activations are all computed before any of them is narrowed."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = torch.nn.ModuleList(torch.nn.Linear(16, 512) for _ in range(4))
        self.narrow = torch.nn.ModuleList(torch.nn.Linear(512, 16) for _ in range(4))
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        wide = [torch.relu(each(given)) for each in self.widen]
        return torch.stack([self.drop(each(hidden)) for each, hidden in zip(self.narrow, wide, strict=True)]).sum(0)


def test_a_step_whose_branches_moved_has_the_same_bits() -> None:
    torch.manual_seed(0)
    model = _Branches()
    batch = torch.randn(64, 16), torch.randn(64, 16)
    options = {"iterations": 20_000}
    step = memfit.fit(
        model, torch.nn.functional.mse_loss, batch, budget="70%", planner="search", options=options, verify=True
    )
    assert isinstance(step, memfit.PlannedStep)
    first = list(dict.fromkeys(int(line.split()[1]) for line in step.plan.schedule.lines() if "compute" in line))
    assert first != sorted(first)
