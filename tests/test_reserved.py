"""What torch's allocator takes for a schedule: the simulator's live bytes, in blocks; one step and the next."""

from __future__ import annotations

import msgspec
from devices import linked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import graphs, legal_schedules

from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.schedule import Schedule
from memfit.simulate import simulate
from memfit.simulate.allocator_trace import EventKind, replay
from memfit.simulate.cuda_allocator import AllocatorSettings
from memfit.simulate.reserved import reserved, schedule_events

MIB = 1 << 20
BLOCKS_OF_512 = linked(1000.0, 700.0, alignment_bytes=512)


def graph_of(sizes: list[int], reads: list[tuple[int, ...]], workspaces: list[int] | None = None) -> Graph:
    """The first size is a resident's; each op writes the next storage. The last one is the output."""
    roles = [Role.INPUT, *[Role.ACTIVATION] * (len(sizes) - 2), Role.OUTPUT]
    held = workspaces or [0] * len(reads)
    return Graph.build(
        name="made",
        storages=[
            Storage(id=i, name=f"s{i}", bytes=b, role=r) for i, (b, r) in enumerate(zip(sizes, roles, strict=True))
        ],
        ops=[
            Op(
                id=i,
                name=f"op{i}",
                phase=Phase.FORWARD,
                reads=read,
                writes=(i + 1,),
                seconds=0.0,
                workspace_bytes=held[i],
            )
            for i, read in enumerate(reads)
        ],
    )


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_allocated_bytes_are_the_simulated_ones_with_whole_blocks(data: st.DataObject) -> None:
    made = data.draw(graphs(most_ops=12))
    graph = Graph.build(
        name=made.name,
        storages=made.storages,
        ops=[msgspec.structs.replace(op, workspace_bytes=0) for op in made.ops],
        boundaries=made.boundaries,
        device=made.device,
    )
    drawn = data.draw(legal_schedules(graph))
    schedule = Schedule.parse([line.split(" bytes_outside")[0] for line in drawn.lines()])
    events, begins = schedule_events(graph, schedule, steps=2)
    held = [0, *replay(events).allocated_bytes.tolist()]
    peaks = [max(held[first:end]) for first, end in ((begins[0], begins[1] + 1), (begins[1], len(held)))]
    assert not len(schedule) or peaks == [simulate(graph, schedule, BLOCKS_OF_512).peak_bytes] * 2


def test_residents_come_first_and_stay() -> None:
    graph = graph_of([3 * MIB, 11 * MIB, 12 * MIB], [(0,), (1,)])
    found = reserved(graph, Schedule.parse(["compute 0", "compute 1", "drop 1"]))
    # The 11 MiB lie beside the resident first, and from the second step on in the output's 12 MiB, which are not split.
    assert (found.resident_bytes, found.allocated_peak_bytes) == (20 * MIB, 27 * MIB)
    assert found.step_peaks_bytes == (32 * MIB, 32 * MIB, 32 * MIB)
    assert (found.peak_bytes, found.fragmentation_bytes) == (32 * MIB, 5 * MIB)


def test_a_workspace_is_freed_with_its_op() -> None:
    graph = graph_of([512, 11 * MIB, 12 * MIB], [(0,), (1,)], workspaces=[12 * MIB, 0])
    found = reserved(graph, Schedule.parse(["compute 0", "compute 1", "drop 1"]))
    assert found.peak_bytes == (2 + 12 + 12) * MIB  # the output lies where the workspace was


def test_memory_reused_in_place_is_one_block() -> None:
    graph = Graph.build(
        name="in place",
        storages=[
            Storage(id=i, name=str(i), bytes=11 * MIB, role=r)
            for i, r in enumerate((Role.INPUT, Role.ACTIVATION, Role.OUTPUT))
        ],
        ops=[
            Op(id=0, name="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=0.0),
            Op(id=1, name="g", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=0.0, reuses=((1, 2),)),
        ],
    )
    events, _ = schedule_events(graph, Schedule.parse(["compute 0", "compute 1 in_place_of 1"]))
    assert [event.kind for event in events] == [EventKind.ALLOCATE, EventKind.ALLOCATE, EventKind.FREE]
    assert reserved(graph, Schedule.parse(["compute 0", "compute 1 in_place_of 1"])).peak_bytes == 24 * MIB


def test_a_later_step_may_take_more() -> None:
    graph = graph_of([512, 30 * MIB, 12 * MIB, 24 * MIB, 30 * MIB], [(0,)] * 4)
    schedule = ["compute 0", "drop 1", "compute 1", "compute 2", "drop 2", "compute 3", "drop 3"]
    # First the 12 MiB split the 30, and the 24 have a segment; then they split the 24, and the 24 take the 30.
    assert reserved(graph, Schedule.parse(schedule)).step_peaks_bytes == (56 * MIB, 86 * MIB, 86 * MIB)


def test_what_a_cap_refuses_is_said() -> None:
    graph = graph_of([512, 30 * MIB, 30 * MIB], [(0,), (1,)])
    schedule = Schedule.parse(["compute 0", "compute 1", "drop 1"])
    assert reserved(graph, schedule, AllocatorSettings(allowed_bytes=40 * MIB)).is_refused
    assert not reserved(graph, schedule, AllocatorSettings(allowed_bytes=62 * MIB)).is_refused


def test_what_others_hold_shares_pages_but_no_segments() -> None:
    graph = graph_of([12 * MIB, 512, 512], [(0,), (1,)])
    schedule = Schedule.parse(["compute 0", "compute 1", "drop 1"])

    def peak_mib(*, expandable: bool) -> float:
        settings = AllocatorSettings(expandable_segments=expandable)
        return reserved(graph, schedule, settings, arena_bytes=18 * MIB, outside_bytes=9 * MIB).peak_bytes / MIB

    assert peak_mib(expandable=True) == 2 * 20 + 2  # 12, 9 and 18 MiB lie in two pages, and small blocks in another
    assert peak_mib(expandable=False) == 12 + 18 + 2 + 9
