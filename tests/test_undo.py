"""The undo log: after every move, accepted or taken back, the state is that of a fresh simulation, in all fields."""

from __future__ import annotations

import random

import pytest
from chains import chain, network, problem
from devices import LINKED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retention_audit import audit
from strategies import graphs

from memfit.graph import Graph
from memfit.plan import Problem
from memfit.planners.engine.annealing.loop import anneal
from memfit.planners.engine.annealing.state import make_annealing_state
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.peak_reducing_order import peak_reducing_order
from memfit.planners.engine.retention import undo
from memfit.planners.engine.retention.decisions import Retention, held_bytes, keep_everything, simulated
from memfit.planners.engine.retention.instance import FREE, Instance, build_instance
from memfit.planners.engine.retention.live_bytes import settle_bytes
from memfit.planners.engine.retention.stages import change, settle
from memfit.planners.engine.retention.state import IncrementalState

NAMES = ("RETENTION", "HOLDING", "BEGINS", "WAITS", "ENTRIES", "INSERTED", "REMOVED", "LIVE", "WITHIN")


def instance_of(graph: Graph) -> Instance:
    task = Problem(graph=graph, device=LINKED, budget_bytes=1 << 40, host_budget_bytes=0)
    return build_instance(task, peak_reducing_order(graph, LINKED))


def make_move(instance: Instance, state: IncrementalState, pick: random.Random) -> bool:
    """Change the retention of up to three intervals; return whether the result is allowed."""
    intervals = instance.tables.intervals
    free = [number for number, rule in enumerate(intervals["rule"].tolist()) if rule == FREE]
    for interval in pick.sample(free, min(len(free), pick.randint(1, 3))):
        start, end = int(intervals["start"][interval]), int(intervals["end"][interval])
        release = pick.randint(start, end)
        change(instance.tables, state, interval, *pick.choice([(0, 0), (start, start + 1), (release, end)]))
    return settle(instance.tables, state) and settle_bytes(instance.tables, state)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=14), seed=st.integers(0, 1 << 30))
def test_every_move_of_a_random_graph_leaves_the_state_of_a_fresh_simulation(graph: Graph, seed: int) -> None:
    pick, instance = random.Random(seed), instance_of(graph)
    state = simulated(instance, keep_everything(instance))
    for _ in range(12):
        if make_move(instance, state, pick) and pick.random() < 0.5:
            undo.commit(state)
        else:
            undo.take_back(state)
        audit(instance.tables, state)
    retention = Retention(release=state.intervals["release"].copy(), hold=state.intervals["hold"].copy())
    assert held_bytes(state).tolist() == held_bytes(simulated(instance, retention)).tolist()


@pytest.mark.parametrize(
    "graph", [chain(90), network([100, 40, 70] * 12, [[n - 1, max(-1, n - 7)] for n in range(36)])]
)
def test_every_move_of_an_annealing_is_audited_and_leaves_the_state_of_a_fresh_simulation(graph: Graph) -> None:
    instance = build_instance(problem(graph, 900), update_at_once_order(graph))
    state, annealing = simulated(instance, keep_everything(instance)), make_annealing_state(instance, seed=1)
    mean_seconds = float(instance.tables.positions["seconds"].mean())
    annealing.totals["penalty"] = mean_seconds / (0.01 * instance.budget_bytes)
    annealing.totals["temperature"] = mean_seconds
    for _ in range(300):
        anneal(instance.tables, state, annealing, 1, 0.985)
        audit(instance.tables, state)
    assert 50 < annealing.totals["accepted"][0] < annealing.totals["tried"][0] - 50


@pytest.mark.parametrize("name", NAMES)
def test_an_inverse_that_is_left_out_is_found(name: str) -> None:
    """The rows of one kind are made rows of no kind before a move is taken back."""
    graph = network([100, 40, 70] * 4)
    instance = instance_of(graph)
    kind = getattr(undo, name)
    for seed in range(200):
        pick = random.Random(seed)
        state = simulated(instance, keep_everything(instance))
        for _ in range(3):
            (undo.commit if make_move(instance, state, pick) else undo.take_back)(state)
        make_move(instance, state, pick)
        rows = state.undo[: int(state.totals["undo_count"][0])]
        rows["kind"][rows["kind"] == kind] = -1
        undo.take_back(state)
        try:
            audit(instance.tables, state)
        except AssertionError as error:
            assert "differ" in str(error)
            return
    pytest.fail(f"no move needs the inverse of {name}")
