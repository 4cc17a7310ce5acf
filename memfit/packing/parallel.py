"""Layouts that stay safe when ops run at the same time: who may share memory is read off the graph, not off an order.

Two storages may share bytes only if every op that touches the one is ordered, by the graph, before the op that writes
the other. The graph's order is known in full (`ancestors`), or along a few long paths only (`paths`); or a layout for
one serial order is kept, and the order that it needs is added to the graph (`implicit_dependences`).

Source: mxnet 1.0, "Optimizing Memory Consumption", memory allocation for parallel operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.device import GENERIC, Device
from memfit.errors import InvalidOptionError
from memfit.graph import Graph
from memfit.packing.auto import Auto
from memfit.packing.blocks import Blocks, PackingProblem
from memfit.packing.first_fit import FirstFit

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Addresses for the storages of a graph whose ops may run at the same time.

    Attributes:
        offsets_bytes: storage -> where it begins. Residents, arrivals and what outlives the step are not in it.
        height_bytes: the highest used byte.
        dependences: pairs (op, later op) that have to be kept beside the graph's own; they come from sharing.
    """

    offsets_bytes: Mapping[int, int]
    height_bytes: int
    dependences: Edges = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Which op writes a storage, and which touch it in all, the writer included."""

    writer: int
    ops: tuple[int, ...]


def predecessors_of(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return for each op the ops that have to be over before it: writers of what it needs, and those that draw before.

    An op that mutates waits for all that touched the storage before it, and all that come after wait for it.
    """
    needed: list[set[int]] = [set() for _ in graph.ops]
    last_change: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_draw: dict[str, int] = {}
    for op in graph.ops:
        for storage in (*op.reads, *op.mutates):
            if storage in last_change:
                needed[op.id].add(last_change[storage])
        for storage in op.mutates:
            needed[op.id].update(readers.pop(storage, ()))
        for storage in op.reads:
            readers.setdefault(storage, []).append(op.id)
        for storage in (*op.writes, *op.mutates):
            last_change[storage] = op.id
        if op.random is not None:
            if op.random in last_draw:
                needed[op.id].add(last_draw[op.random])
            last_draw[op.random] = op.id
    return tuple(tuple(sorted(ops - {number})) for number, ops in enumerate(needed))


def users_of(graph: Graph) -> dict[int, Users]:
    """Return the users of each storage that the arena holds."""
    touching: dict[int, list[int]] = {}
    for op in graph.ops:
        for storage in dict.fromkeys((*op.writes, *op.reads, *op.mutates)):
            touching.setdefault(storage, []).append(op.id)
    return {
        storage.id: Users(writer=graph.writer_of[storage.id], ops=tuple(touching[storage.id]))
        for storage in graph.storages
        if storage.id in graph.writer_of and not storage.required_at_end and storage.bytes
    }


def pack_by_ancestors(graph: Graph, device: Device = GENERIC) -> ParallelLayout:
    """Share wherever the graph orders two storages; O(n^2) bits for the relation.

    Args:
        graph: of the part that runs in parallel, such as a forward pass.
        device: gives the alignment.
    """
    users, before = users_of(graph), _ancestors(graph)
    storages = list(users)
    touching = [sum(1 << op for op in users[storage].ops) for storage in storages]
    earlier = [before[users[storage].writer] for storage in storages]
    meets = np.ones((len(storages), len(storages)), np.bool_)
    for i in range(len(storages)):
        for j in range(i):
            ordered = touching[i] & earlier[j] == touching[i] or touching[j] & earlier[i] == touching[j]
            meets[i, j] = meets[j, i] = not ordered
    return _first_fit(graph, device, storages, meets)


def pack_by_paths(graph: Graph, device: Device = GENERIC, *, paths: int = 8) -> ParallelLayout:
    """Share only along the longest `paths` paths of the graph; O(n) for each path, and a sort.

    Ops of one colour are ordered by their path, so that two storages which only ops of that colour touch are ordered.
    They are packed as in a series, one colour above the other: bytes of two colours are never shared. All other
    storages share with none.

    Raises:
        InvalidOptionError: `paths` is below 1.
    """
    if paths < 1:
        raise InvalidOptionError(f"paths is {paths}, expected 1 or more")
    colours = colour_paths(graph, paths)
    users = users_of(graph)
    alone: list[int] = []
    together: dict[int, list[int]] = {}
    for storage in users:
        seen = {colours[op] for op in users[storage].ops}
        colour = seen.pop() if len(seen) == 1 else None
        (alone if colour is None else together.setdefault(colour, [])).append(storage)
    offsets: dict[int, int] = {}
    height_bytes = 0
    for storage in alone:
        offsets[storage] = height_bytes
        height_bytes += device.aligned(graph.storages[storage].bytes)
    for storages in together.values():
        layout = FirstFit().pack(PackingProblem(blocks=_serial_blocks(graph, users, storages, device)))
        offsets.update(zip(storages, (layout.offsets_bytes + height_bytes).tolist(), strict=True))
        height_bytes += layout.height_bytes
    return ParallelLayout(offsets_bytes=offsets, height_bytes=height_bytes)


