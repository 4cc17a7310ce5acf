"""The model of torch's CUDA allocator: each rule by hand, invariants on random traces, and torch's own counters."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.simulate.allocator_trace import Event, EventKind, replay
from memfit.simulate.cuda_allocator import AllocatorSettings, CachingAllocator
from memfit.system.files import read_bytes

KIB, MIB = 1 << 10, 1 << 20
DATA = Path(__file__).parent / "data/cuda_allocator.json.gz"
GOLDEN: dict[str, Any] = json.loads(read_bytes(DATA))
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def allocate(block: int, size_bytes: int, stream: int = 0) -> Event:
    return Event(EventKind.ALLOCATE, block, size_bytes, stream)


def free(block: int) -> Event:
    return Event(EventKind.FREE, block)


def reserved_mib(events: list[Event], settings: AllocatorSettings | None = None) -> list[float]:
    return [each / MIB for each in replay(events, settings).reserved_bytes.tolist()]


def test_requests_are_rounded_up_to_512_bytes() -> None:
    assert replay([allocate(0, 1), allocate(1, 513)]).allocated_bytes.tolist() == [512, 1536]


def test_a_request_of_no_bytes_takes_none() -> None:
    assert replay([allocate(0, 0), free(0)]).reserved_bytes.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("size_bytes", "segment_mib"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
)
def test_segments_by_the_size_of_the_request(size_bytes: int, segment_mib: int) -> None:
    assert reserved_mib([allocate(0, size_bytes)]) == [segment_mib]


def test_small_and_large_requests_and_streams_have_pools_of_their_own() -> None:
    assert reserved_mib([allocate(0, 2 * MIB), allocate(1, KIB)]) == [20, 22]
    assert reserved_mib([allocate(0, 2 * MIB), free(0), allocate(1, 2 * MIB, stream=1)]) == [20, 20, 40]


def test_the_smallest_free_block_that_fits_serves() -> None:
    made = [allocate(0, 40 * MIB), allocate(1, 30 * MIB), free(0), free(1)]
    assert reserved_mib([*made, allocate(2, 29 * MIB), allocate(3, 40 * MIB)])[-1] == 70


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE])
def test_of_equal_blocks_the_lowest_address_serves(settings: AllocatorSettings) -> None:
    allocator = CachingAllocator(settings)
    for name in range(6):
        allocator.allocate(name, 12 * MIB)
    addresses = allocator.addresses()
    for name in (4, 0, 2):  # apart: they do not merge
        allocator.free(name)
    allocator.allocate(6, 12 * MIB)
    assert allocator.addresses()[6] == addresses[0]


def test_a_large_block_is_split_if_more_than_a_mebibyte_remains() -> None:
    for left, held in ((MIB, 14 * MIB), (MIB + 512, 13 * MIB - 512)):  # of a segment of 14 MiB
        assert replay([allocate(0, 14 * MIB - left)]).allocated_bytes[0] == held


def test_a_small_block_is_split_wherever_512_bytes_remain() -> None:
    assert replay([allocate(0, MIB), allocate(1, MIB - 512), allocate(2, 512)]).reserved_bytes[-1] == 2 * MIB


def test_free_neighbours_merge() -> None:
    parts = [allocate(number, 5 * MIB) for number in range(4)]
    frees = [free(1), free(3), free(2)]
    assert reserved_mib([*parts, *frees, allocate(4, 15 * MIB)])[-1] == 20


def test_a_block_used_by_another_stream_is_free_when_that_has_come_so_far() -> None:
    used = [allocate(0, 12 * MIB), Event(EventKind.USE, 0, stream=1), free(0)]
    assert replay(used).allocated_bytes[-1] == 0
    assert reserved_mib([*used, allocate(1, 12 * MIB)])[-1] == 24
    assert reserved_mib([*used, Event(EventKind.FINISH, stream=1), allocate(1, 12 * MIB)])[-1] == 12
    assert (
        reserved_mib([allocate(0, 12 * MIB), Event(EventKind.USE, 0, stream=0), free(0), allocate(1, 12 * MIB)])[-1]
        == 12
    )


def test_emptying_the_cache_returns_whole_segments_only() -> None:
    trace = [
        allocate(0, 5 * MIB),
        allocate(1, 5 * MIB),
        allocate(2, 30 * MIB),
        free(0),
        free(2),
        Event(EventKind.EMPTY),
    ]
    assert reserved_mib(trace)[-1] == 20


@pytest.mark.parametrize(
    "settings", [AllocatorSettings(capacity_bytes=40 * MIB), AllocatorSettings(allowed_bytes=40 * MIB)]
)
def test_a_full_device_returns_what_is_free_and_tries_again(settings: AllocatorSettings) -> None:
    trace = [allocate(0, 30 * MIB), free(0), allocate(1, 36 * MIB), allocate(2, 6 * MIB), allocate(3, 1)]
    found = replay(trace, settings)
    assert [each // MIB for each in found.reserved_bytes.tolist()] == [30, 30, 36, 36, 38]
    assert found.refused == (3,)


def test_blocks_too_large_to_split_serve_only_what_is_nearly_as_large() -> None:
    settings = AllocatorSettings(max_split_bytes=32 * MIB)
    trace = [allocate(0, 64 * MIB), free(0), allocate(1, 12 * MIB), allocate(2, 40 * MIB), allocate(3, 50 * MIB)]
    assert reserved_mib(trace, settings) == [64, 64, 76, 116, 116]


def test_an_expandable_segment_grows_by_pages_where_its_end_is_free() -> None:
    trace = [allocate(0, 15 * MIB), allocate(1, 15 * MIB), free(1), allocate(2, 44 * MIB), allocate(3, 512)]
    assert reserved_mib(trace, EXPANDABLE) == [20, 40, 40, 60, 62]
    assert replay(trace, EXPANDABLE).segments.tolist() == [0] * 5


def test_an_expandable_segment_gives_back_whole_pages() -> None:
    trace = [allocate(0, 15 * MIB), allocate(1, 40 * MIB), allocate(2, 1 * MIB + 1), free(1), Event(EventKind.EMPTY)]
    assert reserved_mib(trace, EXPANDABLE) == [20, 60, 60, 60, 40]  # the second page lies in the free block


def test_pages_given_back_are_filled_first() -> None:
    first = [allocate(0, 20 * MIB), allocate(1, 20 * MIB), allocate(2, 20 * MIB), free(1), Event(EventKind.EMPTY)]
    assert reserved_mib([*first, allocate(3, 19 * MIB), allocate(4, 2 * MIB)], EXPANDABLE)[-3:] == [40, 60, 80]


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    sizes = st.one_of(st.integers(1, 3 * KIB), st.integers(MIB - 2, 3 * MIB), st.integers(9 * MIB, 24 * MIB))
    events: list[Event] = []
    alive: list[int] = []
    for block in range(draw(st.integers(1, 30))):
        events.append(allocate(block, draw(sizes), draw(st.integers(0, 1))))
        alive.append(block)
        while alive and draw(st.booleans()):
            freed = alive.pop(draw(st.integers(0, len(alive) - 1)))
            if draw(st.integers(0, 4)) == 0:
                events.append(Event(EventKind.USE, freed, stream=draw(st.integers(0, 2))))
            events.append(free(freed))
        if draw(st.integers(0, 9)) == 0:
            events.append(Event(EventKind.FINISH, stream=draw(st.integers(0, 2))))
    return events


@given(traces(), st.booleans())
def test_reserved_only_grows_on_a_device_without_end(events: list[Event], expandable: bool) -> None:
    found = replay(events, AllocatorSettings(expandable_segments=expandable))
    assert not found.refused
    assert (found.reserved_bytes >= found.allocated_bytes).all()
    assert (found.reserved_bytes[1:] >= found.reserved_bytes[:-1]).all()
    assert (found.segments[1:] >= found.segments[:-1]).all()


@given(traces(), st.booleans(), st.integers(2, 60))
def test_reserved_stays_under_a_cap_and_all_comes_back(events: list[Event], expandable: bool, mebibytes: int) -> None:
    settings = AllocatorSettings(expandable_segments=expandable, capacity_bytes=mebibytes * MIB)
    found = replay(events, settings)
    assert found.reserved_bytes.max() <= mebibytes * MIB
    blocks = [event.block for event in events if event.kind == EventKind.ALLOCATE]
    emptied = replay([*events, *(free(block) for block in blocks), Event(EventKind.EMPTY)], settings)
    assert (emptied.allocated_bytes[-1], emptied.reserved_bytes[-1], emptied.segments[-1]) == (0, 0, 0)


@given(traces(), st.booleans())
def test_blocks_do_not_overlap(events: list[Event], expandable: bool) -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable))
    for kind, block, size_bytes, stream in events:
        if kind == EventKind.ALLOCATE:
            assert allocator.allocate(block, size_bytes, stream)
        elif kind == EventKind.FREE:
            allocator.free(block)
        elif kind == EventKind.USE:
            allocator.use(block, stream)
        else:
            allocator.finish(stream)
        blocks = sorted(allocator.addresses().values())
        assert all(left + size <= right for (left, size), (right, _) in pairwise(blocks))
        assert sum(size for _, size in blocks) == allocator.allocated_bytes


@pytest.mark.parametrize("number", range(len(GOLDEN["traces"])))
def test_the_model_equals_torch_after_every_event(number: int) -> None:
    trace = GOLDEN["traces"][number]
    events = [Event(EventKind(kind), *rest) for kind, *rest in trace["events"]]
    found = replay(events, AllocatorSettings(**trace["settings"]))
    rows = zip(found.allocated_bytes.tolist(), found.reserved_bytes.tolist(), found.segments.tolist(), strict=True)
    assert [list(row) for row in rows] == trace["rows"]
    assert list(found.refused) == trace["refused"]


def test_the_stored_traces_reach_every_rule() -> None:
    kinds = {event[0] for trace in GOLDEN["traces"] for event in trace["events"]}
    assert kinds == set(EventKind)
    refused = {trace["settings"]["expandable_segments"] for trace in GOLDEN["traces"] if trace["refused"]}
    assert refused == {False, True}
