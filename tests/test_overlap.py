"""Copies beside compute: what a simulated schedule says, and how measured spans are counted."""

from __future__ import annotations

import pytest
from devices import LINKED
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs

from memfit.checker import check
from memfit.graph import Graph
from memfit.plan import Problem
from memfit.planners.engine.overlapping import with_overlap
from memfit.planners.engine.results import keeping_schedule, unplanned_peak_bytes
from memfit.planners.offload import OffloadPlanner
from memfit.simulate import simulate
from memfit.simulate.overlap import Transfers, simulated_transfers


def test_overlap_is_copying_without_waiting() -> None:
    transfers = Transfers(to_host=((0.0, 4.0),), to_device=((3.0, 6.0), (8.0, 9.0)), stalls=((2.0, 3.5), (8.5, 10.0)))
    assert transfers.stall_seconds == 3.0
    assert transfers.overlap_seconds == pytest.approx(2.0 + 2.5 + 0.5)
    assert Transfers().overlap_seconds == Transfers().stall_seconds == 0.0


@given(graphs(collectives=True))
def test_what_is_simulated_adds_up(graph: Graph) -> None:
    task = Problem(
        graph=graph,
        device=LINKED,
        budget_bytes=int(0.8 * unplanned_peak_bytes(graph, LINKED)),
        host_budget_bytes=1 << 40,
    )
    plan = OffloadPlanner(iterations=200, rematerialize=False).plan(task).plan
    if plan is None:
        return
    timeline = simulate(graph, plan.schedule, LINKED)
    transfers = simulated_transfers(timeline, plan.graph, plan.schedule)
    assert transfers.stall_seconds == pytest.approx(timeline.stall_seconds)
    for name, spans in (("to_host", transfers.to_host), ("to_device", transfers.to_device)):
        assert sum(end - start for start, end in spans) == pytest.approx(timeline.busy_seconds[name])
    assert 0 <= transfers.overlap_seconds <= timeline.makespan_seconds * (1 + 1e-9)


@settings(max_examples=300)
@given(graphs(most_ops=12, collectives=True), st.booleans())
def test_collectives_beside_compute_are_legal_within_the_budget_and_no_slower(graph: Graph, at_its_peak: bool) -> None:
    plain = keeping_schedule(Problem(graph=graph, device=LINKED, budget_bytes=0))
    before = simulate(graph, plain, LINKED)
    schedule = with_overlap(graph, LINKED, plain, before.peak_bytes if at_its_peak else None)
    check(graph, schedule)
    after = simulate(graph, schedule, LINKED)
    assert after.makespan_seconds <= before.makespan_seconds
    assert not at_its_peak or after.peak_bytes <= before.peak_bytes
