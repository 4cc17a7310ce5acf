"""Layouts that stay safe when ops run at the same time: the graph says which storages may share bytes, not an order.

Two storages may share bytes only if every op that touches one of them is ordered, by the graph, before the op that
writes the other. `WAYS` names three ways to make such a layout: the graph's order is used in full (`ancestors`), or
along a few long paths only (`paths`), or the layout is that of one serial order (`series`), and the dependences that
it needs are added to the graph's own.

Workspaces and in-place reuse are left out: a storage has the bytes that it was given from the op that writes it to the
last op that touches it.

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
from memfit.packing.blocks import Blocks, PackingProblem
from memfit.packing.first_fit import FirstFit
from memfit.packing.portfolio import Portfolio

Edges = tuple[tuple[int, int], ...]
WAYS = ("ancestors", "paths", "series")
PATHS = 8  # of the note's "first k paths": most graphs of vision models have fewer branches


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Addresses for the storages of a graph whose ops may run at the same time.

    Attributes:
        offsets_bytes: storage -> its first byte. Residents, arrivals and storages that outlive the step are left out.
        height_bytes: the highest used byte.
        dependences: pairs (op, later op) that have to be kept beside the graph's own, because their storages share.
    """

    offsets_bytes: Mapping[int, int]
    height_bytes: int
    dependences: Edges = ()


def pack_parallel(
    graph: Graph, way: str, device: Device = GENERIC, *, paths: int = PATHS, seconds: float = 1.0, seed: int = 0
) -> ParallelLayout:
    """Return a layout of `graph` that is safe when its ops run at the same time.

    Args:
        graph: the part that runs in parallel, such as a forward pass.
        way: one of `WAYS`.
        device: gives the alignment.
        paths: how many paths the way `paths` shares along.
        seconds: time limit of the packing in the way `series`.
        seed: of the packing in the way `series`.

    Raises:
        InvalidOptionError: there is no such way, or `paths` is below 1.
    """
    if way == "ancestors":
        return pack_by_ancestors(graph, device)
    if way == "paths":
        return pack_by_paths(graph, device, paths=paths)
    if way == "series":
        return pack_in_series(graph, device, seconds=seconds, seed=seed)
    raise InvalidOptionError(f"no way of parallel-safe sharing is called {way!r}, expected one of {', '.join(WAYS)}")


