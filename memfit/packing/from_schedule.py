"""From a schedule to blocks: one for every stay of a storage on the device, and for every workspace.

Steps are positions of the schedule, so live ranges are exact: a block is there from its Compute or Prefetch on, and
gone at its Drop. A write that takes over the memory of an input goes on in the input's block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.packing.blocks import Blocks
from memfit.schedule import Boundary, Compute, Drop, Prefetch, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlocks:
    """The blocks of a step, and which instruction begins which.

    Attributes:
        blocks: what an arena has to hold; ids count up from 0.
        names: what each block is, for people.
        block_of: (position, storage) -> block, where the instruction at that position allocates the storage, or takes
            memory over for it. What outlives the step, comes from the user, or has no bytes is in no block.
        copy_of: (position, storage) -> block of the second copy of a write that is still live; gone right after.
        workspace_of: position -> block of the workspace of the op computed there.
        outside_bytes: int64[n], bytes on the device that are neither resident nor in a block while each instruction
            runs: arrivals, what is still there at the end because it is required, what user code holds.
    """

    blocks: Blocks
    names: tuple[str, ...]
    block_of: dict[tuple[int, int], int]
    copy_of: dict[tuple[int, int], int]
    workspace_of: dict[int, int]
    outside_bytes: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class _Stay:
    """One stay in memory; `begins` are the places where a storage gets it, several after taking over."""

    name: str
    size_bytes: int
    start: int
    end: int | None = None
    outside: bool = False
    begins: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def blocks_of(graph: Graph, schedule: Schedule, device: Device = GENERIC) -> StepBlocks:
    """Return the blocks of `schedule`, rounded up to the device's alignment.

        >>> from memfit.graph import Graph, Op, Phase, Role, Storage
        >>> from memfit.schedule import Schedule
        >>> storage = {"x": Role.INPUT, "h": Role.ACTIVATION, "y": Role.OUTPUT}
        >>> graph = Graph.build(
        ...     name="two",
        ...     storages=[Storage(id=i, name=n, bytes=100, role=r) for i, (n, r) in enumerate(storage.items())],
        ...     ops=[
        ...         Op(id=0, name="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=0.0),
        ...         Op(id=1, name="g", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=0.0, workspace_bytes=8),
        ...     ],
        ... )
        >>> step = blocks_of(graph, Schedule.parse(["compute 0", "compute 1", "drop 1"]))
        >>> [(name, b.bytes, b.start, b.end) for name, b in zip(step.names, step.blocks, strict=True)]
        [('h', 100, 0, 2), ('workspace of g', 8, 1, 2)]

    Args:
        graph: gives sizes; workspace that is not known counts as none.
        schedule: legal on `graph`, as `memfit.checker.check` has it.
        device: gives the alignment of allocations.

    Guarantees: live blocks, `outside_bytes` and residents add up to what `memfit.simulate` says, at each position; it
    does not round workspaces up, blocks do.
    """
    replay = _Replay(graph)
    for position, instruction in enumerate(schedule):
        if isinstance(instruction, Compute):
            replay.compute(position, instruction)
        elif isinstance(instruction, Drop):
            replay.live.pop(instruction.storage).end = position
        elif isinstance(instruction, Prefetch):
            replay.begin(position, instruction.storage)
        elif isinstance(instruction, Boundary):
            replay.cross(position, instruction)
    return replay.finish(len(schedule), device)


class _Replay:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.live: dict[int, _Stay] = {}
        self.stays: list[_Stay] = []
        self.copies: list[tuple[tuple[int, int], _Stay]] = []
        self.workspaces: list[tuple[int, _Stay]] = []
        self.held: list[tuple[int, int]] = []  # (position, bytes) that user code holds from there on

    def begin(self, position: int, storage: int, *, outside: bool = False) -> None:
        known = self.graph.storages[storage]
        stay = _Stay(name=known.name, size_bytes=known.bytes, start=position, outside=outside)
        stay.begins.append((position, storage))
        self.live[storage] = stay
        self.stays.append(stay)

    def compute(self, position: int, instruction: Compute) -> None:
        op = self.graph.ops[instruction.op]
        taker = self._take_over(position, instruction)
        for storage in op.writes:
            if storage not in self.live:
                self.begin(position, storage)
            elif storage != taker:
                self.copies.append(((position, storage), self._brief(position, storage)))
        if op.workspace_bytes:
            name = f"workspace of {op.name}"
            stay = _Stay(name=name, size_bytes=op.workspace_bytes, start=position, end=position + 1)
            self.workspaces.append((position, stay))

    def cross(self, position: int, instruction: Boundary) -> None:
        for storage in self.graph.boundaries[instruction.boundary].arrivals:
            self.begin(position, storage, outside=True)
        self.held.append((position, instruction.bytes_outside))

    def finish(self, count: int, device: Device) -> StepBlocks:
        for storage, stay in self.live.items():
            stay.end = count
            stay.outside |= self.graph.storages[storage].required_at_end
        inside = [stay for stay in self.stays if not stay.outside and stay.size_bytes]
        copies = [entry for entry in self.copies if entry[1].size_bytes]
        every = [*inside, *(stay for _, stay in copies), *(stay for _, stay in self.workspaces)]
        blocks = Blocks(
            ids=np.arange(len(every)),
            sizes_bytes=[stay.size_bytes for stay in every],
            starts=[stay.start for stay in every],
            ends=[count if stay.end is None else stay.end for stay in every],
            alignment_bytes=device.alignment_bytes,
        )
        first_copy, first_workspace = len(inside), len(inside) + len(copies)
        return StepBlocks(
            blocks=blocks,
            names=tuple(stay.name for stay in every),
            block_of={begin: number for number, stay in enumerate(inside) for begin in stay.begins},
            copy_of={place: first_copy + number for number, (place, _) in enumerate(copies)},
            workspace_of={place: first_workspace + number for number, (place, _) in enumerate(self.workspaces)},
            outside_bytes=self._outside(count, device),
        )

    def _take_over(self, position: int, instruction: Compute) -> int | None:
        """Let a write go on in the stay of the input it takes over; return that write."""
        taken = instruction.in_place_of
        if taken is None:
            return None
        op = self.graph.ops[instruction.op]
        taker = next(new for old, new in op.reuses if old == taken and new not in self.live)
        stay = self.live.pop(taken)
        stay.begins.append((position, taker))
        stay.name = f"{stay.name}, {self.graph.storages[taker].name}"
        self.live[taker] = stay
        return taker

    def _brief(self, position: int, storage: int) -> _Stay:
        known = self.graph.storages[storage]
        name = f"second copy of {known.name}"
        return _Stay(name=name, size_bytes=known.bytes, start=position, end=position + 1)

    def _outside(self, count: int, device: Device) -> NDArray[np.int64]:
        changes = np.zeros(count + 1, np.int64)
        for stay in self.stays:
            if stay.outside:
                changes[stay.start] += device.aligned(stay.size_bytes)
                changes[count if stay.end is None else stay.end] -= device.aligned(stay.size_bytes)
        for position, held_bytes in self.held:
            changes[position] += held_bytes
        return np.cumsum(changes)[:count]