def colour_paths(graph: Graph, paths: int) -> list[int | None]:
    """Return the colour of each op: 0 for the longest path, 1 for the longest in what is left, and so on; else None."""
    needed = predecessors_of(graph)
    colours: list[int | None] = [None] * len(graph.ops)
    for colour in range(paths):
        length, previous = [0] * len(needed), [-1] * len(needed)
        for op, before in enumerate(needed):
            if colours[op] is not None:
                continue
            length[op] = 1
            for other in before:
                if colours[other] is None and length[other] + 1 > length[op]:
                    length[op], previous[op] = length[other] + 1, other
        at = int(np.argmax(length)) if length else 0
        if not length or length[at] == 0:
            break
        while at >= 0:
            colours[at] = colour
            at = previous[at]
    return colours


def pack_in_series(graph: Graph, device: Device = GENERIC, *, seconds: float = 1.0) -> ParallelLayout:
    """Share as the graph's own order lets it, and keep the dependences which that makes.

    The arena is as small as that of a serial step; how much can still run at the same time depends on the sharing.
    """
    users = users_of(graph)
    storages = list(users)
    blocks = _serial_blocks(graph, users, storages, device)
    layout = Auto().pack(PackingProblem(blocks=blocks, time_limit_seconds=seconds))
    offsets = dict(zip(storages, layout.offsets_bytes.tolist(), strict=True))
    return ParallelLayout(
        offsets_bytes=offsets,
        height_bytes=layout.height_bytes,
        dependences=implicit_dependences(graph, offsets, device),
    )


def _serial_blocks(graph: Graph, users: Mapping[int, Users], storages: Sequence[int], device: Device) -> Blocks:
    """Return a block for each storage: live from the op that writes it to the last that touches it."""
    return Blocks(
        ids=storages,
        sizes_bytes=[graph.storages[s].bytes for s in storages],
        starts=[users[s].writer for s in storages],
        ends=[max(users[s].ops) + 1 for s in storages],
        alignment_bytes=device.alignment_bytes,
    )


def implicit_dependences(graph: Graph, offsets_bytes: Mapping[int, int], device: Device = GENERIC) -> Edges:
    """Return the pairs (op, later op) that a layout for the graph's own order needs: users of a storage before the
    writer of one that has its bytes next."""
    users = users_of(graph)
    edges: set[tuple[int, int]] = set()
    by_offset = sorted(offsets_bytes, key=lambda storage: offsets_bytes[storage])
    for place, first in enumerate(by_offset):
        top = offsets_bytes[first] + device.aligned(graph.storages[first].bytes)
        for second in by_offset[place + 1 :]:
            if offsets_bytes[second] >= top:
                break
            early, late = sorted((users[first], users[second]), key=lambda user: user.writer)
            edges.update((op, late.writer) for op in early.ops)
    return tuple(sorted(edges))


def _ancestors(graph: Graph) -> list[int]:
    """Return for each op the set of ops before it in the graph, as the bits of an integer."""
    before: list[int] = []
    for needed in predecessors_of(graph):
        bits = 0
        for op in needed:
            bits |= before[op] | 1 << op
        before.append(bits)
    return before


def _first_fit(graph: Graph, device: Device, storages: Sequence[int], meets: NDArray[np.bool_]) -> ParallelLayout:
    """Place storages, largest first, each as low as those it meets let it."""
    sizes = [device.aligned(graph.storages[storage].bytes) for storage in storages]
    offsets = [0] * len(storages)
    placed: list[int] = []
    for i in sorted(range(len(storages)), key=lambda i: (-sizes[i], i)):
        at = 0
        for j in sorted((j for j in placed if meets[i, j]), key=lambda j: offsets[j]):
            if offsets[j] >= at + sizes[i]:
                break
            at = max(at, offsets[j] + sizes[j])
        offsets[i] = at
        placed.append(i)
    return ParallelLayout(
        offsets_bytes=dict(zip(storages, offsets, strict=True)),
        height_bytes=max((at + size for at, size in zip(offsets, sizes, strict=True)), default=0),
    )
