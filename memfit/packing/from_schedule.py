"""From a schedule to blocks: one for each live range of a storage, and one for each workspace.

Steps are positions of the schedule, so live ranges are exact: a block begins at a Compute or Prefetch and ends at a
Drop. A write that reuses the memory of an input in place shares the input's block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.packing.blocks import Blocks
from memfit.schedule import Code, Schedule
from memfit.simulate.live_ranges import LiveRange, live_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlocks:
    """The blocks of a step, and which instruction begins which.

    Attributes:
        blocks: the arena's contents; ids count up from 0.
        names: a readable name of each block.
        block_of: (position, storage) -> block, where the instruction at that position allocates the storage or reuses
            memory for it. Storages that are required at the end, arrive from the user, or are empty have no block.
        copy_of: (position, storage) -> block of the second copy of a live write; it lives for that instruction.
        workspace_of: position -> block of the workspace of the op computed there.
        outside_bytes: int64[n], bytes on the device that are neither resident nor in a block while each instruction
            runs: arrivals, storages required at the end, and bytes held by user code.
    """

    blocks: Blocks
    names: tuple[str, ...]
    block_of: dict[tuple[int, int], int]
    copy_of: dict[tuple[int, int], int]
    workspace_of: dict[int, int]
    outside_bytes: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A future block: a live range with the ranges that reuse its memory in place, a second copy, or a workspace.

    `begins` are (position, storage) of each live range in it; one of them `outside` keeps the piece out of the arena.
    """

    name: str
    size_bytes: int
    start: int
    end: int
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
    found = live_ranges(graph, schedule)
    pieces = _joined(graph, found.ranges, len(schedule))
    inside = [piece for piece in pieces if not piece.outside and piece.size_bytes]
    copies = [(position, s) for position, s in found.second_copies if graph.storages[s].bytes]
    brief = [(f"second copy of {graph.storages[s].name}", graph.storages[s].bytes, at) for at, s in copies]
    for at, op in found.workspaces:
        brief.append((f"workspace of {graph.ops[op].name}", graph.ops[op].workspace_bytes or 0, at))
    every = [*inside, *(_Piece(name=name, size_bytes=size, start=at, end=at + 1) for name, size, at in brief)]
    first_copy, first_workspace = len(inside), len(inside) + len(copies)
    return StepBlocks(
        blocks=Blocks(
            ids=np.arange(len(every)),
            sizes_bytes=[piece.size_bytes for piece in every],
            starts=[piece.start for piece in every],
            ends=[piece.end for piece in every],
            alignment_bytes=device.alignment_bytes,
        ),
        names=tuple(piece.name for piece in every),
        block_of={begin: number for number, piece in enumerate(inside) for begin in piece.begins},
        copy_of={place: number for number, place in enumerate(copies, first_copy)},
        workspace_of={at: number for number, (at, _) in enumerate(found.workspaces, first_workspace)},
        outside_bytes=_outside_bytes(schedule, device, [piece for piece in pieces if piece.outside]),
    )


def _joined(graph: Graph, ranges: tuple[LiveRange, ...], count: int) -> list[_Piece]:
    """Return the pieces of all storages that are not resident; ranges that share memory in place are one piece."""
    pieces: list[_Piece] = []
    piece_of: dict[int, _Piece] = {}  # index of a live range -> its piece
    for index, stay in enumerate(ranges):
        storage = graph.storages[stay.storage]
        if storage.resident:
            continue
        if stay.memory_of is None:
            piece = _Piece(name=storage.name, size_bytes=storage.bytes, start=stay.first, end=stay.last)
            pieces.append(piece)
        else:
            piece = piece_of[stay.memory_of]
            piece.name, piece.end = f"{piece.name}, {storage.name}", stay.last
        piece_of[index] = piece
        piece.begins.append((stay.first, stay.storage))
        piece.outside |= stay.begun_by == Code.BOUNDARY or (stay.last == count and storage.required_at_end)
    return pieces


def _outside_bytes(schedule: Schedule, device: Device, pieces: list[_Piece]) -> NDArray[np.int64]:
    changes = np.zeros(len(schedule) + 1, np.int64)
    for piece in pieces:
        changes[piece.start] += device.aligned(piece.size_bytes)
        changes[piece.end] -= device.aligned(piece.size_bytes)
    is_boundary = schedule.codes == Code.BOUNDARY
    changes[:-1][is_boundary] += schedule.extras[is_boundary]
    return np.cumsum(changes)[:-1]
