"""Every planner on graphs that are no networks: it answers with a legal plan within the budget, or says infeasible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import pytest
from chains import NO_LIMIT, chain, counted, problem

from memfit.checker import check
from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Status
from memfit.planners import PLANNERS, make_planner
from memfit.simulate import simulate


def graph_of(sizes: Sequence[int], ops: Sequence[tuple[Phase, tuple[int, ...], tuple[int, ...]]]) -> Graph:
    """Ops as (phase, reads, writes); storage 0 is the batch."""
    storages = [
        Storage(id=number, name=f"s{number}", bytes=size, role=Role.ACTIVATION if number else Role.INPUT)
        for number, size in enumerate(sizes)
    ]
    made = [
        Op(id=number, name=f"op{number}", phase=phase, reads=reads, writes=writes, seconds=1.0)
        for number, (phase, reads, writes) in enumerate(ops)
    ]
    return Graph.build(name="odd", storages=storages, ops=made)


def changed(graph: Graph, change: Callable[[Op], Op]) -> Graph:
    return Graph.build(name="odd", storages=graph.storages, ops=[change(op) for op in graph.ops])


def two_apart() -> Graph:
    """Two chains of one batch each that nothing connects."""
    one, other = chain(4, 100), chain(4, 1000)
    first_storage, first_op = len(one.storages), len(one.ops)
    storages = [
        msgspec.structs.replace(storage, id=storage.id + first_storage, name=f"other {storage.name}")
        for storage in other.storages
    ]
    ops = [
        msgspec.structs.replace(
            op,
            id=op.id + first_op,
            reads=tuple(s + first_storage for s in op.reads),
            writes=tuple(s + first_storage for s in op.writes),
        )
        for op in other.ops
    ]
    return Graph.build(name="odd", storages=[*one.storages, *storages], ops=[*one.ops, *ops])


def mutating() -> Graph:
    """A chain whose third op writes over the state that the first one reads."""
    graph = chain(6, 4096)
    state = Storage(id=len(graph.storages), name="state", bytes=4096, role=Role.STATE)

    def touch(op: Op) -> Op:
        if op.name not in ("f0", "f2"):
            return op
        return msgspec.structs.replace(op, reads=(*op.reads, state.id), mutates=(state.id,) if op.name == "f2" else ())

    return Graph.build(name="odd", storages=[*graph.storages, state], ops=[touch(op) for op in graph.ops])


F, B = Phase.FORWARD, Phase.BACKWARD
GRAPHS: dict[str, Callable[[], Graph]] = {
    "nothing": lambda: graph_of([64], []),
    "one forward op": lambda: graph_of([64, 64], [(F, (0,), (1,))]),
    "one backward op": lambda: graph_of([64, 64], [(B, (0,), (1,))]),
    "a chain of two": lambda: graph_of([64, 64, 64], [(F, (0,), (1,)), (B, (0, 1), (2,))]),
    "two apart": two_apart,
    "no bytes": lambda: chain(6, 0),
    "no seconds": lambda: changed(chain(6), lambda op: msgspec.structs.replace(op, seconds=0.0)),
    "workspaces only": lambda: changed(
        graph_of([64], [(F, (0,), ()), (F, (0,), ()), (B, (0,), ())]),
        lambda op: msgspec.structs.replace(op, workspace_bytes=1 << 20),
    ),
    "random": lambda: changed(chain(8), lambda op: msgspec.structs.replace(op, random="cpu" if op.id % 2 else None)),
    "computed once": lambda: changed(chain(8), lambda op: msgspec.structs.replace(op, recomputable=False)),
    "mutating": mutating,
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_answers(planner: str, name: str) -> None:
    graph = GRAPHS[name]()
    made = make_planner(planner, **counted(planner, 300))
    asked = problem(graph, NO_LIMIT)
    least = made.plan(asked).bounds.least_budget_found_bytes
    assert least is not None
    for budget_bytes in (NO_LIMIT, least, least - 1):
        result = made.plan(dataclasses.replace(asked, budget_bytes=budget_bytes))
        if result.plan is None:
            assert budget_bytes < least
            is_proved = budget_bytes < result.bounds.least_budget_bound_bytes
            assert result.status is (Status.INFEASIBLE if is_proved else Status.TIMED_OUT)
            continue
        check(graph, result.plan.schedule)
        peak_bytes = simulate(graph, result.plan.schedule, GENERIC).peak_bytes
        assert result.bounds.least_budget_bound_bytes <= peak_bytes <= budget_bytes
        assert result.plan.predicted.peak_bytes == peak_bytes
        assert 0.0 <= result.plan.overhead < len(graph.ops) + 1
