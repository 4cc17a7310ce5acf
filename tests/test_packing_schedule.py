"""From a schedule to blocks: at every position the blocks hold as many bytes as the simulator counts."""

from __future__ import annotations

import numpy as np
import pytest
from devices import LINKED, linked
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs, legal_schedules

from memfit.device import GENERIC, Device
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.packing import pack
from memfit.packing.from_schedule import StepBlocks, blocks_of
from memfit.schedule import Schedule
from memfit.simulate import simulate


def live_bytes(step: StepBlocks, count: int, sizes: np.ndarray) -> np.ndarray:
    live = np.zeros(count + 1, np.int64)
    np.add.at(live, step.blocks.starts, sizes)
    np.subtract.at(live, step.blocks.ends, sizes)
    return np.cumsum(live)[:count]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
@pytest.mark.parametrize("device", [LINKED, linked(1.0, 1.0)], ids=["64", "1"])
def test_blocks_agree_with_the_simulator(device: Device, data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = data.draw(legal_schedules(graph))
    step, timeline = blocks_of(graph, schedule, device), simulate(graph, schedule, device)
    resident = sum(device.aligned(storage.bytes) for storage in graph.storages if storage.resident)
    sizes = step.blocks.sizes_bytes.copy()
    for position, block in step.workspace_of.items():  # the simulator does not round workspaces up
        sizes[block] = graph.ops[int(schedule.operands[position])].workspace_bytes or 0
    live = live_bytes(step, len(schedule), sizes) + step.outside_bytes + resident
    assert live.tolist() == timeline.device_bytes.tolist()
    layout = pack(step.blocks, "best_fit")
    assert (layout.offsets_bytes % device.alignment_bytes == 0).all()


def relu_chain(*, output_role: Role = Role.OUTPUT) -> Graph:
    """x -> a -> b (may be written over a) -> y."""
    roles = (("x", Role.INPUT), ("a", Role.ACTIVATION), ("b", Role.ACTIVATION), ("y", output_role))
    return Graph.build(
        name="chain",
        storages=[Storage(id=i, name=name, bytes=100, role=role) for i, (name, role) in enumerate(roles)],
        ops=[
            Op(id=0, name="conv", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=0.0, workspace_bytes=30),
            Op(id=1, name="relu", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=0.0, reuses=((1, 2),)),
            Op(id=2, name="head", phase=Phase.FORWARD, reads=(2,), writes=(3,), seconds=0.0),
        ],
    )


def test_what_takes_over_goes_on_in_the_same_block() -> None:
    step = blocks_of(
        relu_chain(), Schedule.parse(["compute 0", "compute 1 in_place_of 1", "compute 2", "drop 2"]), GENERIC
    )
    assert step.names == ("a, b", "workspace of conv")
    assert [(b.bytes, b.start, b.end) for b in step.blocks] == [(100, 0, 3), (30, 0, 1)]
    assert step.block_of == {(0, 1): 0, (1, 2): 0}
    assert step.workspace_of == {0: 1}


def test_what_outlives_the_step_is_not_in_the_arena() -> None:
    step = blocks_of(relu_chain(), Schedule.parse(["compute 0", "compute 1", "drop 1", "compute 2", "drop 2"]), GENERIC)
    assert step.names == ("a", "b", "workspace of conv")
    assert step.outside_bytes.tolist() == [0, 0, 0, 100, 100]


def test_every_rematerialization_is_a_block() -> None:
    lines = ["compute 0", "compute 1", "drop 1", "compute 0", "drop 1", "compute 2", "drop 2"]
    step = blocks_of(relu_chain(), Schedule.parse(lines), Device(name="cuda", alignment_bytes=512))
    assert step.names == ("a", "b", "a", "workspace of conv", "workspace of conv")
    assert [(b.bytes, b.start, b.end) for b in step.blocks][:3] == [(512, 0, 2), (512, 1, 6), (512, 3, 4)]


def test_a_second_copy_lives_for_one_instruction() -> None:
    step = blocks_of(relu_chain(), Schedule.parse(["compute 0", "compute 0", "compute 1"]), GENERIC)
    assert step.names[2] == "second copy of a"
    assert step.copy_of == {(1, 1): 2}
    assert (step.blocks[2].start, step.blocks[2].end) == (1, 2)
