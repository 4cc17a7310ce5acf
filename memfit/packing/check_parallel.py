"""The judge of layouts for ops that run at the same time; it shares no code with what makes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.device import GENERIC, Device
from memfit.errors import InvalidLayoutError
from memfit.graph import Graph
from memfit.packing.parallel import ParallelLayout


def check_parallel(graph: Graph, layout: ParallelLayout, device: Device = GENERIC) -> None:
    """Return if no two ops that may run at the same time, or in either order, can meet in the same bytes.

    What may run at the same time is what neither the data of the graph nor `layout.dependences` orders.

    Raises:
        InvalidLayoutError: two storages share bytes, and the ops that touch them are not ordered; names both storages
        and
            two such ops. Also: an offset that is negative or not aligned, a storage without one, a height that is
            wrong, a dependence that runs against the graph.
    """
    for storage, offset in layout.offsets_bytes.items():
        if offset < 0 or offset % device.alignment_bytes:
            raise InvalidLayoutError(
                f"storage {storage} {graph.storages[storage].name!r} has offset {offset}, expected a multiple of "
                f"{device.alignment_bytes} from 0"
            )
    missing = [s.id for s in graph.storages if _in_arena(graph, s.id) and s.id not in layout.offsets_bytes]
    if missing:
        name = graph.storages[missing[0]].name
        raise InvalidLayoutError(f"storage {missing[0]} {name!r} has no offset, expected one: an op writes it")
    _require_height(graph, layout, device)
    reaches = _reachable(graph, layout)
    sharing = sorted((offset, offset + device.aligned(graph.storages[s].bytes), s) for s, offset in _offsets(layout))
    for place, (_, top, first) in enumerate(sharing):
        for base, _, second in sharing[place + 1 :]:
            if base >= top:
                break
            _require_order(graph, first, second, reaches)


def _offsets(layout: ParallelLayout) -> list[tuple[int, int]]:
    return list(layout.offsets_bytes.items())


def _in_arena(graph: Graph, storage: int) -> bool:
    known = graph.storages[storage]
    written = any(storage in op.writes for op in graph.ops)
    return written and known.bytes > 0 and not known.required_at_end and not known.resident


def _require_height(graph: Graph, layout: ParallelLayout, device: Device) -> None:
    tops = [offset + device.aligned(graph.storages[s].bytes) for s, offset in _offsets(layout)]
    if layout.height_bytes != max(tops, default=0):
        raise InvalidLayoutError(f"height is {layout.height_bytes}, expected {max(tops, default=0)}, the highest byte")


def _reachable(graph: Graph, layout: ParallelLayout) -> NDArray[np.bool_]:
    """Return a matrix: whether op j can only begin when op i is over; in order of j, so that what is before is
    known."""
    count = len(graph.ops)
    after = np.zeros((count, count), np.bool_)
    for before, later in layout.dependences:
        if not 0 <= before < later < count:
            raise InvalidLayoutError(f"dependence of op {later} on op {before}, expected an op before it")
        after[before, later] = True
    for j, op in enumerate(graph.ops):
        for i, other in enumerate(graph.ops[:j]):
            touches = {*op.reads, *op.mutates}
            gives = touches & {*other.writes, *other.mutates}
            changes = {*op.mutates} & {*other.reads, *other.mutates}
            draws = op.random is not None and op.random == other.random
            if gives or changes or draws:
                after[i, j] = True
        for i in np.flatnonzero(after[:, j]).tolist():
            after[:, j] |= after[:, i]
    return after


def _require_order(graph: Graph, first: int, second: int, reaches: NDArray[np.bool_]) -> None:
    def loose(early: int, late: int) -> tuple[int, int] | None:
        writer = next(op.id for op in graph.ops if late in op.writes)
        touching = [op.id for op in graph.ops if early in (*op.reads, *op.writes, *op.mutates)]
        return next(((op, writer) for op in touching if not reaches[op, writer]), None)

    one, other = loose(first, second), loose(second, first)
    if one is not None and other is not None:
        names = [graph.storages[storage].name for storage in (first, second)]
        before, after = (graph.ops[op].name for op in one)
        raise InvalidLayoutError(
            f"storages {first} {names[0]!r} and {second} {names[1]!r} share bytes, but ops {one[0]} {before!r} and "
            f"{one[1]} {after!r} may run at the same time; expected an order, or addresses apart"
        )
