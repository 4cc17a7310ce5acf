"""Live ranges: the bytes of the simulator at every instruction, the reads of the reference, memory reused in place."""

from __future__ import annotations

import numpy as np
from devices import LINKED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Reference
from strategies import graphs, legal_schedules

from memfit.checker import check
from memfit.graph import Graph
from memfit.schedule import Compute, CrossBoundary, Schedule
from memfit.simulate import simulate
from memfit.simulate.live_ranges import LiveRanges, live_ranges


def bytes_of(graph: Graph, schedule: Schedule, found: LiveRanges) -> list[int]:
    """Return the bytes on the device at each instruction, added up from live ranges."""
    size = [LINKED.aligned(storage.bytes) for storage in graph.storages]
    held = np.zeros(len(schedule), np.int64)
    for stay in found.ranges:
        held[stay.first : stay.last] += size[stay.storage]
    for position, storage in found.second_copies:
        held[position] += size[storage]
    for position, op in found.workspaces:
        held[position] += graph.ops[op].workspace_bytes or 0
    for position, instruction in enumerate(schedule):
        if isinstance(instruction, CrossBoundary):
            held[position:] += instruction.bytes_outside
    return held.tolist()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_live_ranges_add_up_to_the_simulated_bytes(data: st.DataObject) -> None:
    graph = data.draw(graphs(most_ops=12))
    schedule = data.draw(legal_schedules(graph))
    check(graph, schedule)
    found = live_ranges(graph, schedule)
    assert bytes_of(graph, schedule, found) == simulate(graph, schedule, LINKED).device_bytes.tolist()
    assert [stay.first for stay in found.ranges] == sorted(stay.first for stay in found.ranges)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_live_ranges_hold_what_the_reference_holds_and_reads(data: st.DataObject) -> None:
    graph = data.draw(graphs(most_ops=12))
    schedule = data.draw(legal_schedules(graph))
    found, reference = live_ranges(graph, schedule), Reference(graph, LINKED)
    for position, instruction in enumerate(schedule):
        if isinstance(instruction, Compute):
            op = graph.ops[instruction.op]
            assert {s.storage for s in found.ranges if position in s.reads} == {*op.reads, *op.mutates}
            assert {s.storage for s in found.ranges if position in s.mutations} == set(op.mutates)
            second_copies = {storage for place, storage in found.second_copies if place == position}
            assert second_copies == reference.versions.keys() & set(op.writes)
        reference.run(instruction)
        live = [stay.storage for stay in found.ranges if stay.first <= position < stay.last]
        assert sorted(live) == sorted(reference.versions)
    assert {s.storage for s in found.ranges if s.departed_at is not None} == reference.users


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_memory_reused_in_place_passes_from_one_range_to_the_next(data: st.DataObject) -> None:
    graph = data.draw(graphs(most_ops=12))
    schedule = data.draw(legal_schedules(graph))
    found = live_ranges(graph, schedule).ranges
    reused = {stay.first: found[stay.memory_of].storage for stay in found if stay.memory_of is not None}
    asked = {p: each.in_place_of for p, each in enumerate(schedule) if isinstance(each, Compute)}
    assert reused == {position: storage for position, storage in asked.items() if storage is not None}
    for stay in found:
        if stay.memory_of is not None:
            before = found[stay.memory_of]
            assert before.last == stay.first
            op = graph.ops[int(schedule.operands[stay.first])]
            assert (before.storage, stay.storage) in op.reuses
