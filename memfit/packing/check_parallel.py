"""The judge of layouts for ops that run at the same time; it shares no code with the ways to make them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from memfit.device import GENERIC, Device
from memfit.errors import InvalidLayoutError
from memfit.graph import Graph
from memfit.packing.parallel import ParallelLayout


def check_parallel(graph: Graph, layout: ParallelLayout, device: Device = GENERIC) -> None:
    """Return if no two ops that may run at the same time, or in either order, use the same bytes.

    Two ops may run at the same time if neither the data of the graph nor `layout.dependences` order them.

    Args:
        graph: what runs in parallel.
        layout: offsets of all storages that its ops write, except those that outlive the step.
        device: gives the alignment.

    Raises:
        InvalidLayoutError: two storages share bytes, and the ops that touch them are not ordered; the message names
            both storages and two such ops. Also: an offset that is negative or not aligned, a storage without one, a
            wrong height, a dependence that runs against the graph's order.
    """
    for storage, offset in layout.offsets_bytes.items():
        if offset < 0 or offset % device.alignment_bytes:
            raise InvalidLayoutError(
                f"storage {storage} {graph.storages[storage].name!r} has offset {offset}, expected a multiple of "
                f"{device.alignment_bytes} from 0"
            )
    writers = {storage: op.id for op in graph.ops for storage in op.writes}
    for storage in graph.storages:
        inside = storage.id in writers and storage.bytes > 0 and not storage.required_at_end and not storage.resident
        if inside and storage.id not in layout.offsets_bytes:
            name = f"{storage.id} {storage.name!r}"
            raise InvalidLayoutError(f"storage {name} has no offset, expected one: an op writes it")
    sharing = sorted((at, at + device.aligned(graph.storages[s].bytes), s) for s, at in layout.offsets_bytes.items())
    height = max((top for _, top, _ in sharing), default=0)
    if layout.height_bytes != height:
        raise InvalidLayoutError(f"height is {layout.height_bytes}, expected {height}, the highest byte")
    _require_orders(graph, layout, sharing, writers)


def _require_orders(
    graph: Graph, layout: ParallelLayout, sharing: list[tuple[int, int, int]], writers: dict[int, int]
) -> None:
    """Require an order of every two storages that share bytes; `sharing` has (offset, top, storage), sorted."""
    before = _reachable(graph, layout)
    touching: defaultdict[int, set[int]] = defaultdict(set)
    for op in graph.ops:
        for storage in (*op.reads, *op.writes, *op.mutates):
            touching[storage].add(op.id)
    over = {s: np.logical_and.reduce(before[:, sorted(touching[s])], axis=1) for _, _, s in sharing}
    for place, (_, top, first) in enumerate(sharing):
        for base, _, second in sharing[place + 1 :]:
            if base >= top:
                break
            if over[first][writers[second]] or over[second][writers[first]]:
                continue
            names = [graph.storages[storage].name for storage in (first, second)]
            late = writers[second]
            early = next(op for op in sorted(touching[first]) if not before[late, op])
            raise InvalidLayoutError(
                f"storages {first} {names[0]!r} and {second} {names[1]!r} share bytes, but ops {early} "
                f"{graph.ops[early].name!r} and {late} {graph.ops[late].name!r} may run at the same time; expected an "
                "order, or addresses apart"
            )


def _reachable(graph: Graph, layout: ParallelLayout) -> NDArray[np.bool_]:
    """Return bool[op, op]: whether the first can only begin when the second is over."""
    count = len(graph.ops)
    before = np.zeros((count, count), np.bool_)
    for earlier, later in layout.dependences:
        if not 0 <= earlier < later < count:
            raise InvalidLayoutError(f"dependence of op {later} on op {earlier}, expected an op before it")
        before[later, earlier] = True
    changed: defaultdict[int, set[int]] = defaultdict(set)  # storage -> earlier ops that wrote or mutated it
    used: defaultdict[int, set[int]] = defaultdict(set)  # storage -> earlier ops that read or mutated it
    sharing: defaultdict[str, set[int]] = defaultdict(set)
    for op in graph.ops:
        for storage in (*op.reads, *op.mutates):
            before[op.id, list(changed[storage])] = True
        for storage in op.mutates:
            before[op.id, list(used[storage])] = True
        for shared in op.kept_in_order:
            before[op.id, list(sharing[shared])] = True
            sharing[shared].add(op.id)
        for other in np.flatnonzero(before[op.id]).tolist():
            before[op.id] |= before[other]
        for storage in (*op.reads, *op.mutates):
            used[storage].add(op.id)
        for storage in (*op.writes, *op.mutates):
            changed[storage].add(op.id)
    return before
