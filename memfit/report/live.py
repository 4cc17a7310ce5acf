"""The live bytes of a schedule at each instruction: the simulator's totals, by role and by storage."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.device import Device
from memfit.graph import Graph
from memfit.schedule import Code, Schedule
from memfit.simulate import Timeline, on_compute, simulate
from memfit.simulate.live_ranges import LiveRange, LiveRanges, live_ranges
from memfit.system.lines import printable


class Layer(enum.StrEnum):
    """The classes of live bytes: the roles of storages, and two for bytes that are in no storage of the graph."""

    OUTSIDE = "outside"
    PARAMETER = "parameter"
    STATE = "state"
    CONSTANT = "constant"
    INPUT = "input"
    OUTPUT = "output"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One schedule of a graph of n instructions, simulated, with its live bytes by role and by storage.

    Attributes:
        graph, device, schedule: as given.
        timeline: of the simulator.
        stays: the live ranges of each storage, by its id, in the order in which they begin.
        layers: int64[n] for each layer; their sum is `timeline.device_bytes`. Second copies, which a Compute writes
            beside live copies of the same storages, count as workspace.
        clock_seconds: float64[n + 1], when the compute stream reaches each instruction, and the end of the step.
        computations: for each op, the positions at which it is computed.
    """

    graph: Graph
    device: Device
    schedule: Schedule
    timeline: Timeline
    stays: tuple[tuple[LiveRange, ...], ...]
    layers: dict[Layer, NDArray[np.int64]]
    clock_seconds: NDArray[np.float64]
    computations: tuple[tuple[int, ...], ...]

    def live_at(self, position: int) -> list[int]:
        """Return the storages on the device while the instruction at `position` runs, largest first."""
        live = {stay.storage for stays in self.stays for stay in stays if stay.first <= position < stay.last}
        return sorted(live, key=lambda storage: (-self.graph.storages[storage].bytes, storage))

    def op_at(self, position: int) -> int | None:
        """Return the op that the instruction at `position` computes, or the next one computed, or None."""
        following = np.flatnonzero(self.schedule.codes[position:] == Code.COMPUTE)
        return int(self.schedule.operands[position + following[0]]) if len(following) else None

    def doing_at(self, position: int) -> str:
        """Return the op at a position in words: `while conv1 runs (forward, in net.conv1)`; empty after the last op."""
        number = self.op_at(position)
        if number is None:
            return ""
        op = self.graph.ops[number]
        module = f", in {printable(op.module)}" if op.module else ""
        return f"while {printable(op.name)} runs ({op.phase}{module})"


def play(graph: Graph, schedule: Schedule, device: Device) -> Run:
    """Simulate a schedule, and return it with its live bytes by role and by storage.

    Args:
        graph: the step.
        schedule: legal on it (see `memfit.checker.check`).
        device: gives the alignment of allocations and the rates of copies.

    Time is linear in the instructions and in the storages that their ops read and write.
    """
    found = live_ranges(graph, schedule)
    timeline = simulate(graph, schedule, device)
    stays: list[list[LiveRange]] = [[] for _ in graph.storages]
    for stay in found.ranges:
        stays[stay.storage].append(stay)
    computations: list[list[int]] = [[] for _ in graph.ops]
    for position in np.flatnonzero(schedule.codes == Code.COMPUTE).tolist():
        computations[int(schedule.operands[position])].append(position)
    return Run(
        graph=graph,
        device=device,
        schedule=schedule,
        timeline=timeline,
        stays=tuple(tuple(each) for each in stays),
        layers=_layers(graph, schedule, device, found),
        clock_seconds=_clock_seconds(graph, schedule, timeline),
        computations=tuple(tuple(positions) for positions in computations),
    )


def _layers(graph: Graph, schedule: Schedule, device: Device, found: LiveRanges) -> dict[Layer, NDArray[np.int64]]:
    sizes = [device.aligned(storage.bytes) for storage in graph.storages]
    changes = {layer: np.zeros(len(schedule) + 1, np.int64) for layer in Layer}
    for stay in found.ranges:
        change = changes[Layer(graph.storages[stay.storage].role)]
        change[stay.first] += sizes[stay.storage]
        change[stay.last] -= sizes[stay.storage]
    is_boundary = schedule.codes == Code.BOUNDARY
    changes[Layer.OUTSIDE][:-1][is_boundary] += schedule.extras[is_boundary]
    layers = {layer: np.cumsum(change[:-1]) for layer, change in changes.items()}
    for position, op in found.workspaces:
        layers[Layer.WORKSPACE][position] += graph.ops[op].workspace_bytes or 0
    for position, storage in found.second_copies:
        layers[Layer.WORKSPACE][position] += sizes[storage]
    return layers


def _clock_seconds(graph: Graph, schedule: Schedule, timeline: Timeline) -> NDArray[np.float64]:
    ends = np.where(on_compute(graph, schedule), timeline.end_seconds, 0.0)
    reached = np.concatenate(([0.0], np.maximum.accumulate(ends)))
    reached[-1] = timeline.makespan_seconds
    return reached
