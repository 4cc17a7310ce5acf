"""The simulator, on cases solved by hand; `test_replay.py` compares it with a reference on random ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices import linked
from small_step import KEEP_EVERYTHING, small_step

from memfit.checker import check
from memfit.device import GENERIC, Device
from memfit.errors import InvalidDeviceError, InvalidGraphError, InvalidScheduleError
from memfit.graph import Boundary, Graph, Op, Phase, Role, Storage
from memfit.plan import Problem
from memfit.planners.engine.bounds.bounds import Proofs, prove_bounds
from memfit.planners.engine.bounds.minimum_cuts import Bound
from memfit.planners.engine.retention.emit import with_early_collectives
from memfit.schedule import Compute, Drop, Schedule
from memfit.simulate import Timeline, arrays_of, simulate

# 64 bytes take 2 s to the host and 4 s back.
SLOW_LINK = linked(32.0, 16.0)
FORWARD = Phase.FORWARD


def run(lines: str, graph: Graph | None = None, device: Device = SLOW_LINK) -> Timeline:
    graph = graph or small_step()
    return simulate(graph, Schedule.parse(lines.split("; ")), device)


def times(timeline: Timeline) -> list[tuple[float, float]]:
    return list(zip(timeline.start_seconds.tolist(), timeline.end_seconds.tolist(), strict=True))


def test_keep_everything() -> None:
    timeline = run("; ".join(KEEP_EVERYTHING))
    # residents 300; then conv 64 and 50 of workspace; relu 64; mask 16 and dropout 64; noise 8; nothing; loss 4;
    # the tangent 4 arrives; gradient 200; reduced 200; nothing
    assert timeline.device_bytes.tolist() == [414, 428, 508, 516, 516, 520, 524, 724, 924, 924]
    assert timeline.host_bytes.tolist() == [0] * 10
    assert (timeline.peak_bytes, timeline.peak_position, timeline.host_peak_bytes) == (924, 8, 0)
    assert timeline.start_seconds.tolist() == [0, 2, 3, 4, 5, 6, 7, 7, 11, 12]
    assert timeline.end_seconds.tolist() == [2, 3, 4, 5, 6, 7, 7, 11, 12, 13]
    assert timeline.makespan_seconds == 13.0
    assert timeline.busy_seconds == {"compute": 13.0, "to_host": 0.0, "to_device": 0.0}
    assert timeline.stall_seconds == 0.0


def test_every_storage_is_rounded_up_to_the_alignment_and_workspace_is_not() -> None:
    timeline = run("compute 0; compute 1", device=Device(name="aligned", alignment_bytes=512))
    assert timeline.device_bytes.tolist() == [1024 + 512 + 50, 1024 + 1024]


def test_a_drop_frees_at_its_position() -> None:
    assert run("compute 0; compute 1; drop 2; compute 2").device_bytes.tolist() == [414, 428, 364, 444]


def test_an_in_place_reuse_adds_nothing() -> None:
    assert run("compute 0; compute 1 in_place_of 2; compute 2").device_bytes.tolist() == [414, 364, 444]


def test_a_second_copy_is_there_while_its_op_runs() -> None:
    timeline = run("compute 0; compute 1; compute 2; drop 4; compute 0; compute 2; drop 5")
    # recomputing 0: 64 of second copy and 50 of workspace; recomputing 2: the mask, and dropout twice
    assert timeline.device_bytes.tolist() == [414, 428, 508, 492, 492 + 114, 508 + 64, 508 - 64]


def test_unknown_workspace_counts_nothing() -> None:
    graph = small_step()
    unknown = tuple(msgspec.structs.replace(op, workspace_bytes=None) for op in graph.ops)
    assert run("compute 0", msgspec.structs.replace(graph, ops=unknown)).peak_bytes == 364


def test_bytes_outside_count_from_their_boundary_to_the_end() -> None:
    lines = "; ".join(KEEP_EVERYTHING).replace("boundary 0", "boundary 0 bytes_outside 1000")
    assert run(lines).device_bytes.tolist() == [414, 428, 508, 516, 516, 520, 1524, 1724, 1924, 1924]


def test_an_offload_overlaps_and_wait_stalls_for_the_rest() -> None:
    timeline = run("compute 0; offload 2; compute 1; wait 2; drop 2; compute 2")
    assert times(timeline) == [(0, 2), (2, 4), (2, 3), (3, 4), (4, 4), (4, 5)]
    assert timeline.device_bytes.tolist() == [414, 364, 428, 428, 364, 444]
    assert timeline.host_bytes.tolist() == [0, 64, 64, 64, 64, 64]
    assert timeline.busy_seconds == {"compute": 4.0, "to_host": 2.0, "to_device": 0.0}
    assert timeline.stall_seconds == 1.0


def test_wait_is_free_once_the_copy_has_ended() -> None:
    timeline = run("compute 0; offload 2; compute 1; compute 2; compute 3; wait 2; drop 2")
    assert times(timeline)[-2:] == [(5, 5), (5, 5)]
    assert timeline.stall_seconds == 0.0


def test_each_direction_is_serial_and_they_overlap() -> None:
    timeline = run(
        "compute 0; compute 1; offload 2; offload 3; compute 2; wait 2; drop 2; prefetch 2; wait 3; drop 3; prefetch 3"
    )
    # to the host: 2 in [3, 5), 3 in [5, 7); back: 2 in [5, 9), 3 in [9, 13)
    assert times(timeline)[2:] == [(3, 5), (5, 7), (3, 4), (4, 5), (5, 5), (5, 9), (5, 7), (7, 7), (9, 13)]
    assert timeline.stall_seconds == 3.0
    assert timeline.makespan_seconds == 13.0


def test_a_disk_shares_its_rate_between_both_directions() -> None:
    shared = msgspec.structs.replace(
        SLOW_LINK, to_host_shared_bytes_per_second=16.0, to_device_shared_bytes_per_second=8.0
    )
    timeline = run(
        "compute 0; compute 1; offload 2; offload 3; compute 2; wait 2; drop 2; prefetch 2; wait 3; drop 3; prefetch 3",
        device=shared,
    )
    # From 5 s on both copy at half of their rates: 3 is on the host at 9 s, and half of 2 is back, the rest 2 s later.
    assert times(timeline)[2:] == [(3, 5), (5, 9), (3, 4), (4, 5), (5, 5), (5, 11), (5, 9), (9, 9), (11, 15)]
    assert timeline.stall_seconds == 5.0
    assert timeline.busy_seconds == {"compute": 4.0, "to_host": 6.0, "to_device": 10.0}


def test_a_copy_takes_its_latency_once() -> None:
    late = msgspec.structs.replace(SLOW_LINK, copy_latency_seconds=0.5)
    timeline = run("compute 0; offload 2; compute 1; wait 2; drop 2; compute 2", device=late)
    assert times(timeline)[1:4] == [(2, 4.5), (2, 3), (3, 4.5)]


def test_copies_take_a_share_of_compute_while_they_run() -> None:
    loaded = msgspec.structs.replace(SLOW_LINK, copy_compute_seconds_per_byte=0.25 / 32)
    timeline = run("compute 0; offload 2; compute 1; compute 2; wait 2", device=loaded)
    # The copy runs from 2 s to 4 s: 1.5 s of work are done by then, and the last half second takes half a second.
    assert sum(times(timeline)[1:4], ()) == pytest.approx((2, 4, 2, 2 + 4 / 3, 2 + 4 / 3, 4.5))
    assert timeline.stall_seconds == 0.0


def test_the_first_read_waits_for_a_prefetch_and_the_second_does_not() -> None:
    timeline = run("compute 0; offload 2; wait 2; drop 2; prefetch 2; compute 1; drop_host 2; drop 3; compute 1")
    assert times(timeline) == [(0, 2), (2, 4), (2, 4), (4, 4), (4, 8), (8, 9), (9, 9), (9, 9), (9, 10)]
    assert timeline.device_bytes.tolist() == [414, 364, 364, 300, 364, 428, 428, 364, 428]
    assert timeline.host_bytes.tolist() == [0, 64, 64, 64, 64, 64, 0, 0, 0]
    assert timeline.stall_seconds == 2.0 + 4.0


def test_a_boundary_waits_for_what_departs() -> None:
    timeline = run("; ".join((*KEEP_EVERYTHING[:6], "offload 7; wait 7; drop 7; prefetch 7; boundary 0")))
    # 4 bytes: 0.125 s to the host, 0.25 s back
    assert times(timeline)[-2:] == [(7.125, 7.375), (7.125, 7.375)]
    assert timeline.stall_seconds == 0.375


def test_a_mutation_of_a_host_copy_counts_the_host_once() -> None:
    timeline = run(
        "compute 0; compute 1; compute 2; compute 3; offload 5; wait 5; compute 4; offload 5; wait 5; drop 5"
    )
    assert timeline.host_bytes.tolist() == [0, 0, 0, 0, 64, 64, 64, 64, 64, 64]


def test_an_empty_schedule_holds_the_residents() -> None:
    timeline = run("", Graph.build(name="none", storages=small_step().storages[:2], ops=[]))
    assert (timeline.peak_bytes, timeline.peak_position, timeline.makespan_seconds) == (300, 0, 0.0)
    assert len(timeline.device_bytes) == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "compute 0; offload 2",
            "instruction 1 'offload 2' copies, but device 'generic' has no to_host_bytes_per_second",
        ),
        ("compute 0; offload 2; wait 2", "instruction 1 'offload 2' copies, but device 'generic' has no to_host"),
    ],
)
def test_a_device_without_a_link_copies_nothing(lines: str, message: str) -> None:
    with pytest.raises(InvalidDeviceError, match=message):
        run(lines, device=Device(name="generic"))


def test_a_link_of_one_direction_is_no_way_back() -> None:
    device = Device(name="one way", to_host_bytes_per_second=1.0)
    with pytest.raises(InvalidDeviceError, match="'prefetch 2' copies, but device 'one way' has no to_device_bytes"):
        run("compute 0; offload 2; wait 2; drop 2; prefetch 2", device=device)


@pytest.mark.parametrize(
    "lines",
    [
        "compute 1",
        "drop 2",
        "drop 0",
        "offload 2",
        "offload 0",
        "wait 2",
        "prefetch 2",
        "drop_host 2",
        "compute 0; offload 2; drop 2",
        "compute 0; offload 2; offload 2",
        "compute 0; offload 2; prefetch 2",
        "compute 0; offload 2; wait 2; prefetch 2",
        "compute 0; offload 2; drop_host 2",
        "compute 0; offload 2; wait 2; drop 2; prefetch 2; drop 2",
        "compute 0; offload 2; wait 2; drop 2; prefetch 2; drop_host 2",
        "compute 0 in_place_of 2",
        "compute 0; compute 1 in_place_of 99",
        "compute 0; compute 1; compute 1 in_place_of 2",
        "compute 0; offload 2; compute 1 in_place_of 2",
        "compute 0; compute 1; compute 2 in_place_of 3",
        "boundary 0; boundary 0",
    ],
)
def test_what_is_not_where_it_must_be_is_refused(lines: str) -> None:
    position = lines.count(";")
    with pytest.raises(
        InvalidScheduleError, match=rf"^instruction {position} .* cannot be carried out on graph 'small"
    ):
        run(lines)


@pytest.mark.parametrize(
    ("code", "operand"), [(0, 9), (0, -1), (1, 11), (5, 11), (6, 1), (7, 0), (-1, 0), (100, 2**31 - 1)]
)
def test_ids_of_another_graph_are_refused(code: int, operand: int) -> None:
    good = Schedule.parse("compute 0")
    schedule = Schedule(
        np.append(good.codes, np.int8(code)), np.append(good.operands, np.int32(operand)), np.append(good.extras, -1)
    )
    with pytest.raises(
        InvalidScheduleError, match=rf"^instruction 1 \(code {code}, operand {operand}\) names what is not"
    ):
        simulate(small_step(), schedule)


def test_bytes_outside_never_overflow() -> None:
    boundaries = [Boundary(position=0, departures=(), arrivals=())] * 3
    graph = Graph.build(name="outside", storages=[], ops=[], boundaries=boundaries)
    assert run(f"boundary 0 bytes_outside {1 << 60}", graph).peak_bytes == 1 << 60
    with pytest.raises(InvalidScheduleError, match="instruction 1 "):
        run(f"boundary 0 bytes_outside {1 << 60}; boundary 1 bytes_outside 1; boundary 2", graph)


def test_a_graph_that_breaks_its_rules_is_refused_and_not_run() -> None:
    storage = Storage(id=0, name="s", bytes=1, role=Role.ACTIVATION)
    op = Op(id=0, name="op", phase=FORWARD, reads=(77,), writes=(0,), seconds=0.0)
    with pytest.raises(InvalidGraphError, match="names storage 77"):
        run("compute 0", Graph(name="never verified", storages=(storage,), ops=(op,)))


def test_arrays_are_made_once_for_each_alignment() -> None:
    graph = small_step()
    arrays = arrays_of(graph)
    assert arrays_of(graph) is arrays
    assert arrays_of(graph, 512).device_bytes.tolist() == [512] * 11
    assert arrays.reads[arrays.read_starts[6] : arrays.read_starts[7]].tolist() == [8, 4, 3]
    assert arrays.reads[arrays.read_starts[4] : arrays.read_starts[5]].tolist() == [5, 6]
    assert arrays.reuses.tolist() == [2, 3]


# Everything at once: in-place reuse, offloads across a mutation, prefetches, a boundary with bytes outside.
EVERYTHING = (
    "compute 0; compute 1 in_place_of 2; offload 3; compute 2; compute 3; wait 3; drop 3; offload 5; wait 5; "
    "compute 4; drop_host 5; offload 5; compute 5; wait 5; drop 5; boundary 0 bytes_outside 7; prefetch 3; "
    "prefetch 5; compute 6; drop_host 3; compute 7; compute 8"
)


def test_simulate_golden(golden: Callable[[str, str], None]) -> None:
    schedule = Schedule.parse(EVERYTHING.split("; "))
    graph = small_step()
    check(graph, schedule)
    timeline = simulate(graph, schedule, SLOW_LINK)
    columns = zip(times(timeline), timeline.device_bytes.tolist(), timeline.host_bytes.tolist(), strict=True)
    notes = [f"{start:g} to {end:g} s, {device} B, host {host} B" for (start, end), device, host in columns]
    golden("small_step.txt", "\n".join(f"{line}  # {note}" for line, note in zip(schedule.lines(), notes, strict=True)))


# The README beside the graphs gives these.
PUBLISHED = {
    "monet_resnet50_184_checkmate": (405, 1.01899, 22_860_939_072),
    "monet_unet_11_checkmate": (154, 1.88251, 18_778_968_072),
    "dtr_inceptionv4_64_functional": (1170, 0.63631, 11_245_095_108),
    "dtr_tv_densenet121_84_functional": (1461, 0.35476, 11_020_415_300),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_graphs_without_rematerialization(name: str, shared_graphs: Path) -> None:
    op_count, seconds, peak_bytes = PUBLISHED[name]
    graph = Graph.load(shared_graphs / f"{name}.graph.json.gz")
    assert len(graph.ops) == op_count
    schedule = drop_after_last_use(graph)
    check(graph, schedule)
    timeline = simulate(graph, schedule)
    assert timeline.makespan_seconds == pytest.approx(seconds, abs=5.001e-6)
    assert timeline.peak_bytes == peak_bytes


def drop_after_last_use(graph: Graph) -> Schedule:
    last_use = {s: op.id for op in graph.ops for s in (*op.reads, *op.writes, *op.mutates)}
    kept = {s.id for s in graph.storages if s.resident or s.required_at_end}
    instructions: list[Compute | Drop] = []
    for op in graph.ops:
        instructions.append(Compute(op=op.id))
        dead = [s for s in dict.fromkeys((*op.reads, *op.writes)) if last_use[s] == op.id and s not in kept]
        instructions.extend(Drop(storage=s) for s in dead)
    return Schedule.of(instructions)


def backward_with_sums(seconds: float) -> Graph:
    """Two gradients, each reduced in its bucket over ranks, and two updates: ops of 1 s, sums of `seconds`."""
    names = ["first gradient", "first sum", "second gradient", "second sum", "first update", "second update"]
    buckets = [Storage(id=number, name=f"bucket{number}", bytes=64, role=Role.GRADIENT) for number in range(2)]
    parameters = [Storage(id=2 + number, name=f"p{number}", bytes=64, role=Role.PARAMETER) for number in range(2)]
    touched: list[dict[str, tuple[int, ...]]] = [
        {"reads": (2,), "writes": (0,)},
        {"mutates": (0,)},
        {"reads": (3,), "writes": (1,)},
        {"mutates": (1,)},
        {"reads": (0,), "mutates": (2,)},
        {"reads": (1,), "mutates": (3,)},
    ]
    ops = [
        Op(
            id=number,
            name=name,
            phase=Phase.BACKWARD,
            seconds=seconds if name.endswith("sum") else 1.0,
            group="ranks" if name.endswith("sum") else None,
            **{"reads": (), "writes": (), **storages},
        )
        for number, (name, storages) in enumerate(zip(names, touched, strict=True))
    ]
    return Graph.build(name="sums", storages=[*buckets, *parameters], ops=ops)


EACH_ONCE = [f"compute {number}" for number in range(6)]


def test_collectives_overlap_with_compute_until_their_storage_is_read() -> None:
    short = simulate(backward_with_sums(0.5), Schedule.parse(EACH_ONCE))
    assert times(short) == [(0, 1), (1, 1.5), (1, 2), (2, 2.5), (2, 3), (3, 4)]
    assert short.busy_seconds == {"compute": 4.0, "to_host": 0.0, "to_device": 0.0, "communication": 1.0}
    assert (short.makespan_seconds, short.stall_seconds) == (4.0, 0.0)
    long = simulate(backward_with_sums(4.0), Schedule.parse(EACH_ONCE))
    assert times(long) == [(0, 1), (1, 5), (1, 2), (5, 9), (5, 6), (9, 10)]
    assert (long.makespan_seconds, long.stall_seconds) == (10.0, 6.0)


def test_unread_collectives_end_the_step() -> None:
    timeline = simulate(backward_with_sums(4.0), Schedule.parse(EACH_ONCE[:2]))
    assert (timeline.makespan_seconds, timeline.stall_seconds) == (5.0, 0.0)


def test_collectives_are_computed_as_early_as_they_may_be() -> None:
    graph = backward_with_sums(4.0)
    late = Schedule.parse([EACH_ONCE[number] for number in (0, 2, 1, 3, 4, 5)])
    early = Schedule.of(with_early_collectives(graph, list(late)))
    assert list(early.lines()) == EACH_ONCE
    check(graph, early)
    assert simulate(graph, early).peak_bytes == simulate(graph, late).peak_bytes


def test_overhead_that_hides_behind_collectives_is_not_proved() -> None:
    graph = backward_with_sums(4.0)
    assert graph.compute_seconds == 4.0
    task = Problem(graph=graph, device=GENERIC, budget_bytes=1 << 20)
    for recompute_seconds, overhead in ((7.0, 0.1), (0.0, -0.6)):  # of 10 s, compute waits for 6
        proofs = Proofs(recompute=Bound(op=0, seconds=recompute_seconds))
        bounds = prove_bounds(task, proofs, least_found_bytes=None, unplanned_seconds=10.0)
        assert bounds.overhead == pytest.approx(overhead)
