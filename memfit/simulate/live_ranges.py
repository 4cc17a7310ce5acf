"""Live ranges of a schedule: the one walk that says when each storage and workspace is on the device.

The checker keeps a walk of its own, and so does the simulator's compiled loop: tests compare all three.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.graph import Graph
from memfit.schedule import Code, Schedule


@dataclass(slots=True, kw_only=True)
class LiveRange:
    """One stay of a storage on the device: `[first, last)` in schedule positions.

    Attributes:
        storage: the storage's id.
        first: position of the instruction that allocates it; 0 for a resident.
        last: position of the instruction that frees it, or the schedule's length.
        begun_by: code of the instruction at `first`; None for a resident.
        memory_of: index of the live range whose memory this one reuses in place, or None.
        reads: positions of the Computes in the stay that read or mutate the storage, ascending.
        mutations: those of them that mutate it.
        departed_at: position of the CrossBoundary that hands the storage to the user, or None.
    """

    storage: int
    first: int
    last: int
    begun_by: Code | None
    memory_of: int | None = None
    reads: list[int] = field(default_factory=list[int])
    mutations: list[int] = field(default_factory=list[int])
    departed_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRanges:
    """Everything that is on the device during a schedule, except what user code holds (`CrossBoundary.bytes_outside`).

    Attributes:
        ranges: every stay of every storage, residents included, in the order in which they begin.
        second_copies: (position, storage) for each write that is live already; its second copy lives at that position.
        workspaces: (position, op) for each Compute of an op with known workspace bytes; it lives at that position.
    """

    ranges: tuple[LiveRange, ...]
    second_copies: tuple[tuple[int, int], ...]
    workspaces: tuple[tuple[int, int], ...]


def live_ranges(graph: Graph, schedule: Schedule) -> LiveRanges:
    """Return the live ranges of `schedule`, which is legal on `graph` (see `memfit.checker.check`).

        >>> from memfit.graph import Graph, Op, Phase, Role, Storage
        >>> storage = {"x": Role.INPUT, "h": Role.ACTIVATION, "y": Role.OUTPUT}
        >>> graph = Graph.build(
        ...     name="two",
        ...     storages=[Storage(id=i, name=n, bytes=100, role=r) for i, (n, r) in enumerate(storage.items())],
        ...     ops=[
        ...         Op(id=0, name="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=0.0),
        ...         Op(id=1, name="g", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=0.0, reuses=((1, 2),)),
        ...     ],
        ... )
        >>> found = live_ranges(graph, Schedule.parse(["compute 0", "compute 1 in_place_of 1"]))
        >>> [(each.storage, each.first, each.last, each.memory_of) for each in found.ranges]
        [(0, 0, 2, None), (1, 0, 1, None), (2, 1, 2, 1)]

    Time is linear in the instructions and in what their ops read and write.

    Args:
        graph: the step.
        schedule: legal on `graph`.
    """
    walk = _Walk(graph, len(schedule))
    rows = zip(schedule.codes.tolist(), schedule.operands.tolist(), schedule.extras.tolist(), strict=True)
    for position, (code, operand, extra) in enumerate(rows):
        if code == Code.COMPUTE:
            walk.compute(position, operand, extra)
        elif code == Code.DROP:
            walk.end(operand, position)
        elif code == Code.PREFETCH:
            walk.begin(operand, position, Code.PREFETCH)
        elif code == Code.BOUNDARY:
            walk.cross(position, operand)
    return LiveRanges(
        ranges=tuple(walk.ranges), second_copies=tuple(walk.second_copies), workspaces=tuple(walk.workspaces)
    )


class _Walk:
    """Opens and closes live ranges, instruction by instruction; `open` maps a storage to its range's index."""

    def __init__(self, graph: Graph, length: int) -> None:
        self.graph, self.length = graph, length
        self.ranges: list[LiveRange] = []
        self.second_copies: list[tuple[int, int]] = []
        self.workspaces: list[tuple[int, int]] = []
        self.open: dict[int, int] = {}
        for storage in graph.storages:
            if storage.resident:
                self.begin(storage.id, 0, None)

    def begin(self, storage: int, position: int, begun_by: Code | None, memory_of: int | None = None) -> None:
        """Open the live range of a storage.

        Args:
            storage: has no open range.
            position: of the instruction that brings it to the device; 0 for a resident.
            begun_by: kind of that instruction; None for a resident.
            memory_of: index of the range whose memory it takes over in place; None if it has memory of its own.
        """
        self.open[storage] = len(self.ranges)
        self.ranges.append(
            LiveRange(storage=storage, first=position, last=self.length, begun_by=begun_by, memory_of=memory_of)
        )

    def end(self, storage: int, position: int) -> int:
        """Close the live range of a storage; return its index.

        Args:
            storage: has an open range.
            position: of the instruction that frees it, or takes over its memory.
        """
        index = self.open.pop(storage)
        self.ranges[index].last = position
        return index

    def compute(self, position: int, op_id: int, in_place_of: int) -> None:
        """Note what an op reads, mutates and writes.

        Args:
            position: of the instruction.
            op_id: may have been computed before.
            in_place_of: the storage whose memory one of the writes takes over; -1 for none.
        """
        op = self.graph.ops[op_id]
        for storage, _ in self.graph.read_versions[op_id]:
            self.ranges[self.open[storage]].reads.append(position)
        for storage in op.mutates:
            self.ranges[self.open[storage]].mutations.append(position)
        taker = memory_of = None
        if in_place_of in self.open:
            taker = next(new for old, new in op.reuses if old == in_place_of and new not in self.open)
            memory_of = self.end(in_place_of, position)
        for storage in op.writes:
            if storage in self.open:
                self.second_copies.append((position, storage))
            else:
                self.begin(storage, position, Code.COMPUTE, memory_of if storage == taker else None)
        if op.workspace_bytes:
            self.workspaces.append((position, op_id))

    def cross(self, position: int, boundary: int) -> None:
        """Note the departures of a boundary, and open the ranges of its arrivals.

        Args:
            position: of the instruction.
            boundary: its number in the graph.
        """
        for storage in self.graph.boundaries[boundary].departures:
            stay = self.ranges[self.open[storage]]
            stay.departed_at = position if stay.departed_at is None else stay.departed_at
        for storage in self.graph.boundaries[boundary].arrivals:
            self.begin(storage, position, Code.BOUNDARY)
