"""The strategies of the memory cost tool: apart, in place, shared; on the note's examples, and against the checker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs, legal_schedules

from memfit.checker import check
from memfit.cli import main
from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.packing.strategies import strategy_bytes
from memfit.plan import Problem
from memfit.planners.engine.results import unplanned_schedule
from memfit.schedule import Schedule
from memfit.simulate import simulate
from memfit.simulate.in_place import apart, in_place

SIZE = 100


def sigmoids(*, trap: bool) -> Graph:
    """Three sigmoids in a row, each may be written over its input; with the trap, F needs B as well as C does."""
    names = ["A", "B", "C", "D"] + (["F"] if trap else [])
    storages = [Storage(id=0, name="x", bytes=SIZE, role=Role.INPUT)]
    storages += [Storage(id=i, name=name, bytes=SIZE, role=Role.ACTIVATION) for i, name in enumerate(names, start=1)]
    reads = [(0,), (1,), (2,), (3,), (2, 4)]
    ops = [
        Op(
            id=i,
            name=name,
            phase=Phase.FORWARD,
            reads=reads[i],
            writes=(i + 1,),
            seconds=0.0,
            reuses=() if i == 0 else ((reads[i][0], i + 1),),
        )
        for i, name in enumerate(names)
    ]
    return Graph.build(name="sigmoids", storages=storages, ops=ops)


def test_a_chain_of_sigmoids_takes_one_storage() -> None:
    schedule = Schedule.parse(
        ["compute 0", "compute 1", "drop 1", "compute 2", "drop 2", "compute 3", "drop 3", "drop 4"]
    )
    placed = in_place(sigmoids(trap=False), schedule)
    assert placed.lines() == [
        "compute 0",
        "compute 1 in_place_of 1",
        "compute 2 in_place_of 2",
        "compute 3 in_place_of 3",
        "drop 4",
    ]
    needs = strategy_bytes(sigmoids(trap=False), schedule, GENERIC)
    assert needs == {"none": 5 * SIZE, "inplace": 2 * SIZE, "sharing": 2 * SIZE}


def test_the_trap_is_not_stepped_into() -> None:
    """B is still needed by F after C = sigmoid(B), so that C is not written over B; F then is."""
    lines = ["compute 0", "compute 1", "drop 1", "compute 2", "compute 3", "drop 3", "compute 4", "drop 2", "drop 4"]
    placed = in_place(sigmoids(trap=True), Schedule.parse([*lines, "drop 5"]))
    assert placed.lines()[2] == "compute 2"
    assert placed.lines()[4] == "compute 4 in_place_of 2"
    needs = strategy_bytes(sigmoids(trap=True), Schedule.parse([*lines, "drop 5"]), GENERIC)
    assert needs == {"none": 6 * SIZE, "inplace": 3 * SIZE, "sharing": 3 * SIZE}


def two_inputs(*, mutates: tuple[int, ...] = ()) -> Graph:
    """An op that may write over either of two inputs, the second of which is larger, each for a result of its size."""
    sizes = {"x": SIZE, "small": SIZE, "large": 2 * SIZE, "one": SIZE, "two": 2 * SIZE}
    storages = [
        Storage(id=i, name=name, bytes=size, role=Role.ACTIVATION if i else Role.INPUT)
        for i, (name, size) in enumerate(sizes.items())
    ]
    both = Op(
        id=2, name="both", phase=Phase.FORWARD, reads=(1, 2), writes=(3, 4), mutates=mutates, seconds=0.0,
        reuses=((1, 3), (2, 4)),
    )  # fmt: skip
    ops = [Op(id=i, name=f"op{i}", phase=Phase.FORWARD, reads=(0,), writes=(i + 1,), seconds=0.0) for i in range(2)]
    return Graph.build(name="two inputs", storages=storages, ops=[*ops, both])


def test_the_notes_perceptron_takes_three_areas() -> None:
    """Its figure of a two-layer perceptron: act1, d(fc1), out and d(fc2) in place; d(act1) and d(A) share memory."""
    names = ["A", "fc1", "act1", "fc2", "out", "d(fc2)", "d(W2)", "d(act1)", "d(fc1)", "d(W1)", "d(A)"]
    number = {name: at for at, name in enumerate(names)}
    weights = ("d(W2)", "d(W1)")
    storages = [
        Storage(
            id=at,
            name=name,
            bytes=SIZE,
            role=Role.INPUT if name == "A" else Role.GRADIENT if name.startswith("d(") else Role.ACTIVATION,
            required_at_end=name in weights,
        )
        for at, name in enumerate(names)
    ]
    reads = {
        "fc1": ("A",),
        "act1": ("fc1",),
        "fc2": ("act1",),
        "out": ("fc2",),
        "d(fc2)": ("out",),
        "d(W2)": ("d(fc2)", "act1"),
        "d(act1)": ("d(fc2)",),
        "d(fc1)": ("d(act1)", "act1"),
        "d(W1)": ("d(fc1)", "A"),
        "d(A)": ("d(fc1)",),
    }
    over = {"act1": "fc1", "out": "fc2", "d(fc2)": "out", "d(fc1)": "act1"}
    ops = [
        Op(
            id=at,
            name=name,
            phase=Phase.BACKWARD if name.startswith("d(") else Phase.FORWARD,
            reads=tuple(number[each] for each in reads[name]),
            writes=(number[name],),
            seconds=0.0,
            reuses=((number[over[name]], number[name]),) if name in over else (),
        )
        for at, name in enumerate(reads)
    ]
    graph = Graph.build(name="perceptron", storages=storages, ops=ops)
    schedule = unplanned_schedule(Problem(graph=graph, device=GENERIC, budget_bytes=0))
    placed = in_place(graph, schedule)
    check(graph, placed)
    reused = {line.split()[1]: line.split()[3] for line in placed.lines() if "in_place_of" in line}
    assert {ops[int(op)].name: names[int(storage)] for op, storage in reused.items()} == over
    beside = 1 + len(weights)  # what comes in and goes out
    needs = strategy_bytes(graph, schedule, GENERIC)
    assert needs == {"none": (8 + beside) * SIZE, "inplace": (4 + beside) * SIZE, "sharing": (3 + beside) * SIZE}


def test_of_two_that_die_the_larger_is_taken_over() -> None:
    schedule = Schedule.parse(["compute 0", "compute 1", "compute 2", "drop 1", "drop 2"])
    placed = in_place(two_inputs(), schedule)
    assert placed.lines() == ["compute 0", "compute 1", "compute 2 in_place_of 2", "drop 1"]
    check(two_inputs(), placed)


def test_what_is_there_already_takes_nothing_over() -> None:
    """The second copy of what the larger could be written over for is not wanted: the smaller one is."""
    lines = ["compute 0", "compute 1", "compute 2", "drop 3", "compute 2", "drop 1", "drop 2"]
    placed = in_place(two_inputs(), Schedule.parse(lines))
    assert placed.lines()[4:] == ["compute 2 in_place_of 1", "drop 2"]
    check(two_inputs(), placed)


def test_what_an_op_mutates_is_not_taken_over() -> None:
    schedule = Schedule.parse(["compute 0", "compute 1", "compute 2", "drop 1", "drop 2"])
    assert in_place(two_inputs(mutates=(2,)), schedule) == schedule


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_in_place_is_legal_and_never_costs(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = data.draw(legal_schedules(graph))
    try:
        schedule = apart(schedule)
        check(graph, schedule)
    except ValueError:
        return  # an input that was to be dropped or offloaded meanwhile
    placed = in_place(graph, schedule)
    check(graph, placed)
    device = GENERIC
    if not any(line.startswith(("offload", "prefetch")) for line in schedule.lines()):
        assert simulate(graph, placed, device).peak_bytes <= simulate(graph, schedule, device).peak_bytes


def test_estimate_says_what_each_strategy_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sigmoids.graph.json"
    sigmoids(trap=False).save(path)
    assert main(["estimate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategies"] == {"none": 500, "inplace": 200, "sharing": 200}
    assert main(["estimate", str(path), "--strategy", "sharing", "--forward-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategies"] == {"sharing": 200}
    assert main(["estimate", str(path)]) == 0
    assert "and shared, packed" in capsys.readouterr().out
    assert main(["estimate", str(path), "--strategy", "free"]) == 2
    assert "expected one of none, inplace, sharing" in capsys.readouterr().err
