"""The places of a program's host copies: each has an offset in one slab, from its Offload to its DropHost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.graph import Graph
from memfit.packing import Blocks, pack
from memfit.schedule import DropHost, Offload, Schedule

_PACKING_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """Where host copies are.

    Attributes:
        offsets: position of an Offload -> offset of its copy, in bytes.
        height_bytes: of the slab that holds them.
    """

    offsets: dict[int, int]
    height_bytes: int


NO_HOST_COPIES = HostLayout(offsets={}, height_bytes=0)


@dataclass(slots=True)
class _Copy:
    """A host copy of a storage, live from `start` to `end`; `written` are the positions of its Offloads."""

    storage: int
    start: int
    end: int
    written: list[int]


def host_layout(graph: Graph, schedule: Schedule, alignment_bytes: int) -> HostLayout:
    """Lay out the host copies of a schedule.

    Args:
        graph: gives the sizes.
        schedule: legal on the graph.
        alignment_bytes: offsets and sizes are rounded up to multiples.
    """
    copies: list[_Copy] = []
    current: dict[int, _Copy] = {}
    for position, instruction in enumerate(schedule):
        if isinstance(instruction, Offload):
            if instruction.storage not in current:
                current[instruction.storage] = _Copy(instruction.storage, position, len(schedule), [])
                copies.append(current[instruction.storage])
            current[instruction.storage].written.append(position)
        elif isinstance(instruction, DropHost):
            current.pop(instruction.storage).end = position
    if not copies:
        return NO_HOST_COPIES
    blocks = Blocks(
        ids=np.arange(len(copies)),
        sizes_bytes=np.array([max(1, graph.storages[copy.storage].bytes) for copy in copies], np.int64),
        starts=np.array([copy.start for copy in copies], np.int64),
        ends=np.array([copy.end for copy in copies], np.int64),
        alignment_bytes=alignment_bytes,
    )
    layout = pack(blocks, time_limit_seconds=_PACKING_SECONDS)
    offsets = {
        position: int(offset)
        for copy, offset in zip(copies, layout.offsets_bytes, strict=True)
        for position in copy.written
    }
    return HostLayout(offsets=offsets, height_bytes=layout.height_bytes)