def predecessors_of(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return for each op the ops that have to end before it begins.

    They are the writers of what it reads, and the last op before it of the same generator or ranks. An op that
    mutates a storage follows all earlier ops that touch it, and is followed by all later ones.
    """
    needed: list[set[int]] = [set() for _ in graph.ops]
    last_change: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_of: dict[str, int] = {}
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
        for shared in op.kept_in_order:
            if shared in last_of:
                needed[op.id].add(last_of[shared])
            last_of[shared] = op.id
    return tuple(tuple(sorted(ops - {number})) for number, ops in enumerate(needed))


def users_of(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Return the ops that touch each storage of the arena, in the graph's order; the first is the op that writes it.

    The arena holds the storages that an op writes, that have bytes, and that are not left at the end.
    """
    touching: dict[int, list[int]] = {}
    for op in graph.ops:
        for storage in dict.fromkeys((*op.writes, *op.reads, *op.mutates)):
            touching.setdefault(storage, []).append(op.id)
    return {
        storage.id: tuple(touching[storage.id])
        for storage in graph.storages
        if storage.id in graph.writer_of and not storage.required_at_end and storage.bytes
    }


def pack_by_ancestors(graph: Graph, device: Device = GENERIC) -> ParallelLayout:
    """Share wherever the graph orders two storages, the largest placed first; O(n^2) time, n^2 bits for the relation.

    Args:
        graph: the part that runs in parallel.
        device: gives the alignment.
    """
    users, before = users_of(graph), _ancestors(graph)
    storages = list(users)
    touching = [sum(1 << op for op in users[storage]) for storage in storages]
    earlier = [before[users[storage][0]] for storage in storages]
    meets = np.ones((len(storages), len(storages)), np.bool_)
    for i in range(len(storages)):
        for j in range(i):
            ordered = touching[i] & earlier[j] == touching[i] or touching[j] & earlier[i] == touching[j]
            meets[i, j] = meets[j, i] = not ordered
    return _first_fit(graph, device, storages, meets)


def pack_by_paths(graph: Graph, device: Device = GENERIC, *, paths: int = PATHS) -> ParallelLayout:
    """Share only along the longest paths of the graph; O(n) for each path, and a sort.

    Ops of one colour are ordered by their path, so two storages that only ops of that colour touch are ordered. They
    are packed as in a series, one colour above the other: two colours never share bytes. A storage that ops of two
    colours touch, or an op without one, shares with none.

    Args:
        graph: the part that runs in parallel.
        device: gives the alignment.
        paths: how many paths are coloured.

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
        seen = {colours[op] for op in users[storage]}
        colour = seen.pop() if len(seen) == 1 else None
        (alone if colour is None else together.setdefault(colour, [])).append(storage)
    offsets: dict[int, int] = {}
    height_bytes = 0
    for storage in alone:
        offsets[storage] = height_bytes
        height_bytes += device.aligned(graph.storages[storage].bytes)
    for storages in together.values():
        layout = FirstFit().pack(PackingProblem(blocks=serial_blocks(graph, storages, device)))
        offsets.update(zip(storages, (layout.offsets_bytes + height_bytes).tolist(), strict=True))
        height_bytes += layout.height_bytes
    return ParallelLayout(offsets_bytes=offsets, height_bytes=height_bytes)


def colour_paths(graph: Graph, paths: int) -> list[int | None]:
    """Return the colour of each op: 0 on the longest path, 1 on the longest path of the remaining ops, and so on.

    Args:
        graph: the part that runs in parallel.
        paths: how many paths are coloured; ops on none of them have the colour None.
    """
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


def pack_in_series(graph: Graph, device: Device = GENERIC, *, seconds: float = 1.0, seed: int = 0) -> ParallelLayout:
    """Share as the graph's own order allows, and add the dependences that this sharing needs.

    The arena is as small as that of a serial step. The added dependences limit what can run at the same time.

    Args:
        graph: the part that runs in parallel.
        device: gives the alignment.
        seconds: time limit of the packing.
        seed: of the packing.
    """
    storages = list(users_of(graph))
    problem = PackingProblem(blocks=serial_blocks(graph, storages, device), time_limit_seconds=seconds, seed=seed)
    layout = Portfolio().pack(problem)
    offsets = dict(zip(storages, layout.offsets_bytes.tolist(), strict=True))
    return ParallelLayout(
        offsets_bytes=offsets,
        height_bytes=layout.height_bytes,
        dependences=implicit_dependences(graph, offsets, device),
    )


def serial_blocks(graph: Graph, storages: Sequence[int], device: Device = GENERIC) -> Blocks:
    """Return a block for each storage in the graph's own order: live from its writer to the last op that touches it.

    Args:
        graph: its ops are the steps.
        storages: among those of `users_of`; they are the ids of the blocks.
        device: gives the alignment.
    """
    users = users_of(graph)
    return Blocks(
        ids=storages,
        sizes_bytes=[graph.storages[s].bytes for s in storages],
        starts=[users[s][0] for s in storages],
        ends=[users[s][-1] + 1 for s in storages],
        alignment_bytes=device.alignment_bytes,
    )


def implicit_dependences(graph: Graph, offsets_bytes: Mapping[int, int], device: Device = GENERIC) -> Edges:
    """Return the pairs (op, later op) that a layout for the graph's own order needs, sorted.

    Where two storages share bytes, every op that touches the earlier one comes before the writer of the later one.

    Args:
        graph: its own order is that of the layout.
        offsets_bytes: storage -> its first byte.
        device: gives the alignment.
    """
    users = users_of(graph)
    edges: set[tuple[int, int]] = set()
    by_offset = sorted(offsets_bytes, key=lambda storage: offsets_bytes[storage])
    for place, first in enumerate(by_offset):
        top = offsets_bytes[first] + device.aligned(graph.storages[first].bytes)
        for second in by_offset[place + 1 :]:
            if offsets_bytes[second] >= top:
                break
            early, late = sorted((users[first], users[second]))
            edges.update((op, late[0]) for op in early)
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
    """Place storages, largest first, each as low as those that it meets allow.

    `meets` is bool[n, n]: whether two storages must not share bytes.
    """
    sizes = np.array([device.aligned(graph.storages[storage].bytes) for storage in storages], np.int64)
    offsets = np.zeros(len(storages), np.int64)
    placed = np.zeros(len(storages), np.bool_)
    for i in np.argsort(-sizes, kind="stable").tolist():
        others = np.flatnonzero(meets[i] & placed)
        others = others[np.argsort(offsets[others], kind="stable")]
        at = 0
        for base, size in zip(offsets[others].tolist(), sizes[others].tolist(), strict=True):
            if base >= at + sizes[i]:
                break
            at = max(at, base + size)
        offsets[i], placed[i] = at, True
    return ParallelLayout(
        offsets_bytes=dict(zip(storages, offsets.tolist(), strict=True)),
        height_bytes=int((offsets + sizes).max(initial=0)),
    )
