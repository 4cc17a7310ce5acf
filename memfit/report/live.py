"""What lives on the device at each instruction of a schedule: the simulator's totals, by role and by storage."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.device import Device
from memfit.graph import Graph, Role
from memfit.report.words import printable
from memfit.schedule import Code, Schedule
from memfit.simulate import Timeline, simulate


class Layer(enum.StrEnum):
    """What a live byte is counted under: the roles of storages, and two that are not storages of the graph."""

    OUTSIDE = "outside"
    PARAMETER = "parameter"
    STATE = "state"
    CONSTANT = "constant"
    INPUT = "input"
    OUTPUT = "output"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    WORKSPACE = "workspace"


LAYER_OF = {role: Layer(role.value) for role in Role}


@dataclass(slots=True, kw_only=True)
class LiveRange:
    """One stay of a storage on the device: `[first, last)` in schedule positions.

    `begun_by` is the code of the instruction that brought it, None where it was there from the start. `first_read` and
    `last_read` are the positions of the first and last Compute in the stay that read or mutated it.
    """

    storage: int
    first: int
    last: int
    begun_by: Code | None
    first_read: int | None = None
    last_read: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One schedule of a graph, simulated and taken apart.

    Attributes:
        ranges: every stay of every storage, in the order in which they begin.
        second_copy_bytes: i64[n], what a Compute writes beside live copies of the same storages.
        layers: i64[n] for each layer; their sum is `timeline.device_bytes`.
        clock_seconds: f64[n + 1], when the compute stream reaches each instruction, and the end of the step.
        computations: for each op, the positions at which it is computed.
    """

    graph: Graph
    device: Device
    schedule: Schedule
    timeline: Timeline
    ranges: tuple[LiveRange, ...]
    second_copy_bytes: NDArray[np.int64]
    layers: dict[Layer, NDArray[np.int64]]
    clock_seconds: NDArray[np.float64]
    computations: tuple[tuple[int, ...], ...]

    def live_at(self, position: int) -> list[int]:
        """Return the storages on the device while the instruction at `position` runs, largest first."""
        live = {stay.storage for stay in self.ranges if stay.first <= position < stay.last}
        return sorted(live, key=lambda storage: (-self.graph.storages[storage].bytes, storage))

    def op_at(self, position: int) -> int | None:
        """Return the op that the instruction at `position` computes, or the next one computed, or None."""
        following = np.flatnonzero(self.schedule.codes[position:] == Code.COMPUTE)
        return int(self.schedule.operands[position + following[0]]) if len(following) else None

    def doing_at(self, position: int) -> str:
        """Say what runs at a position: `while conv1 runs (forward, in net.conv1)`; nothing after the last op."""
        number = self.op_at(position)
        if number is None:
            return ""
        op = self.graph.ops[number]
        module = f", in {printable(op.module)}" if op.module else ""
        return f"while {printable(op.name)} runs ({op.phase}{module})"


def play(graph: Graph, schedule: Schedule, device: Device) -> Run:
    """Simulate `schedule` and take its live bytes apart.

    The schedule must be legal (`memfit.checker`). Time is linear in its instructions and in what its ops touch.
    """
    walk = _Walk(graph, len(schedule), device)
    rows = zip(schedule.codes.tolist(), schedule.operands.tolist(), schedule.extras.tolist(), strict=True)
    for position, (code, operand, extra) in enumerate(rows):
        walk.step(position, code, operand, extra)
    walk.finish()
    timeline = simulate(graph, schedule, device)
    return Run(
        graph=graph,
        device=device,
        schedule=schedule,
        timeline=timeline,
        ranges=tuple(walk.ranges),
        second_copy_bytes=walk.second_copy_bytes,
        layers=_layers(graph, schedule, walk),
        clock_seconds=_clock_seconds(schedule, timeline),
        computations=tuple(tuple(positions) for positions in walk.computations),
    )


class _Walk:
    """Opens and closes live ranges, instruction by instruction."""

    def __init__(self, graph: Graph, length: int, device: Device) -> None:
        self.graph = graph
        self.length = length
        self.aligned_bytes = [device.aligned(storage.bytes) for storage in graph.storages]
        self.ranges: list[LiveRange] = []
        self.open: dict[int, LiveRange] = {}
        self.second_copy_bytes = np.zeros(length, np.int64)
        self.computations: list[list[int]] = [[] for _ in graph.ops]
        for storage in graph.storages:
            if storage.resident:
                self._begin(storage.id, 0, None)

    def step(self, position: int, code: int, operand: int, extra: int) -> None:
        if code == Code.COMPUTE:
            self._compute(position, operand, extra)
        elif code == Code.DROP:
            self._end(operand, position)
        elif code == Code.PREFETCH:
            self._begin(operand, position, Code.PREFETCH)
        elif code == Code.BOUNDARY:
            for storage in self.graph.boundaries[operand].arrivals:
                self._begin(storage, position, Code.BOUNDARY)

    def finish(self) -> None:
        for storage in list(self.open):
            self._end(storage, self.length)

    def _compute(self, position: int, op_id: int, in_place_of: int) -> None:
        op = self.graph.ops[op_id]
        self.computations[op_id].append(position)
        for storage in dict.fromkeys(op.reads + op.mutates):
            stay = self.open[storage]
            stay.first_read = position if stay.first_read is None else stay.first_read
            stay.last_read = position
        if in_place_of in self.open:
            self._end(in_place_of, position)
        for storage in dict.fromkeys(op.writes):
            if storage in self.open:
                self.second_copy_bytes[position] += self.aligned_bytes[storage]
            else:
                self._begin(storage, position, Code.COMPUTE)

    def _begin(self, storage: int, position: int, begun_by: Code | None) -> None:
        stay = LiveRange(storage=storage, first=position, last=self.length, begun_by=begun_by)
        self.open[storage] = stay
        self.ranges.append(stay)

    def _end(self, storage: int, position: int) -> None:
        self.open.pop(storage).last = position


def _layers(graph: Graph, schedule: Schedule, walk: _Walk) -> dict[Layer, NDArray[np.int64]]:
    changes = {layer: np.zeros(len(schedule) + 1, np.int64) for layer in Layer}
    for stay in walk.ranges:
        change = changes[LAYER_OF[graph.storages[stay.storage].role]]
        change[stay.first] += walk.aligned_bytes[stay.storage]
        change[stay.last] -= walk.aligned_bytes[stay.storage]
    is_boundary = schedule.codes == Code.BOUNDARY
    changes[Layer.OUTSIDE][:-1][is_boundary] += schedule.extras[is_boundary]
    layers = {layer: np.cumsum(change[:-1]) for layer, change in changes.items()}
    workspace_bytes = np.array([op.workspace_bytes or 0 for op in graph.ops] or [0], np.int64)
    is_compute = schedule.codes == Code.COMPUTE
    layers[Layer.WORKSPACE][is_compute] += workspace_bytes[schedule.operands[is_compute]]
    layers[Layer.WORKSPACE] += walk.second_copy_bytes
    return layers


def _clock_seconds(schedule: Schedule, timeline: Timeline) -> NDArray[np.float64]:
    on_compute = np.isin(schedule.codes, (Code.COMPUTE, Code.WAIT, Code.BOUNDARY))
    ends = np.where(on_compute, timeline.end_seconds, 0.0)
    reached = np.concatenate(([0.0], np.maximum.accumulate(ends)))
    reached[-1] = timeline.makespan_seconds
    return reached
