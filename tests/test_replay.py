"""Checker and simulator against the plain reference, on random graphs and schedules."""

from __future__ import annotations

import numpy as np
import pytest
from devices import LINKED
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference, first_illegal
from strategies import broken_schedules, graphs, legal_schedules

from memfit.checker import check
from memfit.errors import InvalidScheduleError
from memfit.schedule import Schedule
from memfit.simulate import simulate


@given(st.data())
@settings(max_examples=300)
def test_legal_schedules_pass_and_give_the_reference_timeline(data: st.DataObject) -> None:
    graph = data.draw(graphs(collectives=True))
    schedule = data.draw(legal_schedules(graph))
    check(graph, schedule)
    timeline = simulate(graph, schedule, LINKED)
    reference = Reference(graph, LINKED)
    for instruction in schedule:
        reference.run(instruction)
    starts, ends, device_bytes, host_bytes = zip(*reference.rows, strict=True)
    assert timeline.device_bytes.tolist() == list(device_bytes)
    assert timeline.host_bytes.tolist() == list(host_bytes)
    np.testing.assert_allclose(timeline.start_seconds, starts)
    np.testing.assert_allclose(timeline.end_seconds, ends)
    assert timeline.peak_bytes == max(device_bytes)
    assert timeline.peak_position == device_bytes.index(max(device_bytes))
    assert timeline.host_peak_bytes == max(host_bytes)
    assert timeline.makespan_seconds == pytest.approx(max(*reference.clocks, reference.sent))
    work = sum(graph.ops[op].compute_seconds for op in reference.computed)
    sent = sum(graph.ops[op].seconds for op in reference.computed) - work
    assert timeline.busy_seconds.get("communication", 0.0) == pytest.approx(sent)
    assert timeline.busy_seconds["compute"] == pytest.approx(work)
    assert timeline.stall_seconds == pytest.approx(reference.clocks[0] - work)


@given(st.data())
@settings(max_examples=600)
def test_broken_schedules_fail_where_the_reference_fails(data: st.DataObject) -> None:
    graph = data.draw(graphs(collectives=True))
    schedule = data.draw(broken_schedules(graph))
    illegal = first_illegal(graph, schedule, LINKED)
    if illegal is None:
        check(graph, schedule)
        simulate(graph, schedule, LINKED)
        return
    place = illegal if isinstance(illegal, str) else f"instruction {illegal} "
    with pytest.raises(InvalidScheduleError, match=f"^{place}"):
        check(graph, schedule)
    try:
        simulate(graph, schedule, LINKED)
    except InvalidScheduleError as error:
        # The simulator takes more on trust, but what it refuses is illegal, there or before.
        assert isinstance(illegal, str) or int(str(error).split()[1]) >= illegal


@given(st.data())
@settings(max_examples=200)
def test_text_round_trip(data: st.DataObject) -> None:
    graph = data.draw(graphs(collectives=True))
    schedule = data.draw(legal_schedules(graph))
    noted = [f"{line}  # {line}, again" for line in schedule.lines()]
    assert type(schedule).parse(noted) == schedule


@given(st.data())
@settings(max_examples=200)
def test_arrays_of_anything_are_simulated_or_refused(data: st.DataObject) -> None:
    graph = data.draw(graphs(collectives=True))
    count = data.draw(st.integers(0, 12))

    def column(least: int, most: int, kind: type[np.integer]) -> np.ndarray:
        near = st.integers(-2, 12)
        return np.array([data.draw(near | st.integers(least, most)) for _ in range(count)], kind)

    codes, operands = column(-128, 127, np.int8), column(-(1 << 31), (1 << 31) - 1, np.int32)
    schedule = Schedule(codes, operands, column(-(1 << 63), (1 << 63) - 1, np.int64))
    try:
        check(graph, schedule)
    except InvalidScheduleError as error:
        assert len(str(error)) < 500
    else:
        assert first_illegal(graph, schedule, LINKED) is None
    try:
        timeline = simulate(graph, schedule, LINKED)
    except InvalidScheduleError as error:
        assert len(str(error)) < 500
    else:
        assert timeline.device_bytes.min(initial=0) >= 0
